"""Ranks that train one policy must agree on what they train: compared at the start, and told by rank 0 on a resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import prism
from prism.distributed import ranks
from prism.errors import PrismError
from prism.policy import Policy
from prism.training.checkpoint import TrainingState
from prism.training.config import FREE_ON_RESUME, TrainConfig

_GROUPS = ("weights", "optimizer", "model")


def check_same_start(policy: Policy, config: TrainConfig, data: str) -> None:
    """Every rank has the same code, settings, data and first weights; else one line says what differs, and where."""
    if ranks.world_size() == 1:
        return
    own = {
        "code": f"prism {prism.__version__}, torch {torch.__version__}, sources {source_fingerprint()}",
        **{f"setting train.{name}": value for name, value in _mathematics(config).items()},
        "policy": _digest(json.dumps(policy.spec.to_json(), sort_keys=True).encode()),
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


def tell_state(state: tuple[TrainingState, dict[str, Tensor]] | None) -> tuple[TrainingState, dict[str, Tensor]] | None:
    """The state and model tensors that rank 0 resumes from, on every rank: only rank 0 has to see the checkpoints."""
    if ranks.world_size() == 1:
        return state
    data = ranks.from_leader(_pack(*state) if state is not None else b"")
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
    digest = hashlib.sha256()
    for name, value in sorted(policy.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _mathematics(config: TrainConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name not in FREE_ON_RESUME}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _pack(state: TrainingState, model: dict[str, Tensor]) -> bytes:
    """safetensors with a JSON header: nothing that could run code goes over the wire either."""
    groups = {"weights": state.weights, "optimizer": state.optimizer, "model": model}
    tensors = {f"{group}.{name}": value for group, named in groups.items() for name, value in named.items()}
    fields = (f.name for f in dataclasses.fields(state) if f.name not in _GROUPS)
    header = {"state": json.dumps({name: getattr(state, name) for name in fields})}
    return safetensors.torch.save({name: value.contiguous() for name, value in tensors.items()}, header)


def _unpack(data: bytes) -> tuple[TrainingState, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for name, value in safetensors.torch.load(data).items():
        group, _, key = name.partition(".")
        groups[group][key] = value
    size = int.from_bytes(data[:8], "little")
    values = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["state"])
    return TrainingState(**values, weights=groups["weights"], optimizer=groups["optimizer"]), groups["model"]
