"""What touch, sound and depth are worth: policies with and without the sense that decides (Sec. 5, Fig. 3).

Try:
    python -m research senses --json senses.json
    python -m research senses --parts all without --seeds 0        the first columns of the table, one seed
    python -m research senses --parts --json senses.json           runs nothing: the figures of what is there

Three tasks of the tabletop (docs/reference/tabletop.md). Trainings have the same CPU time, data and test episodes.
    all         PRISM with all senses
    without     PRISM trained without the sense that decides
    baselines   Diffusion Policy, Flow Matching and IMLE Policy with all senses
    dropout     PRISM as it is, and trained with dropout (three times as long: more to learn), with each sensor and
                each pair missing at run time
Every policy is a trial of the folder `work`: killed, the same command goes on; each part may have a process of its own.
ComputedTrials that are not there are in `missing`, and a mean says how many seeds it is of.

    tasks.SENSE.{all,without}          {success, ci, jerk, mode_switches, seeds}
    tasks.SENSE.gain                   {mean, low, high, p, seeds, episodes}: all minus without, the same episodes
    tasks.SENSE.methods.METHOD         as `all`; `ahead`: PRISM minus the method
    dropout.SENSE.{plain,trained}      {nothing, SENSOR, SENSOR + SENSOR}: as `all`; `change`: minus nothing missing
    redundant.SENSE                    sensors whose information another one has too
    means.METHOD                       mean success over the three tasks, null where a trial is missing; `ahead`
The page in `work` has a chart of each of the three parts for each task.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError, check_numbers
from prism.evaluation.metrics import FloatArray, paired, success_interval
from prism.evaluation.results import write_atomic
from prism.experiments.comparison import CompareConfig, Contestant, compare, folder_of, summarise
from prism.experiments.run_folder import Run
from prism.experiments.trial import RESULT, EvaluationPlan, TrialId, TrialResult
from prism.experiments.trials import commits_of
from prism.report.charts import BAR_STYLE, Bar, bar_chart, page
from research import modality
from research.report import Claim, ComputedTrials, Result, Study, Verdict, Written, decided, show_rows

Part = Literal["all", "without", "baselines", "dropout"]
SENSES = {
    "touch": ("tabletop-insert-left", "tactile"),
    "sound": ("tabletop-rattle", "audio"),
    "depth": ("tabletop-height", "depth_wrist"),
}
# The hand's place is in the offsets of object_state too: of the hole, of the mark, of the stand (its height: in depth).
REDUNDANT = {"touch": ["proprio"], "sound": ["proprio"], "depth": ["proprio"]}
PRISM = Contestant("prism", "prism")
# What is redundant is dropped more often: the policy must learn the task without it, too.
TRAINED = Contestant(
    "prism-dropout", "prism", ("policy.encoder.dropout=0.05", 'policy.encoder.sensor_dropout={"proprio": 0.3}')
)
LONGER = 3  # times the CPU time: to learn with and without a sensor is more to learn
ARMS = {"plain": PRISM, "trained": TRAINED}
NOTHING = "nothing"  # is missing
BARS = {"touch": 0.25, "sound": 0.25, "depth": 0.15}  # of the gain: ours
ALLOWED = 0.05  # success that a redundant sensor may cost: the paper's 3 to 5 points


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    parts: Annotated[tuple[Part, ...], option("PART ...")] = ("all", "without", "baselines", "dropout")
    """Which parts of the table to run now; none: only read what is there."""
    senses: Annotated[tuple[str, ...], option("SENSE ...")] = tuple(SENSES)
    """touch, sound, depth."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("diffusion", "flow_matching", "imle")
    """What PRISM is compared with: methods, or variations: NAME=METHOD:KEY=VALUE."""
    minutes: float = 1.0
    """CPU minutes of each training; with dropout three times as many."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training."""
    episodes: int = 50
    """Test episodes of each policy."""
    demonstrations: int = 200
    """Of each task."""
    dropped_episodes: int = 20
    """The first of them, of each policy under each condition of the part `dropout`; a redundant sensor's are all."""
    jobs: int = 1
    """Trainings at the same time, one thread each."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-senses")
    """Where the runs and finished parts are kept; default: runs/study-senses."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.senses if name not in SENSES]:
            raise PrismError(f"senses: '{unknown[0]}' is none of {', '.join(SENSES)}")
        if not self.seeds or min(self.episodes, self.dropped_episodes, self.demonstrations, self.jobs) < 1:
            raise PrismError("senses: seeds, episodes, dropped-episodes, demonstrations and jobs must be at least 1")
        check_numbers(self, "--", {"(0, inf)": "minutes"})

    def comparison(self, contestants: Sequence[Contestant], seeds: Sequence[int], without: str = "") -> CompareConfig:
        """Of all senses' tasks; or, `without` one of the senses, of its task."""
        names = (without,) if without else self.senses
        settings = [f"demonstrations.episodes={self.demonstrations}"]
        settings += [f'demonstrations.without=["{SENSES[without][1]}"]'] if without else []
        return CompareConfig(
            recipes=tuple(SENSES[name][0] for name in names),
            contestants=tuple(contestants),
            seeds=tuple(seeds),
            minutes=self.minutes * (LONGER if TRAINED in contestants else 1),
            clock="cpu",
            settings=tuple(settings),
            evaluation=EvaluationPlan(self.episodes, curve=()),
        )

    def contestants(self, part: Part) -> list[Contestant]:
        own = {"baselines": [Contestant.parse(method) for method in self.methods], "dropout": [TRAINED]}
        return own.get(part, [PRISM])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(Contestant.parse(method).name for method in self.methods)

    def folder(self, part: Part, sense: str = "") -> Path:
        return self.work / (f"{part}-{sense}" if sense else part)


