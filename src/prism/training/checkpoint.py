"""Checkpoints: a folder each, written whole or not at all, loaded with no other file and without pickle.

    run/checkpoints/step-00001234/
        config.json           format version, prism version, the PolicySpec (sensors, horizons, method)
        model.safetensors     averaged (EMA) weights and every buffer, normaliser statistics included: what is deployed
        training.json         step, seconds, the training config, validation losses
        training.safetensors  raw weights and AdamW's moments
        checksums.json        size and sha256 of each
        sensor_use.json       measured afterwards: which sensors are used, and required (evaluation/sensor_use.py)

Deployment needs config.json, model.safetensors and checksums.json; a resume needs all five. The newest checkpoint is
found by looking, never through a pointer that could disagree with the disk.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from prism_client import ActionKind
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode

import prism
from prism.data.formats.episode_folders import is_recording
from prism.data.formats.store import is_store
from prism.errors import PrismError
from prism.io import files, old_keys
from prism.io.files import DamagedError
from prism.methods.presets import build_policy
from prism.policy import Policy, PolicySpec

FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("config.json", "model.safetensors", "training.json", "training.safetensors")
SENSOR_USE = "sensor_use.json"

Build = Callable[[PolicySpec], Policy]
Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingState:
    """All that a resume needs beside the policy: two runs that agree in it go on alike, bit for bit."""

    step: int  # steps done
    seconds: float  # spent in the loop, over all its sittings
    train_config: dict[str, Any]
    data: str  # fingerprint of the training windows
    val_loss: float | None  # of this very checkpoint
    best_val_loss: float | None  # of the run so far
    skipped: int  # consecutive steps skipped until here
    skipped_total: int
    scaler: dict[str, float]  # float16 loss scale; empty otherwise
    weights: dict[str, Tensor]  # raw, not averaged
    optimizer: dict[str, Tensor]  # "exp_avg.<name>", "exp_avg_sq.<name>", "step.<name>"
    windows: dict[str, int] = dataclasses.field(default_factory=dict)  # PolicySpec.trained_on; older: counted from here


def save_checkpoint(
    run_dir: Path, spec: PolicySpec, model: Mapping[str, Tensor], state: TrainingState, keep_last: int = 2
) -> Path:
    """Write the checkpoint of `state.step`, then prune: the newest `keep_last` and the best one stay.

    There is no moment without a good checkpoint: the old ones go only when the new one has its name. A checkpoint
    of the same step that verifies is left as it is; one that does not is replaced.
    """
    folder = folder_of(run_dir, state.step)
    config = {"format_version": FORMAT_VERSION, "prism_version": prism.__version__, "policy": spec.to_json()}
    training = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in ("weights", "optimizer")
    }
    tensors = {f"weights.{name}": value for name, value in state.weights.items()}
    tensors |= {f"optimizer.{name}": value for name, value in state.optimizer.items()}
    with files.explain_write_errors(folder, _describe_newest(run_dir)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(folder.parent)
        if folder.exists():
            with suppress(DamagedError):
                verify_checkpoint(folder)
                return folder
            files.remove_folder(folder)
        files.write_folder(
            folder,
            {
                "config.json": files.encode_json(config),
                "model.safetensors": _encode(model),
                "training.json": files.encode_json(training),
                "training.safetensors": _encode(tensors),
            },
        )
        _prune(run_dir, keep_last, newest=folder)
    return folder


def check_resume(run_dir: Path, resume: bool | Literal["auto"]) -> bool:
    """Whether to continue what is in a folder: the one check before a training is started there.

    "auto" continues a training that has begun and starts one that has not. Otherwise what is asked for must fit what
    is there. A training that failed before it logged or saved anything has not begun: the next try may use its folder.
    """
    log = run_dir / "log.jsonl"
    begun = (run_dir / "checkpoints").exists() or (log.exists() and log.stat().st_size > 0)
    if is_store(run_dir) or is_recording(run_dir):
        raise PrismError(f"{run_dir} holds a dataset: choose another folder for the run (--out)")
    if resume == "auto":
        return begun
    if begun and not resume:
        raise PrismError(f"{run_dir} holds a run already: continue it with --resume, or choose another --out")
    if resume and not run_dir.is_dir():
        raise PrismError(f"{run_dir} does not exist, so there is nothing to resume: check the name, or drop --resume")
    return resume


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first, intact or not."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def verify_checkpoint(folder: Path, names: tuple[str, ...] = _FILES) -> None:
    """Raise PrismError with the first thing that is wrong with the checkpoint; DamagedError if an older one may do."""
    _read_config(folder)
    sums = files.read_sums(folder)
    for name in names:
        files.read_verified(folder, name, sums)


def latest_checkpoint(run_dir: Path, report: Report | None = None) -> Path | None:
    """The newest intact checkpoint; damaged ones are reported and skipped. None if there is none.

    A checkpoint of another format version is not damage: that error is raised.
    """
    candidates = list_checkpoints(run_dir)
    if found := _first_intact(reversed(candidates), report):
        return found
    if candidates:
        raise PrismError(f"{run_dir / 'checkpoints'}: none of its {len(candidates)} checkpoints is intact; train again")
    return None


def best_checkpoint(run_dir: Path, report: Report | None = None) -> Path | None:
    """The checkpoint with the lowest validation loss; the newest one when none has been validated."""
    losses = {folder: loss for folder in list_checkpoints(run_dir) if (loss := _val_loss(folder)) is not None}
    by_loss = sorted(losses, key=lambda folder: losses[folder])
    return _first_intact(by_loss, report) or latest_checkpoint(run_dir, report)


def _first_intact(folders: Iterable[Path], report: Report | None) -> Path | None:
    for folder in folders:
        try:
            verify_checkpoint(folder)
        except DamagedError as error:
            (report or _to_stderr)(f"skipped a damaged checkpoint: {error}")
        else:
            return folder
    return None


def set_aside_newer(folder: Path) -> None:
    """Rename checkpoints newer than `folder` (all damaged, or it would not be the latest) out of the run's way."""
    for path in list_checkpoints(folder.parent.parent):
        if _step(path) > _step(folder):
            os.rename(path, path.with_name(f"damaged-{path.name}-{os.urandom(3).hex()}"))


