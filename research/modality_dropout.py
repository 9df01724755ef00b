"""What dropping whole sensors in training brings, when one is missing afterwards (Sec. 5, Fig. 3).

Try:
    python -m research modality-dropout --json modality-dropout.json
    python -m research modality-dropout --given research/results/modality_dropout_30_episodes.json

A MetaWorld task whose object and goal arrive twice: `object_world` (positions in the world) and `object_hand` (the
same, as seen from the hand). With `proprio` either one is enough. Per seed two policies are trained on the same
demonstrations with the same steps, one without and one with dropout, and each is rolled out with every sensor, without
`object_world` and without `object_hand`, on the same episodes.

cost: success with every sensor minus success without one of the two, mean over both. saved: cost without dropout minus
cost with it, over the same seeds and episodes. Intervals: 95 %, bootstrap of training seeds and episodes, crossed
(docs/howto/comparison.md). Every policy is a trial of the folder `work`: killed, the same command goes on; more seeds
are added.
    successes.ARM.CONDITION   one row a seed, one entry an episode
    claims                    the sentences of the paper, and what became of them
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prism.cli.style import option
from prism.controller import Controller, ControllerConfig
from prism.data import open_dataset
from prism.data.episodes import Array, Episode, EpisodeSource, wanted_sensors
from prism.data.views import SourceView
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.evaluation.metrics import interval
from prism.evaluation.play import TEST_SEED, run_episode
from prism.evaluation.results import run_info
from prism.io import files
from prism.methods.presets import build_policy, tiny
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Policy
from prism.sensors import SensorSpec
from prism.sims.collect import collect
from prism.sims.environment import Env
from prism.sims.task_table import make_env
from prism.training.config import TrainConfig
from prism.training.trainer import train
from research.modality import DropSensors, EnvView
from research.report import Claim, ComputedTrials, Result, Study, Verdict, Written, confirmed

# Where they are in MetaWorld's `object_state`: object, goal; object - hand, goal - hand.
VIEWS: dict[str, list[int]] = {"object_world": [0, 1, 2, 3, 4, 5], "object_hand": [6, 7, 8, 12, 13, 14]}
PAPER_COST = 0.05  # of success, at most, without one modality
NOTHING = "nothing"  # is missing: every sensor is there
_PROPRIO, _OBJECT = "proprio", "object_state"


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    task: str = "metaworld-reach"
    """A MetaWorld task."""
    seeds: int = 3
    """Policies of each kind, and seeds of their training."""
    steps: int = 2000
    """Training steps of each policy."""
    episodes: int = 10
    """Episodes under each condition."""
    dropout: float = 0.3
    """Chance of each sensor to be absent from a window, for the policies that are trained with it."""
    demonstrations: int = 20
    """Episodes to train on."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/bench-modality-dropout")
    """Where the runs and finished parts are kept; default: runs/bench-modality-dropout."""
    given: Annotated[Path | None, option("FILE")] = None
    """Judge this file of an earlier --json, and train nothing."""

    def __post_init__(self) -> None:
        if min(self.seeds, self.steps, self.episodes, self.demonstrations) < 1:
            raise PrismError("modality-dropout: seeds, steps, episodes and demonstrations must all be at least 1")
        if not 0 < self.dropout < 1:
            raise PrismError(f"modality-dropout: dropout is {self.dropout}; it must be between 0 and 1")
        if not self.task.startswith("metaworld-"):
            raise PrismError(f"modality-dropout: '{self.task}' is no MetaWorld task, whose object can be seen twice")


def _sensors(sensors: tuple[SensorSpec, ...]) -> tuple[SensorSpec, ...]:
    proprio = next(sensor for sensor in sensors if sensor.name == _PROPRIO)
    return proprio, *(SensorSpec(name, "vector", (len(where),)) for name, where in VIEWS.items())


def _split(streams: dict[str, Array]) -> dict[str, Array]:
    return {_PROPRIO: streams[_PROPRIO], **{name: streams[_OBJECT][..., where] for name, where in VIEWS.items()}}


class SeenTwiceEnv(EnvView):
    """A MetaWorld environment with `object_world` and `object_hand` for its `object_state`."""

    def __init__(self, env: Env) -> None:
        super().__init__(env, _sensors(env.sensors))

    def see(self, observation: dict[str, Array]) -> dict[str, Array]:
        return _split(observation)


