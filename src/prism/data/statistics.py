"""What each sensor showed in the training data: SensorSpec.seen, in the words of prism_client/first_look.py.

| kind   | key                                                                                                    |
| ------ | ------------------------------------------------------------------------------------------------------ |
| vector | low, high (D,); quaternions: [{first, mean (4,), least}], least: smallest |q . mean| in the data        |
| rgb    | grid, spread (8 * 8 * 3,): mean and deviation of each cell of a picture; bright: darkest and brightest |
|        | mean of a picture; tail: mean and deviation of what the reddest pixels have over the bluest            |
| depth  | low, high: of the median of what a picture measured, metres; grid, spread (8 * 8,)                     |
| audio  | peak; level: lowest and highest of a window's; bands, band_spread (8,): log10 shares of the power      |

Pixels and sound are of a few steps (24), numbers of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from prism_client.first_look import cells, spectrum, tail

from prism.data.episodes import EpisodeSource
from prism.data.inspect import sample_frames
from prism.normalize import Statistics
from prism.sensors import SensorSpec

Array = np.ndarray[Any, Any]
_EPISODES, _EACH = 8, 3  # pictures that are looked at
_ROWS = 512  # of an episode, to see which numbers are quaternions
_UNIT = 1e-3  # off the norm of 1: what float32 and a driver's rounding leave


def with_seen(
    sensors: Sequence[SensorSpec], source: EpisodeSource, statistics: Statistics | None = None
) -> tuple[SensorSpec, ...]:
    """The sensors with what they showed in `source`; `statistics`: of its vectors."""
    rotations = _rotations(source, [s.name for s in sensors if s.kind == "vector" and s.shape[0] >= 4])
    found = []
    for spec in sensors:
        seen: dict[str, Any] | None = None
        if spec.kind == "vector" and statistics is not None and spec.name in statistics.vectors:
            own = statistics.vectors[spec.name]
            seen = {"low": _short(own.min), "high": _short(own.max)}
            seen |= {"quaternions": rotations[spec.name]} if rotations.get(spec.name) else {}
        elif spec.kind in _SEEN:
            frames = [frame for *_, frame in sample_frames(source, spec, _EPISODES, _EACH)]
            seen = _SEEN[spec.kind](np.stack(frames)) if frames else None
        found.append(replace(spec, seen=seen))
    return tuple(found)


def _short(values: Array, digits: int = 6) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.reshape(-1).tolist()]


def _rgb(frames: Array) -> dict[str, Any]:
    grids, tails = np.stack([cells(frame) for frame in frames]), np.array([tail(frame) for frame in frames])
    means = frames.reshape(len(frames), -1).mean(1)
    return {
        "grid": _short(grids.mean(0), 4),
        "spread": _short(grids.std(0), 3),
        "bright": _short(np.array([means.min(), means.max()]), 4),
        "tail": _short(np.array([tails.mean(), tails.std()]), 4),
    }


def _depth(frames: Array) -> dict[str, Any] | None:
    known = np.isfinite(frames) & (frames > 0)
    middles = [float(np.median(frame[there])) for frame, there in zip(frames, known, strict=True) if there.any()]
    if not middles:
        return None
    measured = np.ma.masked_invalid(
        [cells(np.where(there, frame, np.nan)[..., None]) for frame, there in zip(frames, known, strict=True)]
    )
    grid, spread = (_short(np.ma.filled(one, 0.0), 4) for one in (measured.mean(0), measured.std(0)))
    return {"low": min(middles), "high": max(middles), "grid": grid, "spread": spread}


def _audio(frames: Array) -> dict[str, Any]:
    levels = np.sqrt((frames.astype(np.float64) ** 2).mean(1))
    heard = [spectrum(frame) for frame, level in zip(frames, levels, strict=True) if level > 0]
    seen: dict[str, Any] = {
        "peak": float(np.abs(frames).max()),
        "level": _short(np.array([levels.min(), levels.max()])),
    }
    if heard:
        seen |= {"bands": _short(np.mean(heard, axis=0), 4), "band_spread": _short(np.std(heard, axis=0), 3)}
    return seen


_SEEN = {"rgb": _rgb, "depth": _depth, "audio": _audio}


def _rotations(source: EpisodeSource, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """For each vector: the runs of four numbers with norm 1 in every sampled row."""
    if not names:
        return {}
    rows: dict[str, list[Array]] = {name: [] for name in names}
    for episode in np.unique(np.linspace(0, len(source.lengths) - 1, _EPISODES).round().astype(int)).tolist():
        part = source.read(episode, 0, min(_ROWS, int(source.lengths[episode])), streams=names)
        for name in names:
            there = part.present.get(name)
            rows[name].append(part.streams[name] if there is None else part.streams[name][there])
    return {name: _found_rotations(np.concatenate(parts).astype(np.float64)) for name, parts in rows.items()}


def _found_rotations(rows: Array) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    first = 0
    while len(rows) > 1 and first + 4 <= rows.shape[1]:
        q = rows[:, first : first + 4]
        one_hot = (q == q.round()).all()
        if one_hot or (np.abs(np.linalg.norm(q, axis=1) - 1) > _UNIT).any():
            first += 1
            continue
        mean = np.linalg.eigh(q.T @ q)[1][:, -1]  # the mean rotation: q and -q are one
        found.append({"first": first, "mean": _short(mean), "least": float(np.abs(q @ mean).min())})
        first += 4
    return found
