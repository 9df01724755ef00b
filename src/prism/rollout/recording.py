"""An evaluation on disk: one .npz without pickles, from which the report can be made again at any time.

`meta` holds UTF-8 JSON; the arrays of episode i are `i/actions`, `i/states`, ... Frames are JPEG files laid end
to end in one uint8 array with their sizes beside it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.rollout.results import RECORDINGS, EpisodeResult, EvaluationResult, Fan, write_atomic
from prism.selection import SelectionConfig

FORMAT_VERSION = 1
FOLDER = "evaluation"
_ROW = tuple(f.name for f in dataclasses.fields(EpisodeResult) if f.name not in RECORDINGS)
_Arrays = dict[str, NDArray[Any]]


def recording_path(run: Path, task: str) -> Path:
    return run / FOLDER / f"{task}.npz"


def save_result(path: Path, result: EvaluationResult, overwrite: bool = False) -> None:
    arrays: _Arrays = {}
    for i, episode in enumerate(result.episodes):
        arrays |= {f"{i}/{name}": value for name, value in _episode_arrays(episode).items()}
    meta = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "episodes"}
    meta["controller"] = dataclasses.asdict(result.controller)
    meta["format_version"] = FORMAT_VERSION
    meta["episodes"] = [{name: getattr(episode, name) for name in _ROW} for episode in result.episodes]
    arrays["meta"] = np.frombuffer(json.dumps(meta, allow_nan=False).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue(), overwrite)


def load_result(path: Path) -> EvaluationResult:
    if not path.is_file():
        raise PrismError(f"{path} does not exist: evaluate the policy first (prism eval RUN)")
    try:
        # Read whole first: np.load leaves the file open when it is damaged.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays: _Arrays = {name: file[name] for name in file.files}
        meta: dict[str, Any] = json.loads(bytes(arrays["meta"]))
        version = meta.pop("format_version")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise PrismError(f"{path} is damaged or not a recording ({error}): run prism eval again") from error
    if version != FORMAT_VERSION:
        raise PrismError(f"{path} has format {version}, this version reads {FORMAT_VERSION}: run prism eval again")
    try:
        controller = dict(meta["controller"])
        controller["selection"] = SelectionConfig(**controller["selection"])
        meta["controller"] = ControllerConfig(**controller)
        meta |= {name: tuple(meta.get(name, ())) for name in ("crashes", "lost")}
        meta["episodes"] = tuple(_episode(row, arrays, i) for i, row in enumerate(meta["episodes"]))
        return EvaluationResult(**meta)
    except (KeyError, TypeError, ValueError) as error:
        raise PrismError(f"{path} lacks or misspells a field ({error}): run prism eval again") from error


def load_results(run: Path) -> list[EvaluationResult]:
    """Every task that was evaluated in a run, in the order of their names."""
    paths = sorted((run / FOLDER).glob("*.npz"))
    if not paths:
        raise PrismError(f"{run} has no {FOLDER}/*.npz: evaluate the policy first (prism eval {run})")
    return [load_result(path) for path in paths]


def _episode_arrays(episode: EpisodeResult) -> _Arrays:
    arrays: _Arrays = {
        "actions": episode.actions,
        "states": episode.states,
        "latency_ms": np.asarray(episode.latency_ms, dtype=np.float64),
    }
    if episode.fans:
        arrays["fan_steps"] = np.array([[fan.step, fan.index] for fan in episode.fans], dtype=np.int64)
        arrays["fan_modes"] = np.stack([fan.modes for fan in episode.fans])
        arrays["fans"] = np.stack([fan.candidates for fan in episode.fans])
    if episode.frames:
        arrays["frames"] = np.frombuffer(b"".join(episode.frames), dtype=np.uint8)
        arrays["frame_sizes"] = np.array([len(frame) for frame in episode.frames], dtype=np.int64)
        arrays["frame_steps"] = np.array(episode.frame_steps, dtype=np.int64)
    return arrays


def _episode(row: Mapping[str, Any], arrays: _Arrays, i: int) -> EpisodeResult:
    fans: list[Fan] = []
    if f"{i}/fans" in arrays:
        fans = [
            Fan(int(step), int(index), candidates, modes)
            for (step, index), candidates, modes in zip(
                arrays[f"{i}/fan_steps"], arrays[f"{i}/fans"], arrays[f"{i}/fan_modes"], strict=True
            )
        ]
    frames: list[bytes] = []
    steps: list[int] = []
    if f"{i}/frames" in arrays:
        data, ends = arrays[f"{i}/frames"].tobytes(), np.cumsum(arrays[f"{i}/frame_sizes"])
        frames = [data[int(end - size) : int(end)] for end, size in zip(ends, arrays[f"{i}/frame_sizes"], strict=True)]
        steps = [int(step) for step in arrays[f"{i}/frame_steps"]]
    return EpisodeResult(
        **{name: row[name] for name in _ROW},
        latency_ms=[float(value) for value in arrays[f"{i}/latency_ms"]],
        actions=arrays[f"{i}/actions"],
        states=arrays[f"{i}/states"],
        fans=fans,
        frames=frames,
        frame_steps=steps,
    )
