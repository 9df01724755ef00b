"""Before the first step: a folder that is ours, ranks that agree on what they train, and the state to resume from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import prism
from prism import ranks
from prism.data.loader import BatchOrder
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.io import files
from prism.io.files import exclusive
from prism.io.jsonconfig import from_json, to_json
from prism.policy import Policy, PolicySpec
from prism.training import checkpoint
from prism.training.checkpoint import TrainingState
from prism.training.config import FREE_ON_RESUME, TrainConfig
from prism.types import Batch

_GROUPS = ("weights", "optimizer", "model")
Resumed = tuple[TrainingState, dict[str, Tensor]]  # and the tensors of the model


@contextmanager
def open_run(
    policy: Policy, windows: Windows, config: TrainConfig, run_dir: Path, resume: bool | Literal["auto"]
) -> Iterator[tuple[BatchOrder, str, bool]]:
    """Hold the folder. -> the order of the windows, the fingerprint of the data, whether there is a run to resume."""
    with ExitStack() as stack:
        with ranks.share_errors():
            if len(windows) == 0:
                raise PrismError("there is nothing to train on: the dataset has no training window")
            if ranks.is_leader():
                resume = checkpoint.check_resume(run_dir, resume)
                with files.explain_write_errors(run_dir, "Nothing was trained"):
                    run_dir.mkdir(parents=True, exist_ok=True)
                with files.explain_write_errors(run_dir, "Its checkpoints are unchanged"):
                    stack.enter_context(exclusive(run_dir))
                    files.remove_leftovers(run_dir)
            size, seed, world = config.batch_size, config.seed, ranks.world_size()
            order = BatchOrder(len(windows), size, seed, ranks.rank(), world, windows.blocks, windows.weights)
            data = fingerprint(windows)
        check_same_start(policy, config, data)
        yield order, data, bool(resume)


def check_same_start(policy: Policy, config: TrainConfig, data: str) -> None:
    """Every rank has the same code, settings, data and first weights; else one line says what differs, and where."""
    if ranks.world_size() == 1:
        return
    own = {
        "code": f"prism {prism.__version__}, torch {torch.__version__}, sources {source_fingerprint()}",
        **{f"setting train.{k}": v for k, v in dataclasses.asdict(config).items() if k not in FREE_ON_RESUME},
        "policy": _digest(_plain(policy.spec).encode(), {}),
        "training data": data,
        "first weights": weights_fingerprint(policy),
    }
    everybody = [json.loads(text) for text in ranks.gather_text(json.dumps(own))]
    for name, value in everybody[0].items():
        different = [rank for rank, theirs in enumerate(everybody) if theirs[name] != value]
        if different:
            message = (
                f"the ranks do not have the same {name}: rank {different[0]} has {everybody[different[0]][name]}, "
                f"rank 0 has {value}; give every machine the same version of prism, the same data and options"
            )
            raise PrismError(message) if ranks.is_leader() else ranks.ReportedError(message)


def broadcast_state(state: Resumed | None) -> Resumed | None:
    """The state and model tensors that rank 0 resumes from, on every rank: only rank 0 has to see the checkpoints."""
    if ranks.world_size() == 1:
        return state
    data = ranks.broadcast(_pack(*state) if state is not None else b"")
    return state if ranks.is_leader() or not data else _unpack(data)


def source_fingerprint() -> str:
    """Of prism's own source files, by name and content."""
    root = Path(prism.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def weights_fingerprint(policy: Policy) -> str:
    """Of every parameter and buffer: the seed, pretrained weights and normaliser statistics are in it."""
    return _digest(b"", policy.state_dict())


def _digest(head: bytes, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(head)
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _pack(state: TrainingState, model: dict[str, Tensor]) -> bytes:
    """safetensors with a JSON header: nothing that could run code goes over the wire either."""
    groups = {"weights": state.weights, "optimizer": state.optimizer, "model": model}
    tensors = {f"{group}.{name}": value for group, named in groups.items() for name, value in named.items()}
    fields = (f.name for f in dataclasses.fields(state) if f.name not in _GROUPS)
    header = {"state": json.dumps({name: getattr(state, name) for name in fields})}
    return safetensors.torch.save({name: value.contiguous() for name, value in tensors.items()}, header)


def _unpack(data: bytes) -> Resumed:
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for name, value in safetensors.torch.load(data).items():
        group, _, key = name.partition(".")
        groups[group][key] = value
    size = int.from_bytes(data[:8], "little")
    values = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["state"])
    return TrainingState(**values, weights=groups["weights"], optimizer=groups["optimizer"]), groups["model"]


def find_state(run_dir: Path, policy: Policy, config: TrainConfig, data: str, notes: list[str]) -> Resumed | None:
    """The newest intact checkpoint of the run, or None if there is none; `notes` name it."""
    folder = checkpoint.latest_checkpoint(run_dir, notes.append)
    notes.append(f"resuming {folder}" if folder else f"{run_dir} has no checkpoint yet: starting at step 0")
    if folder is None:
        return None
    state = checkpoint.load_training_state(folder)
    _check_same_run(folder, policy, config, data, state)
    policy.spec = dataclasses.replace(policy.spec, absent=checkpoint.read_spec(folder).absent)
    model = checkpoint.load_model_tensors(folder)
    checkpoint.set_aside_newer(folder)
    return state, model


def _check_same_run(folder: Path, policy: Policy, config: TrainConfig, data: str, state: TrainingState) -> None:
    """A resumed run is the same run: same policy, same data, same mathematics."""
    there, here = _with_defaults(checkpoint.read_spec(folder), policy), policy.spec
    if there.action.kind is None:  # from before kinds were looked for in the data
        here = dataclasses.replace(here, action=dataclasses.replace(here.action, kind=None))
    if changed := _changes(json.loads(_plain(there)), json.loads(_plain(here))):
        remedy = "resume with the options the run was started with, or start a new run"
        raise PrismError(f"{folder / 'config.json'} describes another policy ({', '.join(changed)}): {remedy}")
    stored, asked = {**TrainConfig(steps=1).to_json(), **state.train_config}, config.to_json()  # older: with defaults
    different = sorted(
        key for key in stored.keys() | asked.keys() if key not in FREE_ON_RESUME and stored.get(key) != asked.get(key)
    )
    if different and set(different) <= {"steps", "minutes"} and _larger(asked, stored):
        different = []  # a run that is over may go on; the learning rate follows the new budget from here
    if different:
        changes = ", ".join(f"{key} = {stored.get(key)} there, {asked.get(key)} now" for key in different)
        raise PrismError(
            f"{folder / 'training.json'}: the run was started with other settings ({changes}): "
            "resume with the stored ones, or start a new run"
        )
    if data != state.data:
        raise PrismError(
            f"{folder / 'training.json'}: the run was started with other data: resume with the same --data"
        )


def _with_defaults(spec: PolicySpec, policy: Policy) -> PolicySpec:
    """A stored spec, with the settings that were added since at their defaults."""
    config = getattr(policy, "config", None)
    if config is None or spec.method != policy.spec.method:
        return spec
    return dataclasses.replace(spec, config=to_json(from_json(type(config), spec.config)))


def _changes(there: Any, here: Any, key: str = "") -> list[str]:
    """What differs, by dotted keys."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(there.keys() | here.keys())
        return [c for name in names for c in _changes(there.get(name), here.get(name), f"{key}.{name}".lstrip("."))]
    return [] if there == here else [f"{key} = {there} there, {here} now"]


def _larger(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a budget of the same unit is larger than the one before."""
    return any(float(asked[key]) > float(stored[key]) > 0 for key in ("steps", "minutes")) and not any(
        bool(asked[key]) != bool(stored[key]) for key in ("steps", "minutes")
    )


def _plain(spec: PolicySpec) -> str:
    """Tuples and lists are the same there. What was absent is found in training, what is missed after it; what sensors
    showed may be kept or not."""
    sensors = [dataclasses.replace(sensor, seen=None, colour=None).to_json() for sensor in spec.sensors]
    return json.dumps({**spec.to_json(), "sensors": sensors, "absent": (), "missed": ()}, sort_keys=True)


def fingerprint(windows: Windows) -> str:
    """A short name for the data: the number of windows, their weights, and the content of 32, evenly spread."""
    batch = windows.batch(np.linspace(0, len(windows) - 1, 32).astype(np.int64))
    weights = b"" if windows.weights is None else windows.weights.tobytes()
    tensors = batch_tensors(batch)
    for name, kept in windows.kept.items():  # other machines round features otherwise: their frames count
        del tensors[f"streams.{name}"]
        weights += kept.content.encode()
    return _digest(str(len(windows)).encode() + weights, tensors)


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of a batch by a flat name."""
    tensors = {f"streams.{name}": value for name, value in batch.observation.streams.items()}
    tensors |= {f"present.{name}": value for name, value in batch.observation.present.items()}
    return {**tensors, "actions": batch.actions, "action_valid": batch.action_valid}
