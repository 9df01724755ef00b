"""Where the demonstrations of a run come from, and how they become what the task's environment shows.

| kind    | from                                                                       |
| ------- | -------------------------------------------------------------------------- |
| expert  | data/TASK, recorded from the task's expert first where it is not there yet |
| shipped | Push-T demonstrations of our expert, inside the package                    |
| human   | Push-T demonstrations of people: prism data collect pusht-human            |
| path    | any dataset that prism reads: --data PATH                                  |
| mixture | several of these, `parts`: prism train A B                                 |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from prism.data import EpisodeSource, open_dataset, with_sensors
from prism.data.episodes import IntArray
from prism.data.formats.store import StoreSource, is_store
from prism.data.formats.table import parse_map
from prism.data.locate import find_dataset
from prism.data.pictures import DEFAULT_SIDE, cached_pictures, with_default_sizes
from prism.data.views import LaterActions, draw, with_kind
from prism.data.windows import split_episodes
from prism.errors import PrismError, check_choices, check_numbers
from prism.normalize import compute_statistics
from prism.sensors import action_spec_of
from prism.sims.task_table import TASKS, make_env

Kind = Literal["expert", "shipped", "human", "path", "mixture"]
_ENOUGH = 10  # episodes that show where a task begins
COLLECTED = Path("data")  # where `prism data collect TASK` records by default


@dataclass(frozen=True)
class Part:
    """One of several datasets that a policy learns from (prism.experiments.combined_recipe)."""

    task: str | None  # where the policy is rolled out; None: a dataset alone
    demonstrations: Demonstrations
    weight: float = 1.0  # how often a step of it is drawn, relative to the others
    text: str = ""  # instruction of its episodes, if it has no text sensor; "": the words of the task or dataset


@dataclass(frozen=True)
class Demonstrations:
    kind: Kind
    episodes: int = 20  # expert: how many to record
    noise: float = 0.0  # expert: disturbance of what is executed, not of what is recorded; of half the action range
    beyond: int = 0  # expert: steps recorded after success, so that a policy learns to come to rest
    mirror: bool = False  # Push-T: each demonstration and its mirror image (prism_sims/pusht_features.py)
    path: str | None = None  # the dataset; None: where the kind says
    map: tuple[str, ...] = ()  # which key of it becomes which sensor (data/formats/table.py); (): a guess, explained
    fps: float | None = None  # steps a second, for formats that do not store it
    # preprocessing of the dataset's sensors, SENSOR.KEY=VALUE (data/views.py)
    sensors: tuple[str, ...] = ()
    # train on less, drawn by the seed (data/views.py): a share of the steps, or a number of demonstrations
    fraction: float | None = None
    count: int | None = None
    # seconds that a reading may be from its step, for recordings with time stamps (data/align.py); None: one step
    tolerance: float | None = None
    # of the dataset: only these episodes ('0-46,48-'), without these sensors, without episodes that cannot be read
    only: str = ""
    without: tuple[str, ...] = ()
    skip_damaged: bool = False
    next_actions: bool = False  # plans begin with the action of the next step: the paper's windows, as it writes them
    keep: tuple[str, ...] = ()  # only these sensors; (): all
    parts: tuple[Part, ...] = ()  # of a mixture

    def __post_init__(self) -> None:
        check_choices(self, "demonstrations")
        ranges = {"[1, inf)": "episodes count", "[0, inf)": "noise beyond", "(0, inf)": "fps tolerance"}
        check_numbers(self, "demonstrations", {**ranges, "(0, 1]": "fraction"})
        if self.count is not None and self.fraction is not None:
            raise PrismError("demonstrations.count and demonstrations.fraction both say how much: give one of them")
        if self.kind == "path" and self.path is None:
            raise PrismError("demonstrations.kind is 'path', but no path is given (--data PATH)")
        if (self.kind == "mixture") != bool(self.parts):
            raise PrismError("demonstrations.kind is 'mixture' where there are parts, and only there")

    def elsewhere(self) -> Demonstrations:
        """Portable form: paths without this machine's folders."""
        parts = tuple(replace(part, demonstrations=part.demonstrations.elsewhere()) for part in self.parts)
        return replace(self, parts=parts, path=None if self.path is None else Path(self.path).name)


@dataclass(frozen=True)
class Split:
    """Which episodes a training learns from, the steps of each, and which are held out for validation."""

    training: IntArray
    steps: IntArray
    held_out: IntArray


def split_demonstrations(
    config: Demonstrations, source: EpisodeSource, copies: int, val_fraction: float, seed: int
) -> Split:
    """Of a mixture, each dataset by itself. A mirrored episode is no independent one: held out is held out with all its
    copies."""
    parts = [(len(member.source.lengths), member.copies) for member in getattr(source, "members", ())]
    training, steps, held_out, first = [], [], [], 0
    for count, times in parts or [(len(source.lengths), copies)]:
        originals = count // times
        held_in, held = split_episodes(originals, val_fraction, seed)
        if (short := (config.count or 0) - len(held_in)) > 0:  # to train on N is to train on N
            held_in, held = np.sort(np.concatenate([held_in, held[:short]])), held[short:]
        taken, length = draw(source.lengths[first + held_in], config.fraction, config.count, seed)
        training += [first + held_in[taken] + copy * originals for copy in range(times)]
        steps += [length] * times
        held_out.append(first + held)
        first += count
    return Split(np.concatenate(training), np.concatenate(steps), np.concatenate(held_out))


