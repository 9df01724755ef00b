"""One connected robot: what it may ask for, its window, its chooser, and what the live page may see of it.

A request is a map with one time step of each sensor under the sensor's name, and these keys, all optional:

    reset      true: this observation starts an episode (the history and the plan are forgotten)
    seed       whole number, with reset: repeats the random numbers of an episode
    executed   how many actions of the last plan the robot has executed; default: the server's exec_horizon
    sent       (n, D), the commands that the robot really got since the last request; default: the executed actions
    all_candidates   true: the reply holds the candidates that were not chosen too, (K, T, D)
    plan       false: take this observation into the history, make no plan
    ages       {sensor: seconds since it was measured}
    prompt     the instruction, of a policy with one text sensor; what openpi's clients call it
    checked    true: this client compares its first observation with the metadata and stops the robot for what a reply
               calls `absent` (prism-client does); of all others the server does both, and refuses

A sensor may be left out: it is absent for that step. A key that is neither is refused, because a misspelt sensor would
be an absent one for ever. What a client should know is in the `warnings` of a reply, each once.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism_client.first_look import look
from prism_client.messages import Plan

from prism.errors import PrismError
from prism.inference.about import needed_sensors
from prism.inference.chooser import Chooser, ControllerConfig
from prism.inference.health import WORDS, as_spec, trained_on
from prism.inference.tokens import Tokens
from prism.inference.window import Reading, Window
from prism.policy import Policy
from prism.rows import Random
from prism.selection import FloatArray
from prism.sensors import SensorSpec

Array = NDArray[np.generic]
KEYS = ("reset", "seed", "executed", "sent", "plan", "all_candidates", "ages", "prompt", "checked")
NEWER = ("checked", "sent", "all_candidates")  # of them: those that older servers refuse
HASTY = 10  # requests in a row
_SAID = 100  # warnings that one connection gets
TRACE = 240  # executed actions that the live page shows
WHO: ContextVar[str] = ContextVar("who", default="-")  # whose request a log line is about

logger = logging.getLogger("prism.server")


class RequestError(PrismError):
    """An error that the client can fix: it gets this line and stays connected."""


@dataclass(frozen=True)
class Request:
    observation: dict[str, Array]
    reset: bool = False
    seed: int | None = None
    executed: int | None = None
    plan: bool = True
    ages: dict[str, float] | None = None
    checked: bool = False
    guessed: tuple[tuple[str, str], ...] = ()  # keys of another program, and the sensors that they were taken for
    sent: NDArray[np.float64] | None = None  # (n, Da)
    all_candidates: bool = False


class Reader:
    """Turns messages into requests for one policy; says in one line what is wrong with the others."""

    def __init__(
        self, sensors: tuple[SensorSpec, ...], action_dim: int, rename: Mapping[str, str] | None = None
    ) -> None:
        self._action_dim = action_dim
        self._specs = {spec.name: spec for spec in sensors}
        self._rename = dict(rename or {})  # key of the client -> sensor; "": ignored
        texts = [spec.name for spec in sensors if spec.kind == "text"]
        self._rename.setdefault("prompt", texts[0] if len(texts) == 1 else "")
        if clash := sorted(set(self._specs) & set(KEYS)):
            raise PrismError(f"the policy has a sensor called '{clash[0]}', a name that the protocol uses: rename it")
        for key, name in self._rename.items():
            if name and name not in self._specs:
                raise PrismError(f"--map {key}={name}: the policy has no sensor '{name}'; it has {self._names()}")

    def read(self, message: Mapping[str, Any]) -> Request:
        observation: dict[str, Array] = {}
        guessed = []
        for key, value in message.items():
            if (key in KEYS and key != "prompt") or not (name := self._name(key)):
                continue
            if key not in self._rename and key.rpartition("/")[2] != name:
                guessed.append((key, name))
            if name in observation:
                raise RequestError(f"sensor '{name}' is in the request twice, once as '{key[:60]}'")
            if value is not None:  # None: absent, as if it had been left out
                observation[name] = self._reading(self._specs[name], value)
        executed = _whole(message, "executed", 100_000)
        seed = _whole(message, "seed", 2**63 - 1)
        reset = _truth(message, "reset", False)
        return Request(
            observation,
            reset,
            seed,
            executed,
            _truth(message, "plan", True),
            self._ages(message),
            _truth(message, "checked", False),
            tuple(guessed),
            self._sent(message),
            _truth(message, "all_candidates", False),
        )

    def _reading(self, spec: SensorSpec, value: object) -> Array:
        if isinstance(value, Mapping | bytes) or (isinstance(value, str) and spec.kind != "text"):
            raise RequestError(f"sensor '{spec.name}': send an array, not {type(value).__name__}")
        try:
            if isinstance(value, list):  # as numbers: each text of a list would get the room of the longest
                value = np.array(value, dtype=np.float64)
            with np.errstate(over="ignore", invalid="ignore"):  # too large for float32: infinite, so absent
                return as_spec(spec, value)
        except PrismError as error:
            raise RequestError(str(error)) from None
        except (ValueError, TypeError, OverflowError, MemoryError):  # ragged lists, text in them
            raise RequestError(f"sensor '{spec.name}': this is not an array of numbers") from None

    def _ages(self, message: Mapping[str, Any]) -> dict[str, float] | None:
        ages = message.get("ages")
        if ages is None:
            return None
        if not isinstance(ages, Mapping) or not all(
            isinstance(age, int | float | np.number) and not isinstance(age, bool) for age in ages.values()
        ):
            raise RequestError("ages is {sensor: seconds}")
        return {name: float(age) for key, age in ages.items() if (name := self._name(str(key)))}

    def _sent(self, message: Mapping[str, Any]) -> NDArray[np.float64] | None:
        value = message.get("sent")
        if value is None:
            return None
        try:
            commands = np.asarray(value, dtype=np.float64)
        except (ValueError, TypeError):
            raise RequestError("sent holds commands, (n, D) numbers") from None
        if commands.size == 0:
            return np.empty((0, self._action_dim))
        if commands.ndim != 2 or commands.shape[1] != self._action_dim or not np.isfinite(commands).all():
            raise RequestError(f"sent holds commands, (n, {self._action_dim}) finite numbers, not {commands.shape}")
        return commands

    def _name(self, key: str) -> str:
        """The sensor that a client's key means; "": ignored."""
        name = self._rename.get(key, key)
        if name and name not in self._specs and (name := self._alias(name)) not in self._specs:
            raise RequestError(self._unknown(key))
        return name

    def _alias(self, key: str) -> str:
        """The sensor that an openpi-style key (observation/state, observation/image) means, where only one can be."""
        path, _, last = key.rpartition("/")
        if path not in ("observation", "observation/images", "observation/exterior", "observation/wrist"):
            return key
        if last in self._specs:
            return last
        kind = "vector" if last in ("state", "joint_position", "proprio") else "rgb" if "image" in last else ""
        fitting = [name for name, spec in self._specs.items() if spec.kind == kind]
        return fitting[0] if len(fitting) == 1 else key

    def _unknown(self, key: str) -> str:
        if "/" in key:  # another program's names: a guess by letters would be wrong
            return f"no sensor '{key[:60]}'; the policy has {self._names()}; rename it, or prism serve --map KEY=SENSOR"
        close = difflib.get_close_matches(key[:60], self._specs, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"the policy has {self._names()}"
        return f"no sensor '{key[:60]}': {hint}"

    def _names(self) -> str:
        return ", ".join(self._specs)[:200]


def _truth(message: Mapping[str, Any], key: str, default: bool) -> bool:
    value = message.get(key, default)
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{key} is true or false, not {repr(value)[:40]}")
    return bool(value)


def _whole(message: Mapping[str, Any], key: str, high: int) -> int | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) <= high:
        raise RequestError(f"{key} is a whole number of at least 0, not {repr(value)[:40]}")
    return int(value)


