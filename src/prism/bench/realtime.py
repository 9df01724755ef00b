"""`prism bench realtime`: does the paper-size policy hold its control rate here, cameras to action?

A clock divides time into slots of 1 / rate seconds. In every slot one frame of every camera arrives (made up, each
different), the control loop takes them in and gives an action; frames are encoded and plans made beside it
(inference/lanes.py, prism_client/executor.py). T_o = 8, T_p = 16, T_a = 8, K = 8, all sensors' preprocessing and
the health checks included.

actions_per_s    actions that were on time, over the whole time from the first slot to the end of the last
late_actions     given after the end of their slot
p50_ms, p99_ms, max_ms   from the beginning of the slot, when its frames arrive, to its action
frames, frames_encoded, observations_dropped, encode_p50_ms, encode_p99_ms (arrival -> token)
plan_*           request -> plan, encoding of the newest frames included; plan_age: of the observation behind an action;
                 plan_misses: plans that took longer than plan_budget_ms, which is T_a / rate
holds            actions without a plan (the old one was used up): 0 when planning keeps up
cpu_share        of the cores, by this process; stolen_s: what a virtual machine's host withheld of them in that time
max_actions_per_s   with the frames fed as fast as they are encoded, instead of by the clock
max_action_difference (robot units), max_action_difference_scaled (half ranges)   back end against eager, same latents
`python -m research realtime` adds what kept tokens bring, and other methods in the same loop.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from prism_client import ActionKind, Executor, Stats
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.experiments.run_folder import Run, default_controller
from prism.inference.backends import Agreement, Backend, Frame, load_backend
from prism.inference.lanes import Lanes, LocalPlanner, is_realtime, steady
from prism.inference.tokens import warm_up
from prism.methods.base import ContextPolicy
from prism.methods.presets import build_policy, preset
from prism.sensors import SensorSpec, encode_text

if TYPE_CHECKING:
    from prism.cli.bench import Realtime

WRIST = (SensorSpec("rgb_wrist", "rgb", (84, 84, 3)), SensorSpec("proprio", "vector", (15,)))
CALVIN = (
    SensorSpec("rgb_static", "rgb", (200, 200, 3)),
    SensorSpec("rgb_wrist", "rgb", (84, 84, 3)),
    SensorSpec("depth_static", "depth", (200, 200), clip=(0.1, 6.0)),
    SensorSpec("depth_wrist", "depth", (84, 84), clip=(0.01, 2.0)),
    SensorSpec("tactile", "tactile", (160, 120, 6)),
    SensorSpec("proprio", "vector", (15,)),
)
SENSORS: dict[str, tuple[SensorSpec, ...]] = {"wrist": WRIST, "calvin": CALVIN}
RATES = {"wrist": 50.0, "calvin": 30.0}  # the bars, in actions a second
BACKENDS = {"wrist": "onnx", "calvin": "onnx-int8"}  # the most exact that holds the rate with room to spare
ACTION_DIM = 7
_INSTRUCTION = "push the block"
_FRAMES = 48  # different ones; then they come again
_SPARE = 1.01  # the clock runs so much faster than the bar, so that the rate is above it and not beside it


def synthetic_frames(sensors: tuple[SensorSpec, ...], count: int, rng: np.random.Generator) -> list[Frame]:
    """A pattern that moves, and noise on it: no two frames are the same, and ranges are those of a camera."""
    frames: list[Frame] = []
    for t in range(count):
        frame: Frame = {}
        for spec in sensors:
            if spec.kind == "text":
                frame[spec.name] = encode_text(_INSTRUCTION[: spec.shape[0]], spec.shape[0]).copy()
                continue
            if not spec.is_image:
                noise, seen = rng.normal(size=spec.shape), spec.seen or {}
                if "low" in seen:  # beyond it the sensor would be absent
                    noise = rng.uniform(seen["low"], seen["high"])
                frame[spec.name] = noise.astype(np.float32)
                continue
            rows, columns = np.ogrid[: spec.shape[0], : spec.shape[1]]
            wave = 0.5 + 0.3 * np.sin(rows / 17.0 + 0.3 * t) * np.cos(columns / 23.0 - 0.2 * t)
            picture = wave if len(spec.shape) == 2 else np.repeat(wave[..., None], spec.shape[2], axis=2)
            picture = np.clip(picture + rng.normal(0.0, 0.05, spec.shape), 0.0, 1.0)
            frame[spec.name] = (
                (255 * picture).astype(np.uint8) if spec.dtype == np.uint8 else (0.2 + 1.5 * picture).astype(np.float32)
            )
        frames.append(frame)
    return frames


@dataclass(frozen=True)
class Loop:
    """The measurements of one run of the control loop."""

    late: int
    latency_ms: NDArray[np.float64]
    seconds: float
    cpu_seconds: float

    def figures(self) -> dict[str, float]:
        on_time = len(self.latency_ms) - self.late
        return {
            "actions_per_s": on_time / self.seconds,
            "late_actions": self.late,
            "p50_ms": float(np.median(self.latency_ms)),
            "p99_ms": float(np.quantile(self.latency_ms, 0.99)),
            "max_ms": float(self.latency_ms.max()),
        }


def run_loop(control: Executor, frames: list[Frame], slots: int, rate: float, on_slot: Any = None) -> Loop:
    """`slots` slots of 1 / rate seconds: sleep until one begins, take its frames, give its action."""
    latency = np.empty(slots)
    start = time.perf_counter() + 0.01
    cpu = time.process_time()
    for slot in range(slots):
        begin = start + slot / rate
        while (ahead := begin - time.perf_counter()) > 0:
            time.sleep(ahead)
        control.step(frames[slot % len(frames)])
        latency[slot] = time.perf_counter() - begin
        if on_slot is not None and slot % max(1, int(rate)) == 0:
            on_slot(slot)
    while (ahead := start + slots / rate - time.perf_counter()) > 0:
        time.sleep(ahead)
    seconds = time.perf_counter() - start
    return Loop(int((latency > 1.0 / rate).sum()), 1e3 * latency, seconds, time.process_time() - cpu)


def saturate(control: Executor, lanes: Lanes, frames: list[Frame], seconds: float) -> float:
    """Actions a second when the next frames arrive as soon as fewer than four observations wait for their tokens."""
    start = time.perf_counter()
    actions = 0
    while time.perf_counter() - start < seconds:
        control.step(frames[actions % len(frames)])
        actions += 1
        while lanes.unfinished > 3:
            time.sleep(2e-3)
    return actions / (time.perf_counter() - start)


@dataclass(frozen=True)
class Ready:
    """A policy that is ready to be measured."""

    policy: ContextPolicy
    controller: ControllerConfig
    backend: Backend
    agreement: Agreement
    frames: list[Frame]
    rate: float


def prepare(config: Realtime) -> Ready:
    policy, controller = _policy(config)
    frames = synthetic_frames(policy.spec.sensors, _FRAMES, np.random.default_rng(config.seed))
    name = config.backend or BACKENDS[config.sensors]
    backend, agreement = load_backend(name, policy, frames[:16], config.candidates)
    return Ready(policy, controller, backend, agreement, frames, slot_rate(config, policy))


def run(config: Realtime, console: Console, ready: Ready | None = None) -> dict[str, Any]:
    threads = torch.get_num_threads()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("back end", total=None)
        ready = ready or prepare(config)
        policy, agreement = ready.policy, ready.agreement
        slots = max(1, round(config.seconds * ready.rate))
        progress.update(bar, description=f"{ready.rate:g} actions/s", total=slots)
        with steady(realtime=True):
            seen = measure(ready, slots, config, lambda slot: progress.update(bar, completed=slot))
    torch.set_num_threads(threads)
    own = ", ".join(spec.name for spec in policy.spec.sensors)
    return {
        "sensors": config.sensors if config.checkpoint is None else own,
        "backend": ready.backend.name,
        "rate": ready.rate,
        **seen,
        "max_action_difference": agreement.max_difference,
        "max_action_difference_scaled": agreement.max_difference_scaled,
        "mean_action_difference_scaled": agreement.mean_difference_scaled,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "candidates": config.candidates,
        "obs_horizon": policy.spec.obs_horizon,
        "pred_horizon": policy.spec.pred_horizon,
        "exec_horizon": ready.controller.exec_horizon,
        "seconds": config.seconds,
        "cores": os.cpu_count(),
        **run_info(config.seed),
    }


def slot_rate(config: Realtime, policy: ContextPolicy) -> float:
    if config.rate is not None:
        return config.rate
    if config.checkpoint is not None and policy.spec.fps > 0:
        return policy.spec.fps
    return _SPARE * RATES[config.sensors]


def measure(ready: Ready, slots: int, config: Realtime, on_slot: Any = None, saturated: float = 5.0) -> dict[str, Any]:
    """The loop by the clock, then as fast as it goes."""
    policy, backend, frames, rate = ready.policy, ready.backend, ready.frames, ready.rate
    count = config.lanes or os.cpu_count() or 1
    planner = LocalPlanner(backend, replace(ready.controller, candidates=config.candidates), count)
    lanes = planner.lanes
    kind, budget = policy.spec.action.kind or ActionKind.ABSOLUTE, 1e3 * ready.controller.exec_horizon / rate
    with Executor(planner, action_kind=kind, budget_ms=budget, max_held=0, look=False) as control:
        warm_up(backend, config.candidates)
        control.reset(config.seed)
        for slot in range(policy.spec.pred_horizon):  # the first plans, and every code path once
            control.step(frames[slot % len(frames)])
            time.sleep(1.0 / rate)
        while lanes.unfinished:
            time.sleep(1e-3)
        control.stats, lanes.statistics = Stats(), type(lanes.statistics)()
        stolen = stolen_seconds()
        loop = run_loop(control, frames, slots, rate, on_slot)
        stolen = stolen_seconds() - stolen
        while lanes.unfinished:
            time.sleep(1e-3)
        seen = lanes.statistics
        result = {
            **loop.figures(),
            "frames": seen.frames,
            "frames_encoded": seen.frames_encoded,
            "observations_dropped": seen.steps_dropped,
            "backlog_max": seen.backlog,
            "encode_p50_ms": 1e3 * float(np.median(seen.encode_seconds)),
            "encode_p99_ms": 1e3 * float(np.quantile(seen.encode_seconds, 0.99)),
            "plan_compute_p50_ms": 1e3 * float(np.median(seen.plan_seconds or [0.0])),
            "plan_budget_ms": control.budget_ms,
            **control.stats.summary(),
            "stolen_s": stolen,
            "cpu_share": loop.cpu_seconds / loop.seconds / (os.cpu_count() or 1),
            "lanes": count,
            "realtime": is_realtime(),  # whether the system let the loop go before other programs
        }
        if saturated > 0:
            result["max_actions_per_s"] = saturate(control, lanes, frames, saturated)
    return result


def stolen_seconds() -> float:
    """Since the system started: time in which this virtual machine had work and its host ran something else."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()  # cpu user nice system idle ... steal
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # not Linux
        return 0.0


def _policy(config: Realtime) -> tuple[ContextPolicy, ControllerConfig]:
    if config.checkpoint is not None:
        run = Run(config.checkpoint)
        policy, controller = run.policy(), replace(run.settings, warm_start=False)  # which no lane does
    else:
        spec = preset(config.size).spec(SENSORS[config.sensors], ACTION_DIM, RATES[config.sensors])
        policy, controller = build_policy(spec, config.seed), default_controller(spec)
    if not isinstance(policy, ContextPolicy):
        raise PrismError(f"method '{policy.spec.method}' cannot be run by a back end")
    return policy.eval(), controller


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{result['sensors']}, {result['backend']}, {result['rate']:g} slots/s", show_header=False)
    shown = [
        *("actions_per_s", "late_actions", "p50_ms", "p99_ms", "max_ms", "frames", "frames_encoded", "plans"),
        *("plan_latency_p50_ms", "plan_latency_p99_ms", "plan_misses", "holds", "cpu_share", "max_actions_per_s"),
        *("max_action_difference", "token_cache_ratio", "token_cache_ratio_wrist"),
    ]
    for key in (*shown, *(key for key in result if key.startswith("compare_"))):
        if key in result:
            value = result[key]
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
