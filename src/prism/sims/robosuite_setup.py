"""The five robomimic tasks as robosuite builds them: our defaults, or the `env_args` of a robomimic dataset.

robosuite is an optional package. Its pin of an optional controller (mink) excludes numpy 2, so it is installed without
its dependencies, which the extra names instead: INSTALL_LINE.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from prism.errors import PrismError

Variant = Literal["state", "pixels", "rgbd"]
VERSION = "1.5.2"
INSTALL_LINE = f"pip install 'prism-policy[robosuite]' && pip install --no-deps robosuite=={VERSION}"
FPS = 20.0
ROBOMIMIC_TYPE = 1  # robomimic's number for robosuite environments
_BUILD_SEED = 0  # what robosuite draws once, when it builds a model (the cube's edge, the hammer): the same always


@dataclass(frozen=True)
class Task:
    """One benchmark task: robosuite's name for it, its robots, the step limit of the protocol."""

    env_name: str
    max_steps: int
    robots: tuple[str, ...] = ("Panda",)
    static_camera: str = "agentview"

    @property
    def env_args(self) -> dict[str, Any]:
        """What robomimic stores with a dataset, and needs to build the environment again."""
        arm = {
            "type": "OSC_POSE", "input_max": 1, "input_min": -1,
            "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5], "output_min": [-0.05, -0.05, -0.05, -0.5, -0.5, -0.5],
            "kp": 150, "damping_ratio": 1, "impedance_mode": "fixed", "kp_limits": [0, 300],
            "damping_ratio_limits": [0, 10], "position_limits": None, "orientation_limits": None,
            "uncouple_pos_ori": True, "input_type": "delta", "input_ref_frame": "base", "interpolation": None,
            "ramp_ratio": 0.2, "gripper": {"type": "GRIP"},
        }  # fmt: skip
        kwargs: dict[str, Any] = {
            "robots": list(self.robots),
            "controller_configs": {"type": "BASIC", "body_parts": {"right": arm}},
            "control_freq": int(FPS),
            "reward_shaping": False,
        }
        if len(self.robots) == 2:
            kwargs["env_configuration"] = "opposed"
        return {"env_name": self.env_name, "type": ROBOMIMIC_TYPE, "env_version": VERSION, "env_kwargs": kwargs}


TASKS: dict[str, Task] = {
    "lift": Task("Lift", 400),
    "can": Task("PickPlaceCan", 400),
    "square": Task("NutAssemblySquare", 400),
    "transport": Task("TwoArmTransport", 700, ("Panda", "Panda")),
    "tool-hang": Task("ToolHang", 700),
}


def task_name(task: str, variant: Variant) -> str:
    return f"robosuite-{task}" + ("" if variant == "state" else f"-{variant}")


NAMES: dict[str, tuple[str, Variant]] = {task_name(t, v): (t, v) for t in TASKS for v in get_args(Variant)}


def task_of(env_args: Mapping[str, Any]) -> str:
    """The task whose environment `env_args` names."""
    name = env_args.get("env_name")
    for task, entry in TASKS.items():
        if entry.env_name == name:
            return task
    known = ", ".join(entry.env_name for entry in TASKS.values())
    raise PrismError(f"env_args: 'env_name' is {name!r}; prism plays {known}")


def parse_env_args(text: str | bytes | Mapping[str, Any], where: str = "env_args") -> dict[str, Any]:
    """A dataset's env_args, checked: JSON, one of the tasks, recorded with the robosuite that is installed."""
    if isinstance(text, Mapping):
        args: Any = dict(text)
    else:
        try:
            args = json.loads(text)
        except (ValueError, RecursionError):
            raise PrismError(f"{where}: is not JSON; a robomimic dataset keeps it as an attribute of 'data'") from None
    if not isinstance(args, dict) or not isinstance(args.get("env_kwargs"), dict):
        raise PrismError(f"{where}: needs 'env_name' and 'env_kwargs'; is this a robomimic dataset of robosuite?")
    try:
        task_of(args)
    except PrismError as error:
        raise PrismError(f"{where}: {error}") from None
    recorded = str(args.get("env_version") or "an unknown version")
    if recorded.split(".")[:2] != VERSION.split(".")[:2]:
        raise PrismError(
            f"{where}: recorded with robosuite {recorded}, prism plays {VERSION}, where the same actions move "
            "otherwise: train on it (prism train FILE), and evaluate on demonstrations of our own (prism data collect)"
        )
    return args


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """robosuite logs advice when it is imported, and sets MUJOCO_GL for the whole process: neither is wanted."""
    disabled, backend = logging.root.manager.disable, os.environ.get("MUJOCO_GL")
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if backend is None:
            os.environ.pop("MUJOCO_GL", None)
        else:
            os.environ["MUJOCO_GL"] = backend


def load_robosuite() -> Any:
    """The package, or one line that says how to get it."""
    try:
        found = version("robosuite")
    except PackageNotFoundError:
        raise PrismError(f"robosuite is not installed: {INSTALL_LINE}") from None
    if found.split(".")[:2] != VERSION.split(".")[:2]:
        raise PrismError(f"robosuite {found} is installed, prism plays {VERSION}: {INSTALL_LINE}")
    try:
        with _quiet():
            import robosuite
    except ImportError as error:
        raise PrismError(f"robosuite needs {error.name}: {INSTALL_LINE}") from None
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    return robosuite


def build(env_args: Mapping[str, Any]) -> Any:
    """robosuite's environment, as `env_args` describe it."""
    robosuite = load_robosuite()
    try:
        return build_class(lambda **kwargs: robosuite.make(env_args["env_name"], **kwargs), env_args["env_kwargs"])
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise PrismError(
            f"env_args: robosuite {VERSION} does not build {env_args['env_name']} from them ({error})"
        ) from None


def build_class(make: Callable[..., Any], env_kwargs: Mapping[str, Any]) -> Any:
    """An environment of robosuite's without a renderer of its own, built once and reset softly."""
    kwargs = {key: value for key, value in env_kwargs.items() if not key.startswith(("camera_", "render"))}
    kwargs.update(
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        hard_reset=False,  # the model stays: nothing is compiled again, and a renderer can keep it
        ignore_done=True,
        renderer="mujoco",
        seed=_BUILD_SEED,
    )
    with _quiet():
        return make(**kwargs)