@dataclass(frozen=True)
class View:
    """What the live page may see of a request. Made by the worker after it, never changed afterwards."""

    observation: Mapping[str, Array]
    faults: Mapping[str, str]
    counts: Mapping[str, int]  # steps at which each sensor was not believed, this episode
    plan: Plan | None
    planned_at: float  # time.monotonic() of the plan


class Session:
    """The state of one connection. `begin` and `finish` run on the worker's thread; one request at a time."""

    def __init__(
        self,
        number: int,
        who: str,
        policy: Policy,
        config: ControllerConfig,
        scale: FloatArray,
        seed: int,
        tokens: Tokens | None = None,
        allow_absent: bool = False,
        trust_sensors: bool = False,
    ) -> None:
        self.number = number
        self.who = who
        self.requests = 0
        self.episodes = 1
        self.steps = 0  # executed, this episode
        self.config, self._normalizer = config, policy.normalizer
        self.window = Window(policy.spec)
        self.chooser = Chooser(policy.spec, config, scale)
        self.rng = Random(seed)
        self.tokens = tokens  # None: the policy has no encoder to keep them of, whole windows are sampled
        self.gained: list[Reading] = []  # time steps that are to be encoded
        self._needs = frozenset(needed_sensors(policy))
        self._events = [spec.name for spec in policy.spec.sensors if spec.steps > 1]
        self._allow_absent, self._trust_sensors = allow_absent, trust_sensors
        self._looked = False  # at the first observation of this episode
        self._said: set[str] = set()  # warnings that the client has
        self._warnings: list[str] = []  # that it is to get with the next reply
        self._warned: set[str] = set()  # of them, this episode
        self._seed = seed
        self._observed = 0  # since the last plan
        self._hasty = 0  # requests in a row that came sooner than they could
        self._planned_at = 0.0
        self._lock = threading.Lock()
        self._trace: deque[NDArray[np.float32]] = deque(maxlen=TRACE)  # guarded by the lock
        self.faults: Counter[tuple[str, str]] = Counter()  # of the last request, for the metrics
        self.view: View | None = None

    def begin(self, request: Request) -> None:
        """Take the observation in. A PrismError leaves the session as usable as before."""
        self.faults = Counter()
        if request.reset:
            self._reset(request.seed)
        for key, name in request.guessed:
            self._warn(f"'{key[:60]}' is taken for sensor '{name}'; to be sure: prism serve --map {key[:60]}={name}")
        if not (self._looked or request.checked or self._trust_sensors):
            self._look(request)
        self._looked = True
        if request.sent is not None:
            self.chooser.advance(0, request.sent)
            self._show(request.sent)
        missed = self._executed(request) if request.plan and self.chooser.plan is not None else 0
        self.gained = self.window.observe(request.observation, request.ages, missed)
        self.requests += 1
        self._observed += 1
        faults = self.window.health.faults
        self.faults.update(faults.items())
        for name in faults.keys() - self._needs:
            if faults[name] != "missing":  # what was left out, was left out on purpose
                self._warn(f"sensor '{name}' {WORDS[faults[name]]}: absent until it recovers")
        for name in sorted(self._needs & faults.keys()):
            said = f"sensor '{name}' {WORDS[faults[name]]}, and the policy requires it"
            if not (request.checked or self._allow_absent):
                raise RequestError(f"{said}: fix it; or start prism serve with --allow-absent")
            if name not in self._warned:
                self._warned.add(name)
                self._warn(said)
        if not request.plan:
            self._publish(request)

    def _look(self, request: Request) -> None:
        """RequestError where a first observation cannot be what the policy was trained on."""
        found = look([trained_on(spec, self._normalizer) for spec in self.window.sensors], request.observation)
        for doubt in found.doubts:
            self._warn(doubt)
        if found.wrong:
            raise RequestError(found.wrong)

    def _warn(self, text: str) -> None:
        """To the log, and to the client with its next reply, once a connection."""
        if text not in self._said and len(self._said) < _SAID:
            self._said.add(text)
            self._warnings.append(text)
            logger.warning("%s: %s", self.who, text)

    def _reset(self, seed: int | None) -> None:
        self.episodes += 1 if self.requests else 0
        self.rng.manual_seed(self._seed + self.episodes - 1 if seed is None else seed)
        self.window.reset()
        self.chooser.reset()
        if self.tokens is not None:
            self.tokens.reset()
        self._observed = self.steps = 0
        self._looked = False
        self._warned.clear()
        with self._lock:
            self._trace.clear()

    def _executed(self, request: Request) -> int:
        """Count what the robot has executed of the plan; how many steps it did not show meanwhile."""
        executed = self.config.exec_horizon if request.executed is None else request.executed
        self._advance(executed - self.chooser.row, request)  # the rest was counted by a request that then failed
        missed = max(0, executed - 1 - self._observed)
        if missed and self._events and "events" not in self._warned:
            self._warned.add("events")
            logger.warning(
                "%d steps since the last plan were not sent: the readings of '%s' are lost; send every observation",
                missed,
                "', '".join(self._events),
            )
        if request.executed is None:
            self._check_pace()
        return missed

    def _advance(self, rows: int, request: Request) -> None:
        plan, row = self.chooser.plan, self.chooser.row
        if rows < 1 or plan is None:
            return
        self.chooser.advance(rows, None if request.sent is None else ())
        if request.sent is None:
            self._show(plan.actions[row : row + rows])

    def _show(self, commands: NDArray[np.floating]) -> None:
        """On the live page."""
        self.steps += len(commands)
        with self._lock:
            self._trace.extend(commands.astype(np.float32))

    def finish(self, request: Request, candidates: NDArray[np.float32], latency_ms: float) -> dict[str, Any]:
        """Choose; the reply. Only `actions` is an array: openpi's ActionChunkBroker cuts every array by steps."""
        plan = self.chooser.choose(candidates, self.window.newest, latency_ms)
        self._observed = 0
        self._planned_at = time.monotonic()
        self._publish(request)
        return {
            "actions": plan.actions,
            "exec_horizon": self.config.exec_horizon,
            **plan.info.to_reply(),
            **self.observed(),
            **({"all_candidates": plan.candidates} if request.all_candidates else {}),
        }

    def observed(self) -> dict[str, Any]:
        """What every reply says."""
        warnings, self._warnings = self._warnings, []
        told = {"warnings": warnings} if warnings else {}
        return {"plan_age": self._observed, "absent": list(self.window.absent), **told}

    def trace(self) -> list[NDArray[np.float32]]:
        """The latest executed actions, oldest first; from any thread."""
        with self._lock:
            return list(self._trace)

    def _check_pace(self) -> None:
        """A client that does not say how much it executed is believed to execute exec_horizon: does it look so?"""
        spec, steps = self.chooser.spec, self.config.exec_horizon
        seconds = time.monotonic() - self._planned_at
        self._hasty = self._hasty + 1 if steps > 1 and spec.fps > 0 and seconds * spec.fps < steps / 2 else 0
        if self._hasty == HASTY:
            logger.warning(
                "%s asks again after %.3g s, and is believed to have executed %d actions by then (%.3g s): if it "
                "executes one, serve with --set exec_horizon=1, or let it send 'executed'",
                self.who,
                seconds,
                steps,
                steps / spec.fps,
            )

    def _publish(self, request: Request) -> None:
        health = self.window.health
        counts: Counter[str] = Counter()
        for (name, _), steps in health.counts.items():
            counts[name] += steps
        self.view = View(request.observation, dict(health.faults), counts, self.chooser.plan, self._planned_at)