def run(config: Config, console: Console) -> Study:
    for part in config.parts:
        for seed in config.seeds:  # a first, complete table after a third of the time
            for sense in config.senses if part == "without" else ("",):
                comparison_config = config.comparison(config.contestants(part), [seed], sense)
                compare(config.folder(part, sense), comparison_config, config.jobs, console)
    drops = Drops(config, console)
    if "dropout" in config.parts:
        drops.run()
    study = summary(config, drops)
    console.print(f"page: {write_page(config.work / 'senses.html', study)}", highlight=False, soft_wrap=True)
    return study


class Drops:
    """Success of the trained policies with sensors missing at run time, a trial a policy."""

    def __init__(self, config: Config, console: Console) -> None:
        self.config, self.console = config, console
        self.trials = ComputedTrials(config.work / "dropped", console)

    def name(self, sense: str, arm: str, seed: int) -> str:
        return f"{sense}/{arm}/seed-{seed}"

    def run(self) -> None:
        for seed in self.config.seeds:
            for sense in self.config.senses:
                for arm in ARMS:
                    self.trial(sense, arm, seed, play=True)

    def trial(self, sense: str, arm: str, seed: int, play: bool) -> Result | None:
        """What is there, or played now; None where its training is not."""
        id = TrialId(SENSES[sense][0], ARMS[arm].name, seed)
        folder = folder_of(self.config.folder("all" if arm == "plain" else "dropout"), id)
        if not (folder / RESULT).is_file():
            return None
        episodes = [self.config.dropped_episodes, self.config.episodes]
        spec = {"policy": id.name, **Run(folder).weights_id(), "episodes": episodes, "redundant": REDUNDANT[sense]}
        compute = functools.partial(self.play, folder, REDUNDANT[sense]) if play else None
        return self.trials.get(self.name(sense, arm, seed), spec, compute)

    def play(self, folder: Path, redundant: Sequence[str]) -> Result:
        """condition -> a row an episode."""
        run, config = Run(folder), self.config
        look = functools.partial(modality.study, folder, run.task(None), controller=run.settings, workers=0)
        found = look(config.dropped_episodes).results
        if config.episodes > config.dropped_episodes:  # a small difference needs more of them
            found |= look(config.episodes, most=1, sensors=redundant).results
        return {" + ".join(out) or NOTHING: [e.row() for e in result.episodes] for out, result in found.items()}

    def read(self, sense: str, arm: str) -> dict[int, dict[str, Any]]:
        """By seed, what is there."""
        found = {seed: self.trial(sense, arm, seed, play=False) for seed in self.config.seeds}
        return {seed: one for seed, one in found.items() if one is not None}


