"""A policy as ONNX graphs: one a sensor, one that fuses a time step, one that turns a window into plans.

    sensor-I.onnx   stream (N, ...) as the SensorSpec says            -> features (N, d)       preprocessing included
                    (N, history, ...) of a sensor with a history: its latest readings, the newest last
    fusion.onnx     features of all sensors, in order (N, sum of d)   -> step (N, F)           Eq. 2
    plan.onnx       steps (B, To, F), latents (B, K, Z)               -> plans (B, K, Tp, Da)  normalised, Sec. 4.2
    absent.safetensors   by sensor: what takes the place of its features where it is absent
    metadata.json        what each graph takes and gives; the sensors; how plans become actions

N, B and K are free. The graphs are apart because sensors come and go: one that is absent is not run. Sound and text
have no graph (torch.stft and distinct strings do not export well); where they are used the policy itself encodes them.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from prism.encoders.kinds import SensorEncoder
from prism.errors import PrismError
from prism.io.files import encode_json, write_folder
from prism.methods.base import ContextPolicy
from prism.methods.prism import PrismPolicy
from prism.policy import Policy

METADATA = "metadata.json"
FORMAT = 1
_OPSET = 17
_HOW = {
    "features": "of every sensor, in the order of `sensors`, end to end: what its graph makes of its newest "
    "reading (with `history` above 1: of its latest `history` readings, the newest last; one that is "
    "missing is the one before it, or the next). Images (H, W, C) uint8, RGB; depth in metres, 0: not "
    "measured; vectors in their own units",
    "absent": "of a sensor that is missing, not finite or without a graph (null): its vector in "
    "absent.safetensors takes the place of its features",
    "steps": "(B, obs_horizon, step_width), the oldest time step first, the newest last; at the start of an "
    "episode the first one fills all",
    "choice": "each of the K plans is a whole answer: never average them. Take the one whose beginning is "
    "nearest to the rest of the plan before, mean |difference| / action_scale; any, where there is "
    "none. Row 0 is the answer to the newest observation; execute exec_horizon rows, then plan again",
}
EXPORTED = ("vector", "rgb", "depth", "tactile")  # kinds of sensors that have a graph


class SensorGraph(nn.Module):
    """stream -> features, for a sensor that is present."""

    def __init__(self, encoder: SensorEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, stream: Tensor) -> Tensor:
        return self.encoder.encode(stream, None)


class FusionGraph(nn.Module):
    """features of all sensors -> a fused time step, with what a sentence makes of them."""

    def __init__(self, policy: PrismPolicy) -> None:
        super().__init__()
        self.encoder = policy.encoder

    def forward(self, features: Tensor) -> Tensor:
        return self.encoder.fuse(features)


class PlanGraph(nn.Module):
    """steps, latents -> plans: the context once, its keys and values once, all K candidates in one batch."""

    def __init__(self, policy: PrismPolicy) -> None:
        super().__init__()
        self.encoder, self.generator = policy.encoder, policy.generator

    def forward(self, steps: Tensor, latents: Tensor) -> Tensor:
        plans: Tensor = self.generator(self.generator.prepare(self.encoder.mix(steps)), latents)
        return plans


def example_stream(encoder: SensorEncoder, rows: int) -> Tensor:
    """Something of the right shape and type, the same every time."""
    spec = encoder.spec
    rng = torch.Generator().manual_seed(0)
    if spec.kind in ("rgb", "tactile", "text"):
        return torch.randint(0, 256, (rows, *spec.step_shape), generator=rng, dtype=torch.uint8)
    return torch.rand((rows, *spec.step_shape), generator=rng)


def export_sensor(encoder: SensorEncoder) -> bytes:
    return _export(SensorGraph(encoder), (example_stream(encoder, 2),), ("stream",), ("features",), ({0: "N"},))


def export_fusion(policy: PrismPolicy) -> bytes:
    total = sum(encoder.features for encoder in sensor_encoders(policy))
    return _export(FusionGraph(policy), (torch.zeros(2, total),), ("features",), ("step",), ({0: "N"},))


def export_plan(policy: PrismPolicy) -> bytes:
    steps = torch.zeros(2, policy.spec.obs_horizon, step_width(policy))
    latents = torch.zeros(2, 3, policy.config.generator.latent)
    free = ({0: "B"}, {0: "B", 1: "K"})
    return _export(PlanGraph(policy), (steps, latents), ("steps", "latents"), ("plans",), free)


def step_width(policy: PrismPolicy) -> int:
    """F: the width of one fused time step."""
    total = sum(encoder.features for encoder in sensor_encoders(policy))
    with torch.no_grad():
        return int(policy.encoder.fuse(torch.zeros(1, total)).shape[1])


def export_graphs(policy: ContextPolicy, progress: Callable[[str], None] = lambda graph: None) -> dict[str, bytes]:
    """The graphs by their names: sensors that have one, and of a policy that plans in a single pass the rest."""
    graphs: dict[str, bytes] = {}
    for index, encoder in enumerate(sensor_encoders(policy)):
        if encoder.spec.kind in EXPORTED:
            progress(f"sensor-{index}.onnx ({encoder.spec.name})")
            graphs[f"sensor-{index}.onnx"] = export_sensor(encoder)
    if isinstance(policy, PrismPolicy):
        progress("fusion.onnx")
        graphs["fusion.onnx"] = export_fusion(policy)
        progress("plan.onnx")
        graphs["plan.onnx"] = export_plan(policy)
    return graphs


def export_onnx(
    policy: Policy,
    folder: Path,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda graph: None,
    exec_horizon: int | None = None,
) -> dict[str, Any]:
    """Write `folder` whole or not at all; its metadata. `progress` gets the name of each graph before it is made.

    `exec_horizon`: actions of a plan to execute before the next one, for the metadata; default: half of them.
    """
    if not isinstance(policy, PrismPolicy):
        raise PrismError(
            f"method '{policy.spec.method}' has no single-pass plan graph; export a policy of method 'prism'"
        )
    policy.eval()
    if folder.exists():
        if not overwrite:
            raise PrismError(f"{folder} exists already: remove it, choose another name, or pass --overwrite")
        if not (folder / METADATA).is_file():
            raise PrismError(f"{folder} is not an export of prism: {METADATA} is missing; give another folder")
    files = export_graphs(policy, progress)
    sensors = [
        {
            "graph": f"sensor-{index}.onnx" if f"sensor-{index}.onnx" in files else None,
            "features": encoder.features,
            **encoder.spec.to_json(),
        }
        for index, encoder in enumerate(sensor_encoders(policy))
    ]
    metadata = {
        "format": FORMAT,
        "graphs": sorted(files),
        "sensors": sensors,
        "obs_horizon": policy.spec.obs_horizon,
        "pred_horizon": policy.spec.pred_horizon,
        "action_dim": policy.spec.action_dim,
        "fps": policy.spec.fps,
        "step_width": step_width(policy),
        "latent": policy.config.generator.latent,
        "exec_horizon": exec_horizon or max(policy.spec.pred_horizon // 2, 1),
        **_HOW,
        "latents": "(B, K, latent) independent standard normal numbers; one draw a candidate",
        "actions": "(plans + anchor) * action_moves * action_scale + action_center, then the 4 values from each of "
        "`quaternions` on divided by their norm; anchor: 0 without one, else ((the newest reading of it in the "
        "window)[:action_dim] - action_center) / action_scale * action_moves, 0 where there is none, its quaternions "
        "first given the sign of which the product with quaternion_reference is not negative",
        "anchor": policy.config.anchor,
        "action_scale": policy.normalizer.action_scale.tolist(),
        "action_center": policy.normalizer.action_center.tolist(),
        "action_moves": policy.normalizer.action_moves.tolist(),
        "quaternions": list(policy.normalizer.quaternions),
        "quaternion_reference": policy.normalizer.quaternion_reference.tolist(),
    }
    files[METADATA] = encode_json(metadata)
    absent = {encoder.spec.name: encoder.absent.detach().clone() for encoder in sensor_encoders(policy)}
    files["absent.safetensors"] = save(absent)
    write_folder(folder, files)
    return metadata


def require(package: str) -> None:
    """PrismError with the remedy unless `package` is installed."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise PrismError(f"this needs {package}, which is not installed: pip install 'prism-policy[onnx]'")


def sensor_encoders(policy: ContextPolicy) -> list[SensorEncoder]:
    return [encoder for encoder in policy.encoder.encoders if isinstance(encoder, SensorEncoder)]


def _export(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    free: tuple[dict[int, str], ...],
) -> bytes:
    require("onnx")
    content = io.BytesIO()
    with quiet(), torch.no_grad():
        torch.onnx.export(
            module.eval(),
            example,
            content,  # type: ignore[arg-type]  # takes a file as well
            dynamo=False,  # traces: seconds where the other exporter takes a minute, and N, B, K stay free all the same
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=dict(zip((*inputs, *outputs), (*free, free[-1]), strict=True)),
            opset_version=_OPSET,
        )
    return content.getvalue()


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter tells of its own deprecations and of packages that it could use: nothing a user can fix.

    The quantiser sets up the root logger by the way, after which every line of our own log would come twice.
    """
    previous, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
        logging.root.handlers[:] = handlers
