"""Do the baselines follow their own papers (more evaluations, more demonstrations are better)? On Push-T.

Try:
    python -m research trends --json trends.json
    python -m research trends --recipe pusht-human --minutes 5 --episodes 50 --json trends.json      3 hours
    python -m research trends --recipe pusht-human --minutes 2.5 --methods act mse --shares 0.01 0.05 0.95 --seeds 0
    python -m research trends --methods flow_matching rectified_flow --seeds 0 --steps 500
    python -m research trends --runs compare/pusht/trials/pusht-human/flow_matching/seed-* --episodes 50

Three trends, each decided by the paired interval over training seeds and episodes (docs/howto/comparison.md):
    data          trained on more of the demonstrations a method is better; every method
    evaluations   diffusion and flow matching are better with five evaluations of the network a plan than with one, the
                  same weights
    few_step      what was made for few evaluations is better than what it was made from, asked once: rectified flow,
                  consistency-FM and AdaFlow than flow matching, the consistency policy than diffusion
A verdict on `data` and `few_step` takes three training seeds; one on `evaluations` holds of the policies it counts.

    score.METHOD.SHARE.EVALUATIONS    mean score of rollouts; "own": as many evaluations as the method takes
    score_ci, success                 likewise
    scores.METHOD.SHARE.EVALUATIONS   one mean a training seed, null where it is missing
    trends.NAME.METHOD                {mean, low, high, p, seeds, episodes} of the difference, {before, after}: the
                                      means it is the difference of, over the seeds that both have
Everybody draws one plan and executes it for as long: the network alone counts, not the choice among its plans.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.metrics import FloatArray, interval, paired
from prism.evaluation.play import evaluate
from prism.experiments.recipes import Experiment, recipe, with_budget, with_method, with_teacher
from prism.io.jsonconfig import with_settings
from prism.methods import METHODS
from prism.methods.base import ContextPolicy
from prism.methods.diffusion import DiffusionConfig
from prism.methods.flow_matching import FlowMatchingConfig
from prism.policy import Policy
from prism.selection import SelectionConfig
from prism.training.checkpoint import load_policy
from research.report import Claim, ComputedTrials, Result, Study, Written, decided, settings_of, show_rows, train_run
from research.selection import TUNING_SEED, subjects

OWN = "own"  # as many evaluations as the method takes by itself
ASKED = ("diffusion", "flow_matching")  # methods that are asked more or less often
TEACHERS = {name: method.teacher for name, method in METHODS.items() if method.teacher}
MADE_FROM = {**TEACHERS, "consistency_fm": "flow_matching", "adaflow": "flow_matching"}


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    recipe: str = "pusht"
    """pusht (shipped demonstrations) or pusht-human (prism data collect pusht-human)."""
    methods: Annotated[tuple[str, ...], option("NAME ...")] = ("flow_matching", "diffusion", "imle", "act", "mse")
    """Methods of prism train --method; a distilled one's teacher is trained before it."""
    runs: Annotated[tuple[Path, ...], option("RUN ...")] = ()
    """Runs that are there already, one a method and seed, in place of training: more evaluations against fewer."""
    shares: Annotated[tuple[float, ...], option("SHARE ...")] = (0.05, 0.95)
    """Parts of the demonstrations to train on, growing; the others are held out."""
    evaluations: Annotated[tuple[int, ...], option("N ...")] = (1, 5)
    """Evaluations of the network a plan, growing, of diffusion and flow matching; the same weights for all of them."""
    steps: int = 1500
    """Training steps of each run."""
    minutes: Annotated[float | None, option("M")] = None
    """Minutes of CPU time of each run, in place of the steps."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of every training: --set train.batch_size=32."""
    episodes: int = 20
    """Rollouts of each."""
    first_seed: int = TUNING_SEED
    """Seed of the first of them."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    workers: int = 1
    """Processes that roll out in parallel."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-trends")
    """Where the runs and finished parts are kept; default: runs/study-trends."""

    def __post_init__(self) -> None:
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise PrismError(f"trends: unknown method '{unknown[0]}'; use {', '.join(METHODS)}")
        if not (self.methods or self.runs):
            raise PrismError("trends: name methods to train, or runs that are there")
        if not self.seeds or self.episodes < 1 or self.steps < 1:
            raise PrismError("trends: name a seed, and at least one step and one episode")
        if any(not 0 < share < 1 for share in self.shares) or list(self.shares) != sorted(set(self.shares)):
            raise PrismError(f"trends: shares {self.shares}: give growing numbers between 0 and 1")
        if self.minutes is not None and self.minutes <= 0:
            raise PrismError(f"trends: minutes is {self.minutes:g}; it must be above 0")
        if list(self.evaluations) != sorted(set(self.evaluations)) or min(self.evaluations, default=0) < 1:
            raise PrismError(f"trends: evaluations {self.evaluations}: give growing numbers from 1")

    def experiment(self, method: str, share: float, seed: int) -> Experiment:
        steps = self.steps if self.minutes is None else None
        experiment = with_budget(with_method(recipe(self.recipe), method), self.minutes, steps, seed)
        fixed = [f"train.val_fraction={1 - share:.4g}", "train.threads=1", 'train.clock="cpu"']
        return with_settings(experiment, [*fixed, *self.set])

    @property
    def trained(self) -> tuple[str, ...]:
        """Methods to train: none where runs are given."""
        return () if self.runs else self.methods

    @property
    def budget(self) -> str:
        if self.runs:
            return "runs trained before"
        return f"{self.steps} steps" if self.minutes is None else f"{self.minutes:g} CPU minutes"

    def asked(self, method: str) -> tuple[int | None, ...]:
        """How often the network is asked for a plan; None: as often as the method does by itself."""
        return self.evaluations if method in ASKED else (None,)


