"""ROS 2 bags (sqlite or MCAP, read with `rosbags`): one bag an episode, every topic brought to the camera's clock.

Keys are topics (`/joint_states.position` for a part of a message). The clock is the first camera's; the actions
are the topic mapped to `action`, and an episode is the stretch in which they are known. Finding the messages takes
a pass over each bag: convert bags once, and train on the result.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from prism.data.align import AlignConfig, Timed, Times, align, check_times, named
from prism.data.episodes import Array, BoolArray, IntArray
from prism.data.formats import rosmsg
from prism.data.formats.recent import Recent
from prism.data.formats.table import (
    ACTION,
    IGNORED,
    Absent,
    Column,
    Columns,
    Entry,
    Raw,
    Stream,
    Table,
    TableSource,
    make_table,
)
from prism.errors import PrismError, need, reason, unreadable
from prism.sensors import SensorSpec, encode_text

AGAIN = "copy or record it again"
_ACTION_WORDS = ("action", "command", "cmd", "target")
_KEPT = 4  # bags whose alignment is kept in memory
_TEXT_BYTES = 128  # at least; more where the first bag has longer texts
_FILES = (".mcap", ".db3")
_MOST_TEXT = 1024  # longer ones are no instructions: a robot's description


_Message = tuple[Any, int, bytes]  # connection, when it was received (nanoseconds), content


@dataclass(frozen=True)
class _Key:
    """A column: the topic, its type, and which part of the message it is."""

    topic: str
    msgtype: str
    field: rosmsg.Field | None  # None: an image, audio or text
    stamped: bool  # messages begin with a header whose time is set
    column: Column
    joints: tuple[str, ...] = ()  # of joint states: their names in the first message, in its order


@dataclass(frozen=True)
class _Bag:
    """One bag on its clock: numbers ready, pictures by the time at which they were received."""

    values: dict[str, Array]
    pictures: dict[str, tuple[IntArray, Times]]  # receive time of each step's message, and its stamp
    present: dict[str, BoolArray]
    length: int
    gaps: tuple[str, ...]


def is_rosbag(path: Path) -> bool:
    """A bag (a folder with metadata.yaml, or its file alone), or a folder of bags."""
    if path.is_file():
        return path.suffix in _FILES
    return path.is_dir() and bool(_bags_in(path))


def _bags_in(path: Path) -> list[Path]:
    """Bags, one an episode, in the order of their names; files without metadata.yaml beside them count, too."""
    if path.is_file() or (path / "metadata.yaml").is_file():
        return [path]
    found = [*path.glob("*/metadata.yaml"), *(file for end in _FILES for file in path.glob(f"*{end}"))]
    return sorted(file.parent if file.name == "metadata.yaml" else file for file in found)


class RosbagSource(TableSource):
    """A bag, or a folder of bags. `fps` is the rate of the steps; default: the camera's own."""

    def __init__(
        self, path: Path, fps: float | None = None, entries: Sequence[Entry] = (), tolerance: float | None = None
    ) -> None:
        self.path = path
        self._arguments = (path, fps, tuple(entries), tolerance)
        self._highlevel: Any = need("rosbags.highlevel", "ros", f"{path}: ROS 2 bags")
        self._typesys: Any = need("rosbags.typesys", "ros", f"{path}: ROS 2 bags")
        self._bags = _bags_in(path)
        self._lock = threading.RLock()
        self._known: Recent[int, _Bag] = Recent(_KEPT)
        self._reader: tuple[int, Any] | None = None
        notes: list[str] = []
        self._left_out: dict[str, str] = {}  # by topic, in words
        table = self._table(entries, fps or 10.0, notes)
        if fps is None:
            fps = self._guarded(0, self._clock, self._own_rate)
            if any(stream.spec.kind == "audio" for stream in table.streams):  # how much of it a step has: by the rate
                table = self._table(entries, fps, notes := [])
            notes.append(f"steps are at the rate of '{self._clock}', {fps:g} a second; --fps chooses another")
        self.fps = float(fps)
        self._config = AlignConfig(self.fps, tolerance)
        notes.append(f"every topic is brought to the times of '{self._clock}', within {self._config.reach:.3g} s")
        self._use(table)
        self._rates: dict[str, float] = {}  # of each key's messages in the first bag
        lengths = []
        for number in range(len(self._bags)):
            bag = self._bag(number)
            lengths.append(bag.length)
            notes += [f"{self._bags[number].name}: {sentence}" for sentence in bag.gaps]
        self._use(dataclasses.replace(table, streams=tuple(map(self._at_own_rate, table.streams))))
        self.lengths = np.array(lengths, np.int64)
        self.sometimes_absent = frozenset(sensor.name for sensor in self.sensors)
        self.notes = tuple(notes)

    def _table(self, entries: Sequence[Entry], fps: float, notes: list[str]) -> Table:
        """The keys, the table and the clock, by the first bag."""
        guess = all(entry.name in (ACTION, IGNORED) for entry in entries)
        self._keys: dict[str, _Key] = self._guarded(0, "the topics", self._survey, fps, guess)
        notes += self._left_out.values()
        for source in (source for entry in entries if entry.name != IGNORED for source in entry.sources):
            if source not in self._keys and (why := self._left_out.get(source.partition(".")[0])):
                raise PrismError(f"{self.path}: --map {source}: {why}; map another topic")
        action = self._find_action(entries, notes)
        table = make_table(self.path, [key.column for key in self._keys.values()], action, entries, fps, notes)
        pictures = [s for s in table.streams if s.spec.is_image]
        first = next((s for s in pictures if s.spec.kind == "rgb"), pictures[0] if pictures else table.action)
        self._clock: str = first.columns[0].key
        return table

    def _where(self, episode: int) -> str:
        return f"{self._bags[episode]}: episode {episode}"

    def _guarded(self, number: int, what: str, work: Any, *arguments: Any) -> Any:
        """Whatever a damaged bag makes rosbags, sqlite or a message raise becomes one line."""
        with unreadable(f"{self._where(number)}: {what}: not readable", AGAIN):
            return work(number, *arguments)

    def _open(self, number: int) -> Any:
        if self._reader is None or self._reader[0] != number:
            self._close()
            store = self._typesys.get_typestore(self._typesys.Stores.ROS2_HUMBLE)
            reader = self._highlevel.AnyReader([self._bags[number]], default_typestore=store)
            reader.open()
            self._reader = number, reader
        return self._reader[1]

    def _close(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None and not sys.is_finalizing():  # else it cannot import any more
            self._close()

    def _messages(
        self, reader: Any, topic: str, number: int, start: int | None = None, stop: int | None = None
    ) -> closing[Generator[_Message]]:
        """Closed by a `with`, also where a message cannot be read: a bag that is still being read does not close."""
        found = [c for c in reader.connections if c.topic == topic]
        if not found:
            raise PrismError(f"{self._where(number)}: has no topic '{topic}', the first bag has; leave one of them out")
        return closing(reader.messages(found, start, stop))

    def _survey(self, number: int, fps: float, guess: bool) -> dict[str, _Key]:
        """The columns, by the first message of every topic of the first bag. What is not read is left out, with a note;
        what is damaged as well, but only where a table says what is wanted."""
        reader = self._open(number)
        keys: dict[str, _Key] = {}
        for topic, msgtype in sorted({(c.topic, c.msgtype) for c in reader.connections}):
            all_count = msgtype == rosmsg.TEXT or rosmsg.is_audio(msgtype)  # for their sizes
            with self._messages(reader, topic, number) as messages:
                recorded = list(messages if all_count else islice(messages, 1))
            try:
                keys |= {key.column.key: key for key in self._topic_keys(reader, topic, msgtype, recorded, fps)}
            except Exception as error:
                if guess and not isinstance(error, rosmsg.NotReadError):
                    raise PrismError(
                        f"{self._where(number)}, '{topic}': not readable ({reason(error)}); {AGAIN}, or say with --map "
                        "which topics to read"
                    ) from None
                self._left_out[topic] = f"'{topic}' ({msgtype}) is left out: {reason(error)}"
        if not keys:
            why = next(iter(self._left_out.values()), "it has no topics")
            raise PrismError(f"{self._where(number)}: holds no message that could be a sensor ({why}); {AGAIN}")
        return keys

    def _topic_keys(
        self, reader: Any, topic: str, msgtype: str, recorded: Sequence[_Message], fps: float
    ) -> list[_Key]:
        """`recorded`: the first message, or all of them. NotReadError says why there are no keys."""
        if not rosmsg.is_read(msgtype):
            raise rosmsg.NotReadError("messages of this type are not read")
        if not recorded:
            raise rosmsg.NotReadError("it has no messages")
        if msgtype not in reader.typestore.fielddefs:
            raise rosmsg.NotReadError("the bag lacks the definition of this type")
        messages = [reader.deserialize(content, connection.msgtype) for connection, _, content in recorded]
        header = getattr(messages[0], "header", None)
        stamped = header is not None and (header.stamp.sec, header.stamp.nanosec) != (0, 0)
        if msgtype in rosmsg.IMAGES:
            image = rosmsg.decode_image(messages[0])
            return [_Key(topic, msgtype, None, stamped, Column(topic, image.shape, image.dtype))]
        if msgtype == rosmsg.TEXT:
            size = max(_TEXT_BYTES, *(len(str(message.data).encode()) for message in messages))
            if size > _MOST_TEXT:
                raise rosmsg.NotReadError(
                    f"a text of {size} bytes is too long for an instruction, at most {_MOST_TEXT}"
                )
            return [_Key(topic, msgtype, None, stamped, Column(topic, (size,), np.dtype(np.str_)))]
        if rosmsg.is_audio(msgtype):
            sizes = [len(rosmsg.audio_samples(message)) for message in messages]
            rate = rosmsg.audio_rate(sum(sizes[:-1]), (recorded[-1][1] - recorded[0][1]) * 1e-9)
            column = Column(topic, (max(round(rate / fps), 1),), np.dtype(np.float32), sample_rate=rate)
            return [_Key(topic, msgtype, None, stamped, column)]
        found = []
        for field in rosmsg.FIELDS[msgtype]:
            if size := len(field.get(messages[0])):
                key = f"{topic}.{field.name}" if field.name else topic
                name = topic.strip("/") if field.name == "position" else ""
                column = Column(key, (size,), np.dtype(np.float32), name, field.skip, quaternions=field.quaternions)
                joints = tuple(map(str, getattr(messages[0], "name", ())))
                found.append(_Key(topic, msgtype, field, stamped, column, joints if len(joints) == size else ()))
        if not found:
            raise rosmsg.NotReadError("its first message holds no numbers")
        return found

    def _find_action(self, entries: Sequence[Entry], notes: list[str]) -> str:
        if any(entry.name == ACTION for entry in entries):
            return ""
        ignored = {key for entry in entries if entry.name == IGNORED for key in entry.sources}
        vectors = [key for key, found in self._keys.items() if found.field is not None and key not in ignored]
        likely = [key for key in vectors if any(word in key.lower() for word in _ACTION_WORDS)]
        if len(likely) != 1:
            raise PrismError(
                f"{self.path}: which topic is the action? Choose it: --map TOPIC=action "
                f"(there are {', '.join(likely or vectors) or 'no topics of numbers'})"
            )
        notes.append(f"'{likely[0]}' is taken for the action, by its name")
        return likely[0]

    def _own_rate(self, number: int) -> float:
        times, _, _ = self._recorded(number, self._keys[self._clock])
        if not (rate := _rate(times)):
            raise PrismError(f"{self._where(number)}: '{self._clock}' has no rate of its own; give --fps")
        return rate

    def _at_own_rate(self, stream: Stream) -> Stream:
        """With the rate of the topic in its spec: what is late, depends on it."""
        if stream.spec.kind in ("audio", "text"):
            return stream
        rate = min(self._rates.get(column.key, 0.0) for column in stream.columns)
        return dataclasses.replace(stream, spec=dataclasses.replace(stream.spec, fps=rate))

    def _recorded(self, number: int, key: _Key) -> tuple[Times, IntArray, list[Any]]:
        """The messages' own times in seconds, when they were received in nanoseconds, and what each holds (of a picture
        nothing: those are read when they are asked for)."""
        reader = self._open(number)
        stamps: list[float] = []
        received: list[int] = []
        values: list[Any] = []
        with self._messages(reader, key.topic, number) as messages:
            for connection, time, content in messages:
                stamps.append(_stamp(content) if key.stamped else time * 1e-9)
                received.append(time)
                if key.msgtype not in rosmsg.IMAGES:
                    values.append(_sample(reader.deserialize(content, connection.msgtype), key, len(values)))
        times = check_times(np.array(stamps), f"{self._where(number)}, '{key.topic}'")
        return times, np.array(received, np.int64), values

    def _timed(self, name: str, number: int, key: _Key, times: Times, samples: list[Any]) -> Timed:
        """The stream to align; a picture stands as its message number."""
        column = key.column
        if key.msgtype in rosmsg.IMAGES:
            spec = SensorSpec(name, "depth" if len(column.shape) == 2 else "rgb", column.shape)
            return Timed(spec, times, np.arange(len(times)))
        if key.field is not None:
            turns = key.field.quaternions
            return Timed(SensorSpec(name, "vector", column.shape), times, np.stack(samples), turns, scalar=3)  # xyzw
        if column.is_text:
            with named(f"{self._where(number)}, '{name}'"):
                for text in set(samples):  # refused now, and not in the middle of a training
                    encode_text(text, column.shape[0])
            return Timed(SensorSpec(name, "text", column.shape), times, np.array(samples, dtype=object))
        spec = SensorSpec(name, "audio", column.shape, sample_rate=column.sample_rate)
        counts = np.array([len(sample) for sample in samples])
        return Timed(spec, times, np.concatenate(samples).astype(np.float32) / 32768, chunks=counts)

    def _bag(self, number: int) -> _Bag:
        with self._lock:
            known = self._known.get(number)
            return known or self._known.keep(number, self._guarded(number, "the messages", self._align))

    def _align(self, number: int) -> _Bag:
        timed: dict[str, Timed] = {}
        received: dict[str, IntArray] = {}
        streams = (*self.table.streams, self.table.action)
        for name in dict.fromkeys(column.key for stream in streams for column in stream.columns):
            times, received[name], samples = self._recorded(number, self._keys[name])
            timed[name] = self._timed(name, number, self._keys[name], times, samples)
            if number == 0:
                self._rates[name] = _rate(times)
        found = align(timed, self._clock, self._config, f"{self._where(number)}, ")
        values: dict[str, Array] = {}
        pictures: dict[str, tuple[IntArray, Times]] = {}
        for name, chosen in found.streams.items():
            if timed[name].spec.is_image:
                pictures[name] = received[name][chosen.astype(np.int64)], timed[name].times[chosen.astype(np.int64)]
            else:
                values[name] = chosen
        gaps = tuple(str(gap) for gap in found.gaps if gap.absent)
        return self._trim(number, _Bag(values, pictures, found.present, len(found.clock), gaps))

    def _trim(self, number: int, bag: _Bag) -> _Bag:
        """From the first step with an action to the last; there must be one at every step between."""
        known = np.all([bag.present[column.key] for column in self.table.action.columns], axis=0)
        if not known.any():
            raise PrismError(f"{self._where(number)}: no action at any time of '{self._clock}'; {AGAIN}")
        first, last = int(np.argmax(known)), len(known) - int(np.argmax(known[::-1]))
        if not known[first:last].all():
            step = first + int(np.argmin(known[first:last]))
            raise PrismError(
                f"{self._where(number)}, '{self.table.action.columns[0].key}': no action near step {step} "
                f"({step / self.fps:.2f} s); raise --tolerance, or cut the bag there"
            )
        part = slice(first, last)
        return _Bag(
            {key: value[part] for key, value in bag.values.items()},
            {key: (received[part], stamps[part]) for key, (received, stamps) in bag.pictures.items()},
            {key: mask[part] for key, mask in bag.present.items()},
            last - first,
            bag.gaps,
        )

    def _raw(self, episode: int, start: int, stop: int, columns: Columns) -> tuple[Raw, Absent]:
        bag = self._bag(episode)
        raw: Raw = {}
        for key, column in columns.items():
            if key in bag.values:
                raw[key] = bag.values[key][start:stop]
            else:
                with self._lock:
                    raw[key] = self._guarded(episode, f"'{key}'", self._pictures, bag, key, column, start, stop)
        absent = {key: ~bag.present[key][start:stop] for key in columns}
        return raw, {key: mask for key, mask in absent.items() if mask.any()}

    def _pictures(self, number: int, bag: _Bag, name: str, column: Column, start: int, stop: int) -> Array:
        """One pass over the messages between the first and the last that are wanted."""
        out = np.zeros((stop - start, *column.shape), column.dtype)
        received, stamps = (part[start:stop] for part in bag.pictures[name])
        here = bag.present[name][start:stop]
        if not here.any():
            return out
        reader, key = self._open(number), self._keys[name]
        wanted: dict[tuple[int, float], list[int]] = {}
        for row in np.flatnonzero(here).tolist():
            wanted.setdefault((int(received[row]), float(stamps[row])), []).append(row)
        times = [time for time, _ in wanted]
        with self._messages(reader, key.topic, number, min(times), max(times) + 1) as messages:
            for connection, time, content in messages:
                rows = wanted.pop((time, _stamp(content) if key.stamped else time * 1e-9), None)
                if rows is not None:
                    image = rosmsg.decode_image(reader.deserialize(content, connection.msgtype))
                    if image.shape != column.shape or image.dtype != column.dtype:
                        raise ValueError(f"an image is {image.dtype} {image.shape}, the first {column}")
                    out[rows] = image
        if wanted:
            raise ValueError("a message that was there is gone")
        return out


def _sample(message: Any, key: _Key, number: int) -> Any:
    if key.field is None:
        return str(message.data) if key.column.is_text else rosmsg.audio_samples(message)
    sample = key.field.get(message)
    if sample.shape != key.column.shape:
        raise ValueError(f"message {number} has {len(sample)} numbers, the first {key.column.shape[0]}")
    if key.joints and key.joints != (joints := tuple(message.name)):  # a driver that started anew may order them anew
        if sorted(joints) != sorted(key.joints):
            raise ValueError(f"message {number} is of {', '.join(joints)}, the first of {', '.join(key.joints)}")
        sample = sample[[joints.index(name) for name in key.joints]]
    return sample


def _rate(times: Times) -> float:
    """Samples a second, by the median step, rounded if nearly whole. 0: unknown."""
    step = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    rate = 1 / step if step > 0 else 0.0
    return float(round(rate)) if abs(rate - round(rate)) < 0.05 * rate and rate > 0.5 else rate


def _stamp(content: bytes) -> float:
    """The time of the header that a message begins with: CDR, 4 bytes of encoding, then seconds and nanoseconds."""
    seconds, nano = struct.unpack_from("<iI" if content[1] & 1 else ">iI", content, 4)
    return float(seconds + nano * 1e-9)
