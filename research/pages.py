"""research/TABLES.md, made from the results files: a section a result.

Try:
    python -m research pages             writes the page
    python -m research pages --check     says whether it is what the files give (a test does)

A section says what was done, its table, the command, trainings and date, and what the table does not show. A new
results file gets a `Section` here and a renderer for its kind: comparison.json of `prism compare` and the ablations,
tables of benchmarks, the Go2, the senses, and studies of variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.errors import PrismError
from prism.io import files
from research.report import Result, Written

HERE = Path(__file__).parent
PAGE = HERE / "TABLES.md"
COMMAND = "python -m research pages"
Data = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # heads, rows

TRUE_STATE = "From the true state; execution tuned for PRISM alone"
CHANGED = "experts, features and noise were changed while PRISM's success was watched"
EARLIER = "PRISM with the objective of before 2026-11-19: own target, no soft term, `relative` 0.5"


@dataclass(frozen=True)
class Section:
    file: str  # in results/, without .json
    title: str
    what: str
    table: Callable[[Data], list[Table]]
    limits: tuple[str, ...]  # what it does not show
    label: str = ""  # its first line


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    check: bool = False
    """Write nothing; the exit status is 2 where the page is not what the files give."""


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}"


def spread(value: float, ends: Sequence[float] | None, digits: int = 2) -> str:
    """A mean with its interval."""
    if not ends:
        return number(value, digits)
    return f"{value:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def gap(difference: Mapping[str, Any] | None, digits: int = 3) -> str:
    if difference is None:
        return ""
    low, high = difference["low"], difference["high"]
    return f"{difference['mean']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def comparison(data: Data) -> list[Table]:
    """`table` of comparison.json; success first, the difference is of scores."""
    rows = []
    several = len({row["recipe"] for row in data["table"]}) > 1
    reference = data.get("reference", "prism")
    for row in data["table"]:
        name = f"{row['recipe']}, {row['contestant']}" if several else row["contestant"]
        rows.append(
            [
                name,
                str(len(row["seeds"])),
                spread(row["success"], row["success_ci"]),
                spread(row["score"], row["score_ci"], 3),
                gap(row["difference"]),
                number(row["jerk"], 4 if row["jerk"] < 0.1 else 2),
                f"{row['candidates']}, {row['exec_horizon']}" if "exec_horizon" in row else "",
                f"{row['steps']:,.0f}",
                f"{row['train_seconds']:,.0f}",
            ]
        )
    heads = ("", "n", "success", "score", f"score - {reference}", "jerk", "K, Ta", "updates", "CPU s")
    return [(heads, rows)]


def benchmark(data: Data) -> list[Table]:
    """A table of `python -m research tables`: means by split; success by task where there are few of them."""
    splits = list(data["mean_by_method"]["prism"])
    rows = []
    for method, means in data["mean_by_method"].items():
        ahead = data["common"].get("ahead", {}).get(method)
        ends = data.get("mean_ci") if method == "prism" else None
        cells = [spread(means[split], (ends or {}).get(split)) if split in means else "" for split in splits]
        rows.append([method, *cells, gap(ahead), number(data["common"]["jerk"][method]) if _jerk(data) else ""])
    found: list[Table] = [(("mean success", *splits, "PRISM ahead by", "jerk"), rows)]
    tasks = list(data["success"]["prism"])
    if len(tasks) <= 12 and len(data["success"]) > 1:
        by_task = [
            [m, *(number(of[task]) if task in of else "" for task in tasks)] for m, of in data["success"].items()
        ]
        found.append((("success", *tasks), by_task))
    return found


def _jerk(data: Data) -> bool:
    return "jerk" in data["common"]


def go2(data: Data) -> list[Table]:
    tasks, counts = data["settings"]["tasks"], [str(count) for count in data["settings"]["counts"]]
    rows = []
    for method, by_task in data["curve"].items():
        cells = [", ".join(number(by_task[task][count]["success"]) for count in counts) for task in tasks]
        rows.append([method, *cells, number(data["mean"][method]), gap(data["ahead"].get(method))])
    return [((f"with {', '.join(counts)} demonstrations", *tasks, f"mean of {counts[-1]}", "PRISM ahead by"), rows)]


_WAYS = {"PRISM": "all", "PRISM without the sense": "without"}


def senses(data: Data) -> list[Table]:
    tasks, means = data["tasks"], data["means"]
    entries: dict[str, list[Data]] = {name: [one[key] for one in tasks.values()] for name, key in _WAYS.items()}
    for method in next(iter(tasks.values()))["methods"]:
        entries[method] = [one["methods"][method] for one in tasks.values()]
    rows = []
    for name, of in entries.items():
        mean = means.get("prism" if name == "PRISM" else name)
        cells = [f"{spread(one['success'], one['ci'])}; {number(one['jerk'])}" for one in of]
        ends = ["", ""] if mean is None else [spread(mean["success"], mean["ci"]), gap(mean.get("ahead"))]
        rows.append([name, *cells, *ends])
    return [(("success; jerk", *tasks, "mean success", "PRISM ahead by"), rows)]


def study(data: Data) -> list[Table]:
    """A study of research/variants.py."""
    found: list[Table] = []
    for recipe, table in data["table"].items():
        logged = data["logged"][recipe]
        keys = sorted({key for of in logged.values() for key in of})
        rows = [
            [
                name,
                ", ".join(map(str, row["seeds"])),
                spread(row["success"], row["success_ci"]),
                spread(row["score"], row["score_ci"], 3),
                f"{row['steps']:,.0f}",
                f"{row['train_seconds']:,.0f}",
                *(f"{logged[name][key]:.3g}" if key in logged[name] else "" for key in keys),
            ]
            for name, row in table.items()
        ]
        found.append(((recipe, "seeds", "success", "score", "updates", "CPU s", *keys), rows))
        pairs = data["difference"][recipe].items()
        ours = [[pair, str(d["success"]["seeds"]), gap(d["success"]), gap(d["score"])] for pair, d in pairs]
        found.append((("difference", "n", "success", "score"), ours))
    for recipe, of in data.get("redrawn", {}).items():
        rows = [
            [f"{name}, seed {seed}", number(one["own"], 3), ", ".join(number(value, 3) for value in one["redrawn"])]
            for name, by_seed in of.items()
            for seed, one in by_seed.items()
        ]
        found.append(((f"{recipe}: error of the nearest plan", "own features", "five other draws"), rows))
    return found


SECTIONS = (
    Section(
        "pusht_human_fresh",
        "Human Push-T, 30 CPU minutes",
        "206 human demonstrations, state inputs; success is a coverage of .95. PRISM as its recipe plays, the "
        "baselines as published, flow matching also with four actions of a plan.",
        comparison,
        (
            "a fair race: PRISM's execution was tuned on this task, the baselines' not; a comparison at equal "
            "execution is planned ([PLAN.md](PLAN.md))",
            EARLIER,
            "two commits",
        ),
    ),
    Section(
        "pusht_human",
        "Human Push-T, 30 CPU minutes, nobody smoothed",
        "An earlier recipe: eight actions of a plan, no smoothing, for every method.",
        comparison,
        ("fresh episodes: PRISM's rule of choice was first explored on these 50", EARLIER),
    ),
    Section(
        "study_ablations",
        "What each choice is worth",
        "Human Push-T. Every variant differs from the recipe of that day in one choice; equal updates, tuning "
        "episodes.",
        comparison,
        (
            "other budgets, equal time; of 28 intervals one or two miss 0 by chance",
            "the reference is the recipe of before 2026-11-19: own target, no soft term, `relative` 0.5",
        ),
    ),
    Section(
        "favor",
        "FAVOR+ at heads of 64",
        "The paper's width and depth, m = 256, batches of 16, 4 candidates, 1,000 updates.",
        study,
        ("other tasks, more context tokens, batches of 128", "equal time: a step of FAVOR+ costs more"),
    ),
    Section(
        "placebo",
        "Rejection: a placebo",
        "Human Push-T, batches of 128, equal CPU time: 20 % of the candidates rejected at random, by the own target, "
        "by the batch, or none.",
        study,
        ("other tasks", "30 minutes"),
    ),
    Section(
        "literal",
        "The paper's system as printed, in small",
        "Width 64, 2 blocks, batches of 16, 4 candidates, 3,000 updates. `literal_trained_as_ours`: with our learning "
        "rate, weight decay and averaged weights.",
        comparison,
        (
            "the paper's width, batches of 128, its hours of training; which literal reading costs most",
            "equal execution: the recipe executes 1 action of 8, the literal system 8 of 16 by ProxyScore",
            EARLIER,
        ),
    ),
    Section(
        "presets_fast",
        "One query for eight actions",
        "`fast8`: the paper's preset with one query for eight actions (now `fast`), 1,000 updates.",
        comparison,
        ("one training", EARLIER),
    ),
    Section(
        "metaworld_state",
        "MetaWorld, 50 tasks",
        "10 demonstrations, one CPU minute a task.",
        benchmark,
        ("baselines", EARLIER),
        f"{TRUE_STATE}; three trainings",
    ),
    Section(
        "metaworld_methods",
        "MetaWorld, methods",
        "Three tasks of each split, 10 demonstrations, one CPU minute each.",
        benchmark,
        ("which method is best: at .90 to .97 it cannot tell them apart", EARLIER),
        f"{TRUE_STATE}; three trainings",
    ),
    Section(
        "robomimic",
        "Robomimic's tasks with scripted demonstrations",
        "200 demonstrations, 5 CPU minutes, Transport and ToolHang 12. PRISM plans at every step, the baselines play 8 "
        "actions of 16.",
        benchmark,
        ("robomimic's own data", "other trainings", EARLIER),
        f"{TRUE_STATE}; one training; {CHANGED}",
    ),
    Section(
        "senses",
        "Tasks in which one sense decides",
        "Tabletop, 200 demonstrations, one CPU minute each.",
        senses,
        (
            "fresh episodes: these were looked at while the recipes were made",
            "budgets at which the baselines have converged: IMLE Policy makes 220 to 260 updates, PRISM 1,700 to 3,200",
            EARLIER,
        ),
        f"{TRUE_STATE}; three trainings; {CHANGED}",
    ),
    Section(
        "loco",
        "Go2 with an arm",
        "1.5 CPU minutes each, 50 episodes.",
        go2,
        (
            "diffusion that predicts the plan: [loco_sample.json](results/loco_sample.json)",
            "other trainings",
            EARLIER,
        ),
        f"{TRUE_STATE}; one training; {CHANGED}",
    ),
    Section(
        "few_step",
        "Few-step methods on the Go2's pick-and-place",
        "One CPU minute each, students after their teacher's, one plan drawn.",
        comparison,
        ("budgets at which flow matching has learned the task", "other trainings", EARLIER),
        f"{TRUE_STATE}; one training; {CHANGED}",
    ),
)


def page() -> str:
    parts = [
        f"# Tables\n\nMade from the results files by `{COMMAND}`; do not edit. Intervals are 95 %, over training seeds "
        "and episodes (crossed bootstrap) or, for one training, over episodes alone. n: trainings.\n"
    ]
    parts += [section(one) for one in SECTIONS if (HERE / "results" / f"{one.file}.json").is_file()]
    return "\n".join(parts)


def section(one: Section) -> str:
    data = files.read_json(HERE / "results" / f"{one.file}.json")
    lines = [f"## {one.title}", "", *([f"*{one.label}.*", ""] if one.label else []), one.what, ""]
    for heads, rows in (table for table in one.table(data) if table[1]):
        lines += [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    if (HERE / "results" / f"{one.file}.svg").is_file():
        lines += [f"![{one.title}](results/{one.file}.svg)", ""]
    played = data.get("evaluation") or data["settings"]
    first = f" from seed {played['first_seed']:,}" if "first_seed" in played else ""
    lines.append(
        f"[{one.file}.json](results/{one.file}.json), {data['date'][:10]}, training seeds "
        f"{', '.join(map(str, data['seeds']))}, {played['episodes']} episodes each{first}, commits "
        f"{', '.join(data.get('commits') or [data['commit']])}."
    )
    if data.get("missing"):
        lines.append(f"Not run yet: {len(data['missing'])} trials.")
    lines += ["", f"    {data['command']}", "", "Does not show: " + "; ".join(one.limits) + ".", ""]
    return "\n".join(lines)


def run(config: Config, console: Console) -> Result:
    made = page()
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made
    if not config.check and not same:
        files.replace_file(PAGE, made.encode())
    return {"page": PAGE.name, "sections": len(SECTIONS), "same": same or not config.check}


def show(result: Result, console: Console) -> None:
    console.print(f"{result['page']}: {'as the results files give it' if result['same'] else 'out of date'}")


def check(result: Result) -> None:
    if not result["same"]:
        raise PrismError(f"research/{result['page']} is not what the results files give: run {COMMAND}")
