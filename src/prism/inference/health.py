"""Which sensors can be believed right now: readings in, readings and presence out (run time only).

| fault    | a reading that                                                                                       |
| -------- | ---------------------------------------------------------------------------------------------------- |
| missing  | is not in the observation                                                                            |
| nan      | holds NaN or infinity; depth: has no pixel that is finite (single ones become 0, "not measured")     |
| range    | leaves `spec.limits`: any value of a vector or of audio, the mean of an image, the mean of the       |
|          | measured pixels of depth; depth that measured nothing at all leaves any limits. Without limits:      |
|          | leaves what training showed (`spec.seen`) by more than WIDE times its range                          |
| frozen   | is identical to the one before for more than `spec.max_repeats` readings in a row                    |
| late     | is older than `spec.max_age` seconds, where the caller says how old readings are                     |

A sensor with a fault is absent for that step, and present again with the first reading that has none: nothing needs
to be restarted. Each fault of a sensor is logged once an episode, and so is its end; `faults` and `counts` say all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from prism_client.messages import SensorInfo

from prism.errors import PrismError
from prism.normalize import Normalizer
from prism.sensors import SensorSpec, encode_text

Array = NDArray[np.generic]
Fault = Literal["missing", "nan", "range", "frozen", "late"]

WORDS: dict[Fault, str] = {
    "missing": "is not in the observation",
    "nan": "holds NaN or infinity",
    "range": "is out of range",
    "frozen": "is frozen",
    "late": "is late",
}
WIDE = 100.0  # no scene is that far from the data: the error value of a driver, as 65535 or 1e30
_PERIODS = 3  # a reading is late after this many periods of its sensor, unless the spec says otherwise

logger = logging.getLogger("prism.inference.health")


class SensorMonitor:
    """Watches the sensors of one robot, one time step after the other. `reset` starts an episode.

    `watched`: of these another monitor, nearer to the devices, leaves out frozen and late readings: missing here.
    """

    def __init__(self, sensors: Sequence[SensorSpec], fps: float, watched: Collection[str] = ()) -> None:
        self._watched = frozenset(watched)
        self._specs = {spec.name: spec for spec in sensors}
        self._fps = fps
        self.reset()

    def reset(self) -> None:
        self._step = 0
        self._previous: dict[str, Array] = {}
        self._repeats: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()
        self.faults: dict[str, Fault] = {}  # by sensor, now
        self.counts: Counter[tuple[str, Fault]] = Counter()  # steps of each fault in this episode

    def read(self, spec: SensorSpec, value: object, age: float | None = None) -> tuple[Array, bool]:
        """One reading as the spec says, and whether to believe it; zeros where not. `age`: seconds, if it is known.

        PrismError for what no sensor does on its own: another shape or type than the policy was trained with.
        """
        reading = None if value is None else as_spec(spec, value)
        fault, detail = self._diagnose(spec, reading, age)
        self._note(spec.name, fault, detail)
        if fault is not None or reading is None:
            return np.zeros(spec.shape, spec.dtype), False
        if spec.kind == "depth":
            reading = np.where(np.isfinite(reading), reading, np.float32(0))
        return reading, True

    def step(self) -> None:
        """A time step is over: all its sensors have been read."""
        self._step += 1

    def _diagnose(self, spec: SensorSpec, reading: Array | None, age: float | None) -> tuple[Fault | None, str]:
        if reading is None:
            return "missing", ""
        if not _finite(spec, reading):
            return "nan", ""
        if spec.name not in self._watched and self._stands_still(spec, reading):
            return "frozen", f"the same for {self._repeats[spec.name]} readings, at most {spec.max_repeats} are usual"
        if spec.name not in self._watched and age is not None and not age <= (limit := self._max_age(spec)):
            return "late", f"{age:.3g} s old, at most {limit:.3g} s are usual"
        if (outside := _outside(spec, reading)) is not None:
            return "range", outside
        return None, ""

    def _stands_still(self, spec: SensorSpec, reading: Array) -> bool:
        if not spec.max_repeats:
            return False
        holes = reading.dtype.kind == "f"  # NaN in depth: a pixel that was not measured, the same twice
        same = spec.name in self._previous and np.array_equal(self._previous[spec.name], reading, equal_nan=holes)
        self._repeats[spec.name] = self._repeats[spec.name] + 1 if same else 0
        self._previous[spec.name] = reading
        return self._repeats[spec.name] > spec.max_repeats

    def _max_age(self, spec: SensorSpec) -> float:
        rate = spec.fps or self._fps
        return spec.max_age or (_PERIODS / rate if rate > 0 else np.inf)

    def _note(self, name: str, fault: Fault | None, detail: str) -> None:
        before = self.faults.get(name)
        if fault is not None:
            self.counts[name, fault] += 1
        if fault == before:
            return
        if fault is None:
            del self.faults[name]
            self._log(name, "back", f"sensor '{name}' is back at step {self._step}")
            return
        self.faults[name] = fault
        what = f"{WORDS[fault]} ({detail})" if detail else WORDS[fault]
        self._log(name, fault, f"sensor '{name}' {what} at step {self._step}: absent until it recovers")

    def _log(self, name: str, event: Fault | Literal["back"], message: str) -> None:
        if (name, event) in self._logged:  # once an episode: a sensor that flickers must not fill the log
            return
        self._logged.add((name, event))
        quiet = event == "missing" or (event == "back" and (name, "missing") in self._logged)
        logger.log(logging.INFO if quiet else logging.WARNING, message)  # what was left out, was left out on purpose


def as_spec(spec: SensorSpec, value: object) -> Array:
    """A reading with the shape and type of its spec; a text sensor also takes a str.

    Always a copy: a driver may fill the same buffer again, while the window still holds the reading before.
    """
    if spec.kind == "text" and isinstance(value, str):
        return encode_text(value, spec.shape[0])
    reading = np.asarray(value)
    if reading.shape != spec.shape:
        raise PrismError(
            f"sensor '{spec.name}': the policy was trained with shape {spec.shape}, this observation has "
            f"{reading.shape}; use the robot or task it was trained on"
        )
    if spec.dtype == np.uint8:
        if reading.dtype != np.uint8:
            what = "text is UTF-8 in" if spec.kind == "text" else "images are"
            raise PrismError(f"sensor '{spec.name}': {what} uint8, this observation has {reading.dtype}")
        return reading.copy()
    if reading.dtype.kind not in "fiub":
        raise PrismError(f"sensor '{spec.name}': a {spec.kind} is numbers, this observation has {reading.dtype}")
    return reading.astype(np.float32)


def _finite(spec: SensorSpec, reading: Array) -> bool:
    if reading.dtype.kind != "f":
        return True
    finite = np.isfinite(reading)
    return bool(finite.any() if spec.kind == "depth" else finite.all())


def _outside(spec: SensorSpec, reading: Array) -> str | None:
    """The value outside its limits, in words; None if there is none."""
    if spec.kind == "text":
        return None
    if spec.limits is None:
        return _far(spec, reading)
    low, high = spec.limits
    values = reading.astype(np.float64)
    if spec.kind == "depth":
        measured = values[np.isfinite(values) & (values > 0)]
        if not len(measured):
            return "no pixel was measured"
        values = measured.mean(keepdims=True)
    elif spec.is_image:
        values = values.mean(keepdims=True)
    worst = values.min() if values.min() < low else values.max()
    if low <= worst <= high:
        return None
    mean = "a mean of " if spec.is_image else ""
    return f"{mean}{worst:.4g}, the limits are {low:.4g} to {high:.4g}"


def _far(spec: SensorSpec, reading: Array) -> str | None:
    """The value far outside the training data, in words; None if there is none or the data are unknown."""
    seen = spec.seen or {}
    values = reading.astype(np.float64)
    if spec.kind == "vector" and "low" in seen:
        low, high = np.array(seen["low"], np.float64), np.array(seen["high"], np.float64)
        room = WIDE * max(float((high - low).max()), float(np.abs([low, high]).max()), 1e-6)
        low, high = low - room, high + room
    elif spec.kind == "depth" and "high" in seen:
        values = values[np.isfinite(values) & (values > 0)].mean(keepdims=True) if (values > 0).any() else np.zeros(1)
        low, high = np.zeros(1), np.full(1, WIDE * float(seen["high"]))
    elif spec.kind == "audio" and "peak" in seen:
        high = np.full(len(values), WIDE * max(float(seen["peak"]), 1.0))
        low = -high
    else:
        return None
    beyond = np.maximum(low - values, values - high)
    worst = int(np.argmax(beyond))
    if beyond[worst] <= 0:
        return None
    which = f"number {worst} is " if spec.kind == "vector" else ""
    return f"{which}{values[worst]:.4g}, at most {low[worst]:.4g} to {high[worst]:.4g} is near the training data"


def trained_on(spec: SensorSpec, normalizer: Normalizer) -> SensorInfo:
    """A sensor of a policy: its shape, and what it showed in the training data."""
    vector = spec.kind == "vector"
    return SensorInfo(
        spec.name,
        spec.kind,
        spec.shape,
        spec.dtype.name,
        spec.steps,
        mean=tuple(normalizer.center(spec.name).tolist()) if vector else (),
        std=tuple(normalizer.scale(spec.name).tolist()) if vector else (),
        colour=tuple(spec.colour or ()),
        seen=dict(spec.seen or {}),
    )
