"""Final tables: are they whole, and were they made as they say (research/results/final)?

Try:
    python -m research final --check                 every table there; a line for each problem
    python -m research final --make T.json --published FOLDER --best FOLDER --tag TAG
                                                     a table of two comparisons, with all that it must have
    python -m research final --keep TABLE.json       puts a table there, once: it is never overwritten

A final table is one JSON object:
    protocol, tag        the written protocol, and the git tag that was set before the training
    commits              one: of the training and of the playing
    budget               {"minutes": M} or {"steps": N}, with "clock"; the same for every method
    seeds                of the trainings, three or more
    evaluation           {"episodes": N, "first_seed": S}: fresh ones, S >= 3,000,000
    chosen_on            the episodes that settings were chosen on: ["200000-200029"]
    missing              []
    methods.NAME         updates, weights (sha256 of the file): a value a seed; command: makes the weights again;
                         as_published and best, the two executions: controller, and success and score, a value a seed
A method that names a protocol, tag, commits, budget, seeds or evaluation of its own must name the table's.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.results import write_json
from prism.experiments.comparison import JSON
from prism.experiments.recipes import Experiment
from prism.experiments.trial import RESULT, TrialResult, TrialSpec, state_of
from prism.experiments.trials import Trials
from prism.io import files
from research.report import SEEDS, Result, Written

FOLDER = Path(__file__).parent / "results" / "final"
FRESH = 3_000_000
# Episodes on which something was chosen, or whose outcome was known while a method was changed: first and last seed,
# what was played. The one list of them; add to it before you look at others.
LOOKED_AT = (
    (0, 99_999, "experts, demonstrations, tests"),
    (100_000, 199_999, "test episodes of all tasks; senses and language were changed while they were watched"),
    (200_000, 299_999, "tuning"),
    (300_000, 399_999, "what led to selection.restless"),
    (400_000, 499_999, "MetaWorld, few-step methods, ToolHang"),
    (500_000, 899_999, "human Push-T, robomimic's tasks, replanning"),
    (900_000, 999_999, "presets, attention and the literal system on pick-place"),
    (2_500_000, 2_699_999, "prototypes from cameras and points; lengths of queries and keys"),
    (2_700_000, 2_799_999, "the studies of attention, rejection and departures"),
)
_HEAD = ("protocol", "tag", "commits", "budget", "seeds", "evaluation", "chosen_on", "methods", "missing")
_SAME = ("protocol", "tag", "commits", "budget", "seeds", "evaluation")
_OF_A_METHOD = ("updates", "weights", "command", "as_published", "best")
EXECUTIONS = ("as_published", "best")
_OF_AN_EXECUTION = ("controller", "success", "score")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    check: bool = False
    """Check every table there; the exit status is 2 where one has a problem."""
    keep: Annotated[Path | None, option("FILE")] = None
    """Check this table and put it into --folder under its name, where no table of that name is or was."""
    make: Annotated[Path | None, option("FILE")] = None
    """Write a table from two finished comparisons: --published, --best and --tag."""
    published: Annotated[Path | None, option("FOLDER")] = None
    """The comparison in which each method is executed as published."""
    best: Annotated[Path | None, option("FOLDER")] = None
    """The comparison of the same trainings (--trained) in which each is executed at its best; the same names."""
    tag: str = ""
    """The git tag that was set before the training."""
    folder: Annotated[Path, option("FOLDER")] = FOLDER
    """Where the final tables are; default: research/results/final."""

    def __post_init__(self) -> None:
        if [self.check, self.keep is not None, self.make is not None].count(True) != 1:
            raise PrismError("final: say what to do: --check, --make TABLE.json or --keep TABLE.json")
        if self.make is not None and not (self.published and self.best and self.tag):
            raise PrismError("final: --make needs --published FOLDER --best FOLDER --tag TAG")


def run(config: Config, console: Console) -> Result:
    if config.keep is not None:
        return {"tables": {config.keep.name: keep(config.keep, config.folder)}}
    if config.make is not None and config.published is not None and config.best is not None:
        write_json(config.make, table_of(config.published, config.best, config.tag), overwrite=False)
        return {"tables": {config.make.name: problems(config.make, tagged_in=config.folder)}}
    tables = sorted(config.folder.glob("*.json"))
    return {"tables": {path.name: problems(path) for path in tables}}


def table_of(published: Path, best: Path, tag: str) -> dict[str, Any]:
    """A final table of two comparisons of the same trainings; PrismError where they are not that."""
    played = {name: trials_in(folder) for name, folder in zip(EXECUTIONS, (published, best), strict=True)}
    first, other = played.values()
    if differs := sorted(first.keys() ^ other.keys()):
        raise PrismError(f"{published} and {best} have other methods or seeds: {differs[0]}")
    if changed := [name for name in first if first[name]["weights"] != other[name]["weights"]]:
        raise PrismError(f"{changed[0]}: other weights in {best}; make that comparison with --trained {published}")
    seeds = sorted({seed for _, seed in first})
    methods: dict[str, Any] = {}
    for method in dict.fromkeys(name for name, _ in first):
        mine = [first.get((method, seed), {}) for seed in seeds]
        methods[method] = {
            "updates": [one.get("steps") for one in mine],
            "weights": [one.get("weights") for one in mine],
            "command": command_of(published),
        }
        for execution, trials in played.items():
            found = [trials.get((method, seed)) for seed in seeds]
            values = {key: [one and one["evaluation"][key] for one in found] for key in ("success", "score")}
            methods[method][execution] = {"controller": next(one for one in found if one)["controller"], **values}
    example = next(iter(trial_folders(published)))
    spec, train = TrialSpec.load(example), Experiment.load(example).train
    commits = {str(one["info"].get("commit")) for trials in played.values() for one in trials.values()}
    commits |= {str(one["trained_by"].get("commit")) for one in first.values()}
    return {
        "protocol": spec.protocol,
        "tag": tag,
        "commits": sorted(commits),
        "budget": {"clock": train.clock, **({"minutes": train.minutes} if train.minutes else {"steps": train.steps})},
        "seeds": seeds,
        "evaluation": {"episodes": spec.evaluation.episodes, "first_seed": spec.evaluation.first_seed},
        "chosen_on": list(spec.chosen_on),
        "missing": [f"{method} seed {s}" for method in methods for s in seeds if (method, s) not in first],
        "methods": methods,
    }


def trial_folders(folder: Path) -> list[Path]:
    if not (found := Trials(folder).prepared()):
        raise PrismError(f"{folder}: no comparison here; name the --out of prism compare")
    return found


def trials_in(folder: Path) -> dict[tuple[str, int], TrialResult]:
    """By method and seed; PrismError where one has no result yet."""
    found: dict[tuple[str, int], TrialResult] = {}
    for path in trial_folders(folder):
        if state_of(path)[0] != "done":
            raise PrismError(f"{path}: {state_of(path)[1]}; finish the comparison first")
        result = files.read_json(path / RESULT)
        found[str(result["contestant"]), int(result["seed"])] = result
    return found


def command_of(folder: Path) -> str:
    return str(files.read_json(folder / JSON).get("command", ""))


def keep(table: Path, folder: Path) -> list[str]:
    """Copy a table into the folder of final tables; PrismError where it has a problem, or one of its name exists."""
    to = folder / table.name
    if to.exists():
        raise PrismError(f"{to} exists: a final table is made once. Give another table another name")
    if made := _git(folder, "log", "-1", "--format=%h", "--", table.name):
        raise PrismError(f"{to} was made before, in commit {made}: a final table is made once")
    if found := problems(table, tagged_in=folder):
        raise PrismError(f"{found[0]}{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}")
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_file(to, table.read_bytes())
    return []


def problems(path: Path, tagged_in: Path | None = None) -> list[str]:
    """What a final table lacks, a line each."""
    try:
        table = files.read_json(path)
    except PrismError as error:
        return [str(error)]
    found = [f"{path.name}: {what}" for what in _lacks(table)]
    return found or [f"{path.name}: {what}" for what in _untagged(tagged_in or path.parent, table)]


def _lacks(table: Mapping[str, Any]) -> Iterator[str]:
    if lacking := [key for key in _HEAD if key not in table]:
        yield f"has no '{lacking[0]}'"
        return
    for key in ("protocol", "tag", "chosen_on", "methods"):
        if not table[key]:
            yield f"'{key}' is empty"
    if table["missing"]:
        yield f"lacks {len(table['missing'])} trials: {table['missing'][0]}"
    commits = table["commits"]
    if len(commits) != 1 or not re.fullmatch(r"[0-9a-f]{7,40}", str(commits[0])):
        yield f"commits {', '.join(map(str, commits)) or 'of nobody'}: a table is trained and played by one commit"
    if len([key for key in ("minutes", "steps") if table["budget"].get(key)]) != 1:
        yield "'budget' has minutes or steps, one of them"
    seeds = table["seeds"]
    if len(set(seeds)) < SEEDS:
        yield f"{len(set(seeds))} training seeds; a final table takes {SEEDS}"
    yield from _stale(table["evaluation"], table["chosen_on"])
    for name, method in table["methods"].items():
        for what in _of_method(method, table, len(seeds)):
            yield f"{name}: {what}"


def _of_method(method: Mapping[str, Any], table: Mapping[str, Any], seeds: int) -> Iterator[str]:
    for key in _SAME:
        if key in method and method[key] != table[key]:
            yield f"{key} is {method[key]}, the table's is {table[key]}: a table has one"
    if lacking := [key for key in _OF_A_METHOD if not method.get(key)]:
        yield f"has no '{lacking[0]}'"
        return
    values = {"updates": method["updates"], "weights": method["weights"]}
    for name in EXECUTIONS:
        if lacking := [key for key in _OF_AN_EXECUTION if key not in method[name]]:
            yield f"{name} has no '{lacking[0]}'"
        values |= {f"{name}.{key}": method[name].get(key, []) for key in ("success", "score")}
    for key, value in values.items():
        if not isinstance(value, list) or len(value) != seeds or None in value:
            yield f"'{key}' needs a value for each of the {seeds} seeds"
    for sha in method["weights"]:
        if not _SHA256.fullmatch(str(sha)):
            yield f"'{sha}' in weights is no sha256"


def _stale(evaluation: Mapping[str, Any], chosen_on: Sequence[str]) -> Iterator[str]:
    if lacking := [key for key in ("episodes", "first_seed") if not evaluation.get(key)]:
        yield f"evaluation has no '{lacking[0]}'"
        return
    first, last = evaluation["first_seed"], evaluation["first_seed"] + evaluation["episodes"] - 1
    ranges = [(low, high, f"looked at ({what})") for low, high, what in LOOKED_AT]
    for text in chosen_on:
        if not (ends := re.fullmatch(r"(\d+)-(\d+)", str(text))):
            yield f"chosen_on '{text}': write it as FIRST-LAST, for example 200000-200029"
            continue
        ranges.append((int(ends[1]), int(ends[2]), "what its settings were chosen on"))
    for low, high, what in ranges:
        if first <= high and low <= last:
            yield f"episodes {first}-{last} were {what}: play fresh ones, from {FRESH}"
            return
    if first < FRESH:
        yield f"episodes {first}-{last}: fresh ones have seeds from {FRESH}"


def _untagged(folder: Path, table: Mapping[str, Any]) -> Iterator[str]:
    """The tag must be there, and be older than the training. Without a git checkout nobody can tell."""
    if not _git(folder, "rev-parse", "--is-inside-work-tree"):
        return
    tag, commit = table["tag"], table["commits"][0]
    if not _git(folder, "rev-parse", "-q", "--verify", f"refs/tags/{tag}^{{commit}}"):
        yield f"there is no git tag '{tag}'"
    elif not _git(folder, "rev-list", "-1", f"{commit}^{{commit}}"):
        yield f"there is no commit {commit}"
    elif _git(folder, "rev-list", "-1", f"{tag}^{{commit}}", f"^{commit}"):
        yield f"the tag '{tag}' is not part of commit {commit}: it was set after the training"


def _git(folder: Path, *words: str) -> str:
    """What git says, "" where it refuses or is not there."""
    here = folder if folder.is_dir() else Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def show(result: Result, console: Console) -> None:
    for name, found in result["tables"].items():
        for line in found or [f"{name}: whole"]:
            console.print(line, highlight=False, soft_wrap=True)
    if not result["tables"]:
        console.print("there are no final tables yet", highlight=False)


def check(result: Result) -> None:
    """PrismError where a table has a problem."""
    if bad := [line for found in result["tables"].values() for line in found]:
        raise PrismError(f"final: {len(bad)} problems, the first: {bad[0]}")
