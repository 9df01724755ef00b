"""dataset.json of the project's own format: what it holds, and every way in which it can be wrong."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism.data.episodes import IntArray, checked_ends
from prism.errors import PrismError, reason
from prism.sensors import ActionSpec, SensorSpec

FORMAT_VERSION = 1
MANIFEST = "dataset.json"
ACTIONS = "actions"
PRESENT = ".present"
CHECKSUM = ".crc"
_REQUIRED = ("format_version", "task", "fps", "sensors", "action_dim", "episode_ends")


@dataclass(frozen=True)
class Manifest:
    task: str
    fps: float
    sensors: tuple[SensorSpec, ...]
    action_dim: int
    episode_ends: IntArray  # (E,) cumulative
    provenance: dict[str, Any]  # free-form: who recorded it, with what
    checksums: bool = False  # every stream has a file of checksums
    sometimes_absent: tuple[str, ...] = ()  # sensors that have a file of presence
    action: ActionSpec = field(default_factory=ActionSpec)

    def to_json(self) -> str:
        data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "task": self.task,
            "fps": self.fps,
            "sensors": [sensor.to_json() for sensor in self.sensors],
            "action_dim": self.action_dim,
            "episode_ends": self.episode_ends.tolist(),
            "provenance": self.provenance,
        }
        if action := self.action.to_json():
            data["action"] = action
        if self.checksums:
            data |= {"checksums": "crc32", "sometimes_absent": list(self.sometimes_absent)}
            data["own_checksum"] = _checksum(data)
        return json.dumps(data, indent=1)


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _checksum(data: dict[str, Any]) -> int:
    """Of everything in dataset.json but itself."""
    return zlib.crc32(json.dumps({key: data[key] for key in sorted(data) if key != "own_checksum"}).encode())


def read_manifest(file: Path) -> Manifest:
    """dataset.json with every field checked."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PrismError(f"{file}: not found; a prism dataset is a folder that holds it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PrismError(
            f"{file}: not readable as JSON ({reason(error)}); collect or convert the dataset again"
        ) from None
    if not isinstance(data, dict):
        raise PrismError(f"{file}: holds a {type(data).__name__}, not a JSON object; collect or convert it again")
    version = data.get("format_version")
    if version is not None and version != FORMAT_VERSION:
        raise PrismError(
            f"{file}: 'format_version' is {version!r}, this prism reads {FORMAT_VERSION}; use the prism that wrote it"
        )
    if missing := [key for key in _REQUIRED if key not in data]:
        raise PrismError(f"{file}: key '{missing[0]}' is missing; collect or convert the dataset again")
    fps, action_dim, task = data["fps"], data["action_dim"], data["task"]
    if not isinstance(task, str):
        raise PrismError(f"{file}: 'task' must be text, not {task!r}; mend the file")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise PrismError(f"{file}: 'fps' must be a positive number of steps a second, not {fps!r}; mend the file")
    if isinstance(action_dim, bool) or not isinstance(action_dim, int) or action_dim <= 0:
        raise PrismError(f"{file}: 'action_dim' must be a positive integer, not {action_dim!r}; mend the file")
    provenance = data.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise PrismError(f"{file}: 'provenance' must be a JSON object, not {provenance!r}; mend the file")
    ends = checked_ends(data["episode_ends"], f"{file}: 'episode_ends'")
    sensors = _read_sensors(file, data["sensors"])
    checked, absent = data.get("checksums"), data.get("sometimes_absent", [])
    names = [sensor.name for sensor in sensors]
    if checked not in (None, "crc32") or not isinstance(absent, list) or not all(name in names for name in absent):
        raise PrismError(f"{file}: 'checksums' or 'sometimes_absent' is not what prism writes; mend the file")
    if "own_checksum" in data and data["own_checksum"] != _checksum(data):
        raise PrismError(
            f"{file}: does not match its 'own_checksum': damaged, or edited; if you edited it, remove that key"
        )
    action = ActionSpec.from_json(data.get("action", {}), str(file))
    action.check(action_dim, f"{file}: 'action'")
    return Manifest(task, float(fps), sensors, action_dim, ends, provenance, checked is not None, tuple(absent), action)


def _read_sensors(file: Path, data: object) -> tuple[SensorSpec, ...]:
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise PrismError(f"{file}: 'sensors' must be a list of sensor specs; collect or convert the dataset again")
    try:
        sensors = tuple(SensorSpec.from_json(entry) for entry in data)
        check_sensors(sensors)
    except PrismError as error:
        raise PrismError(f"{file}: 'sensors': {error}") from None
    except (TypeError, ValueError) as error:
        raise PrismError(f"{file}: 'sensors': {reason(error)}; collect or convert the dataset again") from None
    return sensors


def check_sensors(sensors: Sequence[SensorSpec]) -> None:
    """At least one sensor, each with a name of its own that can be a file name."""
    if not sensors:
        raise PrismError("a dataset needs at least one sensor")
    names = [sensor.name for sensor in sensors]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
            raise PrismError(f"sensor name {name!r}: use letters, digits, '_', '-' and '.' only")
        if name == ACTIONS or name.endswith((PRESENT, CHECKSUM)):
            raise PrismError(f"sensor name '{name}' is reserved; choose another")
        if names.count(name) > 1:
            raise PrismError(f"two sensors are named '{name}'; rename one")
