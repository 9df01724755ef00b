"""An environment as a policy is to see it: with another sentence, without some of its sensors.

A policy of several tasks has sensors that one of them lacks: those are absent there, and the sentence of a task without
a text sensor is Task.text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.sensors import SensorSpec, encode_text
from prism.sims.environment import Array, Env, StepResult
from prism.sims.task_table import TASKS, make_env


def sentence_of(task: str) -> str:
    """What to do, in words: the task's own, or its name without that of the simulator."""
    return TASKS[task].text or (task.partition("-")[2] or task).replace("-", " ")


def make_view(
    task: str,
    sensors: Sequence[SensorSpec],
    text: str | None = None,
    without: Collection[str] = (),
    several: bool = False,
) -> Env:
    """The task's environment for a policy with these sensors. `several`: the policy is of several tasks."""
    return EnvView(make_env(task), sensors, text, without, several)


class EnvView:
    """An Env around an Env."""

    def __init__(
        self, env: Env, sensors: Sequence[SensorSpec], text: str | None, without: Collection[str], several: bool
    ) -> None:
        self._env, self._without = env, frozenset(without)
        own = {spec.name for spec in env.sensors}
        texts = [spec for spec in sensors if spec.kind == "text"]
        if unknown := sorted(self._without - {spec.name for spec in sensors}):
            known = ", ".join(spec.name for spec in sensors)
            raise PrismError(f"--without {unknown[0]}: the policy has the sensors {known}")
        if text is not None and not texts:
            raise PrismError(f"--text: the policy has no text sensor; it has {', '.join(s.name for s in sensors)}")
        if text is None and several and texts and not own & {spec.name for spec in texts}:
            text = sentence_of(env.name)
        self._said = {} if text is None else {spec.name: encode_text(text, spec.shape[0]) for spec in texts}
        more = [spec for spec in sensors if spec.name not in own and (several or spec.name in self._said)]
        self.sensors = (*env.sensors, *(replace(spec, fps=0.0) for spec in more))

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, seed: int) -> dict[str, Array]:
        return self._seen(self._env.reset(seed))

    def step(self, action: NDArray[np.float32]) -> StepResult:
        result = self._env.step(action)
        return replace(result, observation=self._seen(result.observation))

    def _seen(self, observation: dict[str, Array]) -> dict[str, Array]:
        seen = {**observation, **self._said}
        return {name: value for name, value in seen.items() if name not in self._without}
