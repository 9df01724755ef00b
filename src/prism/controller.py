"""Alg. 2 for your own environment: one observation in, one action out.

observation -> window -> K candidates in one pass -> chooser -> plan -> executor -> action
               (inference/window.py)   (inference/chooser.py)   (prism_client/executor.py)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from prism_client.action_kind import ActionKind
from prism_client.executor import Executor
from prism_client.first_look import look
from prism_client.messages import Plan, PlanInfo

from prism.errors import PrismError
from prism.inference.chooser import ControllerConfig, action_scale, check_controller
from prism.inference.health import SensorMonitor, trained_on
from prism.inference.inline import InlinePlanner, draw
from prism.policy import Policy
from prism.selection import FloatArray

__all__ = ["Controller", "ControllerConfig", "act_together", "action_scale", "check_controller"]
logger = logging.getLogger("prism.controller")
Readings = Mapping[str, NDArray[np.generic] | str]


class Controller:
    """Turns a policy into actions, one observation at a time.

    A sensor that is missing from the observation, NaN, frozen, out of range or late is marked absent for that step
    (prism.inference.health), and the policy continues with the others. An unknown sensor is an
    error. `reset(seed)` starts an episode; the same seed and observations give the same actions. A new controller
    has been reset with its `seed`: without a call of reset, the first act begins its first episode.

    `look`: `act` compares the first observation of an episode with the training data (units, colours, cameras) and
    refuses dangerous differences. Not needed for the simulator of the training data.
    """

    def __init__(
        self,
        policy: Policy,
        config: ControllerConfig,
        seed: int = 0,
        scale: NDArray[np.floating] | None = None,
        look: bool = True,
    ) -> None:
        self.policy, self.config, self._look = policy, config, look
        self.planner = InlinePlanner(policy, config, seed, scale)
        self.executor = Executor(
            self.planner,
            action_kind=policy.spec.action.kind or ActionKind.ABSOLUTE,  # nothing is held here
            asynchronous=config.delay > 0,
            strict=True,
            absent="continue",
            blend=0 if config.join is None else None,  # None: as stored
            margin=math.inf if config.margin is None else None,
            look=False,  # the executor's own: here it is a PrismError
            max_held=0,
            clock=self.planner.clock,
        )
        self.reset(seed)

    @property
    def scale(self) -> FloatArray:
        """(Da,), the divisor of differences of actions."""
        return self.planner.scale

    @property
    def health(self) -> SensorMonitor:
        """The missing sensors, and why."""
        return self.planner.window.health

    def reset(self, seed: int = 0) -> None:
        self.executor.reset(seed)
        self.replans: list[PlanInfo] = []  # of the plans that were taken over
        self.last_plan: Plan | None = None

    def act(self, observation: Readings, ages: Mapping[str, float] | None = None) -> NDArray[np.float32]:
        """The action (Da,) for this observation. `ages`: seconds since each reading was taken, where known."""
        self._observe(observation, ages)
        return self._command()

    def _observe(self, observation: Readings, ages: Mapping[str, float] | None = None) -> None:
        if self._look and self.last_plan is None:
            first_look(self.policy, observation)
        self.planner.tick()
        self.executor.observe(observation, ages)

    def _command(self) -> NDArray[np.float32]:
        command = self.executor.command()
        if command.plan is not None:
            self.last_plan = command.plan
            self.replans.append(command.plan.info)
        return command.action

    def sent(self, action: NDArray[np.floating]) -> None:
        """The command that the robot really got, if it was clipped. The next plan continues from it."""
        self.executor.sent(action)


def act_together(controllers: Sequence[Controller], observations: Sequence[Readings]) -> list[NDArray[np.float32]]:
    """The actions of several robots with one policy: their plans are drawn in one pass."""
    for controller, observation in zip(controllers, observations, strict=True):
        controller._observe(observation)
    draw([controller.planner for controller in controllers])
    return [controller._command() for controller in controllers]


def first_look(policy: Policy, observation: Mapping[str, object]) -> None:
    """PrismError if a first observation does not match the training data; smaller differences are logged."""
    found = look([trained_on(sensor, policy.normalizer) for sensor in policy.spec.sensors], observation)
    absent = [sensor.name for sensor in policy.spec.sensors if observation.get(sensor.name) is None]
    lacking = [f"sensor '{name}' is not in the first observation: the policy continues without it" for name in absent]
    for doubt in (*lacking, *found.doubts):
        logger.warning("%s", doubt)
    if found.wrong:
        raise PrismError(found.wrong)
