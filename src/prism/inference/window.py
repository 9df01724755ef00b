"""The window of observations that a policy plans from: history, missing readings, health of the sensors.

    one reading of each sensor  ->  health  ->  history  ->  window
                                    believed?   the latest    the latest To time steps
                                                H readings

A sensor that is missing from an observation, NaN, frozen, out of range or late (health.py) is absent for that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from prism.data.history import memory, stacked
from prism.errors import PrismError
from prism.inference.health import SensorMonitor
from prism.policy import PolicySpec
from prism.types import Observation

Array = NDArray[np.generic]
Reading = tuple[dict[str, Array], dict[str, bool]]  # one time step of every sensor, and which can be believed


class Window:
    """The latest time steps of one robot. `reset` starts an episode.

    `watched`: sensors of which a guard leaves out frozen and late readings (robots/guard.py).
    """

    def __init__(self, spec: PolicySpec, watched: Collection[str] = ()) -> None:
        self.sensors, self._horizon = spec.sensors, spec.obs_horizon
        self.health = SensorMonitor(spec.sensors, spec.fps, watched)
        self.reset()

    def reset(self) -> None:
        self.health.reset()
        self._step = 0
        self._readings: deque[Reading] = deque(maxlen=memory(self.sensors, 1))
        self.steps: deque[Reading] = deque(maxlen=self._horizon)  # what a policy is shown, oldest first

    @property
    def newest(self) -> Reading:
        """The latest reading of each sensor, without its history."""
        return self._readings[-1]

    @property
    def absent(self) -> tuple[str, ...]:
        """Sensors that are faulty now."""
        return tuple(sorted(self.health.faults))

    def observe(
        self, observation: Mapping[str, Array | str], ages: Mapping[str, float] | None = None, missed: int = 0
    ) -> list[Reading]:
        """Slide by one time step of each sensor, in sensor units. Returns the time steps that the window gained; one of
        a sensor with a history holds its latest readings (prism.data.history).

        `ages`: how many seconds ago each reading was taken, of the sensors for which that is known. `missed`: time
        steps since the last observation that were not sent. A window is of consecutive steps, and a policy reads
        velocities off it, so they are filled in: vectors by interpolation, everything else by what is nearest in time.
        """
        known = [sensor.name for sensor in self.sensors]
        if unknown := [name for name in observation if name not in known]:
            raise PrismError(
                f"step {self._step}: the policy knows no sensor '{unknown[0]}'; it knows {', '.join(known)}. Leave out "
                "what it does not know, and what is missing: a sensor that is left out counts as absent"
            )
        streams: dict[str, Array] = {}
        present: dict[str, bool] = {}
        for sensor in self.sensors:
            streams[sensor.name], present[sensor.name] = self.health.read(
                sensor, observation.get(sensor.name), None if ages is None else ages.get(sensor.name)
            )
        self.health.step()
        if not any(present.values()):
            raise PrismError(
                f"step {self._step}: none of the policy's sensors ({', '.join(present)}) can be used: the observation "
                f"has {', '.join(observation) or 'nothing'}; one has to be there and finite"
            )
        self._step += 1 + missed
        return self._slide((streams, present), missed)

    def _slide(self, newest: Reading, missed: int) -> list[Reading]:
        length = self._readings.maxlen or 1
        new = [newest]
        if self._readings and missed > 0:
            before = self._readings[-1]
            steps = range(max(1, missed + 3 - self._horizon - length), missed + 1)
            new = [self._between(before, newest, step / (missed + 1)) for step in steps] + new
        self._readings.extend(new * (0 if self._readings else length - 1))  # edge padding: the first one fills it
        gained = []
        for reading in new:
            self._readings.append(reading)
            gained.append(self._with_history())
        self.steps.extend(gained * (1 if self.steps else self._horizon))
        return gained

    def _with_history(self) -> Reading:
        """The time step of the newest readings."""
        newest, believed = self._readings[-1]
        streams, present = dict(newest), dict(believed)
        for sensor in self.sensors:
            if sensor.steps > 1:
                name, past = sensor.name, list(self._readings)[-sensor.steps :]
                there = np.array([known[name] for _, known in past])
                streams[name], any_there = stacked(np.stack([own[name] for own, _ in past]), there)
                present[name] = bool(any_there)
        return streams, present

    def _between(self, earlier: Reading, later: Reading, at: float) -> Reading:
        """A time step between two observations, `at` in (0, 1)."""
        (before, there), (after, present) = earlier, later
        streams, known = {}, {}
        for sensor in self.sensors:
            name = sensor.name
            late = present[name] and (at >= 0.5 or not there[name])
            streams[name], known[name] = (after[name], True) if late else (before[name], there[name])
            if sensor.kind == "vector" and there[name] and present[name]:
                way = after[name].astype(np.float64) - before[name].astype(np.float64)
                streams[name] = (before[name].astype(np.float64) + at * way).astype(np.float32)
        return streams, known


def batched(windows: Sequence[Window], device: torch.device) -> Observation:
    """The windows of several robots with one policy as one batch; all have observed."""
    streams, present = {}, {}
    for sensor in windows[0].sensors:
        steps = np.stack([own[sensor.name] for window in windows for own, _ in window.steps])  # (B * To, ...)
        streams[sensor.name] = torch.from_numpy(steps.reshape(len(windows), -1, *steps.shape[1:]))
        present[sensor.name] = torch.tensor([[there[sensor.name] for _, there in window.steps] for window in windows])
    return Observation(streams, present).to(device)
