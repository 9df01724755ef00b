"""What runs a policy's networks: PyTorch, compiled PyTorch, ONNX Runtime in float32 or int8; behind one interface.

| back end    | sensors                  | fusion, plan                | needs              |
| ----------- | ------------------------ | --------------------------- | ------------------ |
| `eager`     | the policy's modules     | the policy's modules        | nothing            |
| `compile`   | torch.compile            | torch.compile               | a C++ compiler     |
| `onnx`      | ONNX Runtime             | ONNX Runtime                | the extra `onnx`   |
| `onnx-int8` | int8, static (calibrated)| float32, int8 dynamic       | the extra `onnx`   |

`load_backend` compares every one with the eager policy before it is used and refuses it beyond LIMITS, in units of
half the range of an action: |difference| / action_scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prism.errors import PrismError
from prism.inference.export_onnx import PlanGraph, SensorGraph, example_stream, sensor_encoders
from prism.methods.base import ContextPolicy
from prism.methods.prism import PrismPolicy
from prism.policy import Draw, LossOutput, Policy
from prism.ranks import choose_device
from prism.rows import Random
from prism.types import Observation

BackendName = Literal["eager", "compile", "onnx", "onnx-int8"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
# Largest |difference| from eager that is still the same policy, in half ranges of an action. int8 rounds activations
# to 1/255 of their range, layer after layer: what that does to success is measured (docs/explanation/realtime.md).
LIMITS: dict[str, float] = {"eager": 1e-5, "compile": 1e-3, "onnx": 1e-3, "onnx-int8": 0.3}

Frame = dict[str, NDArray[np.generic]]  # one time step of each sensor


class Backend(ABC):
    """Three functions of a policy, each on rows; nothing here knows of time, windows or absence."""

    name: str

    def __init__(self, policy: ContextPolicy) -> None:
        self.policy = policy.eval()
        self.encoders = sensor_encoders(policy)

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""
        return self.policy.normalizer.action_center.device

    @abstractmethod
    def features(self, sensor: int, stream: Tensor) -> Float[Tensor, "N F"]:
        """Of a sensor that is present: stream (N, ...) as its spec says, preprocessing included."""

    def fuse(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N W"]:
        """Eq. 2: the features of all sensors, in order, to one vector a time step."""
        return self.policy.encoder.fuse(features)

    def plan(self, steps: Float[Tensor, "B To W"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        """Normalised plans of K candidates a window of fused steps."""
        return self.policy.plan(self.policy.encoder.mix(steps), candidates, rng)

    def threads(self, count: int) -> None:
        """At most `count` threads inside one call, from now on."""
        torch.set_num_threads(count)


class EagerBackend(Backend):
    name = "eager"

    def __init__(self, policy: ContextPolicy) -> None:
        super().__init__(policy)
        # Pictures come with channels last. Weights laid out otherwise are copied in every call, which for one frame
        # costs a quarter (200x200) to two fifths (84x84) of the time of a ResNet-18. The same numbers to rounding.
        policy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in its stubs

    def features(self, sensor: int, stream: Tensor) -> Float[Tensor, "N F"]:
        return self.encoders[sensor].encode(stream, None)


class CompiledBackend(Backend):
    """torch.compile, for the shapes that occur; the first call of each shape takes as long as a compiler does."""

    name = "compile"

    def __init__(self, policy: ContextPolicy) -> None:
        super().__init__(policy)
        self._sensors: list[Callable[[Tensor], Tensor]] = [
            torch.compile(SensorGraph(encoder)) if encoder.spec.kind != "text" else SensorGraph(encoder)
            for encoder in self.encoders
        ]
        self._plan: Any = torch.compile(PlanGraph(policy)) if isinstance(policy, PrismPolicy) else None

    def features(self, sensor: int, stream: Tensor) -> Float[Tensor, "N F"]:
        return self._sensors[sensor](stream)

    def plan(self, steps: Float[Tensor, "B To W"], candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        if self._plan is None or not isinstance(self.policy, PrismPolicy):
            return super().plan(steps, candidates, rng)
        plans: Tensor = self._plan(steps, self.policy.latents(len(steps), candidates, rng))
        return plans


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise PrismError(f"unknown back end '{name}'; use one of {', '.join(BACKENDS)}")


def backend_device(name: str, backend: str) -> torch.device:
    """The device that is asked for (ranks.choose_device). Back ends other than eager run on the CPU."""
    if backend == "eager":
        return choose_device(name)
    if name not in ("auto", "cpu"):
        raise PrismError(f"--backend {backend} runs on the CPU: use --device cpu, or --backend eager")
    return torch.device("cpu")


def make_backend(name: str, policy: ContextPolicy, frames: Sequence[Frame] = ()) -> Backend:
    """`frames`: observations that calibrate int8; a missing sensor of them is skipped."""
    check_backend(name)
    if name == "eager":
        return EagerBackend(policy)
    if name == "compile":
        return CompiledBackend(policy)
    from prism.inference.backends_onnx import OnnxBackend

    return OnnxBackend(policy, int8=name == "onnx-int8", frames=frames)


@dataclass(frozen=True)
class Agreement:
    """How far a back end's actions are from the eager policy's, for the same observations and latents."""

    backend: str
    max_difference: float  # robot units
    max_difference_scaled: float  # in half ranges of each action
    mean_difference_scaled: float
    limit: float  # of max_difference_scaled


def compare(backend: Backend, observation: Observation, candidates: int = 8, seed: int = 0) -> Agreement:
    eager = backend.policy.sample(observation, candidates, Random(seed))
    other = BackendPolicy(backend).sample(observation, candidates, Random(seed))
    difference = (eager - other).abs()
    scaled = difference / backend.policy.normalizer.action_scale.abs()
    return Agreement(
        backend.name, float(difference.max()), float(scaled.max()), float(scaled.mean()), LIMITS[backend.name]
    )


def load_backend(
    name: str, policy: Policy, frames: Sequence[Frame] = (), candidates: int = 8
) -> tuple[Backend, Agreement]:
    """A back end that was compared with eager, on `frames` or on made-up observations; PrismError if it is off."""
    if not isinstance(policy, ContextPolicy):
        raise PrismError(f"method '{policy.spec.method}' has no encoder that a back end could run; use eager")
    backend = make_backend(name, policy, frames)
    agreement = compare(backend, _windows(policy, frames), candidates)
    if not agreement.max_difference_scaled <= agreement.limit:
        raise PrismError(
            f"back end '{name}' is {agreement.max_difference_scaled:.3g} half ranges of an action away from eager, "
            f"at most {agreement.limit} are tolerated; calibrate with frames of the task, or use 'onnx'"
        )
    return backend, agreement


def load_behind(path: Path, name: str, frames: Sequence[Frame] = (), threads: int = 1) -> Policy:
    """The policy of a run or checkpoint behind a back end: what a worker process calls, or a server."""
    from prism.training.checkpoint import load_policy

    backend, _ = load_backend(name, load_policy(path), frames)
    backend.threads(threads)
    return BackendPolicy(backend)


class BackendPolicy(Policy):
    """A back end as a policy that samples whole windows: for evaluation and servers, which batch. Not to be trained."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.spec = backend.policy.spec
        self.normalizer = backend.policy.normalizer
        self._backend = [backend]  # in a list: its policy is no submodule of this one

    @property
    def backend(self) -> Backend:
        return self._backend[0]

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        raise PrismError(f"a policy behind the back end '{self._backend[0].name}' cannot be trained; train it in eager")

    @torch.inference_mode()
    def sample(self, observation: Observation, candidates: int, rng: Random) -> Float[Tensor, "B K Tp Da"]:
        backend = self._backend[0]
        parts = []
        for index, encoder in enumerate(backend.encoders):
            stream = observation.streams[encoder.spec.name].flatten(0, 1)
            present = observation.present[encoder.spec.name].flatten()
            features = encoder.absent.expand(len(present), -1)
            if bool(present.any()):
                rows = present.nonzero().squeeze(1)
                features = features.index_copy(0, rows, backend.features(index, stream[rows]).to(features.dtype))
            parts.append(features)
        steps = backend.fuse(torch.cat(parts, dim=-1)).unflatten(0, (observation.batch_size, -1))
        plans = backend.plan(steps, candidates, rng)
        return backend.policy.finish(plans, backend.policy.anchor(observation))


