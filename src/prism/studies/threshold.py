"""`prism study threshold`: does the rejection threshold do what it is for? (Eq. 5-7, Lemma E.2, Sec. 5, Fig. 11)

Rules: own (calibrated, the default), relative (the same with objective.relative = 0.5), row (with 1), batch
(calibrated, any target of the batch rejects), paper (literal).

In training: each threshold rule on each task, equal steps. After a warm-up the share of candidates that are rejected
should be near q, and hardly any row should lose all its candidates (the fallback is plain IMLE).
    rates.TASK.RULE = {rejection_rate, fallback_rate, clamped, threshold, hard, trace}

Against batch size: one policy, many random batches of each size; how much does the quantile vary from batch to batch?
    calibration.STAGE.RULE.B = {mean, cv, cv_ema, clamped, effective_samples, pairs}
cv is the standard deviation over batches divided by the mean, of the quantile itself (before EMA and clamp); cv_ema
the same of the threshold that an EMA of these batches gives. Lemma E.2 predicts the variance q(1-q) / (N f^2) for N
independent distances; effective_samples is the N for which that holds. The B K B distances of a batch share B targets
and B contexts, so it is nearer B than B K B.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from prism.data.episodes import IntArray
from prism.data.windows import Windows
from prism.demonstrations import open_demonstrations
from prism.errors import PrismError
from prism.experiments import Experiment, recipe, with_budget
from prism.jsonconfig import with_settings
from prism.normalize import Normalizer, compute_statistics
from prism.objective import RSIMLE, ObjectiveConfig, quantile
from prism.presets import build_policy
from prism.prism_policy import PrismConfig, PrismPolicy
from prism.studies.cells import Cells, Result, settings_of, train_quietly
from prism.studies.report import Claim, Study, confirmed, show_rows
from prism.training.checkpoint import load_policy
from prism.training.monitor import read_log
from prism.workflow import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES: dict[str, tuple[str, ...]] = {
    "own": ("policy.objective.rule=calibrated", "policy.objective.scope=own"),
    "relative": ("policy.objective.rule=calibrated", "policy.objective.scope=own", "policy.objective.relative=0.5"),
    "row": ("policy.objective.rule=calibrated", "policy.objective.scope=own", "policy.objective.relative=1.0"),
    "batch": ("policy.objective.rule=calibrated", "policy.objective.scope=batch"),
    "paper": ("policy.objective.rule=paper",),
}
REJECTION_TOLERANCE, FALLBACK_LIMIT = 0.05, 0.05  # what we ask of a calibrated threshold
PAPER_CV, PAPER_BATCH = 0.05, 64  # Sec. 5, Lemma E.2: "below 5 % at batch size 64"


@dataclass(frozen=True)
class ThresholdConfig:
    work: Path = Path("runs/study-threshold")
    tasks: tuple[str, ...] = ("pusht", "pusht-human", "metaworld-reach", "metaworld-drawer-open")
    rules: tuple[str, ...] = tuple(RULES)
    runs: tuple[str, ...] = ()  # trained before: NAME=RUN; their logs are read, whatever their length
    steps: int = 1500  # of each training
    warmup: int = 500  # steps that do not count
    quantile: float = 0.2
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    candidates: int = 16  # K, paper
    draws: int = 100  # batches of each size
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise PrismError(f"study threshold: unknown rule '{unknown[0]}'; use {', '.join(RULES)}")
        if bad := [text for text in self.runs if not all(text.partition("="))]:
            raise PrismError(f"study threshold: --runs {bad[0]}: write NAME=RUN, for example pusht=runs/pusht")
        if not 0 <= self.warmup < self.steps:
            raise PrismError(f"study threshold: warmup is {self.warmup}; it must be less than the {self.steps} steps")
        if not (self.tasks and self.rules) or min(self.batch_sizes, default=2) < 2 or self.draws < 2:
            raise PrismError("study threshold: name a task and a rule; batch sizes and draws must be at least 2")


def experiment_of(config: ThresholdConfig, task: str, rule: str) -> Experiment:
    settings = (*RULES[rule], f"policy.objective.quantile={config.quantile}", "train.log_every=20", "train.threads=1")
    return with_settings(with_budget(recipe(task), steps=config.steps, seed=config.seed), settings)


def rates(log: Sequence[dict[str, Any]], warmup: int) -> Result:
    """Means over the steps after the warm-up, each line weighted by the steps it stands for."""
    lines, weights, last = [], [], 0
    for line in log:
        if line["step"] > warmup and "rejection_rate" in line:
            lines.append(line)
            weights.append(line["step"] - max(last, warmup))
        last = line["step"]
    if not lines:
        raise PrismError("the log has no line after the warm-up: train for longer")

    def mean(key: str) -> float:
        return float(np.average([line[key] for line in lines], weights=weights))

    return {
        "rejection_rate": mean("rejection_rate"),
        "fallback_rate": mean("fallback_rate"),
        "clamped": mean("threshold_clamped"),
        "threshold": lines[-1]["threshold"],
        "hard": mean("hard"),
        "trace": [
            [line["step"], *(round(line[key], 5) for key in ("rejection_rate", "fallback_rate", "threshold"))]
            for line in log
            if "rejection_rate" in line and (line["step"] % 100 == 0 or line is log[-1])
        ],
    }


def train_rates(config: ThresholdConfig, cells: Cells, task: str, rule: str) -> Result | None:
    experiment = experiment_of(config, task, rule)
    name = f"{task}-{rule}"
    settings = {**settings_of(experiment), "warmup": config.warmup}
    return cells.get(name, settings, lambda: rates(train_quietly(experiment, cells.run(name)), config.warmup))


def read_rates(config: ThresholdConfig) -> dict[str, dict[str, Result]]:
    """{name: {rule: rates}} from the logs of runs that are there."""
    found: dict[str, dict[str, Result]] = {}
    for text in config.runs:
        name, _, path = text.partition("=")
        run = run_folder(Path(path))
        policy = Experiment.load(run).policy
        if not isinstance(policy, PrismConfig):
            raise PrismError(f"--runs {text}: a run of method '{policy.method}' has no threshold; give runs of PRISM")
        log = read_log(run)
        entry = {**rates(log, config.warmup), "steps": log[-1]["step"], "quantile": policy.objective.quantile}
        found.setdefault(name, {})[rule_name(policy.objective)] = entry
    return found


def rule_name(objective: ObjectiveConfig) -> str:
    """Under which of RULES a run counts."""
    if objective.rule != "calibrated":
        return str(objective.rule)
    if objective.relative:
        return "row" if objective.relative == 1.0 else "relative"
    return str(objective.scope)


@torch.no_grad()
def distances_of(
    policy: PrismPolicy, windows: Windows, indices: IntArray, objectives: dict[str, RSIMLE], seed: int
) -> dict[str, Tensor]:
    """For one batch: of each rule the values whose quantile its threshold follows."""
    rng = torch.Generator().manual_seed(seed)
    batch = windows.batch(indices)
    example = policy.example(batch, rng)
    candidates = next(iter(objectives.values())).config.candidates
    latent = policy.latents(len(indices), candidates, rng)
    prepared = policy.generator.prepare(example.context)
    plans = policy.generator(prepared, latent)
    plans = plans if example.anchor is None else plans + example.anchor
    return {
        name: objective.measure(plans, example.target, batch.action_valid).pool
        for name, objective in objectives.items()
    }


def summarise_quantiles(values: Sequence[float], pool: Tensor, config: ObjectiveConfig) -> Result:
    """One entry of `calibration`, from the quantile of every batch and the pooled distances of some of them."""
    array = np.asarray(values, dtype=np.float64)
    centre, spread = float(array.mean()), float(array.std(ddof=1))
    ema, kept, clamped = array[0], [], []
    low, high = config.clamp
    for value in array:
        ema = config.momentum * ema + (1 - config.momentum) * value
        if config.rule == "paper":
            clamped.append(not low < ema < high)
            ema = min(max(ema, low), high)
        kept.append(ema)
    settled = np.asarray(kept[len(kept) // 5 :])
    width = 0.02  # of probability either side: the density at the quantile by a difference quotient
    q = config.quantile
    near = float(quantile(pool, min(q + width, 1.0)) - quantile(pool, max(q - width, 0.0)))
    density = 2 * width / near if near > 0 else float("inf")
    effective = q * (1 - q) / (density * spread) ** 2 if spread > 0 and np.isfinite(density) else None
    return {
        "mean": centre,
        "cv": spread / centre,
        "cv_ema": float(settled.std(ddof=1) / settled.mean()),
        "clamped": float(np.mean(clamped)) if clamped else 0.0,
        "effective_samples": effective,
        "pairs": int(pool.numel()),
    }


def calibrate(policy: PrismPolicy, windows: Windows, batch_size: int, config: ThresholdConfig) -> Result:
    """{rule: entry}: the quantiles of `draws` random batches of one size."""
    dims = policy.spec.action_dim
    configs = {
        rule: with_settings(
            ObjectiveConfig(candidates=config.candidates, quantile=config.quantile),
            [setting.removeprefix("policy.objective.") for setting in RULES[rule]],
        )
        for rule in config.rules
    }
    objectives = {rule: RSIMLE(objective, dims) for rule, objective in configs.items()}
    order = np.random.default_rng([config.seed, batch_size])
    size = min(batch_size, len(windows))
    values: dict[str, list[float]] = {rule: [] for rule in objectives}
    pools: dict[str, Tensor] = {}
    policy.eval()
    for draw in range(config.draws):
        indices = order.choice(len(windows), size, replace=False)
        for rule, pool in distances_of(policy, windows, indices, objectives, config.seed + draw).items():
            values[rule].append(float(quantile(pool, config.quantile)))
            pools[rule] = pool
    return {rule: summarise_quantiles(values[rule], pools[rule], configs[rule]) for rule in objectives}


def calibration(config: ThresholdConfig, cells: Cells) -> dict[str, dict[str, dict[str, Result]]]:
    """{stage: {rule: {batch size: entry}}} of the first task's policy, before training and after it."""
    task = config.tasks[0]
    experiment = experiment_of(config, task, config.rules[0])
    _, source, _ = open_demonstrations(experiment.demonstrations, experiment.task, Console(quiet=True))
    horizons = experiment.policy.obs_horizon, experiment.policy.pred_horizon
    windows = Windows(source, *horizons)
    spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps)
    fresh = build_policy(spec, config.seed, Normalizer.from_statistics(compute_statistics(source)))
    stages = {"untrained": fresh}
    if (run := cells.run(f"{task}-{config.rules[0]}")).is_dir():
        stages["trained"] = load_policy(run)
    found: dict[str, dict[str, dict[str, Result]]] = {}
    for stage, policy in stages.items():
        assert isinstance(policy, PrismPolicy)
        found[stage] = {rule: {} for rule in config.rules}
        for size in config.batch_sizes:
            settings = {**settings_of(experiment), "stage": stage, "batch": size, "draws": config.draws}
            settings |= {"candidates": config.candidates, "rules": list(config.rules)}
            entry = cells.get(
                f"calibration-{stage}-{size}", settings, functools.partial(calibrate, policy, windows, size, config)
            )
            for rule, row in (entry or {}).items():
                found[stage][rule][str(size)] = row
    return found


