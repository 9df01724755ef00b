"""A microphone, or a contact microphone, through PortAudio (sounddevice). One reading is the sound of one step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism.errors import PrismError, need
from prism.robots.contract import Array
from prism.robots.drivers.parts import Stream
from prism.sensors import SensorSpec


@dataclass
class Microphone(Stream):
    sensor: str  # default: the table's name
    device: int | str = ""  # a number, or a part of its name; default: the computer's
    sample_rate: int = 16_000
    channel: int = 0

    remedy = "`python -m sounddevice` lists what there is"

    def __post_init__(self) -> None:
        super().__init__()
        if self.sample_rate <= 0 or self.channel < 0:
            raise PrismError(f"sensors.{self.sensor}: sample_rate {self.sample_rate}, channel {self.channel}: no sound")

    def sensors(self) -> tuple[SensorSpec, ...]:
        samples = round(self.sample_rate / self.step_rate)
        return (SensorSpec(self.sensor, "audio", (samples,), fps=self.step_rate, sample_rate=self.sample_rate),)

    def open(self) -> None:
        try:
            sounddevice: Any = need("sounddevice", "robots-microphone", "driver microphone")
        except OSError:  # the package is there, and the library that it calls is not
            raise self.error("PortAudio is missing", "apt install libportaudio2, or brew install portaudio") from None
        device = None if self.device == "" else self.device
        self._stream = sounddevice.InputStream(
            samplerate=self.sample_rate, device=device, channels=self.channel + 1, dtype="float32"
        )
        self._stream.start()

    def grab(self) -> Mapping[str, tuple[Array, float]]:
        sound, _ = self._stream.read(round(self.sample_rate / self.step_rate))  # waits; (samples, channels)
        stamp = time.monotonic() - float(self._stream.latency)
        return {self.sensor: (np.ascontiguousarray(sound[:, self.channel], np.float32), stamp)}

    def shut(self) -> None:
        self._stream.stop()
        self._stream.close()