def resolve(path: Path, which: Literal["latest", "best"] = "latest", report: Report | None = None) -> Path:
    """The checkpoint folder that `path` means: itself, or one of the run folder's."""
    if not path.exists():
        raise PrismError(f"{path} does not exist: name a run folder (runs/<name>) or a checkpoint folder in it")
    if (path / "config.json").exists() or (_NAME.fullmatch(path.name) and path.parent.name == "checkpoints"):
        return path
    found = best_checkpoint(path, report) if which == "best" else latest_checkpoint(path, report)
    if found is None:
        raise PrismError(f"{path} holds no checkpoint: train first (prism train), or name the folder with config.json")
    return found


def load_policy(
    path: Path | str,
    which: Literal["latest", "best"] = "latest",
    build: Build = build_policy,
    report: Report | None = None,
) -> Policy:
    """The policy of a run folder or of one checkpoint folder, on the CPU, in evaluation mode, EMA weights."""
    folder = resolve(Path(path), which, report)
    spec = read_spec(folder)
    sums = files.read_sums(folder)
    files.read_verified(folder, "config.json", sums)
    tensors = _decode(folder, "model.safetensors", sums)
    policy = _build(folder, spec, build, tensors)
    try:
        policy.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise PrismError(
            f"{folder / 'model.safetensors'} does not fit a '{spec.method}' policy of config.json ({detail[:200]}); "
            "it was written by other code: use that version of prism, or train again"
        ) from None
    return policy.eval()


def read_spec(folder: Path) -> PolicySpec:
    """What the checkpoint is a policy of, without its weights."""
    config = _read_config(folder)
    policy = config.get("policy")
    if not isinstance(policy, dict):
        raise DamagedError(f"{folder / 'config.json'} has no 'policy': use another checkpoint")
    try:
        spec = PolicySpec.from_json(policy)
        if spec.action.kind is None:
            kind = ActionKind.parse(old_keys.kind_of_checkpoint(folder, config))
            spec = dataclasses.replace(spec, action=dataclasses.replace(spec.action, kind=kind))
    except PrismError as error:
        raise PrismError(f"{folder / 'config.json'}: {error}") from None
    return dataclasses.replace(spec, missed=tuple(dict.fromkeys((*spec.missed, *_missed(folder)))))


def _missed(folder: Path) -> list[str]:
    """Sensors without which these weights were measured to be worse; none where they were not measured."""
    path = folder / SENSOR_USE
    if not path.exists():
        return []
    try:
        return [str(row["name"]) for row in files.read_json(path)["sensors"] if row["tolerated"] is not True]
    except (KeyError, TypeError):
        raise PrismError(
            f"{path} has no list 'sensors' of names: remove it, then measure again (prism report)"
        ) from None


