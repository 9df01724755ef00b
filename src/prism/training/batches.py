"""Fixed batches for validation, a fingerprint of the data, and what to keep of a batch that broke the training."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import Tensor

from prism.data.episodes import IntArray
from prism.data.windows import Windows
from prism.training import files
from prism.types import Batch, Observation, Share


def validation_indices(count: int, batch_size: int, batch_count: int) -> list[IntArray]:
    """At most batch_count batches spread evenly over `count` windows; always the same."""
    chosen = np.linspace(0, count - 1, min(count, batch_size * batch_count)).astype(np.int64)
    return [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]


def fingerprint(windows: Windows) -> str:
    """A short name for the data: the number of windows and the content of 32 of them, evenly spread."""
    batch = windows.batch(np.linspace(0, len(windows) - 1, 32).astype(np.int64))
    digest = hashlib.sha256(str(len(windows)).encode())
    for name, value in sorted(batch_tensors(batch).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of a batch by a flat name."""
    tensors = {f"streams.{name}": value for name, value in batch.observation.streams.items()}
    tensors |= {f"present.{name}": value for name, value in batch.observation.present.items()}
    return {**tensors, "actions": batch.actions, "action_valid": batch.action_valid}


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """At most `count` parts of nearly equal size, each of which knows its place in the global batch."""
    rows = len(batch.actions)
    share = batch.share or Share(0, rows)
    count = min(count, rows)
    bounds = [part * rows // count for part in range(count + 1)]
    return [_rows(batch, slice(*edge), Share(share.start + edge[0], share.total)) for edge in pairwise(bounds)]


def _rows(batch: Batch, rows: slice, share: Share) -> Batch:
    streams = {name: value[rows] for name, value in batch.observation.streams.items()}
    present = {name: value[rows] for name, value in batch.observation.present.items()}
    return Batch(Observation(streams, present), batch.actions[rows], batch.action_valid[rows], share)


def dump_batch(path: Path, batch: Batch, notes: dict[str, str]) -> None:
    """Keep the batch that broke the training, for the person who looks into it."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in batch_tensors(batch).items()}
    with files.explain_write_errors(path, "The checkpoints are intact"):
        files.replace_file(path, safetensors.torch.save(tensors, notes))


def non_finite_names(batch: Batch) -> list[str]:
    """The inputs that hold a NaN or an infinity where a sensor was present."""
    names = []
    for name, value in batch_tensors(batch).items():
        if not value.is_floating_point():
            continue
        present = batch.observation.present.get(name.removeprefix("streams."))
        relevant = value[present] if present is not None and name.startswith("streams.") else value
        if not bool(relevant.isfinite().all()):
            names.append(name)
    return names