def open_demonstrations(
    config: Demonstrations,
    task: str | None,
    console: Console,
    small: bool | None = False,
    rgb_side: int = DEFAULT_SIDE,
) -> tuple[Demonstrations, EpisodeSource, int]:
    """The dataset as the task's sensors see it, how many copies of each episode it holds, and its config with the
    path filled in. Copy c of episode e is number c * originals + e. Without a task: all the sensors it has.
    `small`: for training, with its pictures at the size that the policy sees, made once (data/pictures.py); None: as
    they are stored, for a copy. `rgb_side`: the longer side that large colour pictures of own data get."""
    if config.parts:
        from prism.experiments.combined_recipe import open_mixture

        return *open_mixture(config, console, small, rgb_side), 1
    path = locate(config, task, console)
    only = (config.only, _left_out(config, path), config.skip_damaged)
    source = open_dataset(path, config.fps, parse_map(config.map), config.sensors, config.tolerance, *only)
    copies = 1
    if task is None and small is not None:
        source, sizes = with_default_sizes(source, rgb_side)
        for sentence in sizes:
            console.print(f"{path}: {sentence}", highlight=False, markup=False, soft_wrap=True)
    as_shown = None if task is None else TASKS[task].as_shown
    if as_shown is not None and "state" in {sensor.name for sensor in source.sensors}:
        if config.sensors:
            raise PrismError(
                f"--sensor {config.sensors[0]}: the sensors of {task} are computed from the state: leave it out"
            )
        contradicts = TASKS[str(task)].contradictions
        said = [] if contradicts is None or config.path is None else contradicts(source)
        originals = len(source.lengths)
        source = as_shown(source, str(task), config.mirror)
        copies = len(source.lengths) // originals
        if config.path is not None:
            _compare(source, str(task), console, said)
    elif config.mirror:
        raise PrismError(f"{path}: only Push-T demonstrations with a 'state' can be mirrored; set mirror to false")
    elif task is not None and config.kind == "path":
        source = _as_task_shows(source, task, console)
        _compare(source, task, console, _another_task(str(getattr(source, "task", "")), task))
    recorded_in = task or str(getattr(source, "task", ""))
    if recorded_in in TASKS and (task is not None or action_spec_of(source).kind is None):
        source = with_kind(source, TASKS[recorded_in].actions, f"{source.path}, data of {recorded_in},")
    for note in source.notes:
        console.print(f"{path}: {note}", highlight=False, markup=False, soft_wrap=True)
    source = LaterActions(source) if config.next_actions else source
    if small:
        source = cached_pictures(source, lambda words: console.print(words, highlight=False, soft_wrap=True))
    return replace(config, path=str(path)), source, copies


def _left_out(config: Demonstrations, path: Path) -> tuple[str, ...]:
    """Sensors that --without names, and those that --sensors does not."""
    if not config.keep:
        return config.without
    source = open_dataset(path, config.fps, parse_map(config.map), tolerance=config.tolerance, skip_damaged=None)
    names = [sensor.name for sensor in source.sensors]
    if unknown := [name for name in config.keep if name not in names]:
        raise PrismError(f"--sensors {unknown[0]}: {path} has the sensors {', '.join(names)}")
    return tuple(name for name in names if name not in config.keep or name in config.without)


def _as_task_shows(source: EpisodeSource, task: str, console: Console) -> EpisodeSource:
    """Keep only the sensors of the task's environment, so that a policy does not rely on others."""
    env = make_env(task)
    shown = {sensor.name: sensor.shape for sensor in env.sensors}
    action_dim = env.action_dim
    env.close()
    if source.action_dim != action_dim:
        raise PrismError(f"{source.path}: actions have {source.action_dim} dimensions, those of {task} {action_dim}")
    stored = {sensor.name: sensor.shape for sensor in source.sensors}
    common = [name for name in stored if name in shown]
    for name in common:
        if stored[name] != shown[name]:
            raise PrismError(f"{source.path}: '{name}' has shape {stored[name]}, in {task} it has {shown[name]}")
    if not common:
        raise PrismError(
            f"{source.path}: has the sensors {', '.join(stored)}, {task} has {', '.join(shown)}: none in common; "
            "use data of this task, or train on the dataset alone: prism train PATH"
        )
    if left_out := [name for name in stored if name not in shown]:
        console.print(f"{source.path}: {', '.join(left_out)} left out, {task} has no such sensor", highlight=False)
    return with_sensors(source, common)


