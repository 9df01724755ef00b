"""The benchmarks' own protocols, and the tables that they call for.

A benchmark is a list of tasks, a number of episodes each, and named means over tasks. A mean is the mean of the tasks'
rates (macro), and exists only where every task of it was evaluated: what is missing is listed, never averaged over.
Its interval combines the tasks' Wilson intervals [l_i, u_i] of rates p_i (the MOVER rule, equal weights 1/n):

    low = p - sqrt(sum_i (p_i - l_i)^2) / n        high = p + sqrt(sum_i (u_i - p_i)^2) / n

which is honest at 0 and 1, and is Wilson's for one task. It speaks of these policies on these tasks, not of another
training run.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_sims import metaworld, robosuite, tabletop

from prism.errors import PrismError
from prism.evaluation import metrics
from prism.evaluation.play import TEST_SEED
from prism.evaluation.results import EvaluationResult, run_info
from prism.sims.task_table import task_names

NAMES = ("metaworld", "robomimic", "pusht", "calvin", "tabletop")
CHAIN = "calvin"  # the task of five commands in a row; its score is the share of them that was done
CHAIN_LENGTH = 5


@dataclass(frozen=True)
class Benchmark:
    """What is played, how often, and what it is called; `tasks` by the names that make_env knows, without a variant."""

    name: str
    title: str
    rule: str  # the protocol in one line
    tasks: tuple[str, ...]
    episodes: int
    groups: Mapping[str, tuple[str, ...]]  # named means, in the order of the table
    episodes_of: Mapping[str, int] = field(default_factory=dict)  # where a task has its own number
    one_policy: bool = False  # one run plays every task
    candidates: int | None = None  # K, where the benchmark's published figures have one
    success_at: int | None = None  # K of the paper's Success@K, where that was asked for

    def planned(self, task: str, episodes: int | None = None) -> int:
        return episodes or self.episodes_of.get(task, self.episodes)

    def base(self, task: str) -> str | None:
        """The benchmark's task that a task is, or is a variant of: metaworld-reach-pixels -> metaworld-reach"""
        known = [base for base in self.tasks if task == base or task.startswith(f"{base}-")]
        return max(known, key=len) if known and task in task_names() else None

    def variants(self, base: str) -> tuple[str, ...]:
        """Every task that is this one with other sensors, itself first."""
        return tuple(sorted((name for name in task_names() if self.base(name) == base), key=len))


def benchmark(name: str) -> Benchmark:
    if name == "metaworld":
        groups = {split: tuple(f"metaworld-{t}" for t in tasks) for split, tasks in metaworld.SPLITS.items()}
        tasks = tuple(task for split in groups.values() for task in split)
        rule = "20 episodes a task, 200 steps, success at any step"
        return Benchmark(name, "MetaWorld, 50 tasks", rule, tasks, 20, {**groups, "all": tasks})
    if name == "robomimic":
        tasks = tuple(f"robosuite-{task}" for task in robosuite.TASKS)
        rule = "50 seeds a task, 400 steps (transport, tool-hang: 700), success at any step"
        return Benchmark(name, "robomimic, five tasks", rule, tasks, 50, {"all": tasks})
    if name == "pusht":
        rule = "seeds 100000 to 100049, 300 steps; score: best coverage / .95, success: coverage > .95"
        return Benchmark(name, "Push-T", rule, ("pusht",), 50, {})
    if name == "tabletop":
        tasks = tuple(f"tabletop-{command}" for command in tabletop.COMMANDS)
        rule = "50 seeds a command, success at any step"
        return Benchmark(name, "Tabletop, four commands", rule, tasks, 50, {"all": tasks})
    if name == "calvin":
        from prism_sims.calvin_checkout import TASKS

        singles = tuple(f"calvin-{task}" for task in TASKS)
        rule = "1,000 chains of five commands, 360 steps a command; single commands from starts where they are possible"
        return Benchmark(
            name,
            "CALVIN, environment D",
            rule,
            (CHAIN, *singles),
            20,
            {"single": singles},
            {CHAIN: 1000},
            one_policy=True,
            candidates=8,  # paper, Table "CALVIN"
        )
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(NAMES)}"
    raise PrismError(f"no benchmark '{name}': {hint}")


