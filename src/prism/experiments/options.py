"""Options of `prism train` and prism.train, which change a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console

from prism.data import open_dataset
from prism.data.formats.table import parse_map
from prism.data.history import feels_events
from prism.encoders.frozen import architecture_of
from prism.experiments.demonstrations import locate
from prism.experiments.recipes import Experiment, from_cameras, with_budget, with_method, with_preset, with_teacher
from prism.experiments.robust import ROBUST
from prism.io.jsonconfig import with_settings
from prism.sensors import SensorSpec


class TrainOptions(TypedDict, total=False):
    """Options that change a recipe. None: the recipe's value. `prism train --help` explains each."""

    data: Path | str | None
    map: Sequence[str]
    sensor: Sequence[str]
    fps: float | None
    tolerance: float | None
    fraction: float | None
    demonstrations: int | None
    minutes: float | None
    steps: int | None
    clock: str | None
    method: str | None
    teacher: Path | str | None
    init: Path | str | None
    action_kind: str | None
    preset: str | None
    episodes: int | str | None
    without: Sequence[str]
    sensors: Sequence[str]
    weights: Sequence[float] | None
    text: Sequence[str]
    skip_damaged: bool
    robust: bool
    seed: int | None
    set: Sequence[str]


def fitted_to_data(experiment: Experiment, say: Callable[[str], None], **options: Unpack[TrainOptions]) -> Experiment:
    """Own data with cameras are learned as `from_cameras` does; `say` gets a description.

    Not with --preset or --init, which choose the network.
    """
    own = experiment.demonstrations
    if experiment.tasks or own.kind not in ("path", "mixture") or options.get("preset") or options.get("init"):
        return experiment
    plain = options.copy()
    plain["set"] = ()
    asked = customized(experiment, **plain).demonstrations
    seen: dict[str, SensorSpec] = {}
    for part in [part.demonstrations for part in asked.parts] or [asked]:
        how: dict[str, Any] = {"fps": asked.fps, "entries": parse_map(asked.map), "tolerance": asked.tolerance}
        source = open_dataset(locate(part, None, Console(quiet=True)), skip_damaged=None, **how)
        seen |= {s.name: s for s in source.sensors if s.name not in asked.without}
    seen = {name: spec for name, spec in seen.items() if not asked.keep or name in asked.keep}
    cameras = ", ".join(name for name, spec in seen.items() if spec.kind == "rgb")
    if not cameras:
        return experiment
    fitted = from_cameras(experiment)
    say(f"cameras {cameras}: seen with {fitted.policy.encoder.rgb}, pretrained and frozen; docs/howto/cameras.md")
    state = ", ".join(name for name, spec in seen.items() if spec.kind == "vector" and not feels_events(spec))
    chance = fitted.policy.encoder.state_dropout
    if state:
        say(
            f"{state}: left out of {chance:.0%} of the windows, so that the cameras are used; "
            "otherwise: --set policy.encoder.state_dropout=0"
        )
    return fitted


def customized(experiment: Experiment, **options: Unpack[TrainOptions]) -> Experiment:
    """The same experiment with what a call of `prism train` or prism.train changes."""
    given: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None and value != () and value is not False
    }
    if options.get("weights") is not None:
        given["weights"] = options["weights"]  # also an empty one: it is refused
    method, preset, teacher = (given.get(name) for name in ("method", "preset", "teacher"))
    experiment = with_budget(experiment, given.get("minutes"), given.get("steps"), given.get("seed"))
    if "clock" in given:
        experiment = replace(experiment, train=replace(experiment.train, clock=given["clock"]))
    if preset is not None:
        experiment = with_preset(experiment, preset)
    if method is not None and method != experiment.method:
        experiment = with_method(experiment, method, preset)
    if teacher is not None and str(teacher) != experiment.teacher:
        experiment = with_teacher(experiment, Path(teacher))
    if "init" in given and str(given["init"]) != experiment.init:
        from prism.experiments.start_from import with_init

        experiment = with_init(experiment, Path(given["init"]))
    source = experiment.demonstrations
    if "action_kind" in given:
        others = (text for text in given.get("sensor", source.sensors) if not text.startswith("action.kind="))
        given["sensor"] = (*others, f"action.kind={given['action_kind']}")
    if source.parts or "weights" in given or "text" in given:
        from prism.experiments.combined_recipe import with_parts

        source = with_parts(source, given.get("weights"), given.get("text"), given.pop("episodes", None), given)
    named = {"map": "map", "sensor": "sensors", "without": "without", "sensors": "keep"}
    changes: dict[str, Any] = {field: tuple(given[option]) for option, field in named.items() if option in given}
    changes |= {name: given[name] for name in ("fps", "tolerance", "skip_damaged") if name in given}
    if "data" in given:
        changes |= {"kind": source.kind if source.kind == "human" else "path", "path": str(given["data"])}
    if "episodes" in given:  # of a dataset: which; of an expert: how many
        episodes, kind = str(given["episodes"]), changes.get("kind", source.kind)
        changes |= {"episodes": int(episodes)} if kind == "expert" and episodes.isdigit() else {"only": episodes}
    if "fraction" in given or "demonstrations" in given:
        changes |= {"fraction": given.get("fraction"), "count": given.get("demonstrations")}
    source = replace(source, **changes)
    settings = (*(ROBUST if "robust" in given else ()), *given.get("set", ()))
    return _with_architecture(with_settings(replace(experiment, demonstrations=source), settings))


def _with_architecture(experiment: Experiment) -> Experiment:
    """A backbone of transformers is described by a file of its folder: it becomes part of the run, which does not need
    the folder later."""
    encoder = experiment.policy.encoder
    if encoder.rgb != "transformers" or encoder.frozen.architecture:
        return experiment
    frozen = replace(encoder.frozen, architecture=architecture_of(encoder.rgb_weights))
    return replace(experiment, policy=replace(experiment.policy, encoder=replace(encoder, frozen=frozen)))