def load_asked(run: Path, evaluations: int | None) -> Policy:
    """The policy of a run, to be asked so many times for a plan; one that is asked once anyway stays as it is."""
    policy = load_policy(run)
    assert isinstance(policy, ContextPolicy)
    if evaluations is None:
        return policy
    if isinstance(policy.config, DiffusionConfig):
        # All start where the trained number does: further up one evaluation would multiply the network's error by
        # 2029 (schedule.timesteps), and the trend would be decided by arithmetic.
        first = policy.config.visited()[0]
        policy.config = replace(policy.config, evaluations=evaluations, first_step=first)
    elif isinstance(policy.config, FlowMatchingConfig):
        policy.config = replace(policy.config, evaluations=evaluations, solver="euler")
    return policy


def run(config: Config, console: Console) -> Study:
    """Method by method, so that what is there after an interruption is whole trends."""
    trials = ComputedTrials(config.work, console)
    found: dict[tuple[str, float, int], Result] = {}
    for method in config.trained:
        for seed in config.seeds:
            for share in config.shares:
                settings = {
                    **settings_of(config.experiment(method, share, seed)),
                    "evaluations": list(config.asked(method)),
                    "episodes": config.episodes,
                    "first_seed": config.first_seed,
                }
                name = _name(method, share, seed)
                compute = functools.partial(_trial, config, trials, method, share, seed)
                if (result := trials.get(name, settings, compute)) is not None:
                    found[method, share, seed] = result
    policies, task = subjects(config.runs) if config.runs else ([], "")
    for policy in policies:
        method = policy.experiment.method
        settings = {
            **settings_of(policy.experiment),
            "sha256": policy.sha256,
            "evaluations": list(config.asked(method)),
        }
        settings |= {"episodes": config.episodes, "first_seed": config.first_seed}
        compute = functools.partial(_roll_out, config, policy.path, method, task)
        if (result := trials.get(f"{method}-{policy.label}", settings, compute)) is not None:
            key = method, config.shares[-1], policy.experiment.train.seed
            if key in found:
                raise PrismError(f"trends: two runs of {method} have seed {key[2]}: give one of each")
            found[key] = result
    figures = summarise(found, config)
    settings = {
        "recipe": config.recipe,
        "methods": list(config.trained),
        "policies": [policy.name for policy in policies],
        "shares": list(config.shares),
        "evaluations": list(config.evaluations),
        "steps": config.steps if config.minutes is None else None,
        "cpu_minutes": config.minutes,
        "budget": config.budget,
        "settings": list(config.set),
        "episodes": config.episodes,
        "first_seed": config.first_seed,
    }
    seeds = _seeds(found, config)
    return Study(
        "trends", figures, tuple(claims(figures, config)), settings, seeds, tuple(trials.missing), trials.commits
    )


def _seeds(found: dict[tuple[str, float, int], Result], config: Config) -> tuple[int, ...]:
    """Of the trainings: those asked for, or those of the runs that were given."""
    return config.seeds if config.trained else tuple(sorted({seed for _, _, seed in found}))


def _name(method: str, share: float, seed: int) -> str:
    return f"{method}-{share:g}-seed-{seed}"


def _train(config: Config, trials: ComputedTrials, method: str, share: float, seed: int) -> Path:
    """The run of a method; a distilled one's teacher, of the same share, steps and seed, is trained before it."""
    folder = trials.training(_name(method, share, seed))
    experiment = config.experiment(method, share, seed)
    if method in TEACHERS:
        experiment = with_teacher(experiment, _train(config, trials, TEACHERS[method], share, seed))
    train_run(experiment, folder, trials.console)
    return folder


def _trial(config: Config, trials: ComputedTrials, method: str, share: float, seed: int) -> Result:
    folder = _train(config, trials, method, share, seed)
    return _roll_out(config, folder, method, config.experiment(method, share, seed).task or "pusht")


