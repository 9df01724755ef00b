"""Windows that were read before, to fill up a small batch.

LeRobot reads about 250 windows a CPU second of a dataset without pictures, and prism trains on ten times as many: its
loader would be nine tenths of the time. A step therefore trains on LeRobot's batch and on windows of earlier ones,
drawn at random; after an epoch that is all of the dataset. Pictures are not kept: they would not fit.
"""

from __future__ import annotations

import torch
from prism.policy import PolicySpec
from prism.rows import Random
from prism.types import Batch, Observation
from torch import Tensor

_BYTES = 1 << 30


class Memory:
    def __init__(self, spec: PolicySpec, frames: int) -> None:
        self._frames = 0 if any(sensor.is_image for sensor in spec.sensors) else frames
        self._rows: dict[str, Tensor] = {}
        self._count = self._next = 0

    def fill(self, batch: Batch, total: int, rng: Random) -> Batch:
        """`batch` with rows of earlier ones behind it, `total` in all; its own are kept for later."""
        fresh = _flat(batch)
        missing = total - len(batch.actions)
        if self._frames < 1 or missing < 1:
            return batch
        if not self._rows:
            size = sum(value[0].numel() * value.element_size() for value in fresh.values())
            self._frames = min(self._frames, _BYTES // size)
            self._rows = {name: value.new_empty(self._frames, *value.shape[1:]) for name, value in fresh.items()}
        filled = batch
        if self._count:
            drawn = rng.randint(self._count, (missing,)).to(batch.actions.device)
            filled = _batch({name: torch.cat([value, self._rows[name][drawn]]) for name, value in fresh.items()})
        rows = len(batch.actions)
        places = (self._next + torch.arange(rows, device=batch.actions.device)) % self._frames
        for name, value in fresh.items():
            self._rows[name][places] = value
        self._next = (self._next + rows) % self._frames
        self._count = min(self._count + rows, self._frames)
        return filled


def _flat(batch: Batch) -> dict[str, Tensor]:
    streams = {f"stream.{name}": value for name, value in batch.observation.streams.items()}
    present = {f"present.{name}": value for name, value in batch.observation.present.items()}
    return {**streams, **present, "actions": batch.actions, "action_valid": batch.action_valid}


def _batch(rows: dict[str, Tensor]) -> Batch:
    parts = {
        prefix: {name.removeprefix(prefix): value for name, value in rows.items() if name.startswith(prefix)}
        for prefix in ("stream.", "present.")
    }
    return Batch(Observation(parts["stream."], parts["present."]), rows["actions"], rows["action_valid"])
