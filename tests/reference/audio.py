"""Slow, obvious float64 log-mel (prism/audio.py): a sum for every frequency and frame, a loop for every triangle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def log_mel(samples: Float, sample_rate: int, size: int, hop: int, points: int, mels: int) -> Float:
    """(S,) -> (mels, frames)."""
    frames = 1 + (len(samples) - size) // hop
    window = np.array([0.5 - 0.5 * np.cos(2 * np.pi * n / size) for n in range(size)])
    out = np.zeros((mels, frames))
    weights = triangles(sample_rate, points, mels)
    for t in range(frames):
        part = samples[t * hop : t * hop + size] * window
        power = np.zeros(points // 2 + 1)
        for f in range(points // 2 + 1):
            turns = np.exp(-2j * np.pi * f * np.arange(size) / points)
            power[f] = abs((part * turns).sum()) ** 2 / window.sum() ** 2
        for m in range(mels):
            out[m, t] = 1 + np.log10(max((weights[m] * power).sum(), 1e-10)) / 5
    return out


def triangles(sample_rate: int, points: int, mels: int) -> Float:
    """(mels, points / 2 + 1): from 0 at the corner before, to 1 at its own, to 0 at the next."""
    highest = 2595 * np.log10(1 + sample_rate / 2 / 700)
    corners = [700 * (10 ** (highest * i / (mels + 1) / 2595) - 1) for i in range(mels + 2)]
    weights = np.zeros((mels, points // 2 + 1))
    for m in range(mels):
        left, middle, right = corners[m : m + 3]
        for f in range(points // 2 + 1):
            hertz = f * sample_rate / points
            if left < hertz <= middle:
                weights[m, f] = (hertz - left) / (middle - left)
            elif middle < hertz < right:
                weights[m, f] = (right - hertz) / (right - middle)
    return weights
