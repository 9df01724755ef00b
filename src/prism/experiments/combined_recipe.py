"""`prism train A B C`: one policy from several tasks and datasets (prism.data.mixture).

Budget: the sum of the tasks' own. Policy and controller: of the first. The options of a call hold for every part; of
--sensor, --sensors and --without each part takes what names a sensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from prism.data import EpisodeSource, open_dataset
from prism.data.formats.table import parse_map
from prism.data.mixture import Member, Mixture, check_weight
from prism.data.pictures import DEFAULT_SIDE
from prism.errors import PrismError
from prism.experiments import recipes
from prism.experiments.demonstrations import Demonstrations, Part, locate, open_demonstrations
from prism.experiments.recipes import Experiment
from prism.sims.task_table import TASKS
from prism.sims.view import sentence_of

_SHARED = ("map", "fps", "tolerance", "skip_damaged")  # what a part has of the whole
_NAMED = 2  # parts that the name of a run lists


def mixed(names: Sequence[str]) -> Experiment:
    """The experiment of several recipes, tasks or datasets; PrismError where their actions are of two kinds."""
    found = [recipes.recipe(name) for name in names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PrismError(f"'{twice}' is given twice: give it once, with a larger weight (--weights)")
    first = next((one for one in found if one.task), found[0])
    if distilled := next((one.name for one in found if one.policy.method != first.policy.method), None):
        raise PrismError(f"'{distilled}' is of another method than '{first.name}': train one policy for each")
    kinds = {one.task: (TASKS[one.task].actions, TASKS[one.task].grippers) for one in found if one.task}
    for task, kind in kinds.items():
        if kind != kinds[str(first.task)]:
            raise PrismError(
                f"the actions of {first.task} are {_words(*kinds[str(first.task)])}, those of {task} {_words(*kind)}: "
                "one policy cannot learn both: train one for each"
            )
    name = "+".join(one.name for one in found[:_NAMED])
    name += f"+{len(found) - _NAMED}-more" if len(found) > _NAMED else ""
    minutes = sum(one.train.minutes for one in found)
    parts = tuple(Part(one.task, one.demonstrations) for one in found)
    return replace(
        first,
        name=name,
        task=None,
        demonstrations=Demonstrations("mixture", parts=parts),
        train=replace(first.train, minutes=minutes),
    )


def _words(actions: str, grippers: tuple[int, ...]) -> str:
    return f"{actions}, grippers at {list(grippers)}"


def with_parts(
    config: Demonstrations,
    weights: Sequence[float] | None,
    texts: Sequence[str] | None,
    episodes: int | str | None,
    given: Mapping[str, object],
) -> Demonstrations:
    """The same mixture with a weight, a sentence and the episodes of each part."""
    count = len(config.parts)
    if "data" in given:
        raise PrismError(f"--data {given['data']} is for one recipe: with several, give paths instead of names")
    for option, values in (("--weights", weights), ("--text", texts)):
        if values is not None and len(values) != count:
            if not count:
                raise PrismError(f"{option} is for several datasets, one value for each: prism train A B {option} ...")
            raise PrismError(f"{option} has {len(values)} values, and there are {count} datasets: give one for each")
    parts = []
    for number, part in enumerate(config.parts):
        if weights is not None:
            check_weight(weights[number], f"--weights: {_name(part)}")
            part = replace(part, weight=float(weights[number]))
        if texts is not None:
            part = replace(part, text=texts[number])
        if episodes is not None:
            how_many = part.demonstrations.kind == "expert" and str(episodes).isdigit()
            change = {"episodes": int(episodes)} if how_many else {"only": str(episodes)}
            part = replace(part, demonstrations=replace(part.demonstrations, **change))
        parts.append(part)
    return replace(config, parts=tuple(parts))


def _name(part: Part) -> str:
    return part.task or str(part.demonstrations.path)


def open_mixture(
    config: Demonstrations, console: Console, small: bool | None, rgb_side: int = DEFAULT_SIDE
) -> tuple[Demonstrations, Mixture]:
    """The datasets as one, and the config with their paths filled in."""
    parts, members, known = [], [], set[str]()
    for part in config.parts:
        own = part.demonstrations
        asked = replace(own, **{key: getattr(config, key) for key in _SHARED if getattr(config, key)})
        asked = replace(asked, path=str(locate(asked, part.task, console)))
        names = _names(asked) if (config.sensors or config.without or config.keep) else []
        known |= set(names)
        asked = replace(
            asked,
            sensors=(*own.sensors, *(text for text in config.sensors if _fits(text, names))),
            without=(*own.without, *(name for name in config.without if name in names)),
            keep=tuple(name for name in config.keep if name in names) or own.keep,
        )
        if names and config.keep and not asked.keep:
            raise PrismError(f"--sensors {' '.join(config.keep)}: no sensor is left of {_name(part)}")
        located, source, copies = open_demonstrations(asked, part.task, console, small, rgb_side)
        parts.append(replace(part, demonstrations=replace(own, path=located.path)))
        members.append(Member(source, part.weight, part.text or _sentence(part.task, source), copies))
        size = f"{len(source.lengths)} episodes, {int(source.lengths.sum())} steps, weight {part.weight:g}"
        console.print(f"{_name(part)}: {size}", highlight=False, markup=False, soft_wrap=True)
    given = [("--sensors", name) for name in config.keep] + [("--without", name) for name in config.without]
    if unknown := next((f"{option} {name}" for option, name in given if name not in (*known, "text")), None):
        raise PrismError(f"{unknown}: the datasets have the sensors {', '.join(sorted(known))}")
    for text in config.sensors:
        if not _fits(text, sorted(known)):
            raise PrismError(f"--sensor {text}: the datasets have the sensors {', '.join(sorted(known))}")
    if "text" in config.without or (config.keep and "text" not in config.keep):
        members = [replace(member, text="") for member in members]
    source = Mixture(members)
    for remark in source.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    return replace(config, parts=tuple(parts)), source


def _names(config: Demonstrations) -> list[str]:
    """The sensors of a part's dataset."""
    how = {"tolerance": config.tolerance, "skip_damaged": None}
    source = open_dataset(Path(str(config.path)), config.fps, parse_map(config.map), **how)  # type: ignore[arg-type]
    return [spec.name for spec in source.sensors]


def _fits(text: str, names: Sequence[str]) -> bool:
    """Whether SENSOR.KEY=VALUE is of one of these sensors, or of the actions."""
    pattern = text.partition("=")[0].strip().rpartition(".")[0]
    return pattern in ("", "action") or any(fnmatchcase(name, pattern) for name in names)


def _sentence(task: str | None, source: EpisodeSource) -> str:
    """The words of a dataset's task."""
    said = task or str(getattr(source, "task", ""))
    return sentence_of(said) if said in TASKS else said
