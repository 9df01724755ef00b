"""What each choice is worth: heads, features, depth, K, soft term, threshold rule, scope, To (App. B.2, Fig. 6, 7).

Try:
    python -m research ablations --factors rule scope --steps 2500 --json ablations.json
    python -m research ablations --recipe metaworld-pick-place --factors candidates --seeds 0
    python -m research ablations --factors rule depth --add ablations.json --json F     goes on with a results file

Every variant differs from the recipe in the settings below and in nothing else; equal steps, the same data, seeds and
episodes; trials, intervals and the paired test are those of `prism compare`.

    table = rows of comparison.json; factors.NAME = {"VARIANT": score}; pairs = differences between two variants;
    trials = every training with its episodes (experiments/stored_trials.py)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.metrics import Difference, paired
from prism.experiments.comparison import CompareConfig, Comparison, Contestant, Row, compare, table
from prism.experiments.stored_trials import put_back, trials_of
from prism.experiments.trial import EvaluationPlan
from research.report import SEEDS, Claim, Drawn, Study, Verdict, defaults, few_seeds, show_rows
from research.selection import TUNING_SEED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pairs = dict[tuple[str, str], Difference]  # (one, other): one - other
_OBJECTIVE, _ATTENTION = "policy.objective", "policy.generator.attention"
REFERENCE = "prism"

# factor -> variant -> settings; the recipe itself (preset tiny: 2 heads, 2 blocks, K = 8, To = 2, batch, lambda .02)
# stands beside them as "prism".
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "rule": {
        "rule-none": (f"{_OBJECTIVE}.rule=none",),
        "rule-paper": (f"{_OBJECTIVE}.rule=paper",),
        "rule-random": (f"{_OBJECTIVE}.rule=random",),
        "rule-half": (f"{_OBJECTIVE}.relative=0.5",),
        "rule-row": (f"{_OBJECTIVE}.relative=1",),
    },
    "scope": {"scope-own": (f"{_OBJECTIVE}.scope=own",)},
    "candidates": {
        "K-2": (f"{_OBJECTIVE}.candidates=2", f"{_OBJECTIVE}.soft_candidates=2"),
        "K-4": (f"{_OBJECTIVE}.candidates=4",),
        "K-16": (f"{_OBJECTIVE}.candidates=16",),
        "K-32": (f"{_OBJECTIVE}.candidates=32",),
    },
    "soft": {
        "soft-0": (f"{_OBJECTIVE}.soft_weight=0",),
        "soft-0.1": (f"{_OBJECTIVE}.soft_weight=0.1",),
        "soft-literal": (
            f"{_OBJECTIVE}.soft_scaled=false",
            f"{_OBJECTIVE}.soft_respects_rejection=false",
        ),
        "soft-rejected-too": (f"{_OBJECTIVE}.soft_respects_rejection=false",),
    },
    "heads": {f"heads-{n}": (f"{_ATTENTION}.heads={n}",) for n in (1, 4, 8, 16)},
    "features": {
        **{f"favor-{m}": (f"{_ATTENTION}.kind=favor", f"{_ATTENTION}.features={m}") for m in (16, 64, 256, 512)},
        # one head as wide as the paper's (512 / 8 = 64), where 256 features are far from exact attention
        "favor-256-at-64": (f"{_ATTENTION}.kind=favor", f"{_ATTENTION}.features=256", f"{_ATTENTION}.heads=1"),
    },
    "depth": {f"depth-{n}": (f"policy.generator.blocks={n}",) for n in (1, 4, 6)},
    "obs_horizon": {f"To-{n}": (f"policy.obs_horizon={n}",) for n in (1, 4, 8)},
}

# What is compared with each other, beside everything with the recipe.
PAIRS = (
    ("favor-512", "favor-16"),
    ("favor-256-at-64", "heads-1"),
    ("heads-8", "heads-1"),
    ("heads-16", "heads-8"),
    ("K-16", "K-4"),
    ("K-32", "K-16"),
    ("depth-6", "depth-1"),
)


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    recipe: str = "pusht"
    """A recipe or task, as for prism train."""
    factors: Annotated[tuple[str, ...], option("FACTOR ...")] = tuple(FACTORS)
    """rule, scope, candidates, soft, heads, features, depth, obs_horizon; default: all of them."""
    steps: int = 2500
    """Training steps of every variant."""
    minutes: Annotated[float | None, option("M")] = None
    """Minutes of CPU time of every variant, in place of the steps."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 50
    """Episodes of each evaluation."""
    first_seed: int = TUNING_SEED
    """Seed of the first of them: what is chosen by an ablation is not chosen on the test's episodes."""
    add: Annotated[tuple[Path, ...], option("FILE ...")] = ()
    """Results files of this study, of whatever machine: their trials are put into --work and count as if run here."""
    jobs: int = 1
    """Runs at the same time, one thread each."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-ablations")
    """Where the runs and finished parts are kept; default: runs/study-ablations."""

    def __post_init__(self) -> None:
        if unknown := [factor for factor in self.factors if factor not in FACTORS]:
            raise PrismError(f"ablations: unknown factor '{unknown[0]}'; use {', '.join(FACTORS)}")
        if not self.factors or not self.seeds:
            raise PrismError("ablations: name at least one factor and one seed")

    def same(self) -> dict[str, Any]:
        """What every trial of a study has in common, but for its variant and seed."""
        steps = self.steps if self.minutes is None else None
        place = {"recipe": self.recipe, "episodes": self.episodes, "first_seed": self.first_seed}
        return {**place, **defaults(), "steps": steps, "cpu_minutes": self.minutes}

    def comparison(self) -> CompareConfig:
        variants = [(name, settings) for factor in self.factors for name, settings in FACTORS[factor].items()]
        contestants = (Contestant(REFERENCE, "prism"), *(Contestant(n, "prism", s) for n, s in variants))
        return CompareConfig(
            recipes=(self.recipe,),
            contestants=contestants,
            seeds=self.seeds,
            steps=self.steps if self.minutes is None else None,
            minutes=self.minutes,
            clock="cpu",
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve=()),
        )


def run(config: Config, console: Console) -> Study:
    """One comparison of all variants, seed by seed."""
    comparison_config = config.comparison()
    for file in config.add:
        put_back(file, config.same(), {config.work: comparison_config})
    comparison = compare(config.work, comparison_config, config.jobs, console)
    rows = {row.contestant: row for row in comparison.rows}
    missing = [f"{one.trial}: {one.reason}" for one in comparison.missing]
    study = summarise(config, rows, pairs_of(comparison), missing)
    study.figures["trials"] = trials_of([comparison])
    return replace(study, commits=comparison.commits)


def pairs_of(comparison: Comparison) -> Pairs:
    """The PAIRS that are there, on the seeds that both have."""
    found: Pairs = {}
    for pair in PAIRS:
        one, other = (
            {id.seed: trial for id, trial in comparison.trials.items() if id.contestant == name} for name in pair
        )
        if common := sorted(one.keys() & other.keys()):
            found[pair] = paired(table(one, common, "score"), table(other, common, "score"))
    return found


def summarise(config: Config, rows: dict[str, Row], pairs: Pairs, missing: list[str]) -> Study:
    figures = {
        "table": [{**asdict(row), "n": len(row.seeds)} for row in rows.values()],
        "factors": {
            factor: {name: rows[name].score for name in (REFERENCE, *FACTORS[factor]) if name in rows}
            for factor in config.factors
        },
        "pairs": {f"{one} - {other}": asdict(value) for (one, other), value in pairs.items()},
    }
    contestants = config.comparison().contestants
    settings: dict[str, Any] = {
        **config.same(),
        "methods": [f"{one.name}=prism" + f":{','.join(one.settings)}" * bool(one.settings) for one in contestants],
    }
    return Study("ablations", figures, tuple(claims(rows, pairs)), settings, config.seeds, tuple(missing))


def _said(row: Row) -> str:
    text = f"{row.contestant} {row.score:.3f}"
    if row.difference is not None:
        text += f" ({row.difference.mean:+.3f} [{row.difference.low:+.3f}, {row.difference.high:+.3f}])"
    return f"{text}, n = {len(row.seeds)}"


def _better(rows: dict[str, Row], name: str) -> bool:
    """Whether a variant is better than the recipe, beyond chance."""
    difference = rows[name].difference
    return difference is not None and difference.low > 0


def _worse(rows: dict[str, Row], name: str) -> bool:
    difference = rows[name].difference
    return difference is not None and difference.high < 0


def claims(rows: dict[str, Row], pairs: Pairs) -> list[Claim]:
    """The paper's sentences on its ablation figures, which it shows for CALVIN and without numbers."""
    found: list[Claim] = []
    if REFERENCE not in rows:
        return found

    def add(where: str, paper: str, names: tuple[str, ...], held: bool | None, note: str = "") -> None:
        there = [rows[name] for name in (REFERENCE, *names) if name in rows]
        if len(there) < 1 + len(names):
            return
        between = {pair: d for pair, d in pairs.items() if set(pair) <= set(names)}
        differences = [*between.values(), *(row.difference for row in there if row.difference is not None)]
        fewest = min(*(len(row.seeds) for row in there), *(d.seeds for d in differences))
        if held is not None and fewest < SEEDS:
            note = few_seeds(fewest, held)
            held = None
        verdict: Verdict = "cannot be tested here" if held is None else "confirmed" if held else "not confirmed"
        if held is None:
            note = note or "not all of it is beyond chance at this budget"
        words = [_said(row) for row in there]
        words += [f"{one} - {other} {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for (one, other), d in between.items()]
        found.append(Claim(where, paper, "; ".join(words), verdict, note))

    def decided(better: tuple[str, ...], worse: tuple[str, ...]) -> bool | None:
        """Against the recipe: True where all go the paper's way beyond chance, False where one goes the other way."""
        if not all(name in rows for name in (*better, *worse)):
            return None
        ahead = [_better(rows, name) for name in better] + [_worse(rows, name) for name in worse]
        behind = [_worse(rows, name) for name in better] + [_better(rows, name) for name in worse]
        return False if any(behind) else True if all(ahead) else None

    def and_ends(held: bool | None, after: tuple[str, str], before: tuple[str, str]) -> bool | None:
        """A rise that ends: False where it goes on `after`, True where the interval leaves no room for as large a rise
        as the one `before`."""
        if held is False or (after in pairs and pairs[after].low > 0):
            return False
        if not held or after not in pairs or before not in pairs:
            return None
        return pairs[after].high < pairs[before].mean or None

    rule = "EMA-calibrated rejection improves success (against none, and as printed)"
    add("Sec. 5, Fig. 6b", rule, ("rule-none", "rule-paper"), decided((), ("rule-none", "rule-paper")))
    scope = "batch-global rejection is better than comparing with the own target alone"
    add("Sec. 4.4", scope, ("scope-own",), decided((), ("scope-own",)))
    many = "more candidates help up to K = 16, then hardly"
    held = and_ends(decided(("K-16",), ("K-2", "K-4")), ("K-32", "K-16"), ("K-16", "K-4"))
    add("App. B.2, Fig. 7d", many, ("K-2", "K-4", "K-16", "K-32"), held)
    soft = "a small soft term (lambda = 0.02) adds a boost"
    add("Sec. 5, Fig. 6a", soft, ("soft-0",), decided((), ("soft-0",)))
    held = and_ends(decided(("heads-8",), ("heads-1",)), ("heads-16", "heads-8"), ("heads-8", "heads-1"))
    add("App. B.2, Fig. 7a", "saturates at 8 heads", ("heads-1", "heads-8", "heads-16"), held)
    grows = pairs.get(("favor-512", "favor-16"))
    held = None if grows is None or grows.low <= 0 <= grows.high else grows.low > 0
    add("App. B.2, Fig. 7b", "more random features help up to m = 512", ("favor-16", "favor-512"), held)
    same = pairs.get(("favor-256-at-64", "heads-1"))
    held = None if same is None or same.low <= 0 <= same.high else same.low > 0
    note = "exact attention with one head of 64 beside it; no difference beyond chance" if held is None else ""
    add("Sec. 4.2", "FAVOR+ with m = 256 does at heads of 64", ("favor-256-at-64", "heads-1"), held, note)
    add("App. B.2, Fig. 7c", "deeper is better", ("depth-1", "depth-6"), decided(("depth-6",), ("depth-1",)))
    horizon = "the observation horizon matters (the figure's text gives no direction)"
    add("Fig. 6c", horizon, ("To-1", "To-8"), None, "the paper gives no number to compare with")
    return found


def show(study: Study, console: Console) -> None:
    rows = []
    for row in study.figures["table"]:
        d = row["difference"]
        against = "" if d is None else f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
        score = f"{row['score']:.3f} [{row['score_ci'][0]:.3f}, {row['score_ci'][1]:.3f}]"
        rows.append([row["contestant"], str(row["n"]), score, against, f"{row['success']:.0%}", f"{row['jerk']:.4f}"])
    heads = ("variant", "seeds", "score [95 %]", f"- {REFERENCE}", "success", "jerk")
    minutes, steps = study.settings["cpu_minutes"], study.settings["steps"]
    budget = f"{steps} steps" if minutes is None else f"{minutes:g} CPU minutes"
    show_rows(f"Ablations on {study.settings['recipe']}, {budget}", heads, rows, console)


def draw(study: Study) -> Figure:
    """Differences from the recipe with their intervals, a row a variant."""
    from matplotlib.figure import Figure

    rows = [row for row in study.figures["table"] if row["difference"] is not None]
    figure = Figure(figsize=(6.5, 0.28 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(reversed(rows)):
        d = row["difference"]
        color = "#0072b2" if row["n"] > 1 else "#999999"
        axes.plot([d["low"], d["high"]], [at, at], color=color)
        axes.plot(d["mean"], at, "o", color=color, markersize=4)
    names = [f"{row['contestant']} (n = {row['n']})" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.axvline(0, color="#666666", linewidth=0.8)
    axes.set_xlabel("score against the recipe, 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