def _another_task(stored: str, task: str) -> list[str]:
    """Only of a name that prism knows. The variants of a task are one; a whole simulator (calvin) has all its tasks."""
    of, trained = (re.sub("-(pixels|rgbd|state)$", "", name) for name in (stored, task))
    if of == trained or "-" not in of or "-" not in trained or stored not in TASKS:
        return []
    return [f"the data were recorded in {stored}, not in {task}"]


def _compare(source: EpisodeSource, task: str, console: Console, more: Sequence[str] = ()) -> None:
    """Warn where the data contradict the task: its rate, the range of its actions, what its episodes begin with."""
    if console.quiet:  # it would not be read
        return
    env = make_env(task)
    starts = [env.reset(seed) for seed in range(3)]
    env.close()
    said = list(more)
    if not 0.9 < source.fps / env.fps < 1.1:
        said.append(f"the data have {source.fps:g} steps a second, {task} has {env.fps:g}")
    stats = compute_statistics(source)
    room = 0.05 * (env.action_high - env.action_low)
    low, high = stats.actions.min < env.action_low - room, stats.actions.max > env.action_high + room
    if (dims := np.flatnonzero(low | high)).size:
        said.append(
            f"actions {dims.tolist()} leave the range of {task} ({stats.actions.min.min():.3g} to "
            f"{stats.actions.max.max():.3g}): another unit, or another action space?"
        )
    for name, found in stats.vectors.items():
        readings = np.stack([np.asarray(start[name], np.float64) for start in starts if name in start] or [found.mean])
        reach = 0.5 * (found.max - found.min) + 1e-3
        outside = np.atleast_1d(((readings < found.min - reach) | (readings > found.max + reach)).all(0))
        if outside.mean() > 0.1 and len(source.lengths) >= _ENOUGH:
            dims = np.flatnonzero(outside)[:8]
            said.append(
                f"'{name}' of {task} begins far outside the data in {int(outside.sum())} of {len(outside)} "
                f"dimensions ({', '.join(map(str, dims))}): another frame, unit or scene?"
            )
    for sentence in said:
        console.print(f"warning: {source.path}: {sentence}", style="yellow", highlight=False, soft_wrap=True)


def locate(config: Demonstrations, task: str | None, console: Console) -> Path:
    """Path of the dataset, recorded first if necessary."""
    if config.kind == "human":
        return find_dataset("pusht-human", None if config.path is None else Path(config.path))
    if config.kind == "shipped" and config.path is None:
        return find_dataset("pusht-expert")
    if config.path is not None:
        return Path(config.path)
    if task is None:
        raise PrismError("there is no task to record demonstrations of: give a dataset")
    return record_if_missing(config, task, console)


def record_if_missing(config: Demonstrations, task: str, console: Console, workers: int | None = None) -> Path:
    """The folder with at least config.episodes demonstrations of the task's expert; what is missing is recorded now."""
    from prism.sims.collect import collect

    path = COLLECTED / task if config.path is None else Path(config.path)
    there = _recorded(path, task, config) if path.exists() else 0
    if there < config.episodes:
        what = f"{config.episodes - there} more to the {there}" if there else f"{config.episodes}"
        console.print(f"recording {what} demonstrations of {task} in {path}", highlight=False, soft_wrap=True)
        first = int(StoreSource(path).provenance["first_seed"]) if there else TASKS[task].first_seed
        options: dict[str, Any] = {"noise": config.noise, "beyond": config.beyond, "seed": first, "go_on": there > 0}
        collect(task, config.episodes, path, console=console, workers=workers, **options)
    else:
        more = f", {config.episodes} were asked for (fewer: --demonstrations N)" if there > config.episodes else ""
        console.print(f"using the {there} demonstrations in {path}{more}", highlight=False, soft_wrap=True)
    return path


def _recorded(path: Path, task: str, config: Demonstrations) -> int:
    """How many demonstrations are in `path`; PrismError unless they are what `prism data collect` would record now."""
    from prism.sims.collect import other_simulator

    made = StoreSource(path).provenance if is_store(path) else {}
    if not {"first_seed", "attempts", "successes", "noise"} <= made.keys():
        alone = f"prism train {task} --data {path}"
        raise PrismError(f"{path} is not a recording of `prism data collect {task}`: move it away, or use it: {alone}")
    use = f"move it away, or use it as it is (for one recipe: --set demonstrations.path={path})"
    if difference := other_simulator(task, made):
        raise PrismError(f"{path}: {difference}; record it again (prism data collect {task} --overwrite), {use}")
    beyond = made.get("beyond", 0)
    if (made["noise"], beyond) != (config.noise, config.beyond) or made.get("failures", False):
        how = f"with --noise {made['noise']:g} --beyond {beyond}" + " --failures" * made.get("failures", False)
        asked = f"--noise {config.noise:g} --beyond {config.beyond}"
        again = f"prism data collect {task} --episodes {config.episodes} {asked} --overwrite"
        raise PrismError(f"{path} was recorded {how}, {asked} was asked for: record it again ({again}), {use}")
    return len(StoreSource(path).lengths)