@dataclass(frozen=True)
class SeenTwice(SourceView):
    """Demonstrations with the same two sensors."""

    @property
    def sensors(self) -> tuple[SensorSpec, ...]:
        return _sensors(self.source.sensors)

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        part = self.source.read(episode, start, stop, (_PROPRIO, _OBJECT))
        wanted = {sensor.name for sensor in wanted_sensors(self, streams)}
        return Episode({name: v for name, v in _split(part.streams).items() if name in wanted}, part.actions)


def train_policy(
    config: Config, source: EpisodeSource, seed: int, dropout: float, run: Path, console: Console
) -> Policy:
    normalizer = Normalizer.from_statistics(compute_statistics(source))
    policy_config = tiny()
    policy_config = replace(policy_config, encoder=replace(policy_config.encoder, dropout=dropout))
    policy = build_policy(policy_config.spec(source.sensors, source.action_dim, source.fps), seed, normalizer)
    windows = Windows(source, policy_config.obs_horizon, policy_config.pred_horizon, None)
    training = TrainConfig(steps=config.steps, seed=seed, threads=1, val_fraction=0.0)
    result = train(policy, windows, None, training, run, "auto", console, title=run.name)
    if result.stopped_by:
        raise KeyboardInterrupt
    return result.policy


def successes(config: Config, policy: Policy, env: Env, missing: str, console: Console) -> list[bool]:
    controller = Controller(policy, ControllerConfig(), look=False)
    view = DropSensors(env, () if missing == NOTHING else (missing,))
    with Progress(console=console, transient=True) as progress:
        seeds = progress.track(range(TEST_SEED, TEST_SEED + config.episodes), description=f"without {missing}")
        return [run_episode(view, controller, seed).success for seed in seeds]


def run(config: Config, console: Console) -> Study:
    measured = measure(config, console) if config.given is None else _read(config.given)
    figures = {
        key: value for key, value in measured.items() if key not in ("settings", "missing", "commits", *run_info(0))
    }
    if config.given is not None:
        figures["measured"] = {key: measured.get(key) for key in ("command", "commit", "date")}
    seeds = tuple(range(int(measured["settings"].get("seeds", 1))))
    found = dict(measured["settings"]), seeds, tuple(measured.get("missing", ())), measured.get("commits", ())
    return Study("modality-dropout", figures, tuple(claims(measured)), *found)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise PrismError(f"--given {file} does not exist: it is a file of research modality-dropout --json")
    measured: dict[str, Any] = files.read_json(file)
    if missing := {"saved", "saved_ci", "cost_with_dropout_ci", "success", "settings"} - measured.keys():
        raise PrismError(f"--given {file}: no '{min(missing)}'; no file of modality-dropout, or an old one")
    return measured


def measure(config: Config, console: Console) -> dict[str, Any]:
    trials = ComputedTrials(config.work, console)
    settings = config.settings("seeds", "given")
    data = config.work / "demonstrations"
    if not data.exists():
        collect(config.task, config.demonstrations, data, console=console, workers=1)
    source = SeenTwice(open_dataset(data))
    env = SeenTwiceEnv(make_env(config.task))
    kept: dict[int, dict[str, Result]] = {}  # seed, arm, condition

    def trial(name: str, seed: int, dropout: float) -> Result:
        policy = train_policy(config, source, seed, dropout, trials.training(name), console)
        return {missing: successes(config, policy, env, missing, console) for missing in (NOTHING, *VIEWS)}

    try:
        for seed in range(config.seeds):
            for arm, dropout in (("without", 0.0), ("with", config.dropout)):
                name = f"seed-{seed}-{arm}"
                stamp = {**settings, "seed": seed, "arm": arm}
                if (won := trials.get(name, stamp, functools.partial(trial, name, seed, dropout))) is not None:
                    kept.setdefault(seed, {})[arm] = won
                    said = ", ".join(f"without {missing} {sum(v)}/{len(v)}" for missing, v in won.items())
                    console.print(f"seed {seed}, {arm} dropout: {said}", highlight=False)
    finally:
        env.close()
    pairs = {seed: arms for seed, arms in kept.items() if len(arms) == 2}
    if not pairs:
        raise PrismError(f"modality-dropout: no seed has both policies: {trials.missing[0]}")
    found = {"missing": trials.missing, "commits": trials.commits, "settings": {**settings, "seeds": len(pairs)}}
    return {**summarise(pairs), **found}


