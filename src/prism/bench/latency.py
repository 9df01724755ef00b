"""prism bench latency: the time from an encoded context, and from sensor readings, to plans, every method in one run.

Methods take turns in a new random order each round, so that what else the machine does hits all alike; a ratio is the
median over rounds of the ratio within a round. Baselines draw one plan, as in the paper; PRISM draws K = 8 in its one
pass. `same_k` has 8 plans of every method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prism.bench.timing import Times, interleave, paired_ratio, ratio_interval
from prism.errors import PrismError
from prism.evaluation.results import run_info
from prism.experiments.run_folder import Run
from prism.methods import presets
from prism.methods.base import ContextConfig, ContextPolicy
from prism.methods.presets import build_policy
from prism.ranks import choose_device
from prism.rows import Random
from prism.sensors import SensorSpec
from prism.training.trainer import limited_threads
from prism.types import Observation

if TYPE_CHECKING:
    from prism.cli.bench import Latency

HORIZONS = ((8, 16), (16, 32))  # (To, Tp); the paper's, and twice that
BARS = {"diffusion_nfe10": 9.5, "flow_matching_nfe5": 4.9}  # the paper's ratios
FAST_BARS = {"act": 1.0, "diffusion_nfe10": 16.0, "flow_matching_nfe5": 8.0}  # ours, for the preset `fast`
MIN_ROUNDS = 6
_SLOW = "diffusion_nfe100"
_OURS = ("prism", "prism_fast")
_ENCODED = ("prism", "diffusion_nfe10", "flow_matching_nfe5")  # timed with the encoders in them
CANDIDATES = 8  # paper: K at inference
ACTION_DIM = 7
CPU = torch.device("cpu")
SENSORS = (  # paper, App. A: a wrist camera, a static one, the robot's own state
    SensorSpec("rgb_wrist", "rgb", (84, 84, 3)),
    SensorSpec("rgb_static", "rgb", (200, 200, 3)),
    SensorSpec("proprio", "vector", (15,)),
)


@dataclass(frozen=True)
class Way:
    """A way to make plans: a method, and how many passes it takes."""

    key: str
    method: str
    changes: tuple[tuple[str, Any], ...] = ()


WAYS = (
    Way("prism", "prism"),
    Way("prism_fast", "prism_fast"),  # at the paper's size: the preset `fast`
    Way("diffusion_nfe1", "diffusion", (("evaluations", 1), ("spacing", "trailing"))),
    Way("diffusion_nfe10", "diffusion", (("evaluations", 10),)),
    Way("diffusion_nfe100", "diffusion", (("evaluations", 100),)),
    Way("flow_matching_nfe1", "flow_matching", (("evaluations", 1),)),
    Way("flow_matching_nfe5", "flow_matching", (("evaluations", 5),)),
    Way("imle", "imle"),
    Way("act", "act"),
    Way("mse", "mse"),
)


def config_of(method: str, preset: str, obs_horizon: int | None = None, pred_horizon: int | None = None) -> Any:
    fast = method == "prism_fast"
    config: ContextConfig = presets.fast(preset) if fast else presets.method_config(method, preset)
    return replace(
        config,
        obs_horizon=obs_horizon or config.obs_horizon,
        pred_horizon=pred_horizon or config.pred_horizon,
    )


def build(config: ContextConfig) -> ContextPolicy:
    policy = build_policy(config.spec(SENSORS, ACTION_DIM, 10.0), seed=0)
    assert isinstance(policy, ContextPolicy)
    return policy.eval().requires_grad_(False)


def observation(sensors: tuple[SensorSpec, ...], obs_horizon: int, rng: np.random.Generator) -> Observation:
    """One window of random sensor readings."""
    streams: dict[str, Tensor] = {}
    for sensor in sensors:
        shape = (1, obs_horizon, *sensor.step_shape)
        if sensor.dtype == np.uint8:
            streams[sensor.name] = torch.from_numpy(rng.integers(32, 127, shape, dtype=np.uint8))
        else:
            streams[sensor.name] = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    return Observation(streams, {sensor.name: torch.ones(1, obs_horizon, dtype=torch.bool) for sensor in sensors})


@dataclass(frozen=True)
class Bench:
    """All methods of one size on one window."""

    policies: dict[str, ContextPolicy]  # by method
    window: Observation
    context: Tensor  # (1, S, D), the same for all: latency does not depend on values

    @staticmethod
    def make(
        preset: str, obs_horizon: int, pred_horizon: int, methods: tuple[str, ...], device: torch.device = CPU
    ) -> Bench:
        configs = {method: config_of(method, preset, obs_horizon, pred_horizon) for method in methods}
        policies = {method: build(config).to(device) for method, config in configs.items()}
        window = observation(SENSORS, obs_horizon, np.random.default_rng(0)).to(device)
        with torch.inference_mode():
            context = next(iter(policies.values())).encoder(window)
        return Bench(policies, window, context)

    def planner(self, way: Way, candidates: int) -> Callable[[], Tensor]:
        """From the encoded context to plans in robot units."""
        policy, config = self._configured(way)
        rng = Random(0)

        def call() -> Tensor:
            policy.config = config
            with torch.inference_mode():
                return policy.finish(policy.plan(self.context, candidates, rng), None).cpu()  # a GPU is waited for

        return call

    def sampler(self, way: Way, candidates: int) -> Callable[[], Tensor]:
        """From sensor readings to plans: the encoders included."""
        policy, config = self._configured(way)
        rng = Random(0)

        def call() -> Tensor:
            policy.config = config
            return policy.sample(self.window, candidates, rng).cpu()

        return call

    def encoder(self) -> Callable[[], Tensor]:
        policy = next(iter(self.policies.values()))

        def call() -> Tensor:
            with torch.inference_mode():
                encoded: Tensor = policy.encoder(self.window)
                return encoded.cpu()

        return call

    def _configured(self, way: Way) -> tuple[ContextPolicy, ContextConfig]:
        policy = self.policies[way.method]
        changes: dict[str, Any] = dict(way.changes)
        return policy, replace(policy.config, **changes)


def run(config: Latency, console: Console) -> dict[str, Any]:
    """Keys: ratio.<way>, ratio_fast.<way> (against the preset `fast`), ratio_with_encoders.<way> at the first horizons
    (all under horizons.<To>x<Tp>)."""
    if config.run_folder is not None:
        return run_of(config, config.run_folder, console)
    each = {}
    with limited_threads(config.threads):
        for obs_horizon, pred_horizon in HORIZONS:
            console.print(f"measuring To = {obs_horizon}, Tp = {pred_horizon}", highlight=False)
            with console.status("taking turns"):
                each[f"{obs_horizon}x{pred_horizon}"] = _measure(config, obs_horizon, pred_horizon)
    first = next(iter(each.values()))
    return {
        "ratio": first["ratio"],
        "ratio_fast": first["ratio_fast"],
        "ratio_with_encoders": first["ratio_with_encoders"],
        "ratio_same_k": first["ratio_same_k"],
        "bars": BARS,
        "bars_fast": FAST_BARS,
        "preset": config.preset,
        "threads": config.threads,
        "device": config.device,
        "candidates": {"prism": CANDIDATES, "baselines": 1, "same_k": CANDIDATES},
        "note": "ratio: time of a baseline for one plan / time of PRISM for 8, from the encoded context; medians of "
        "ratios within a round, methods interleaved",
        "horizons": each,
        **run_info(config.seed),
    }


def _measure(config: Latency, obs_horizon: int, pred_horizon: int) -> dict[str, Any]:
    ways = [way for way in WAYS if config.all_nfe or way.key != _SLOW]
    methods = tuple(dict.fromkeys(way.method for way in ways))
    bench = Bench.make(config.preset, obs_horizon, pred_horizon, methods, choose_device(config.device))
    rng = np.random.default_rng(config.seed)

    def several(way: Way) -> int:
        return CANDIDATES if way.key in _OURS else 1

    def timed(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, Times]:
        return interleave(calls, rng, config.seconds, MIN_ROUNDS)

    plan = timed({way.key: bench.planner(way, several(way)) for way in ways})
    encoded = [way for way in ways if way.key in _ENCODED]
    sample = timed({**{way.key: bench.sampler(way, several(way)) for way in encoded}, "encoders": bench.encoder()})
    many = [way for way in ways if way.method in ("prism", "imle") or way.key in BARS]
    single = next(way for way in ways if way.key == "prism")
    same = timed({**{w.key: bench.planner(w, CANDIDATES) for w in many}, "prism_k1": bench.planner(single, 1)})
    return {
        "ratio": _ratios(plan),
        "ratio_fast": _ratios(plan, "prism_fast"),
        "ratio_ci": {
            key: ratio_interval(times.wall, plan["prism"].wall, rng) for key, times in plan.items() if key != "prism"
        },
        "ratio_cpu": {key: paired_ratio(t.cpu, plan["prism"].cpu) for key, t in plan.items() if key != "prism"},
        "ratio_with_encoders": _ratios({key: times for key, times in sample.items() if key != "encoders"}),
        "ratio_same_k": _ratios({key: times for key, times in same.items() if key != "prism_k1"}),
        "plan_ms": {key: times.summary() for key, times in plan.items()},
        "with_encoders_ms": {key: times.summary() for key, times in sample.items()},
        "same_k_ms": {key: times.summary() for key, times in same.items()},
        "rounds": len(plan["prism"].wall),
    }


def run_of(config: Latency, folder: Path, console: Console) -> dict[str, Any]:
    """The policy of a run, eager: from sensor readings to the plans that its controller asks for.

    plan_ms         from the encoded context; with_encoders_ms.encoders: the encoders alone, .policy: both
    """
    run, device = Run(folder), choose_device(config.device)
    policy, candidates = run.policy(device), run.settings.candidates
    if not isinstance(policy, ContextPolicy):
        raise PrismError(f"{folder}: method '{policy.spec.method}' has no context to plan from")
    window = observation(policy.spec.sensors, policy.spec.obs_horizon, np.random.default_rng(config.seed)).to(device)
    with limited_threads(config.threads), torch.inference_mode(), console.status(f"measuring {run.name}"):
        bench, way = Bench({"run": policy}, window, policy.encoder(window)), Way("policy", "run")
        calls = {"plan": bench.planner(way, candidates), "encoders": bench.encoder()}
        calls["policy"] = bench.sampler(way, candidates)
        times = interleave(calls, np.random.default_rng(config.seed), config.seconds, MIN_ROUNDS)
    return {
        "run": run.name,
        "method": policy.spec.method,
        "candidates": candidates,
        "plan_ms": times["plan"].summary(),
        "with_encoders_ms": {name: times[name].summary() for name in ("encoders", "policy")},
        "plans_per_s": 1 / float(np.median(times["policy"].wall)),
        "rounds": len(times["plan"].wall),
        "threads": config.threads,
        "device": config.device,
        **run_info(config.seed),
    }


def _ratios(times: Mapping[str, Times], to: str = "prism") -> dict[str, float]:
    return {key: paired_ratio(one.wall, times[to].wall) for key, one in times.items() if key != to}


def show(result: Mapping[str, Any], console: Console) -> None:
    if "run" in result:
        rows = {"from the context": result["plan_ms"], "encoders alone": result["with_encoders_ms"]["encoders"]}
        for name, ms in {**rows, "from sensors to plans": result["with_encoders_ms"]["policy"]}.items():
            console.print(f"{name:<22} p50 {ms['median']:8.2f} ms   p99 {ms['p99']:8.2f} ms", highlight=False)
        console.print(
            f"{result['candidates']} candidates, {result['method']}: {result['plans_per_s']:.1f} plans a second"
        )
        return
    for name, data in result["horizons"].items():
        obs_horizon, pred_horizon = name.split("x")
        words = f"To {obs_horizon}, Tp {pred_horizon}, {result['preset']}, {result['threads']} threads; ms, p50 (p99)"
        table = Table(box=None, padding=(0, 1, 0, 0), title=words, title_justify="left")
        table.add_column("method", no_wrap=True)
        for column in (
            "plans",
            "from context",
            "/ prism",
            "with encoders",
            "/ prism",
            f"{CANDIDATES} plans",
            "/ prism",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for key in data["plan_ms"]:
            table.add_row(
                key,
                str(CANDIDATES if key in _OURS else 1),
                *_columns(data, "plan_ms", "ratio", key),
                *_columns(data, "with_encoders_ms", "ratio_with_encoders", key),
                *_columns(data, "same_k_ms", "ratio_same_k", key),
            )
        console.width = max(console.width, 110)
        console.print(table)
        encoders = data["with_encoders_ms"]["encoders"]
        console.print(f"encoders alone: {encoders['median']:.0f} ms; {data['rounds']} rounds", highlight=False)
    for key, bar in result["bars"].items():
        ratio = result["ratio"][key]
        verdict = "met" if ratio >= bar else "NOT met"
        console.print(f"{key}: {ratio:.2f} times PRISM's time, the paper has {bar}: {verdict}", highlight=False)
    for key, bar in FAST_BARS.items():
        console.print(f"{key}: {result['ratio_fast'][key]:.2f} times the time of `fast`; bar {bar}", highlight=False)


def _columns(data: Mapping[str, Any], kind: str, ratio: str, key: str) -> tuple[str, str]:
    if key not in data[kind]:
        return "", ""
    times = data[kind][key]
    quotient = data[ratio].get(key)
    return f"{times['median']:.1f} ({times['p99']:.0f})", "" if quotient is None else f"{quotient:.2f}"
