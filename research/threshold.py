"""Rejection and fallback of each threshold rule in training; the threshold against batch size (Eq. 5-7, Lemma E.2).

Try:
    python -m research threshold --tasks pusht metaworld-reach --json threshold.json --plot threshold.png

Rules: own (calibrated), relative (the same with objective.relative = 0.5), row (with 1), batch (the
default: calibrated, any target of the batch rejects), paper (literal).

In training: each threshold rule on each task, equal steps. After a warm-up the share of candidates that are rejected
should be near q, and hardly any row should lose all its candidates (the fallback is plain IMLE).
    rates.TASK.RULE = {rejection_rate, fallback_rate, clamped, threshold, hard, trace}

Against batch size: one policy, many random batches of each size; how much does the quantile vary from batch to batch?
    calibration.STAGE.RULE.B = {mean, cv, cv_ema, clamped, effective_samples, pairs, rejection_rate, fallback_rate}
cv is the standard deviation over batches divided by the mean, of the quantile itself (before EMA and clamp); cv_ema
the same of the threshold that an EMA of these batches gives, and the rates are what that threshold would reject.
Lemma E.2 predicts the variance q(1-q) / (N f^2) for N independent distances; effective_samples is the N for which that
holds. The B K B distances of a batch share B targets and B contexts, so it is nearer B than B K B.

Policies that are there already (`runs`): their logs count beside the trainings, and every rule is applied to each
    on_policies.NAME.RULE   as an entry of `calibration`, at B = 64, with the policy's own K, eps and discount
This says what a rule would do to candidates of a policy that was trained with another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from prism.cli.style import option
from prism.data.episodes import IntArray
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.experiments.demonstrations import open_demonstrations
from prism.experiments.recipes import Experiment, recipe, with_budget
from prism.experiments.run_folder import Run
from prism.io.jsonconfig import with_settings
from prism.methods.base import ContextPolicy
from prism.methods.presets import build_policy
from prism.methods.prism import PrismConfig, PrismPolicy
from prism.normalize import Normalizer, compute_statistics
from prism.objective import RSIMLE, ObjectiveConfig
from prism.rows import Random, quantile
from prism.training.checkpoint import load_policy
from prism.training.log import read_log
from research.report import (
    Claim,
    ComputedTrials,
    Drawn,
    Result,
    Study,
    Verdict,
    confirmed,
    settings_of,
    show_rows,
    train_run,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REJECTION_TOLERANCE, FALLBACK_LIMIT = 0.05, 0.05  # what we ask of a calibrated threshold
CONSISTENT = "the threshold keeps a consistent acceptance rate without manual tuning"
PAPER_CV, PAPER_BATCH = 0.05, 64  # Sec. 5, Lemma E.2: "below 5 % at batch size 64"
_OBJECTIVE = "policy.objective"
RULES: dict[str, tuple[str, ...]] = {
    "own": (f"{_OBJECTIVE}.rule=calibrated", f"{_OBJECTIVE}.scope=own", f"{_OBJECTIVE}.relative=0"),
    "relative": (f"{_OBJECTIVE}.rule=calibrated", f"{_OBJECTIVE}.scope=own", f"{_OBJECTIVE}.relative=0.5"),
    "row": (f"{_OBJECTIVE}.rule=calibrated", f"{_OBJECTIVE}.scope=own", f"{_OBJECTIVE}.relative=1"),
    "batch": (f"{_OBJECTIVE}.rule=calibrated", f"{_OBJECTIVE}.scope=batch", f"{_OBJECTIVE}.relative=0"),
    "paper": (f"{_OBJECTIVE}.rule=paper", f"{_OBJECTIVE}.relative=0"),
}


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    tasks: Annotated[tuple[str, ...], option("RECIPE ...")] = (
        "pusht", "pusht-human", "metaworld-reach", "metaworld-drawer-open",
    )  # fmt: skip
    """Recipes to train on; pusht-human needs `prism data collect pusht-human`."""
    rules: Annotated[tuple[str, ...], option("RULE ...")] = tuple(RULES)
    """own, relative, row, batch, paper; default: all of them."""
    runs: Annotated[tuple[str, ...], option("NAME=RUN ...")] = ()
    """Runs of PRISM that are there already: their logs are read, whatever their length, and count beside the others."""
    steps: int = 1500
    """Training steps of each."""
    warmup: int = 500
    """Steps at the beginning that do not count."""
    quantile: float = 0.2
    """q."""
    batch_sizes: Annotated[tuple[int, ...], option("N ...")] = (8, 16, 32, 64, 128, 256, 512)
    """Batch sizes at which the threshold's variation is measured."""
    candidates: int = 16
    """K; 16 in the paper."""
    draws: int = 100
    """Random batches of each size, for the variation."""
    seed: int = 0
    """Of the trainings and the batches."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-threshold")
    """Where the runs and finished parts are kept; default: runs/study-threshold."""

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise PrismError(f"threshold: unknown rule '{unknown[0]}'; use {', '.join(RULES)}")
        if bad := [text for text in self.runs if not all(text.partition("="))]:
            raise PrismError(f"threshold: --runs {bad[0]}: write NAME=RUN, for example pusht=runs/pusht")
        names = [*self.tasks, *(text.partition("=")[0] for text in self.runs)]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise PrismError(f"threshold: '{repeated[0]}' is named twice, among tasks and runs: use another name")
        if not 0 <= self.warmup < self.steps:
            raise PrismError(f"threshold: warmup is {self.warmup}; it must be less than the {self.steps} steps")
        if not ((self.tasks or self.runs) and self.rules) or min(self.batch_sizes, default=2) < 2 or self.draws < 5:
            raise PrismError("threshold: name a task or run, and a rule; batch sizes of 2, draws of 5 or more")


def experiment_of(config: Config, task: str, rule: str) -> Experiment:
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


def train_rates(config: Config, trials: ComputedTrials, task: str, rule: str) -> Result | None:
    experiment = experiment_of(config, task, rule)
    name = f"{task}-{rule}"
    settings = {**settings_of(experiment), "warmup": config.warmup}
    compute = functools.partial(train_run, experiment, trials.training(name), trials.console)
    return trials.get(name, settings, lambda: rates(compute(), config.warmup))


def read_rates(config: Config) -> dict[str, dict[str, Result]]:
    """{name: {rule: rates}} from the logs of runs that are there."""
    found: dict[str, dict[str, Result]] = {}
    for text in config.runs:
        name, _, path = text.partition("=")
        run = Run(path)
        policy = run.experiment.policy
        if not isinstance(policy, PrismConfig):
            raise PrismError(f"--runs {text}: a run of method '{policy.method}' has no threshold; give runs of PRISM")
        log = read_log(run.folder)
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
def draft(
    policy: PrismPolicy, windows: Windows, indices: IntArray, candidates: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates, targets and valid steps of a batch, as in Alg. 1 before it chooses."""
    rng = Random(seed)
    batch = windows.batch(indices)
    draw = ContextPolicy.draw(policy, batch, rng)
    latent = policy.latents(len(indices), candidates, rng)
    plans = policy.generator(policy.generator.prepare(draw.context), latent)
    return plans if draw.anchor is None else plans + draw.anchor, draw.target, batch.action_valid


