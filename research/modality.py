"""What each sensor is worth: the same episodes with every sensor, without each one, without each pair.

Try:
    prism train metaworld-reach --set policy.encoder.dropout=0.3 --out runs/dropped
    python -m research modality runs/dropped --episodes 20
    python -m research modality runs/mine --sensors rgb_wrist proprio --json modality.json

Writes modality.json and modality.html (three bar charts) into the run.

The paper's figure "Modality robustness". A sensor that is dropped is missing from every observation of the episode;
the policy sees its absent vector, which is learned where training had such absences (encoder.dropout, or a dataset
with gaps) and random otherwise: `untrained` names the sensors that were never dropped. Seeds are the same under every
condition, so a change is measured on pairs of episodes; its interval is a bootstrap over these pairs.
"""

from __future__ import annotations

import functools
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table
from tyro.conf import Positional, arg

from prism.cli.style import option
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.play import TEST_SEED, EnvFactory, PolicyFactory, evaluate
from prism.evaluation.results import EpisodeResult, EvaluationResult, write_atomic, write_json
from prism.experiments.run_folder import Run
from prism.policy import PolicySpec
from prism.report.charts import BAR_STYLE, Bar, bar_chart, page
from prism.sensors import SensorSpec
from prism.sims.environment import Array, Env, StepResult, rendering_hint
from prism.sims.task_table import make_env
from prism.training.checkpoint import read_spec, resolve
from research.report import Written

Dropped = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder, or one checkpoint in it."""
    task: Annotated[str | None, option("TASK")] = None
    """The task to roll out in; default: the one the policy was trained for."""
    episodes: int = 20
    """How many episodes under each condition, the same ones everywhere."""
    sensors: Annotated[tuple[str, ...] | None, option("NAME ...")] = None
    """Drop only these; default: all of the policy's."""
    workers: Annotated[int | None, option("N")] = None
    """Processes that roll out in parallel; default: one a core."""


class EnvView(ABC):
    """An environment whose observations are seen otherwise; all the rest is that environment's."""

    def __init__(self, env: Env, sensors: tuple[SensorSpec, ...]) -> None:
        self._env, self.sensors = env, sensors
        self.name, self.action_dim, self.fps, self.max_steps = env.name, env.action_dim, env.fps, env.max_steps
        self.action_low, self.action_high = env.action_low, env.action_high

    @abstractmethod
    def see(self, observation: dict[str, Array]) -> dict[str, Array]:
        """One time step of every sensor of the environment -> of this view."""

    def reset(self, seed: int) -> dict[str, Array]:
        return self.see(self._env.reset(seed))

    def step(self, action: NDArray[np.float32]) -> StepResult:
        result = self._env.step(action)
        return replace(result, observation=self.see(result.observation))

    @property
    def goal_index(self) -> int:
        """Which command of a chain is to be done now; 0 where an episode has but one."""
        return int(getattr(self._env, "goal_index", 0))

    def state(self) -> NDArray[np.float64]:
        return self._env.state()

    def render(self) -> NDArray[np.uint8] | None:
        return self._env.render()

    def rendering_hint(self) -> str | None:
        return rendering_hint(self._env)

    def close(self) -> None:
        self._env.close()


class DropSensors(EnvView):
    """An environment whose named sensors say nothing; it still lists them, because the policy was trained with them."""

    def __init__(self, env: Env, names: Sequence[str]) -> None:
        known = [sensor.name for sensor in env.sensors]
        if unknown := [name for name in names if name not in known]:
            raise PrismError(f"task '{env.name}' has no sensor '{unknown[0]}' to drop; it has {', '.join(known)}")
        super().__init__(env, env.sensors)
        self._names = frozenset(names)

    def see(self, observation: dict[str, Array]) -> dict[str, Array]:
        return {name: value for name, value in observation.items() if name not in self._names}


def without_sensors(env: EnvFactory, names: Dropped) -> Env:
    return DropSensors(env(), names) if names else env()