def figures_of(rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Of a policy's episodes, by training seed."""
    seeds = sorted(rows)
    won = values(rows, seeds, "success")
    more = {key: float(values(rows, seeds, key).mean()) for key in ("jerk", "mode_switches")}
    return {"success": float(won.mean()), "ci": list(success_interval(won)), **more, "seeds": seeds}


def values(rows: Mapping[int, Sequence[Mapping[str, Any]]], seeds: Sequence[int], key: str) -> FloatArray:
    return np.array([[float(episode[key]) for episode in rows[seed]] for seed in seeds])


def difference(
    one: Mapping[int, Sequence[Mapping[str, Any]]], other: Mapping[int, Sequence[Mapping[str, Any]]]
) -> dict[str, Any] | None:
    """Success of one minus the other's, on the seeds and first episodes that both have; None without any."""
    both = sorted(one.keys() & other.keys())
    if not both:
        return None
    tables = [values(rows, both, "success") for rows in (one, other)]
    shared = min(table.shape[1] for table in tables)
    return asdict(paired(*(table[:, :shared] for table in tables)))


def episodes_of(trials: Mapping[TrialId, TrialResult], task: str, name: str) -> dict[int, Sequence[Mapping[str, Any]]]:
    return {id.seed: trial["per_episode"] for id, trial in trials.items() if (id.recipe, id.contestant) == (task, name)}


def summary(config: Config, drops: Drops) -> Study:
    trials: dict[TrialId, TrialResult] = {}
    missing, trained = [], list[TrialResult]()
    for part in ("all", "baselines", "dropout"):
        found = summarise(config.folder(part), config.comparison(config.contestants(part), config.seeds))
        trials |= found.trials
        missing += [f"{part}, {one.trial}: {one.reason}" for one in found.missing]
        trained += found.trials.values()
    tasks: dict[str, Any] = {}
    dropout: dict[str, Any] = {}
    for sense in config.senses:
        task, sensor = SENSES[sense]
        blind = summarise(config.folder("without", sense), config.comparison([PRISM], config.seeds, sense))
        missing += [f"without {sensor}, {one.trial}: {one.reason}" for one in blind.missing]
        trained += blind.trials.values()
        full, lost = (episodes_of(found, task, PRISM.name) for found in (trials, blind.trials))
        tasks[sense] = {"task": task, "sensor": sensor, "all": None, "without": None, "gain": difference(full, lost)}
        tasks[sense] |= {key: figures_of(rows) for key, rows in (("all", full), ("without", lost)) if rows}
        others = {name: episodes_of(trials, task, name) for name in config.names}
        tasks[sense]["methods"] = {
            name: {**figures_of(rows), "ahead": difference(full, rows)} for name, rows in others.items() if rows
        }
        dropout[sense] = {}
        for arm in ARMS:
            there = drops.read(sense, arm)
            dropout[sense][arm] = dropped(there)
            missing += [f"dropped, {sense} {arm} seed {seed}" for seed in config.seeds if seed not in there]
    means = {name: mean_of(config, trials, name) for name in (PRISM.name, *config.names)}
    figures = {
        "tasks": tasks,
        "dropout": dropout,
        "redundant": {name: REDUNDANT[name] for name in config.senses},
        "means": means,
    }
    settings = config.settings("parts", "jobs")
    study = Study("senses", figures, (), settings, config.seeds, tuple(missing), commits_of(trained))
    return replace(study, claims=tuple(claims(study)))


def dropped(by_seed: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """condition -> figures, over the seeds that are there."""
    if not by_seed:
        return {}
    conditions = list(next(iter(by_seed.values())))
    rows = {name: {seed: found[name] for seed, found in by_seed.items()} for name in conditions}
    return {
        name: {**figures_of(mine), **({} if name == NOTHING else {"change": difference(mine, rows[NOTHING])})}
        for name, mine in rows.items()
    }


def mean_of(config: Config, trials: Mapping[TrialId, TrialResult], name: str) -> dict[str, Any]:
    """Mean success over the tasks and, of a baseline, how far PRISM is ahead; null where a trial is missing."""
    names = [SENSES[sense][0] for sense in config.senses]
    tables = [[episodes_of(trials, task, who) for task in names] for who in (name, PRISM.name)]
    if any(len(rows) < len(config.seeds) for found in tables for rows in found):
        return {"success": None, "ahead": None}
    mine, ours = (np.hstack([values(rows, config.seeds, "success") for rows in found]) for found in tables)
    mean = {"success": float(mine.mean()), "ci": list(success_interval(mine))}
    return mean if name == PRISM.name else {**mean, "ahead": asdict(paired(ours, mine))}


def claims(study: Study) -> list[Claim]:
    found = []
    tasks, means = study.figures["tasks"], study.figures["means"]
    for sense, row in tasks.items():
        if row["gain"] is not None:
            both = [f"{row[key]['success']:.0%} {_percent(row[key]['ci'])}" for key in ("all", "without")]
            verdict, chance = decided(row["gain"], BARS[sense])
            found.append(
                Claim(
                    "Sec. 1, Fig. 3",
                    "a policy with more senses does what one without them cannot",
                    f"{row['task']}: {both[0]} with all senses, {both[1]} trained without {row['sensor']}",
                    verdict,
                    f"n = {row['gain']['seeds']} seeds; our task and our bar, {BARS[sense]:.0%}{chance}",
                )
            )
    for name, row in means.items():
        if row["success"] is not None and name != PRISM.name:
            verdict, chance = decided(row["ahead"])
            ours = f"{means[PRISM.name]['success']:.0%} against {row['success']:.0%} of {name}"
            found.append(Claim("Sec. 5", f"PRISM is ahead of {name}", ours, verdict, f"mean of three tasks{chance}"))
    costs = [
        arms["trained"][sensor]["change"]
        for sense, arms in study.figures["dropout"].items()
        for sensor in REDUNDANT[sense]
        if arms["trained"]
    ]
    if costs:
        verdict, chance = min((bearable(cost) for cost in costs), key=lambda one: _WORST_FIRST.index(one[0]))
        mean, low = (max(0.0, -min(cost[key] for cost in costs)) * 100 for key in ("mean", "low"))
        said = f"at most {mean:.0f} points without a redundant sensor (by the intervals {low:.0f})"
        note = f"{len(costs)} of {len(study.figures['dropout'])} tasks, trained with dropout{chance}"
        paper = "without one modality success drops by 3 to 5 points only"
        found.append(Claim("Sec. 5", paper, said, verdict, note))
    return found


_WORST_FIRST: tuple[Verdict, ...] = ("not confirmed", "cannot be tested here", "confirmed")


def bearable(cost: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Is a change of success above -ALLOWED? Where no episode changed there is no interval: with a change in every
    20th, so many alike must be rarer than 5 %."""
    if cost["low"] == cost["high"] and (1 - ALLOWED) ** (cost["seeds"] * cost["episodes"]) > 0.05:
        return "cannot be tested here", "; cannot be told from so few episodes"
    return decided(cost, -ALLOWED)


def _percent(ci: Sequence[float]) -> str:
    return f"[{ci[0] * 100:.0f}, {ci[1] * 100:.0f}]"


def show(study: Study, console: Console) -> None:
    rows = []
    for sense, row in study.figures["tasks"].items():
        entries = {"all senses": row["all"], f"without {row['sensor']}": row["without"], **row["methods"]}
        for name, one in entries.items():
            if one is not None:
                trials = (
                    f"{one['success']:.0%} {_percent(one['ci'])}",
                    f"{one['jerk']:.3f}",
                    f"{one['mode_switches']:.1f}",
                )
                rows.append([f"{sense}: {name}", *trials, str(len(one["seeds"]))])
    show_rows("What a sense is worth", ("policy", "success", "jerk", "mode switches", "seeds"), rows, console)
    rows = [
        [f"{sense}, {arm}: without {name}", f"{one['success']:.0%} {_percent(one['ci'])}", str(len(one["seeds"]))]
        for sense, arms in study.figures["dropout"].items()
        for arm, conditions in arms.items()
        for name, one in conditions.items()
    ]
    if rows:
        show_rows("Sensors missing at run time", ("policy", "success", "seeds"), rows, console)


def write_page(path: Path, study: Study) -> Path:
    write_atomic(path, render(study).encode(), overwrite=True)
    return path


def render(study: Study) -> str:
    settings = study.settings
    lead = f"""Every policy trained for {settings["minutes"]:g} CPU minute(s) of one core, then {settings["episodes"]}
test episodes (at least {settings["dropped_episodes"]} where sensors are missing); with dropout {LONGER} times as long.
Lines are 95 % intervals over training seeds and episodes."""
    if study.missing:
        lead += f" <b>{len(study.missing)} trials are missing</b>: a bar says how many seeds it is of."
    sections = "".join(_section(study, sense) for sense in study.figures["tasks"])
    gaps = "".join(f"<li>{escape(line)}</li>" for line in study.missing)
    content = sections + (f"<h3>Missing</h3><ul>{gaps}</ul>" if gaps else "")
    return page("What each sense is worth", lead, content, "", style=BAR_STYLE + ".charts{align-items:start}")


def _section(study: Study, sense: str) -> str:
    row, arms = study.figures["tasks"][sense], study.figures["dropout"][sense]
    of = len(study.seeds)
    trained = {"PRISM, all senses": row["all"], f"PRISM without {row['sensor']}": row["without"], **row["methods"]}
    charts = [("Trained with and without", [_bar(name, one, of) for name, one in trained.items() if one])]
    for title, count in (("One sensor missing at run time", 1), ("Two sensors missing", 2)):
        bars = [
            _bar(f"{name} ({'dropout in training' if arm == 'trained' else 'no dropout'})", one, of)
            for arm, conditions in arms.items()
            for name, one in conditions.items()
            if name != NOTHING and name.count(" + ") == count - 1
        ]
        charts.append((title, bars))
    mark = row["all"]["success"] if row["all"] else None
    drawn = "".join(
        f'<figure class="panel"><h4>{title}</h4>{bar_chart(bars, title, "success", True, mark)}</figure>'
        for title, bars in charts
        if bars
    )
    return f'<h3>{escape(sense)}: {escape(row["task"])}</h3><div class="charts">{drawn}</div>'


def _bar(name: str, one: Mapping[str, Any], of: int) -> Bar:
    seeds = "" if len(one["seeds"]) == of else f", {len(one['seeds'])} of {of} seeds"
    return Bar(f"{name}{seeds}", one["success"], one["ci"][0], one["ci"][1])