def summarise_quantiles(values: Sequence[float], pool: Tensor, q: float) -> Result:
    """Mean and variation of the quantiles of many batches, and how many independent distances would vary as much."""
    array = np.asarray(values, dtype=np.float64)
    centre, spread = float(array.mean()), float(array.std(ddof=1))
    width = 0.02  # of probability either side: the density at the quantile by a difference quotient
    near = float(quantile(pool, min(q + width, 1.0)) - quantile(pool, max(q - width, 0.0)))
    density = 2 * width / near if near > 0 else float("inf")
    effective = q * (1 - q) / (density * spread) ** 2 if spread > 0 and np.isfinite(density) else None
    return {"mean": centre, "cv": spread / centre, "effective_samples": effective, "pairs": int(pool.numel())}


def form(policy: PrismPolicy) -> dict[str, Any]:
    """eps and discount of the policy's distances, where they are not the default."""
    own, default = policy.config.objective, ObjectiveConfig()
    return {key: getattr(own, key) for key in ("eps", "discount") if getattr(own, key) != getattr(default, key)}


def calibrate(
    policy: PrismPolicy, windows: Windows, batch_size: int, candidates: int, config: Config
) -> dict[str, Result]:
    """{rule: entry}: `draws` random batches of one size through the objective itself. The first fifth warms it up."""
    plain = ObjectiveConfig(candidates=candidates, quantile=config.quantile, relative=0.0, **form(policy))
    objectives = {
        rule: RSIMLE(
            with_settings(plain, [setting.removeprefix("policy.objective.") for setting in RULES[rule]]),
            policy.spec.action_dim,
        )
        for rule in config.rules
    }
    order = np.random.default_rng([config.seed, batch_size])
    size = min(batch_size, len(windows))
    values: dict[str, list[float]] = {rule: [] for rule in objectives}
    logs: dict[str, list[dict[str, float]]] = {rule: [] for rule in objectives}
    pools: dict[str, Tensor] = {}
    policy.eval()
    for draw in range(config.draws):
        batch = draft(policy, windows, order.choice(len(windows), size, replace=False), candidates, config.seed + draw)
        for rule, objective in objectives.items():
            _, target, valid = batch
            distances = objective.distances(*batch, objective.targets(target, valid))
            objective.calibrate(distances.pool)
            values[rule].append(float(quantile(distances.pool, config.quantile)))
            choice = objective.choose(distances.own, objective.reject(distances.near, Random(0)))
            logs[rule].append({key: float(value) for key, value in choice.logs.items()})
            pools[rule] = distances.pool
    found = {}
    for rule in objectives:
        settled = logs[rule][len(logs[rule]) // 5 :]
        thresholds = np.array([line["threshold"] for line in settled])
        found[rule] = summarise_quantiles(values[rule], pools[rule], config.quantile) | {
            "cv_ema": float(thresholds.std() / thresholds.mean()),
            "clamped": float(np.mean([line["threshold_clamped"] for line in settled])),
            "rejection_rate": float(np.mean([line["rejection_rate"] for line in settled])),
            "fallback_rate": float(np.mean([line["fallback_rate"] for line in settled])),
        }
    return found


def windows_of(experiment: Experiment) -> Windows:
    _, source, _ = open_demonstrations(experiment.demonstrations, experiment.task, Console(quiet=True))
    return Windows(source, experiment.policy.obs_horizon, experiment.policy.pred_horizon)


def calibration(
    config: Config, trials: ComputedTrials, found_rates: Mapping[str, Mapping[str, Result]]
) -> dict[str, dict[str, dict[str, Result]]]:
    """{stage: {rule: {batch size: entry}}} of one policy, before training and after it: the first that was trained,
    or the first run that was given."""
    trained = [(task, rule) for task in config.tasks for rule in config.rules if rule in found_rates.get(task, {})]
    if trained:
        run, experiment = trials.training("-".join(trained[0])), experiment_of(config, *trained[0])
    elif config.runs:
        run = Path(config.runs[0].partition("=")[2])
        experiment = Run(run).experiment
    else:
        trials.missing.append("calibration: no training came to its end")
        return {}
    windows = windows_of(experiment)
    source = windows.source
    spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps)
    untrained = build_policy(spec, config.seed, Normalizer.from_statistics(compute_statistics(source)))
    stages = {"untrained": untrained, "trained": load_policy(run)}
    weights = {"untrained": None, "trained": Run(run).weights_id()["sha256"]}
    found: dict[str, dict[str, dict[str, Result]]] = {}
    for stage, policy in stages.items():
        assert isinstance(policy, PrismPolicy)
        found[stage] = {rule: {} for rule in config.rules}
        for size in config.batch_sizes:
            settings = {**settings_of(experiment), "stage": stage, "batch": size, "draws": config.draws}
            settings |= {"candidates": config.candidates, "rules": list(config.rules)}
            settings |= {"seed": config.seed, "sha256": weights[stage], **form(policy)}
            compute = functools.partial(calibrate, policy, windows, size, config.candidates, config)
            for rule, row in (trials.get(f"calibration-{stage}-{size}", settings, compute) or {}).items():
                found[stage][rule][str(size)] = row
    return found


