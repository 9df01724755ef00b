"""What a user says of the sensors of a dataset: preprocessing, rate, what a healthy reading looks like.

    agentview_image.crop=76,76  rgb_*.random_shift=4  depth_static.clip=0.2,3  force.limits=-60,60

action.quaternions=3:7 says which dimensions of the actions are a unit quaternion (nothing behind =: none are).
NAME.KEY=VALUE; the keys are those of SensorSpec, NAME may be a pattern. What a sensor is called, and of which kind it
is, says --map (prism.data.formats.mapping).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prism.data.episodes import Episode, EpisodeSource, SourceView
from prism.errors import PrismError
from prism.io.jsonconfig import with_settings
from prism.sensors import ActionSpec, SensorSpec, action_spec_of

_FIXED = ("name", "kind", "shape", "sample_rate", "names")  # what the data are, not what is done with them
KEYS = tuple(field.name for field in dataclasses.fields(SensorSpec) if field.name not in _FIXED)


@dataclass(frozen=True)
class Respecified(SourceView):
    """A source whose sensors have other specs; the data are the same."""

    sensors: tuple[SensorSpec, ...]
    stated: ActionSpec

    @property
    def action_spec(self) -> ActionSpec:
        return self.stated

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        return self.source.read(episode, start, stop, streams)


def with_sensor_settings(source: EpisodeSource, texts: Sequence[str]) -> EpisodeSource:
    """The source with its sensors as the texts say; PrismError names the one that is wrong."""
    specs = {spec.name: spec for spec in source.sensors}
    action = action_spec_of(source)
    for text in texts:
        target, equals, value = text.partition("=")
        pattern, _, key = target.strip().rpartition(".")
        if target.strip() == "action.quaternions" and equals:
            action = dataclasses.replace(action, quaternions=_quaternions(value, text))
            action.check(source.action_dim, f"--sensor {text}: {source.path}")
            continue
        if not equals or not pattern or key not in KEYS:
            raise PrismError(f"--sensor {text}: write SENSOR.KEY=VALUE, where KEY is one of {', '.join(KEYS)}")
        chosen = [name for name in specs if fnmatchcase(name, pattern)]
        if not chosen:
            raise PrismError(f"--sensor {text}: {source.path} has no sensor '{pattern}'; it has {', '.join(specs)}")
        value = value.strip()
        if "," in value and not value.startswith("["):
            value = f"[{value}]"
        for name in chosen:
            try:
                specs[name] = with_settings(specs[name], (f"{key}={value}",))
            except PrismError as error:
                raise PrismError(f"--sensor {text}: {str(error).removeprefix('--set.')}") from None
    return Respecified(source, tuple(specs.values()), action) if texts else source


def _quaternions(value: str, text: str) -> tuple[int, ...]:
    """'3:7,10:14' -> (3, 10)"""
    parts = [re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", part.strip()) for part in value.split(",") if part.strip()]
    if not all(part is not None and int(part[2] or int(part[1]) + 4) == int(part[1]) + 4 for part in parts):
        raise PrismError(f"--sensor {text}: write FIRST:END of four dimensions, for example action.quaternions=3:7")
    return tuple(sorted(int(part[1]) for part in parts if part is not None))
