"""`prism bench modality-dropout`: whole-modality dropout in training against a sensor that is missing afterwards.

A MetaWorld task whose object and goal arrive twice: `object_world` (positions in the world) and `object_hand` (the
same, as seen from the hand). With `proprio` either one is enough. Per seed two policies are trained on the same
demonstrations with the same steps, one without and one with dropout, and each is rolled out with every sensor, without
`object_world` and without `object_hand`, on the same episodes.

cost: success with every sensor minus success without one of the two, mean over both. saved: cost without dropout minus
cost with it, over the same seeds and episodes, with a 95 % bootstrap interval over the pairs (seed, episode).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from prism.bench.output import Output
from prism.bench.timing import provenance
from prism.controller import Controller, ControllerConfig
from prism.data import open_dataset
from prism.data.episodes import Array, Episode, EpisodeSource, SourceView, wanted_sensors
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.modality import DropSensors
from prism.evaluation.rollout import TEST_SEED, run_episode
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Policy
from prism.presets import build_policy, tiny
from prism.selection import SelectionConfig
from prism.sensors import SensorSpec
from prism.sims.base import Env, EnvView
from prism.sims.collect import collect
from prism.sims.tasks import make_env
from prism.training.config import TrainConfig
from prism.training.loop import train

# Where they are in MetaWorld's `object_state`: object, goal; object - hand, goal - hand.
VIEWS: dict[str, list[int]] = {"object_world": [0, 1, 2, 3, 4, 5], "object_hand": [6, 7, 8, 12, 13, 14]}
_PROPRIO, _OBJECT = "proprio", "object_state"


@dataclass(frozen=True)
class ModalityDropoutConfig:
    task: str = "metaworld-reach"
    seeds: int = 3
    steps: int = 2000
    episodes: int = 10
    dropout: float = 0.3
    demonstrations: int = 20
    json: Path | None = None
    overwrite: bool = False

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


def train_policy(config: ModalityDropoutConfig, source: EpisodeSource, seed: int, dropout: float, run: Path) -> Policy:
    normalizer = Normalizer.from_statistics(compute_statistics(source))
    policy_config = tiny()
    policy_config = replace(policy_config, encoder=replace(policy_config.encoder, dropout=dropout))
    policy = build_policy(policy_config.spec(source.sensors, source.action_dim, source.fps), seed, normalizer)
    windows = Windows(source, policy_config.obs_horizon, policy_config.pred_horizon, None)
    training = TrainConfig(steps=config.steps, seed=seed, threads=1, val_fraction=0.0, checkpoint_minutes=0.0)
    result = train(policy, windows, None, training, run, console=Console(quiet=True))
    if result.stopped_by:
        raise KeyboardInterrupt
    return result.policy


def successes(config: ModalityDropoutConfig, policy: Policy, env: Env, dropped: tuple[str, ...]) -> list[bool]:
    controller = Controller(policy, ControllerConfig(selection=SelectionConfig(action_kind="delta")))
    view = DropSensors(env, dropped)
    return [run_episode(view, controller, TEST_SEED + i).success for i in range(config.episodes)]


def run(config: ModalityDropoutConfig, console: Console) -> dict[str, Any]:
    env = SeenTwiceEnv(make_env(config.task))
    arms = {"without": 0.0, "with": config.dropout}
    kept: dict[str, dict[str, list[list[bool]]]] = {arm: {} for arm in arms}  # arm, condition, seed, episode
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "demonstrations"
            collect(config.task, config.demonstrations, data, console=console, workers=1)
            source = SeenTwice(open_dataset(data))
            for seed in range(config.seeds):
                for arm, dropout in arms.items():
                    policy = train_policy(config, source, seed, dropout, Path(folder) / f"{arm}-{seed}")
                    said = []
                    for name in ("nothing", *VIEWS):
                        won = successes(config, policy, env, () if name == "nothing" else (name,))
                        kept[arm].setdefault(name, []).append(won)
                        said.append(f"without {name} {sum(won)}/{len(won)}")
                    console.print(f"seed {seed}, {arm} dropout: {', '.join(said)}", highlight=False)
    finally:
        env.close()
    return summarise(config, kept)


def summarise(config: ModalityDropoutConfig, kept: dict[str, dict[str, list[list[bool]]]]) -> dict[str, Any]:
    """The figures of the file, from who succeeded in what."""
    rates = {arm: {name: np.asarray(rows, np.float64) for name, rows in parts.items()} for arm, parts in kept.items()}
    costs = {arm: parts["nothing"] - np.mean([parts[name] for name in VIEWS], axis=0) for arm, parts in rates.items()}
    saved = (costs["without"] - costs["with"]).ravel()  # (seeds x episodes,)
    settings = dataclasses.asdict(config)
    for name in ("json", "overwrite"):
        del settings[name]
    return {
        "cost_without_dropout": float(costs["without"].mean()),
        "cost_with_dropout": float(costs["with"].mean()),
        "saved": float(saved.mean()),
        "saved_ci": list(metrics.bootstrap_interval(saved.tolist())),
        "success": {arm: {name: float(v.mean()) for name, v in parts.items()} for arm, parts in rates.items()},
        "success_by_seed": {
            arm: {name: v.mean(axis=1).tolist() for name, v in parts.items()} for arm, parts in rates.items()
        },
        "cost_by_seed": {arm: cost.mean(axis=1).tolist() for arm, cost in costs.items()},
        "settings": settings,
        **provenance(0),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Success on {result['settings']['task']}, {result['settings']['seeds']} seeds")
    for column in ("trained", "every sensor", *(f"without {name}" for name in VIEWS), "cost"):
        table.add_column(column, justify="left" if column == "trained" else "right")
    for arm in ("without", "with"):
        row = result["success"][arm]
        cells = [f"{row[name]:.0%}" for name in ("nothing", *VIEWS)]
        table.add_row(f"{arm} dropout", *cells, f"{result[f'cost_{arm}_dropout']:.0%}")
    console.print(table)
    low, high = result["saved_ci"]
    console.print(f"dropout saves {result['saved']:.0%} [{low:.0%}, {high:.0%}] of success when a sensor is missing")


def main(config: ModalityDropoutConfig) -> None:
    Output(config.json, overwrite=config.overwrite).carry_out(lambda console: run(config, console), show)
