"""The distance between mode means, against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from research.multimodality import mode_distance


def reference(paths: list[np.ndarray], modes: list[str], steps: int) -> float:
    total = 0.0
    for t in range(steps + 1):
        means = []
        for mode in ("left", "right"):
            points = [
                path[t] if t < len(path) else path[-1] for path, of in zip(paths, modes, strict=True) if of == mode
            ]
            means.append(sum(points) / len(points))
        total += float(np.hypot(*(means[0] - means[1])))
    return total / (steps + 1)


def test_mode_distance_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    paths = [rng.normal(size=(length, 2)) * 50 for length in (60, 41, 7, 30, 100)]
    modes = ["left", "right", "neither", "right", "left"]
    assert mode_distance(paths, modes, "left", "right") == pytest.approx(reference(paths, modes, 40))
    assert mode_distance(paths, modes, "right", "left") == mode_distance(paths, modes, "left", "right")
    # what happened in no mode, or after the horizon, does not count
    changed = [*paths[:2], paths[2] + 1e3, *paths[3:]]
    changed[4] = np.concatenate([paths[4][:41], paths[4][41:] + 1e3])
    assert mode_distance(changed, modes, "left", "right") == mode_distance(paths, modes, "left", "right")


def test_parallel_paths_are_as_far_apart_as_they_are() -> None:
    line = np.stack([np.arange(50.0), np.zeros(50)], axis=1)
    above = line + np.array([0.0, 30.0])
    assert mode_distance([line, above], ["left", "right"], "left", "right") == pytest.approx(30.0)


def test_an_empty_mode_has_no_distance() -> None:
    assert mode_distance([np.zeros((5, 2))], ["left"], "left", "right") is None