def load_training_state(folder: Path) -> TrainingState:
    """What a resume needs from one checkpoint folder, verified."""
    _read_config(folder)
    sums = files.read_sums(folder)
    files.read_verified(folder, "training.json", sums)
    values = files.read_json(folder / "training.json")
    tensors = _decode(folder, "training.safetensors", sums)
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
    for name, value in tensors.items():
        group, _, key = name.partition(".")
        groups[group][key] = value
    expected = {field.name for field in dataclasses.fields(TrainingState)} - set(groups)
    if {*values, "windows"} != expected:
        raise PrismError(f"{folder / 'training.json'} needs exactly the keys {sorted(expected)}, has {sorted(values)}")
    return TrainingState(**values, weights=groups["weights"], optimizer=groups["optimizer"])


def load_model_tensors(folder: Path) -> dict[str, Tensor]:
    """Averaged weights and buffers by name, verified."""
    return _decode(folder, "model.safetensors", files.read_sums(folder))


class _AtMost(TorchFunctionMode):
    """Refuses to make tensors far beyond those of the weights file: config.json may state any size.

    Four times the file and 64 MB more: initialisation makes temporary tensors, and some tensors are not stored.
    """

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = sum(value.numel() for value in stored.values()) * 4 + (1 << 24)
        self._calls = 50 * len(stored) + 1000

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _NEW:
            size = args[0] if args and isinstance(args[0], list | tuple) else (*args, *kwargs.get("size", ()))
            numbers = [n for n in size if isinstance(n, int | float)]
            self._values -= int(max(numbers, default=0) ** 2 if name == "eye" else math.prod(numbers))
        self._calls -= 1
        if min(self._values, self._calls) < 0:
            raise PrismError(_TOO_LARGE)
        return func(*args, **kwargs)


_NEW = ("empty", "zeros", "ones", "full", "rand", "randn", "eye")  # the functions that layers are made with
_TOO_LARGE = "describes a larger policy than model.safetensors holds: it was altered; use another checkpoint"


def _build(folder: Path, spec: PolicySpec, build: Build, stored: Mapping[str, Tensor]) -> Policy:
    """The policy with fresh weights, unless it is too large for what is `stored` of it."""
    rows = (spec.action_dim, *(sensor.shape[0] for sensor in spec.sensors if sensor.kind == "vector"))
    try:
        if max(rows) > sum(value.numel() for value in stored.values()):  # the normaliser has a value for each
            raise PrismError(_TOO_LARGE)
        for name in ("obs_horizon", "pred_horizon"):
            stated, own = getattr(spec, name), spec.config.get(name)
            if own not in (stated, None):
                raise PrismError(f"'{name}' is {stated} and, of the method, {own}; use another checkpoint")
        with _AtMost(stored):
            return build(spec)
    except PrismError as error:
        raise PrismError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise PrismError(
            f"{folder / 'config.json'}: its config is not one of a '{spec.method}' policy ({error}); "
            "it was written by other code: use that version of prism, or train again"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, after a look at its version: a future format is named as such before anything else is read."""
    config = files.read_json(folder / "config.json")
    version = config.get("format_version")
    if not isinstance(version, int):
        raise DamagedError(f"{folder / 'config.json'} has no 'format_version': not a checkpoint of prism")
    if version != FORMAT_VERSION:
        remedy = "update prism" if version > FORMAT_VERSION else "use the prism version that wrote it, or train again"
        raise PrismError(
            f"{folder / 'config.json'}: checkpoint format {version} (prism {config.get('prism_version', '?')}), "
            f"this prism {prism.__version__} reads format {FORMAT_VERSION}: {remedy}"
        )
    return config


def _encode(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})


def _decode(folder: Path, name: str, sums: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    data = files.read_verified(folder, name, sums)
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise DamagedError(f"{folder / name} is not safetensors ({error}); use another checkpoint") from None


def _prune(run_dir: Path, keep_last: int, newest: Path) -> None:
    """Newer ones than the one just written are damaged: they do not count as kept."""
    known = [folder for folder in list_checkpoints(run_dir) if _step(folder) <= _step(newest)]
    losses = {folder: loss for folder in known if (loss := _val_loss(folder)) is not None}
    keep = set(known[-keep_last:]) | {newest}
    if losses:
        keep.add(min(losses, key=lambda folder: losses[folder]))
    for folder in known:
        if folder not in keep:
            files.remove_folder(folder)


def _val_loss(folder: Path) -> float | None:
    try:
        loss = files.read_json(folder / "training.json").get("val_loss")
    except PrismError:
        return None
    return float(loss) if isinstance(loss, int | float) else None


def _describe_newest(run_dir: Path) -> str:
    known = list_checkpoints(run_dir)
    return f"The last good checkpoint is {known[-1]} (--resume)" if known else "There is no checkpoint yet"


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)
