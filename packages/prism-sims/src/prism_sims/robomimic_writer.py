"""Writing robomimic's HDF5 layout, so that robomimic reads what prism records.

    data                 attributes: total (steps of all demonstrations), env_args (JSON: the environment)
    data/demo_0          attributes: num_samples, model_file (the scene, XML)
        actions (N, A), states (N, S), rewards (N), dones (N), obs/KEY (N, ...), next_obs/KEY (N, ...)
    mask/train, valid    names of demonstrations; every tenth validates

Row i of `next_obs` is what action i led to; `states` row i is the simulator before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.data.episodes import Array
from prism.errors import PrismError, need
from prism.io.files import AtomicWriter, hidden_beside, sync_folder

_VALID_EVERY = 10


@dataclass(frozen=True)
class Demonstration:
    """One episode of N steps: N actions, N + 1 observations, the simulator's state before each action."""

    observations: Mapping[str, Array]  # (N + 1, ...) by robomimic's key
    actions: NDArray[np.float32]  # (N, A) in [-1, 1]
    states: NDArray[np.float64]  # (N, S)
    rewards: NDArray[np.float64]  # (N,)
    dones: NDArray[np.int64]  # (N,)
    model_file: str

    def __post_init__(self) -> None:
        steps = len(self.actions)
        if steps == 0:
            raise PrismError("a demonstration needs at least one step")
        lengths = {key: len(rows) for key, rows in self.observations.items()}
        if wrong := [key for key, length in lengths.items() if length != steps + 1]:
            raise PrismError(f"'{wrong[0]}' has {lengths[wrong[0]]} rows, {steps} actions need {steps + 1}")
        for key, rows in (("states", self.states), ("rewards", self.rewards), ("dones", self.dones)):
            if len(rows) != steps:
                raise PrismError(f"'{key}' has {len(rows)} rows, there are {steps} actions")


class RobomimicWriter(AtomicWriter):
    """Demonstrations into one file, which gets its name when the `with` block ends well."""

    def __init__(self, path: Path, env_args: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not overwrite:
            raise PrismError(f"{path}: exists already; choose another path or pass --overwrite")
        if self.path.is_dir():
            raise PrismError(f"{path}: is a folder, a file is to be written there; choose another path")
        h5py = need("h5py", "data", f"{path}: HDF5")
        self._text = h5py.string_dtype()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temp = hidden_beside(self.path)
        self._file = h5py.File(self._temp, "w")
        self._data = self._file.create_group("data")
        self._data.attrs["env_args"] = json.dumps(env_args, indent=4)
        self.episodes = self.steps = 0

    def add(self, shown: Demonstration) -> None:
        demo = self._data.create_group(f"demo_{self.episodes}")
        demo.attrs["num_samples"] = len(shown.actions)
        demo.attrs["model_file"] = shown.model_file
        for key in ("actions", "states", "rewards", "dones"):
            demo.create_dataset(key, data=getattr(shown, key))
        for key, rows in shown.observations.items():
            # pictures are compressed, one row a chunk, as they are read
            how: dict[str, Any] = {"compression": "gzip", "chunks": (1, *rows.shape[1:])} if rows.ndim == 4 else {}
            demo.create_dataset(f"obs/{key}", data=rows[:-1], **how)
            demo.create_dataset(f"next_obs/{key}", data=rows[1:], **how)
        self.episodes += 1
        self.steps += len(shown.actions)

    def close(self) -> None:
        if not self.episodes:
            self.abandon()
            raise PrismError(f"{self.path}: no demonstration was added, so no file is written")
        self._data.attrs["total"] = self.steps
        names = [f"demo_{i}" for i in range(self.episodes)]
        valid = names[_VALID_EVERY - 1 :: _VALID_EVERY] or names[-1:]
        train = [name for name in names if name not in valid] or names
        for mask, chosen in (("train", train), ("valid", valid)):
            self._file.create_dataset(f"mask/{mask}", data=np.array(chosen, dtype="S"))
        self._file.close()
        with self._temp.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temp, self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        self._file.close()
        self._temp.unlink(missing_ok=True)