def backend_of(policy: Policy) -> Backend | None:
    """The networks of this policy; None if it has no separate encoder."""
    if isinstance(policy, BackendPolicy):
        return policy.backend
    return EagerBackend(policy) if isinstance(policy, ContextPolicy) else None


def _windows(policy: ContextPolicy, frames: Sequence[Frame], most: int = 4) -> Observation:
    """Up to `most` windows made of the frames in order, the last repeated; made-up readings if there are no frames."""
    horizon = policy.spec.obs_horizon
    rows = max(1, min(most, len(frames) // horizon)) if frames else 2
    streams, present = {}, {}
    for encoder in sensor_encoders(policy):
        name = encoder.spec.name
        readings = [np.asarray(frame[name]) for frame in frames[: rows * horizon] if name in frame]
        if readings:
            readings += [readings[-1]] * (rows * horizon - len(readings))
            steps = [np.broadcast_to(reading, encoder.spec.step_shape) for reading in readings]  # a history of one
            streams[name] = torch.from_numpy(np.stack(steps)).unflatten(0, (rows, horizon))
        else:
            streams[name] = example_stream(encoder, rows * horizon).unflatten(0, (rows, horizon))
        present[name] = torch.full((rows, horizon), bool(readings) or not frames)
    return Observation(streams, present)