def on_policies(config: Config, trials: ComputedTrials) -> dict[str, dict[str, Result]]:
    """{name: {rule: entry}}: every rule on the candidates of every policy that was given."""
    found: dict[str, dict[str, Result]] = {}
    for text in config.runs:
        name, _, path = text.partition("=")
        run = Run(path)
        experiment, policy = run.experiment, run.policy()
        assert isinstance(policy, PrismPolicy)  # read_rates has seen to it
        candidates = policy.config.objective.candidates
        settings = {**settings_of(experiment), "draws": config.draws, "rules": list(config.rules)}
        settings |= {"seed": config.seed, "sha256": run.weights_id()["sha256"], **form(policy)}
        compute = functools.partial(calibrate, policy, windows_of(experiment), PAPER_BATCH, candidates, config)
        if (trial := trials.get(f"policy-{name}", settings, compute)) is not None:
            found[name] = trial
    return found


def run(config: Config, console: Console) -> Study:
    trials = ComputedTrials(config.work, console)
    found: dict[str, dict[str, Result]] = {}
    for task in config.tasks:
        for rule in config.rules:
            if (trial := train_rates(config, trials, task, rule)) is not None:
                found.setdefault(task, {})[rule] = trial
    for name, by_rule in read_rates(config).items():
        found.setdefault(name, {}).update(by_rule)
    applied = on_policies(config, trials)
    table = calibration(config, trials, found)
    settings = {
        name: getattr(config, name)
        for name in ("tasks", "rules", "steps", "warmup", "quantile", "batch_sizes", "candidates", "draws")
    }
    return Study(
        "threshold",
        {"rates": found, "on_policies": applied, "calibration": table},
        (
            *claims_on_batches(table, config.draws),
            *claims_on_rates(found, config.rules, config.quantile),
            *claims_on_policies(applied, config.rules, config.quantile),
        ),
        {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        (config.seed,),
        tuple(trials.missing),
        trials.commits,
    )


def claims_on_rates(found: Mapping[str, Mapping[str, Result]], rules: Sequence[str], q: float) -> list[Claim]:
    """Our bar for every rule in training, {task: {rule: rates}}, and the paper's "consistent acceptance rate"."""
    claims = []
    for rule in rules:
        trials = [by_rule[rule] for by_rule in found.values() if rule in by_rule]
        if not trials:
            continue
        after = f" at q = {q:.0%}", f", in {len(trials)} trainings"
        if rule == "paper":
            clamped = np.mean([trial["clamped"] for trial in trials])
            after = after[0], f"{after[1]}; on the clamp in {clamped:.0%} of the steps"
        claims.append(_consistent(f"{rule}, in training", trials, q, *after))
    return claims


def claims_on_policies(applied: Mapping[str, Mapping[str, Result]], rules: Sequence[str], q: float) -> list[Claim]:
    """The same for every rule on the candidates of trained policies, {policy: {rule: entry}}."""
    words = f"on {len(applied)} trained policies"
    by_rule = {rule: [entries[rule] for entries in applied.values()] for rule in rules if applied}
    return [_consistent(f"{rule}, {words}", entries, q) for rule, entries in by_rule.items()]


def _consistent(where: str, trials: Sequence[Result], q: float, after_rejection: str = "", end: str = "") -> Claim:
    """Is the rejection near q, and the fallback rare, in every one of these trials?"""
    rejected = [trial["rejection_rate"] for trial in trials]
    fallen = [trial["fallback_rate"] for trial in trials]
    ours = (
        f"{where}: rejection {min(rejected):.1%} to {max(rejected):.1%}{after_rejection}, "
        f"fallback {min(fallen):.1%} to {max(fallen):.1%}{end}"
    )
    near = [abs(trial["rejection_rate"] - trial.get("quantile", q)) <= REJECTION_TOLERANCE for trial in trials]
    held = all(near) and max(fallen) < FALLBACK_LIMIT
    note = "" if held else f"asked: q +- {REJECTION_TOLERANCE:.0%} and a fallback below {FALLBACK_LIMIT:.0%}"
    return Claim("App. E.2, Fig. 11", CONSISTENT, ours, confirmed(held), note)


def claims_on_batches(table: Mapping[str, Mapping[str, Mapping[str, Result]]], draws: int) -> list[Claim]:
    """Lemma E.2 on {stage: {rule: {batch size: entry}}} from `draws` batches, of the trained policy if it is there."""
    claims = []
    stage = "trained" if "trained" in table else "untrained"
    entries = table.get(stage, {}).get("paper", {})
    if str(PAPER_BATCH) in entries:
        entry = entries[str(PAPER_BATCH)]
        error = entry["cv"] / np.sqrt(2 * (draws - 1))  # of a standard deviation from so many normal values
        near = abs(entry["cv"] - PAPER_CV) < 2 * error
        verdict: Verdict = "cannot be tested here" if near else confirmed(entry["cv"] < PAPER_CV)
        notes = ["5 % lies within the chance of so many batches"] if near else []
        if entry["clamped"] > 0.5:
            notes.append(f"on the clamp in {entry['clamped']:.0%} of the batches, where nothing can vary")
        claims.append(
            Claim(
                "Sec. 5, Lemma E.2",
                f"coefficient of variation of the threshold below 5 % at batch size {PAPER_BATCH}",
                f"{entry['cv']:.1%} +- {2 * error:.1%} of the quantile of all pairs ({draws} batches), "
                f"{entry['cv_ema']:.1%} of the threshold (EMA, clamp)",
                verdict,
                "; ".join(notes),
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
    keys = ("rejection_rate", "fallback_rate", "clamped")
    rows = [
        [f"{name}, {rule}", *(f"{entry[key]:.1%}" for key in keys)]
        for name, by_rule in study.figures["on_policies"].items()
        for rule, entry in by_rule.items()
    ]
    if rows:
        show_rows(
            "Every rule on trained policies, B = 64", ("policy, rule", "rejected", "fallback", "clamp"), rows, console
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
    for task, by_rule in (study.figures["on_policies"] or study.figures["rates"]).items():
        for rule, trial in by_rule.items():
            at = len(ticks)
            right.barh(at + 0.2, 100 * trial["rejection_rate"], 0.4, color=colors[rule])
            right.barh(at - 0.2, 100 * trial["fallback_rate"], 0.4, color=colors[rule], alpha=0.45)
            names.append(f"{task}, {rule}")
            ticks.append(at)
    right.set_yticks(ticks, names, fontsize=7)
    right.axvline(100 * study.settings["quantile"], color="#666666", linewidth=0.8, linestyle="--")
    right.set(xlabel="% of candidates rejected (pale: of rows on the fallback)", xlim=(0, 100))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