def run(config: ThresholdConfig, console: Console | None = None) -> Study:
    cells = Cells(config.work, console)
    found: dict[str, dict[str, Result]] = {}
    for task in config.tasks:
        for rule in config.rules:
            if (cell := train_rates(config, cells, task, rule)) is not None:
                found.setdefault(task, {})[rule] = cell
    for name, by_rule in read_rates(config).items():
        found.setdefault(name, {}).update(by_rule)
    table = calibration(config, cells)
    settings = {
        name: getattr(config, name)
        for name in ("tasks", "rules", "steps", "warmup", "quantile", "batch_sizes", "candidates", "draws")
    }
    return Study(
        "threshold",
        {"rates": found, "calibration": table},
        (*claims_on_batches(table), *claims_on_rates(found, config)),
        {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        (config.seed,),
        tuple(cells.missing),
    )


def claims_on_rates(found: dict[str, dict[str, Result]], config: ThresholdConfig) -> list[Claim]:
    """Our bar for every rule, and the paper's "consistent acceptance rate"."""
    claims = []
    for rule in config.rules:
        cells = {task: by_rule[rule] for task, by_rule in found.items() if rule in by_rule}
        if not cells:
            continue
        rejected = [cell["rejection_rate"] for cell in cells.values()]
        fallen = [cell["fallback_rate"] for cell in cells.values()]
        held = all(abs(rate - config.quantile) <= REJECTION_TOLERANCE for rate in rejected)
        held = held and max(fallen) < FALLBACK_LIMIT
        note = "" if held else f"asked: q +- {REJECTION_TOLERANCE:.0%} and a fallback below {FALLBACK_LIMIT:.0%}"
        ours = (
            f"{rule}: rejection {min(rejected):.1%} to {max(rejected):.1%} at q = {config.quantile:.0%}, "
            f"fallback {min(fallen):.1%} to {max(fallen):.1%}, on {len(cells)} tasks"
        )
        if rule == "paper":
            ours += f"; on the clamp in {np.mean([cell['clamped'] for cell in cells.values()]):.0%} of the steps"
        paper = "the threshold keeps a consistent acceptance rate without manual tuning"
        claims.append(Claim("App. E.2, Fig. 11", paper, ours, confirmed(held), note))
    return claims


def claims_on_batches(table: dict[str, dict[str, dict[str, Result]]]) -> list[Claim]:
    claims = []
    stage = "trained" if "trained" in table else "untrained"
    entries = table.get(stage, {}).get("paper", {})
    if str(PAPER_BATCH) in entries:
        entry = entries[str(PAPER_BATCH)]
        claims.append(
            Claim(
                "Sec. 5, Lemma E.2",
                f"coefficient of variation of the threshold below 5 % at batch size {PAPER_BATCH}",
                f"{entry['cv']:.1%} of the quantile of all pairs, {entry['cv_ema']:.1%} of the threshold (EMA, clamp)",
                confirmed(entry["cv"] < PAPER_CV),
                f"on the clamp in {entry['clamped']:.0%} of the batches, where nothing can vary"
                if entry["clamped"] > 0.5
                else "",
            )
        )
        n, pairs = entry["effective_samples"], entry["pairs"]
        if n is not None:
            claims.append(
                Claim(
                    "Lemma E.2, (ii)",
                    "aggregating all distances of the minibatch maximises the effective sample size N",
                    f"the {pairs} distances of a batch of {PAPER_BATCH} vary like {n:.0f} independent ones",
                    confirmed(n > 0.5 * pairs),
                    "they share targets and contexts, so N grows with B, not with B K B",
                )
            )
    slopes = []
    for entries in table.get(stage, {}).values():
        if len(entries) >= 3:
            sizes = np.log([int(size) for size in entries])
            slopes.append(float(np.polyfit(sizes, np.log([entry["cv"] for entry in entries.values()]), 1)[0]))
    if slopes:
        claims.append(
            Claim(
                "Lemma E.2, (iii)",
                "the variance of the threshold falls as 1/N with the batch size (the standard deviation as N^-1/2)",
                f"standard deviation ~ B^{min(slopes):.2f} to B^{max(slopes):.2f}, over the rules",
                confirmed(all(abs(slope + 0.5) < 0.15 for slope in slopes)),
                "App. E.2 also writes 'variance O(1/sqrt N)': that is the standard deviation",
            )
        )
    return claims


def show(study: Study, console: Console) -> None:
    percent = ("rejection_rate", "fallback_rate", "clamped")
    rows = [
        [f"{task}, {rule}", *(f"{c[key]:.1%}" for key in percent), f"{c['threshold']:.4f}", f"{c['hard']:.4f}"]
        for task, by_rule in study.figures["rates"].items()
        for rule, c in by_rule.items()
    ]
    heads: tuple[str, ...] = ("task, rule", "rejected", "fallback", "on the clamp", "threshold", "chosen distance")
    show_rows(
        f"Training, after {study.settings['warmup']} steps (q = {study.settings['quantile']})", heads, rows, console
    )
    for stage, by_rule in study.figures["calibration"].items():
        rows = [
            [f"{rule}, B = {size}", f"{e['mean']:.4f}", f"{e['cv']:.1%}", f"{e['cv_ema']:.1%}", f"{e['clamped']:.0%}"]
            for rule, entries in by_rule.items()
            for size, e in entries.items()
        ]
        heads = ("rule", "quantile", "variation", "after EMA", "on the clamp")
        show_rows(f"Threshold against batch size, {stage} policy", heads, rows, console)


def draw(study: Study) -> Figure:
    """Variation by batch size; rejection and fallback by task and rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = {"own": "#0072b2", "relative": "#56b4e9", "row": "#cc79a7", "batch": "#009e73", "paper": "#d55e00"}
    table = study.figures["calibration"]
    for stage, style in (("trained", "o-"), ("untrained", "o:")):
        for rule, entries in table.get(stage, {}).items():
            values = [100 * entry["cv"] for entry in entries.values()]
            left.loglog([int(s) for s in entries], values, style, color=colors[rule], label=f"{rule}, {stage}")
    left.axhline(100 * PAPER_CV, color="#666666", linewidth=0.8, linestyle="--")
    left.set(xlabel="batch size", ylabel="variation of the quantile, %")
    left.legend(frameon=False, fontsize=7)
    names: list[str] = []
    ticks: list[int] = []
    for task, by_rule in study.figures["rates"].items():
        for rule, cell in by_rule.items():
            at = len(ticks)
            right.barh(at + 0.2, 100 * cell["rejection_rate"], 0.4, color=colors[rule])
            right.barh(at - 0.2, 100 * cell["fallback_rate"], 0.4, color=colors[rule], alpha=0.45)
            names.append(f"{task}, {rule}")
            ticks.append(at)
    right.set_yticks(ticks, names, fontsize=7)
    right.axvline(100 * study.settings["quantile"], color="#666666", linewidth=0.8, linestyle="--")
    right.set(xlabel="% of candidates rejected (pale: of rows on the fallback)", xlim=(0, 100))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