def macro_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """95 % interval of the mean of independent rates, from (successes, trials) of each."""
    below = above = 0.0
    for wins, trials in counts:
        low, high = metrics.wilson_interval(wins, trials)
        below += (wins / trials - low) ** 2
        above += (high - wins / trials) ** 2
    mean = metrics.mean([wins / trials for wins, trials in counts])
    return max(0.0, mean - math.sqrt(below) / len(counts)), min(1.0, mean + math.sqrt(above) / len(counts))


@dataclass(frozen=True)
class Row:
    """A line of the table. `success` is None where nothing, or not everything that it needs, was evaluated."""

    label: str
    success: float | None = None
    interval: tuple[float, float] | None = None
    score: float | None = None
    episodes: int = 0
    expert: float | None = None
    paper: float | None = None
    note: str = ""
    is_mean: bool = False


@dataclass(frozen=True)
class BenchmarkResult:
    """What was evaluated: the results of each task (several where there are runs with several training seeds)."""

    benchmark: Benchmark
    results: Mapping[str, tuple[EvaluationResult, ...]]  # by the benchmark's name of the task
    episodes: int | None = None  # asked for, where that is not the protocol's number
    expert: Mapping[str, float] = field(default_factory=dict)  # the demonstrator's own rate by task
    reused: tuple[str, ...] = ()  # tasks that an earlier call has played
    failed: Mapping[str, str] = field(default_factory=dict)  # tasks that gave no result, and why

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(task for task in self.benchmark.tasks if task not in self.results)

    @property
    def settings(self) -> tuple[str, ...]:
        """What the policies saw: the variants of the tasks that were played."""
        suffixes = {r.task.removeprefix(base).removeprefix("-") for base, rs in self.results.items() for r in rs}
        plain = "every sensor" if self.benchmark.name == "calvin" else "state"
        return tuple(sorted(suffix or plain for suffix in suffixes))

    def departures(self) -> tuple[str, ...]:
        """Every way in which this is not the whole protocol."""
        lines = []
        for task, results in self.results.items():
            planned = self.benchmark.planned(task)
            for result in results:
                if result.lost:
                    lines.append(f"{task}: {result.lost[0]} ({len(result.lost)} episodes lost)")
                elif len(result.episodes) != planned:
                    lines.append(f"{task}: {len(result.episodes)} episodes, the protocol has {planned}")
        short = [line for line in lines if "the protocol has" in line]
        if len(short) > 3:
            lines = [line for line in lines if line not in short]
            lines.append(f"{len(short)} tasks with {self.episodes} episodes each, the protocol has another number")
        lines += [f"{task}: {reason}" for task, reason in self.failed.items()]
        if len(commits := sorted({str(r.info.get("commit")) for rs in self.results.values() for r in rs})) > 1:
            lines.append(f"tasks were played by several versions of prism: {', '.join(commits)}")
        if self.missing:
            lines.append(f"missing: {len(self.missing)} of {len(self.benchmark.tasks)} tasks")
        return tuple(lines)

    def counts(self, task: str) -> tuple[int, int]:
        episodes = [episode for result in self.results[task] for episode in result.episodes]
        return sum(episode.success for episode in episodes), len(episodes)

    def rows(self) -> list[Row]:
        """The table: tasks under their group, then the group's mean; CALVIN's chains first."""
        rows = self._chain_rows() if CHAIN in self.benchmark.tasks else []
        shown: set[str] = {CHAIN}
        for group, tasks in self.benchmark.groups.items():
            rows += [self._task_row(task) for task in tasks if task not in shown]
            shown.update(tasks)
            rows.append(self._mean_row(group, tasks))
        return rows + [self._task_row(task) for task in self.benchmark.tasks if task not in shown]

    def _paper(self, label: str) -> float | None:
        return PAPER.get(self.benchmark.name, {}).get(label)

    def _task_row(self, task: str) -> Row:
        expert, paper = self.expert.get(task), self._paper(task)
        if task not in self.results:
            return Row(task, expert=expert, paper=paper, note=self.failed.get(task, "missing"))
        wins, trials = self.counts(task)
        episodes = [episode for result in self.results[task] for episode in result.episodes]
        runs = len(self.results[task])
        lost = sum(len(result.lost) for result in self.results[task])
        notes = [f"{runs} runs"] * (runs > 1) + [f"{lost} lost"] * (lost > 0) + ["reused"] * (task in self.reused)
        score = metrics.mean([episode.score for episode in episodes])
        interval = metrics.wilson_interval(wins, trials)
        return Row(task, wins / trials, interval, score, trials, expert, paper, ", ".join(notes))

    def _mean_row(self, group: str, tasks: Sequence[str]) -> Row:
        paper = self._paper(group)
        known = [self.expert[task] for task in tasks if task in self.expert]
        expert = metrics.mean(known) if len(known) == len(tasks) else None
        there = [task for task in tasks if task in self.results]
        if len(there) < len(tasks):
            note = f"{len(there)} of {len(tasks)}"
            return Row(f"mean, {group}", expert=expert, paper=paper, note=note, is_mean=True)
        counts = [self.counts(task) for task in tasks]
        mean = metrics.mean([wins / trials for wins, trials in counts])
        scores = [metrics.mean([e.score for r in self.results[task] for e in r.episodes]) for task in tasks]
        total = sum(trials for _, trials in counts)
        interval, score, note = macro_interval(counts), metrics.mean(scores), f"{len(tasks)} tasks"
        return Row(f"mean, {group}", mean, interval, score, total, expert, paper, note, is_mean=True)

    def chain_lengths(self) -> list[int]:
        """How many commands in a row were done, of each chain."""
        return [round(e.score * CHAIN_LENGTH) for r in self.results.get(CHAIN, ()) for e in r.episodes]

    def _chain_rows(self) -> list[Row]:
        lengths = self.chain_lengths()
        if not lengths:
            return [Row(CHAIN, note=self.failed.get(CHAIN, "missing"))]
        rows = []
        for count in range(1, CHAIN_LENGTH + 1):
            done = sum(length >= count for length in lengths)
            interval = metrics.wilson_interval(done, len(lengths))
            rows.append(Row(f"{count} in a row", done / len(lengths), interval, episodes=len(lengths)))
        mean = metrics.mean([float(length) for length in lengths])
        low, high = metrics.bootstrap_interval([float(length) for length in lengths])
        note = f"mean length {mean:.2f} [{low:.2f}, {high:.2f}] of {CHAIN_LENGTH}"
        return [*rows, Row("chains", note=note, is_mean=True)]

    def to_json(self) -> dict[str, Any]:
        """Flat: success.TASK, success_ci.TASK, score.TASK, episodes.TASK, mean.GROUP, mean_ci.GROUP, chain.N, ..."""
        bench = self.benchmark
        data: dict[str, Any] = {
            "benchmark": bench.name,
            "protocol": bench.rule,
            "success_at": bench.success_at,
            "settings": list(self.settings),
            "complete": not self.departures(),
            "departures": list(self.departures()),
            "tasks": len(self.results),
            "tasks_of": len(bench.tasks),
            "missing": list(self.missing),
            "reused": list(self.reused),
        }
        for task in (task for task in bench.tasks if task in self.results):
            row = self._task_row(task)
            data |= {f"success.{task}": row.success, f"success_ci.{task}": list(row.interval or ())}
            data |= {f"score.{task}": row.score, f"episodes.{task}": row.episodes}
        for group, tasks in bench.groups.items():
            row = self._mean_row(group, tasks)
            data |= {
                f"mean.{group}": row.success,
                f"mean_ci.{group}": None if row.interval is None else [*row.interval],
            }
        if lengths := self.chain_lengths():
            for count, row in enumerate(self._chain_rows()[:CHAIN_LENGTH], start=1):
                data |= {f"chain.{count}": row.success, f"chain_ci.{count}": list(row.interval or ())}
            data["chain.mean_length"] = metrics.mean([float(length) for length in lengths])
        data |= {f"expert.{task}": rate for task, rate in self.expert.items()}
        data |= {f"paper.{label}": value for label, value in PAPER.get(bench.name, {}).items()}
        data["published"] = OTHERS.get(bench.name, "")
        data["runs"] = {task: [_origin(result) for result in results] for task, results in self.results.items()}
        return {**data, **run_info(TEST_SEED)}


