"""What a user says of the sensors of a dataset: preprocessing, rate, what a healthy reading looks like.

    agentview_image.crop=76,76  rgb_*.random_shift=4  depth_static.clip=0.2,3  force.limits=-60,60

NAME.KEY=VALUE; the keys are those of SensorSpec, NAME may be a pattern. What a sensor is called, and of which kind it
is, says --map (prism.data.formats.mapping).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prism.data.episodes import Episode, EpisodeSource, SourceView
from prism.errors import PrismError
from prism.io.jsonconfig import with_settings
from prism.sensors import SensorSpec

_FIXED = ("name", "kind", "shape", "sample_rate")  # what the data are, not what is done with them
KEYS = tuple(field.name for field in dataclasses.fields(SensorSpec) if field.name not in _FIXED)


@dataclass(frozen=True)
class Respecified(SourceView):
    """A source whose sensors have other specs; the data are the same."""

    sensors: tuple[SensorSpec, ...]

    def read(
        self, episode: int, start: int = 0, stop: int | None = None, streams: Collection[str] | None = None
    ) -> Episode:
        return self.source.read(episode, start, stop, streams)


def with_sensor_settings(source: EpisodeSource, texts: Sequence[str]) -> EpisodeSource:
    """The source with its sensors as the texts say; PrismError names the one that is wrong."""
    specs = {spec.name: spec for spec in source.sensors}
    for text in texts:
        target, equals, value = text.partition("=")
        pattern, _, key = target.strip().rpartition(".")
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
    return Respecified(source, tuple(specs.values())) if texts else source