def run(config: Config, console: Console) -> ModalityStudy:
    run = Run(config.run)
    task = run.task(config.task)
    with Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(f"drop sensors of {task}", total=None)
        found = study(
            config.run,
            task,
            config.episodes,
            controller=run.settings,
            workers=config.workers or os.cpu_count() or 1,
            sensors=config.sensors,
            on_done=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    write_json(run.folder / "modality.json", found.to_json(), overwrite=True)
    console.print(f"charts: {write_page(run.folder / 'modality.html', found)}", highlight=False, soft_wrap=True)
    return found


def conditions(sensors: Sequence[str], most: int = 2) -> list[Dropped]:
    """Nothing dropped, each sensor, each pair."""
    return list(itertools.chain.from_iterable(itertools.combinations(sensors, count) for count in range(most + 1)))


@dataclass(frozen=True)
class ModalityStudy:
    sensors: tuple[str, ...]
    results: dict[Dropped, EvaluationResult]  # () is the baseline
    untrained: tuple[str, ...] = ()  # those that training never dropped

    @property
    def note(self) -> str | None:
        """What to know of the figures, in one line."""
        if not self.untrained:
            return None
        return (
            f"trained without dropout of {', '.join(self.untrained)}: unless the dataset had gaps, what stands in for "
            "an absent one was never learned; train with --set policy.encoder.dropout=0.3 to learn it"
        )

    @property
    def baseline(self) -> EvaluationResult:
        return self.results[()]

    @property
    def metric(self) -> Literal["success", "score"]:
        """What the charts show: success, as the paper, unless there is none to lose."""
        return "success" if any(episode.success for episode in self.baseline.episodes) else "score"

    def change(self, dropped: Dropped, metric: Literal["success", "score"]) -> tuple[float, float, float]:
        """Mean difference from the baseline over the same episodes, and its 95 % interval."""
        pairs = zip(self.results[dropped].episodes, self.baseline.episodes, strict=True)
        differences = [float(getattr(episode, metric)) - float(getattr(full, metric)) for episode, full in pairs]
        return metrics.mean(differences), *metrics.bootstrap_interval(differences)

    def to_json(self) -> dict[str, Any]:
        """{"baseline": row, "single": {sensor: row}, "pair": {"a + b": row}, ...}: rows with intervals and changes."""
        rows: dict[str, dict[str, Any]] = {"single": {}, "pair": {}}
        for dropped in self.results:
            if dropped:
                rows["single" if len(dropped) == 1 else "pair"][" + ".join(dropped)] = self._row(dropped)
        baseline = self.baseline
        return {
            "task": baseline.task,
            "policy": baseline.policy,
            "sensors": list(self.sensors),
            "episodes": len(baseline.episodes),
            "first_seed": baseline.first_seed,
            "metric": self.metric,
            "untrained": list(self.untrained),
            "note": self.note,
            "baseline": self._row(()),
            **rows,
            **baseline.info,
        }

    def _row(self, dropped: Dropped) -> dict[str, Any]:
        summary = self.results[dropped].summary()
        row = {key: summary[key] for key in ("success", "success_ci", "score", "score_ci", "jerk", "mode_switches")}
        for metric in ("success", "score"):
            mean, low, high = self.change(dropped, metric)
            row |= {f"{metric}_change": mean, f"{metric}_change_ci": [low, high]}
        return row


def study(
    policy: Path | PolicyFactory,
    task: str,
    episodes: int = 20,
    first_seed: int = TEST_SEED,
    controller: ControllerConfig | None = None,
    workers: int = 2,
    most: int = 2,
    env: EnvFactory | None = None,
    sensors: Sequence[str] | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> ModalityStudy:
    """Roll out under every condition; `sensors` limits which are dropped, `most` how many at once. `workers` 0: in this
    process."""
    if episodes < 1 or workers < 0 or most < 1:
        raise PrismError(f"episodes = {episodes} and most = {most} must be at least 1, workers = {workers} at least 0")
    controller = controller or ControllerConfig()
    spec = read_spec(resolve(policy)) if isinstance(policy, Path) else policy().spec
    names = [sensor.name for sensor in spec.sensors]
    chosen = tuple(names if sensors is None else sensors)
    if unknown := [name for name in chosen if name not in names]:
        raise PrismError(f"the policy has no sensor '{unknown[0]}' to drop; it has {', '.join(names)}")
    # never all of them: a robot without any sensor has no policy
    sets = [dropped for dropped in conditions(chosen, most) if len(dropped) < len(names)]
    if len(sets) == 1:
        raise PrismError(f"the policy has one sensor, '{names[0]}': without it there is nothing to evaluate")
    make = env or functools.partial(make_env, task)
    results = {}
    for number, dropped in enumerate(sets):

        def tell(episode: EpisodeResult, done: int, total: int, before: int = number * episodes) -> None:
            if on_done is not None:
                on_done(before + done, len(sets) * episodes)

        seen = functools.partial(without_sensors, make, dropped)
        results[dropped] = evaluate(policy, task, episodes, first_seed, controller, workers, progress=tell, env=seen)
    return ModalityStudy(tuple(names), results, never_dropped(spec, chosen))


def never_dropped(spec: PolicySpec, sensors: Sequence[str]) -> tuple[str, ...]:
    """Those of the sensors that training never lacked, by dropout or in its data; none where the policy's config says
    nothing of dropout."""
    encoder = spec.config.get("encoder")
    if encoder is None:
        return ()
    chances, usual = encoder.get("sensor_dropout", {}), encoder.get("dropout", 0.0)
    return tuple(name for name in sensors if not chances.get(name, usual) and name not in spec.absent)


def write_page(path: Path, study: ModalityStudy, overwrite: bool = True) -> Path:
    write_atomic(path, render(study).encode(), overwrite)
    return path


def render(study: ModalityStudy) -> str:
    result = study.baseline
    title = f"What each sensor is worth: {result.task}"
    figures = "".join(
        f'<figure class="panel"><h4>{name}</h4>{chart}</figure>' for name, chart in charts(study) if chart
    )
    lead = f"""{len(result.episodes)} episodes under each condition, always on the same starting positions (seeds from
{result.first_seed}). A sensor that is dropped says nothing from the first step to the last. Lines are 95 % intervals;
dashed: nothing dropped."""
    if study.note is not None:
        lead += f" <b>Note:</b> {escape(study.note)}."
    content = f'<div class="charts">{figures}</div>\n<h3>All numbers</h3>\n{_table(study)}'
    footer = f"""<p>{escape(str(result.info.get("command", "")))}<br>{escape(str(result.info.get("date", "")))},
policy {escape(result.policy)}</p>"""
    return page(title, lead, content, footer, style=BAR_STYLE + ".charts{align-items:start}")


def charts(study: ModalityStudy) -> list[tuple[str, str]]:
    """(title, SVG): single sensors, pairs, change against nothing dropped."""
    metric = study.metric
    percent = metric == "success"
    full = float(study.baseline.summary()[metric])
    single = [dropped for dropped in study.results if len(dropped) == 1]
    several = [dropped for dropped in study.results if len(dropped) > 1]
    changes = sorted((*single, *several), key=lambda dropped: study.change(dropped, metric)[0])
    drawn = [Bar("nothing dropped", full, *_interval(study, ()), css="base")]
    return [
        (
            "Without one sensor",
            bar_chart([*drawn, *_bars(study, single)], "Without one sensor", metric, percent, mark=full),
        ),
        ("Without two", bar_chart(_bars(study, several), "Without two sensors", metric, percent, mark=full)),
        (
            "Change against all sensors",
            bar_chart(_changes(study, changes), "Change against all sensors", f"change of {metric}", percent),
        ),
    ]


def _interval(study: ModalityStudy, dropped: Dropped) -> tuple[float, float]:
    low, high = study.results[dropped].summary()[f"{study.metric}_ci"]
    return float(low), float(high)


def _bars(study: ModalityStudy, sets: Sequence[Dropped]) -> list[Bar]:
    values = {dropped: float(study.results[dropped].summary()[study.metric]) for dropped in sets}
    return [Bar(" + ".join(dropped), value, *_interval(study, dropped)) for dropped, value in values.items()]


def _changes(study: ModalityStudy, sets: Sequence[Dropped]) -> list[Bar]:
    bars = []
    for dropped in sets:
        mean, low, high = study.change(dropped, study.metric)
        bars.append(Bar(" + ".join(dropped), mean, low, high, css="loss" if mean < 0 else "gain"))
    return bars


def _table(study: ModalityStudy) -> str:
    rows = []
    for dropped, result in study.results.items():
        data: dict[str, Any] = result.summary()
        change, low, high = study.change(dropped, study.metric)
        cells = [
            f"{data['success']:.0%}", f"{data['success_ci'][0]:.0%} to {data['success_ci'][1]:.0%}",
            f"{data['score']:.3f}", f"{change:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{data['jerk']:.3f}",
        ]  # fmt: skip
        name = escape(" + ".join(dropped) or "nothing")
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    names = ("Dropped", "Success", "95 %", "Score", f"Change of {study.metric}", "95 %", "Jerk")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="panel scroll" tabindex="0" role="region" aria-label="All conditions"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def show(study: ModalityStudy, console: Console) -> None:
    """One row a condition, the costliest last."""
    metric = study.metric
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("without")
    for name in ("success [95 %]", "score", f"{metric}, change [95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    for dropped in sorted(study.results, key=lambda dropped: -study.change(dropped, metric)[0]):
        row = study.results[dropped].summary()
        low, high = row["success_ci"]
        change, least, most = study.change(dropped, metric)
        table.add_row(
            " + ".join(dropped) or "nothing",
            f"{row['success']:.0%} [{low * 100:.0f}, {high * 100:.0f}]",
            f"{row['score']:.3f}",
            f"{change:+.2f} [{least:+.2f}, {most:+.2f}]" if dropped else "",
        )
    console.print(table)
    if study.note is not None:
        console.print(f"note: {study.note}", highlight=False, markup=False)
