"""Sound: the samples of one control step -> log-mel spectrogram -> features.

    P[f, t] = |sum_n w[n] x[t hop + n] exp(-2 pi i f n / N)|^2          Hann window, no padding at the ends
    L[m, t] = 1 + log10(max(sum_f M[m, f] P[f, t] / sum(w)^2, 1e-10)) / 5         -1 is silence, 1 is full scale

The paper has audio on hardware and says nothing of its encoder: all of this is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.errors import check_numbers


@dataclass(frozen=True)
class AudioConfig:
    mels: int = 40  # frequency bands, from 0 to half the sample rate
    window_ms: float = 25.0  # shortened to the control step where that is shorter
    hop_ms: float = 10.0
    hidden: int = 32  # channels of the first convolution; twice as many in the second
    features: int = 128

    def __post_init__(self) -> None:
        check_numbers(self, "encoder.audio", {"[1, inf)": "mels hidden features", "(0, inf)": "window_ms hop_ms"})


def mel(hertz: float) -> float:
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def mel_filters(mels: int, bins: int, sample_rate: int) -> Float[Tensor, "M F"]:
    """Triangles of height 1 over `bins` frequencies, corners evenly spaced in mel = 2595 log10(1 + f / 700)."""
    edges_mel = torch.linspace(0.0, mel(sample_rate / 2), mels + 2, dtype=torch.float64)
    edges = 700.0 * (torch.pow(10.0, edges_mel / 2595.0) - 1.0)  # (mels + 2,) Hz
    frequency = torch.linspace(0.0, sample_rate / 2, bins, dtype=torch.float64)
    rising = (frequency - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequency) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0.0).float()


class LogMel(nn.Module):
    """(N, S) samples -> (N, mels, frames). The spectrum is padded until bins are at most 32 Hz apart, so that no band
    of the lowest frequencies is empty."""

    window: Tensor
    filters: Tensor

    def __init__(self, config: AudioConfig, samples: int, sample_rate: int) -> None:
        super().__init__()
        self.size = min(max(2, round(config.window_ms * sample_rate / 1000)), samples)
        self.hop = max(1, round(config.hop_ms * sample_rate / 1000))
        self.frames = 1 + (samples - self.size) // self.hop
        self.points = 1 << (max(self.size, math.ceil(sample_rate / 32)) - 1).bit_length()
        self.register_buffer("window", torch.hann_window(self.size), persistent=False)
        filters = mel_filters(config.mels, self.points // 2 + 1, sample_rate)
        self.register_buffer("filters", filters, persistent=False)

    def forward(self, samples: Float[Tensor, "N S"]) -> Float[Tensor, "N M T"]:
        with torch.autocast(samples.device.type, enabled=False):  # half precision has no range for a power spectrum
            before = (self.points - self.size) // 2  # torch.stft puts a shorter window in the middle of its frame
            padded = F.pad(samples.float(), (before, self.points - self.size - before))
            spectrum = torch.stft(
                padded, self.points, self.hop, self.size, self.window, center=False, return_complex=True
            )  # (N, F, T)
            power = (spectrum.real.square() + spectrum.imag.square()) / self.window.sum().square()
            return 1.0 + (self.filters @ power).clamp_min(1e-10).log10() / 5.0


class AudioNet(nn.Module):
    """Log-mel, two convolutions that halve the bands, the mean over time, a linear layer. Of several control steps the
    loudest in each feature counts: a click is as loud in a long history as in a short one."""

    def __init__(self, config: AudioConfig, samples: int, sample_rate: int, steps: int = 1) -> None:
        super().__init__()
        self.log_mel = LogMel(config, steps * samples, sample_rate)
        self.steps = steps
        self.conv1 = nn.Conv2d(1, config.hidden, 3, (2, 1), 1)
        self.conv2 = nn.Conv2d(config.hidden, 2 * config.hidden, 3, (2, 1), 1)
        self.project = nn.Linear(2 * config.hidden * 4, config.features)

    def forward(self, samples: Float[Tensor, "N S"]) -> Float[Tensor, "N F"]:
        x = self.log_mel(samples).unsqueeze(1)  # (N, 1, M, T)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        parts = F.adaptive_avg_pool2d(x, (4, self.steps))  # four parts of the spectrum
        y: Tensor = self.project((parts.amax(-1) if self.steps > 1 else parts).flatten(1))
        return y
