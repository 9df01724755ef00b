"""Recordings for the rerun viewer (extra `rerun`): sensors, candidates and actions on one time line.

sensors/NAME      Image (JPEG), DepthImage in metres, tactile channels by threes, a bar chart of the samples of a sound,
                  scalars of a vector, a text document of an instruction; nothing where the sensor was absent
actions/executed  scalars, robot units; actions/recorded: what the demonstration did; actions/planned: of a dry run,
                  which sends nothing
plan/candidates   the K plans of a replan, coloured by mode, in their first two or three dimensions; plan/chosen: the
                  one that is executed. Plans of changes are summed up
episode           what begins or ended

Time lines: `time`, seconds, episodes one behind the other, and `step`. A .rrd opens with `rerun FILE.rrd`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prism_client import ActionKind

from prism.data.episodes import Episode, EpisodeSource
from prism.data.inspect import Progress, as_picture
from prism.errors import PrismError, need
from prism.evaluation.results import EvaluationResult
from prism.io.files import hidden_beside
from prism.selection import is_change
from prism.sensors import SensorSpec, action_spec_of, decode_text
from prism.sims.task_table import TASKS

if TYPE_CHECKING:
    from prism.robots.contract import Robot

_QUALITY = 80  # JPEG
_PART = 32  # steps read at once
_COLOURS = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75))


class RerunLog:
    """A .rrd file that gets its name when the `with` block ends well; `keep`: however it ends. `at` says when,
    everything else what."""

    def __init__(self, path: Path, name: str, overwrite: bool = False, keep: bool = False) -> None:
        if path.exists() and not overwrite:
            raise PrismError(f"{path} exists already: remove it, choose another name, or pass --overwrite")
        self._rr: Any = need("rerun", "rerun", "--rerun")
        self.path, self._hidden = path, hidden_beside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._rr.RecordingStream(f"prism {name}")
        self._stream.save(self._hidden)
        self._named: set[str] = set()
        self._keep, self.steps = keep, 0  # steps: of episodes that are logged whole

    def __enter__(self) -> RerunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stream.disconnect()  # flushes
        if kind is None or self._keep:
            os.replace(self._hidden, self.path)
        self._hidden.unlink(missing_ok=True)

    def at(self, step: int, fps: float) -> None:
        """Everything from now on is of this step, counted over all episodes."""
        self._stream.set_time("step", sequence=step)
        self._stream.set_time("time", duration=step / (fps or 1.0))

    def say(self, text: str) -> None:
        self._stream.log("episode", self._rr.TextLog(text))

    def observe(self, sensors: Sequence[SensorSpec], observation: Mapping[str, Any]) -> None:
        """One reading of each sensor that is there, as its spec says."""
        for sensor in sensors:
            if sensor.name in observation:
                self._read(sensor, f"sensors/{sensor.name}", observation[sensor.name])

    def picture(self, name: str, jpeg: bytes) -> None:
        self._stream.log(f"sensors/{name}", self._rr.EncodedImage(contents=jpeg, media_type="image/jpeg"))

    def vector(self, entity: str, values: NDArray[Any], names: Sequence[str] = ()) -> None:
        if names and entity not in self._named:
            self._named.add(entity)
            self._stream.log(entity, self._rr.SeriesLines(names=list(names)), static=True)
        self._stream.log(entity, self._rr.Scalars(np.asarray(values, np.float64).reshape(-1)))

    def plan(self, candidates: NDArray[Any], modes: NDArray[Any], index: int, kind: ActionKind | None = None) -> None:
        """Candidates (K, Tp, Da) in robot units."""
        dims = min(candidates.shape[2], 3)
        paths = np.asarray(candidates[:, :, :dims], np.float64)
        if is_change(kind):
            paths = paths.cumsum(axis=1)
        if dims == 1:  # over the steps of the plan
            steps = np.broadcast_to(np.arange(paths.shape[1])[:, None], paths.shape)
            paths = np.concatenate([steps, paths], axis=2)
        strips = self._rr.LineStrips3D if dims == 3 else self._rr.LineStrips2D
        colours = [_COLOURS[int(mode) % len(_COLOURS)] for mode in modes]
        self._stream.log("plan/candidates", strips(list(paths), colors=colours))
        self._stream.log("plan/chosen", strips([paths[index]], colors=[(20, 20, 20)]))

    def episode(
        self, robot: Robot, episode: Episode, details: Mapping[str, NDArray[Any]], said: str, sent: bool = True
    ) -> None:
        """One of `prism run`, behind those before it; `details` are its commands.npz (robots/recording.py); `sent`: to
        the robot."""
        spec = robot.actions.spec
        every = details.get("candidates", details.get("plan", np.zeros(0))[:, None])
        chosen = details.get("chosen", np.zeros(len(every), np.int64))
        plans = dict(zip(details.get("plan_step", np.zeros(0)).tolist(), zip(every, chosen, strict=True), strict=True))
        self.at(self.steps, robot.fps)
        self.say(said)
        for row in range(episode.length):
            self.at(self.steps, robot.fps)
            self.steps += 1
            here = {name: values[row] for name, values in episode.streams.items() if episode.present[name][row]}
            self.observe(robot.sensors, here)
            if row in plans:
                candidates, index = plans[row]
                self.plan(candidates, np.zeros(len(candidates), np.int64), int(index), spec.kind)
            self.vector(f"actions/{'executed' if sent else 'planned'}", episode.actions[row], spec.names)

    def _read(self, sensor: SensorSpec, entity: str, value: Any) -> None:
        rr = self._rr
        if sensor.kind == "depth":
            self._stream.log(entity, rr.DepthImage(value.astype(np.float32), meter=1.0))
        elif sensor.is_image:
            self._stream.log(entity, rr.Image(as_picture(sensor, value)).compress(jpeg_quality=_QUALITY))
        elif sensor.kind == "audio":
            self._stream.log(entity, rr.BarChart(value.astype(np.float32)))
            self.vector(f"{entity}/level", np.sqrt(np.mean(np.square(value, dtype=np.float64), keepdims=True)))
        elif sensor.kind == "text":
            self._stream.log(entity, rr.TextDocument(value if isinstance(value, str) else decode_text(value)))
        else:
            self.vector(entity, value, sensor.names)


def log_dataset(source: EpisodeSource, path: Path, overwrite: bool = False, progress: Progress | None = None) -> Path:
    """Every episode of a dataset."""
    names, total, done = action_spec_of(source).names, int(source.lengths.sum()), 0
    with RerunLog(path, Path(source.path).name, overwrite) as log:
        for episode, length in enumerate(source.lengths.tolist()):
            for start in range(0, length, _PART):
                part = source.read(episode, start, min(start + _PART, length))
                for row in range(part.length):
                    log.at(done, source.fps)
                    if start + row == 0:
                        log.say(f"episode {episode}")
                    here = {
                        name: values[row]
                        for name, values in part.streams.items()
                        if name not in part.present or part.present[name][row]
                    }
                    log.observe(source.sensors, here)
                    log.vector("actions/recorded", part.actions[row], names)
                    done += 1
                if progress is not None:
                    progress(done, total)
    return path


def log_results(results: Sequence[EvaluationResult], path: Path, overwrite: bool = False) -> Path:
    """The episodes that were recorded with pictures (prism eval --report), or all if there are none."""
    with RerunLog(path, path.resolve().stem, overwrite) as log:
        done = 0
        for result in results:
            kind = TASKS[result.task].actions if result.task in TASKS else None
            filmed = [episode for episode in result.episodes if episode.frames or episode.fans]
            for episode in filmed or result.episodes:
                frames = dict(zip(episode.frame_steps, episode.frames, strict=True))
                fans = {fan.step: fan for fan in episode.fans}
                for step in range(len(episode.states)):
                    log.at(done, result.fps)
                    done += 1
                    if step == 0:
                        log.say(f"{result.task}, seed {episode.seed}")
                    log.vector("state", episode.states[step])
                    if step in frames:
                        log.picture("scene", frames[step])
                    if step in fans:
                        fan = fans[step]
                        log.plan(fan.candidates, fan.modes, fan.index, kind)
                    if step < len(episode.actions):
                        log.vector("actions/executed", episode.actions[step])
                outcome = "success" if episode.success else "failure"
                log.say(f"{result.task}, seed {episode.seed}: {outcome}, score {episode.score:.3f}")
    return path