def _roll_out(config: Config, folder: Path, method: str, task: str) -> Result:
    """EVALUATIONS -> {"score", "success"}, a number an episode each."""
    found: Result = {}
    controller = ControllerConfig(candidates=1, selection=SelectionConfig(rule="first"))  # one plan, and that is it
    for evaluations in config.asked(method):
        result = evaluate(
            functools.partial(load_asked, folder, evaluations),
            task,
            config.episodes,
            config.first_seed,
            controller=controller,
            workers=config.workers,
        )
        found[str(evaluations or OWN)] = {
            "score": [episode.score for episode in result.episodes],
            "success": [float(episode.success) for episode in result.episodes],
        }
    return found


def summarise(found: dict[tuple[str, float, int], Result], config: Config) -> dict[str, Any]:
    figures: dict[str, Any] = {key: {} for key in ("score", "score_ci", "success", "scores", "trends")}
    all_seeds = _seeds(found, config)

    def table(method: str, share: float, count: str, seeds: tuple[int, ...], key: str = "score") -> FloatArray:
        return np.array([found[method, share, seed][count][key] for seed in seeds])

    def there(*trials: tuple[str, float]) -> tuple[int, ...]:
        return tuple(seed for seed in all_seeds if all((*trial, seed) in found for trial in trials))

    def trend(name: str, method: str, one: tuple[str, float, str], other: tuple[str, float, str]) -> None:
        """one - other on the seeds that both have."""
        if one != other and (seeds := there(one[:2], other[:2])):
            after, before = table(*one, seeds), table(*other, seeds)
            means = {"before": float(before.mean()), "after": float(after.mean())}
            figures["trends"].setdefault(name, {})[method] = {**asdict(paired(after, before)), **means}

    few, many = config.shares[0], config.shares[-1]
    for method in config.trained or dict.fromkeys(method for method, _, _ in found):
        counts = [str(count or OWN) for count in config.asked(method)]
        for share in config.shares:
            if not (seeds := there((method, share))):
                continue
            for count in counts:
                scores = table(method, share, count, seeds)
                by_seed = dict(zip(seeds, scores.mean(axis=1).tolist(), strict=True))
                values = {
                    "score": float(scores.mean()),
                    "score_ci": list(interval(scores)),
                    "success": float(table(method, share, count, seeds, "success").mean()),
                    "scores": [by_seed.get(seed) for seed in all_seeds],
                }
                for key, value in values.items():
                    figures[key].setdefault(method, {}).setdefault(f"{share:g}", {})[count] = value
        trend("data", method, (method, many, counts[-1]), (method, few, counts[-1]))
        trend("evaluations", method, (method, many, counts[-1]), (method, many, counts[0]))
        if (older := MADE_FROM.get(method)) is not None and 1 in config.asked(older):
            trend("few_step", method, (method, many, counts[-1]), (older, many, "1"))
    return figures


def claims(figures: dict[str, Any], config: Config) -> list[Claim]:
    few, many = f"{config.shares[0]:g}", f"{config.shares[-1]:g}"
    low, high = str(config.evaluations[0]), str(config.evaluations[-1])
    said: dict[str, str] = {
        "data": "more demonstrations are better",
        "evaluations": "more evaluations of the network are better",
        "few_step": "better than the method it was made from, asked once",
    }
    found = []
    for name, paper in said.items():
        for method, d in figures["trends"].get(name, {}).items():
            if name == "data":
                ours = f"{d['before']:.3f} with {few} of the data, {d['after']:.3f} with {many}"
            elif name == "evaluations":
                ours = f"{d['before']:.3f} with {low}, {d['after']:.3f} with {high}"
            else:
                ours = f"{MADE_FROM[method]} with 1: {d['before']:.3f}; {method}: {d['after']:.3f}"
            ours = f"{method}: {ours} ({d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}])"
            given = name == "evaluations"  # the same weights: nothing is said of their training
            verdict, chance = decided(d, trained=not given)
            of = f"given policies: {d['seeds']}" if given else f"n = {d['seeds']}"
            note = f"{config.recipe}, {config.budget}, {d['episodes']} episodes, {of}{chance}"
            found.append(Claim("the baselines' papers", paper, ours, verdict, note))
    return found


def show(study: Study, console: Console) -> None:
    rows = [
        [
            *(method, share, "its own" if count == OWN else count, f"{score:.3f} [{ci[0]:.3f}, {ci[1]:.3f}]"),
            f"{sum(value is not None for value in seeds)} of {len(seeds)}",
        ]
        for method, by_share in study.figures["score"].items()
        for share, by_count in by_share.items()
        for count, score in by_count.items()
        for ci, seeds in [(study.figures[key][method][share][count] for key in ("score_ci", "scores"))]
    ]
    heads = ("method", "share of the data", "evaluations", "score [95 %]", "seeds")
    show_rows(f"Trends on {study.settings['recipe']}, {study.settings['budget']}", heads, rows, console)