def summarise(kept: dict[int, dict[str, Result]]) -> dict[str, Any]:
    """The figures of the file from who succeeded in what: seed, arm, condition, episode."""
    arms = ("without", "with")
    won = {arm: {name: [kept[seed][arm][name] for seed in kept] for name in (NOTHING, *VIEWS)} for arm in arms}
    rates = {arm: {name: np.asarray(rows, np.float64) for name, rows in parts.items()} for arm, parts in won.items()}
    costs = {arm: parts[NOTHING] - np.mean([parts[name] for name in VIEWS], axis=0) for arm, parts in rates.items()}
    saved = costs["without"] - costs["with"]  # (seeds, episodes)
    return {
        "cost_without_dropout": float(costs["without"].mean()),
        "cost_without_dropout_ci": list(interval(costs["without"])),
        "cost_with_dropout": float(costs["with"].mean()),
        "cost_with_dropout_ci": list(interval(costs["with"])),
        "saved": float(saved.mean()),
        "saved_ci": list(interval(saved)),
        "saved_by_seed": saved.mean(axis=1).tolist(),
        "success": {arm: {name: float(v.mean()) for name, v in parts.items()} for arm, parts in rates.items()},
        "success_by_seed": {
            arm: {name: v.mean(axis=1).tolist() for name, v in parts.items()} for arm, parts in rates.items()
        },
        "cost_by_seed": {arm: cost.mean(axis=1).tolist() for arm, cost in costs.items()},
        "successes": won,
    }


def claims(measured: dict[str, Any]) -> list[Claim]:
    low, high = measured["saved_ci"]
    trained = measured["success"]["with"]
    cost, (least, most) = measured["cost_with_dropout"], measured["cost_with_dropout_ci"]
    small: Verdict = "cannot be tested here" if least <= PAPER_COST < most else confirmed(most <= PAPER_COST)
    saves: Verdict = "cannot be tested here" if low <= 0 <= high else confirmed(low > 0)
    task = measured["settings"]["task"]
    ours = ", ".join(f"without {name} {value:.0%}" for name, value in trained.items() if name != "nothing")
    return [
        Claim(
            "Sec. 5",
            "without one modality success drops by 3 to 5 points only",
            f"{cost * 100:.0f} points [{least * 100:.0f}, {most * 100:.0f}] on average "
            f"({trained['nothing']:.0%} with every sensor; {ours})",
            small,
            f"{task}, an object seen twice, trained with dropout; CALVIN is not available here",
        ),
        Claim(
            "Sec. 1, Sec. 5",
            "the encoder degrades gracefully under missing sensors",
            f"dropout in training saves {measured['saved'] * 100:.0f} points [{low * 100:.0f}, {high * 100:.0f}]",
            saves,
            "the paper does not say how absence is learnt; without dropout in training it costs "
            f"{measured['cost_without_dropout'] * 100:.0f} points",
        ),
        Claim(
            "Sec. 5, Fig. 3",
            "without wrist RGB 41.5 %, without proprioception 15.8 %, without depth 66.2 %, with all 65.2 % (CALVIN)",
            "-",
            "cannot be tested here",
            "CALVIN's data and simulator are not available here; research modality does it for any run",
        ),
    ]


def show(study: Study, console: Console) -> None:
    result = {**study.figures, "settings": study.settings}
    table = Table(title=f"Success on {result['settings']['task']}, {result['settings']['seeds']} seeds")
    for column in ("trained", "every sensor", *(f"without {name}" for name in VIEWS), "cost"):
        table.add_column(column, justify="left" if column == "trained" else "right")
    for arm in ("without", "with"):
        row = result["success"][arm]
        shares = [f"{row[name]:.0%}" for name in (NOTHING, *VIEWS)]
        table.add_row(f"{arm} dropout", *shares, f"{result[f'cost_{arm}_dropout']:.0%}")
    console.print(table)
    low, high = result["saved_ci"]
    console.print(f"dropout saves {result['saved']:.0%} [{low:.0%}, {high:.0%}] of success when a sensor is missing")