def _origin(result: EvaluationResult) -> dict[str, Any]:
    keys = ("checkpoint", "date", "commit", "command")
    return {"policy": result.policy, "task": result.task, "first_seed": result.first_seed} | {
        key: result.info[key] for key in keys if key in result.info
    }


# The numbers that others published for the benchmarks, to stand beside ours; never mixed with them. `PAPER` is what the
# PRISM paper prints for PRISM, as success rates. Its MetaWorld tables disagree with each other: the means of the
# per-task table are .915 / .791 / .632 / .854, the split means that it prints are the ones below. Four tasks have no
# number in it.
PAPER: dict[str, dict[str, float]] = {
    "metaworld": {
        "easy": 0.964, "medium": 0.855, "hard": 0.580, "very-hard": 0.858, "all": 0.842,
        **{
            f"metaworld-{task}": percent / 100
            for task, percent in {
                "button-press-topdown": 100, "button-press-topdown-wall": 100, "button-press-wall": 100,
                "peg-unplug-side": 90, "door-close": 100, "door-lock": 100, "door-open": 100, "door-unlock": 100,
                "drawer-close": 100, "drawer-open": 100, "faucet-close": 100, "faucet-open": 100, "handle-press": 100,
                "handle-pull": 38, "handle-press-side": 100, "handle-pull-side": 53, "lever-pull": 76,
                "plate-slide": 100, "plate-slide-back": 100, "dial-turn": 93, "reach": 55, "reach-wall": 83,
                "plate-slide-side": 100, "window-close": 100, "window-open": 100, "basketball": 98, "bin-picking": 63,
                "box-close": 70, "coffee-pull": 93, "coffee-push": 97, "hammer": 100, "peg-insert-side": 88,
                "push-wall": 75, "soccer": 49, "sweep": 98, "sweep-into": 39, "assembly": 100, "hand-insert": 30,
                "pick-out-of-hole": 48, "pick-place": 63, "push": 75, "shelf-place": 68, "disassemble": 83,
                "stick-pull": 78, "stick-push": 100, "pick-place-wall": 98,
            }.items()
        },
    },
    "robomimic": {
        "robosuite-lift": 1.0, "robosuite-can": 1.0, "robosuite-square": 0.84, "robosuite-transport": 0.91,
        "robosuite-tool-hang": 0.86, "all": 0.922,
    },
    "calvin": {"single": 0.652},  # 10 % of environment D, K = 8
}  # fmt: skip

# Push-T is no success table of the paper; Diffusion Policy's own figures (state inputs) stand beside it.
OTHERS: dict[str, str] = {
    "pusht": "Diffusion Policy, state inputs, published: score .95 at the best checkpoint, .91 on average of the last "
    "ten; LeRobot's run of it: 64 % success, mean best overlap .957. Our seeds are Diffusion Policy's, but "
    "gym-pusht, LeRobot's environment and ours, makes other starts of them",
    "robomimic": "Diffusion Policy from images, published: lift 1.00, can .97, square .92, transport .93, "
    "tool-hang .73 (average of the last ten checkpoints)",
    "tabletop": "The paper's four commands on hardware (25 demonstrations each, 50 trials): 92, 88, 84, 78 %; this "
    "world is our own, so nothing here is comparable but the kind of task",
    "metaworld": "The paper prints split means that its own per-task table does not have (.915 / .791 / .632 / .854); "
    "its inputs are pictures and proprioception, ours are in the task's name",
    "calvin": "The paper reports single-task success with 8 candidates after training on 10 % of environment D; it "
    "reports no chains",
}
