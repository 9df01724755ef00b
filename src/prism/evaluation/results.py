"""Results of an evaluation: one record per episode, a summary, metrics.json, and recordings on disk."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.controller import ControllerConfig
from prism.data.formats.npz import check_sizes
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.io.files import encode_json, explain, replace_file
from prism.io.jsonconfig import from_json

RECORDINGS = ("latency_ms", "actions", "states", "fans", "frames", "frame_steps")  # what is not a number a row


@dataclass(frozen=True)
class Fan:
    """The candidates of one replan, in robot units, for the picture that shows the alternatives."""

    step: int
    index: int
    candidates: NDArray[np.float32]  # (K, Tp, Da)
    modes: NDArray[np.int64]  # (K,) which mode each belongs to


@dataclass(frozen=True)
class EpisodeResult:
    seed: int
    success: bool
    score: float
    steps: int
    success_step: int | None  # first step at which the benchmark's rule held
    jerk: float
    physical_jerk: float
    replans: int
    mode_switches: int
    avoidable_switches: int
    modes: float  # mean number of modes among the candidates of a replan
    spread: float  # mean distance between the candidates of a replan
    latency_ms: list[float] = field(repr=False)
    seconds: float  # wall clock of the whole episode, simulator included
    actions: NDArray[np.float32] = field(repr=False)  # (T, Da) executed
    states: NDArray[np.float32] = field(repr=False)  # (T + 1, S) the simulator's state, before and after each
    fans: list[Fan] = field(default_factory=list, repr=False)
    frames: list[bytes] = field(default_factory=list, repr=False)  # JPEG
    frame_steps: list[int] = field(default_factory=list, repr=False)

    def row(self) -> dict[str, Any]:
        """The episode without its recordings, as JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in RECORDINGS}
        return {**values, "latency_p50_ms": metrics.percentile(self.latency_ms, 50)}


@dataclass(frozen=True)
class EvaluationResult:
    task: str
    policy: str  # path of the checkpoint, or what made it
    first_seed: int
    fps: float
    controller: ControllerConfig
    episodes: tuple[EpisodeResult, ...]  # in the order of their seeds
    seconds: float
    crashes: tuple[str, ...] = ()  # one line for each worker that died and was replaced
    lost: tuple[str, ...] = ()  # one line for each episode that killed its worker every time: not among `episodes`
    rendering_hint: str | None = None  # why there are no pictures, and the line that would bring them
    info: dict[str, Any] = field(default_factory=dict)  # command, date, versions, machine

    def summary(self) -> dict[str, Any]:
        """The flat form: every headline number at top level, means over episodes with 95 % intervals."""
        episodes = self.episodes
        latencies = [value for episode in episodes for value in episode.latency_ms]
        scores = [episode.score for episode in episodes]
        jerks = [episode.jerk for episode in episodes]
        switches = [float(episode.mode_switches) for episode in episodes]
        followed = sum(max(0, episode.replans - 1) for episode in episodes)
        wins = sum(episode.success for episode in episodes)
        return {
            "task": self.task,
            "success": wins / len(episodes) if episodes else 0.0,
            "success_ci": list(metrics.wilson_interval(wins, len(episodes))),
            "score": metrics.mean(scores),
            "score_ci": list(metrics.bootstrap_interval(scores)),
            "episodes": len(episodes),
            "first_seed": self.first_seed,
            "jerk": metrics.mean(jerks),
            "jerk_ci": list(metrics.bootstrap_interval(jerks)),
            "physical_jerk": metrics.mean([episode.physical_jerk for episode in episodes]),
            "mode_switches": metrics.mean(switches),
            "mode_switches_ci": list(metrics.bootstrap_interval(switches)),
            "mode_switch_rate": sum(switches) / followed if followed else 0.0,
            "avoidable_switches": metrics.mean([float(episode.avoidable_switches) for episode in episodes]),
            "modes": metrics.mean([episode.modes for episode in episodes]),
            "spread": metrics.mean([episode.spread for episode in episodes]),
            "steps": metrics.mean([float(episode.steps) for episode in episodes]),
            "latency_ms": {"p50": metrics.percentile(latencies, 50), "p99": metrics.percentile(latencies, 99)},
            "replans": len(latencies),
            "seconds": self.seconds,
            "crashes": list(self.crashes),
            "lost": list(self.lost),
            "policy": self.policy,
            "controller": dataclasses.asdict(self.controller),
        }


def pooled(results: Sequence[EvaluationResult], name: str) -> EvaluationResult:
    """The episodes of several tasks as one result, for means over all of them."""
    episodes = tuple(episode for result in results for episode in result.episodes)
    return results[0] if len(results) == 1 else dataclasses.replace(results[0], task=name, episodes=episodes)


def run_info(seed: int) -> dict[str, Any]:
    """Provenance: command, date, versions, machine, and the commit in a git checkout."""
    versions = {}
    for name in ("prism-policy", "torch", "numpy", "metaworld", "robosuite", "mujoco", "gym-pusht"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]]),
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        **({"commit": _COMMIT} if _COMMIT else {}),
    }


def _commit() -> str | None:
    """Of prism's own checkout, "-dirty" where a file of the package differs from it; None for an installed package,
    also where that lies inside somebody's repository."""
    package = Path(__file__).resolve().parents[1]

    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", *command], cwd=package, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return f"{head}-dirty" if git("status", "--porcelain", "--", ".") else head


_COMMIT = _commit()  # of the code that this process has loaded, whatever is checked out by the time it is done


def metrics_json(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    """{"tasks": {name: summary}, "command", "seed", "date", "versions", "machine", "commit"}."""
    info = results[0].info if results else run_info(0)
    return {"tasks": {result.task: result.summary() for result in results}, **info}


def flat_json(result: EvaluationResult) -> dict[str, Any]:
    """One task with its numbers at top level."""
    return {**result.summary(), **result.info, "per_episode": [episode.row() for episode in result.episodes]}


def evaluation_json(results: Sequence[EvaluationResult], name: str) -> dict[str, Any]:
    """What `prism eval --json` writes: one task flat; of several the means flat, and each below "tasks"."""
    if len(results) == 1:
        return flat_json(results[0])
    each = {result.task: flat_json(result) for result in results}
    return {**pooled(results, name).summary(), **results[0].info, "tasks": each}


def write_json(path: Path, data: dict[str, Any], overwrite: bool = False) -> None:
    write_atomic(path, encode_json(data), overwrite)


def refuse_existing(*paths: Path | None, overwrite: bool) -> None:
    """Before minutes of measuring, not after."""
    for path in paths:
        if path is not None and path.exists() and not overwrite:
            raise PrismError(f"{path} exists already: remove it, choose another name, or pass --overwrite")


def write_atomic(path: Path, content: bytes, overwrite: bool = False) -> None:
    """The whole file or none of it: a temporary name in the same folder, fsync, rename."""
    if path.exists() and not overwrite:
        raise PrismError(f"{path} exists already: remove it, choose another name, or allow overwriting")
    try:
        replace_file(path, content)
    except OSError as error:
        raise PrismError(f"{path} cannot be written: {'; '.join(explain(error))}") from error


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# An evaluation on disk: one .npz without pickles, from which the report can be made again at any time. `meta` holds
# UTF-8 JSON; the arrays of episode i are `i/actions`, `i/states`, ... Frames are JPEG files laid end to end in one
# uint8 array with their sizes beside it.

RECORDING_VERSION = 1
FOLDER = "evaluation"
_ROW = tuple(f.name for f in dataclasses.fields(EpisodeResult) if f.name not in RECORDINGS)
_Arrays = dict[str, NDArray[Any]]


def recording_path(run: Path, task: str) -> Path:
    return run / FOLDER / f"{task}.npz"


def save_result(path: Path, result: EvaluationResult, overwrite: bool = False) -> None:
    arrays: _Arrays = {}
    for i, episode in enumerate(result.episodes):
        arrays |= {f"{i}/{name}": value for name, value in _episode_arrays(episode).items()}
    meta = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "episodes"}
    meta["controller"] = dataclasses.asdict(result.controller)
    meta["format_version"] = RECORDING_VERSION
    meta["episodes"] = [{name: getattr(episode, name) for name in _ROW} for episode in result.episodes]
    arrays["meta"] = np.frombuffer(json.dumps(meta, allow_nan=False).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue(), overwrite)


def load_result(path: Path) -> EvaluationResult:
    if not path.is_file():
        raise PrismError(f"{path} does not exist: evaluate the policy first (prism eval RUN)")
    try:
        # Read whole first: np.load leaves the file open when it is damaged.
        content = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(content) as archive:
            check_sizes(archive)
        with np.load(content, allow_pickle=False) as file:
            arrays: _Arrays = {name: file[name] for name in file.files}
        meta: dict[str, Any] = json.loads(bytes(arrays["meta"]))
        version = meta.pop("format_version")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        RecursionError,
        zlib.error,
        zipfile.BadZipFile,
    ) as error:
        raise PrismError(f"{path} is damaged or not a recording ({error}): run prism eval again") from error
    if version != RECORDING_VERSION:
        raise PrismError(f"{path} has format {version}, this version reads {RECORDING_VERSION}: run prism eval again")
    try:
        meta["controller"] = from_json(ControllerConfig, meta["controller"], f"{path}: controller")
        meta |= {name: tuple(meta.get(name, ())) for name in ("crashes", "lost")}
        meta["episodes"] = tuple(_episode(row, arrays, i) for i, row in enumerate(meta["episodes"]))
        return EvaluationResult(**meta)
    except (KeyError, TypeError, ValueError) as error:
        raise PrismError(f"{path} lacks or misspells a field ({error}): run prism eval again") from error


def load_results(run: Path) -> list[EvaluationResult]:
    """Every task that was evaluated in a run, or in the runs of a demo, in the order of their names."""
    paths = sorted((run / FOLDER).glob("*.npz")) or sorted(run.glob(f"*/{FOLDER}/*.npz"), key=lambda path: path.name)
    if not paths:
        raise PrismError(f"{run} has no {FOLDER}/*.npz: evaluate the policy first (prism eval {run})")
    return [load_result(path) for path in paths]


def _episode_arrays(episode: EpisodeResult) -> _Arrays:
    arrays: _Arrays = {
        "actions": episode.actions,
        "states": episode.states,
        "latency_ms": np.asarray(episode.latency_ms, dtype=np.float64),
    }
    if episode.fans:
        arrays["fan_steps"] = np.array([[fan.step, fan.index] for fan in episode.fans], dtype=np.int64)
        arrays["fan_modes"] = np.stack([fan.modes for fan in episode.fans])
        arrays["fans"] = np.stack([fan.candidates for fan in episode.fans])
    if episode.frames:
        arrays["frames"] = np.frombuffer(b"".join(episode.frames), dtype=np.uint8)
        arrays["frame_sizes"] = np.array([len(frame) for frame in episode.frames], dtype=np.int64)
        arrays["frame_steps"] = np.array(episode.frame_steps, dtype=np.int64)
    return arrays


def _episode(row: Mapping[str, Any], arrays: _Arrays, i: int) -> EpisodeResult:
    fans: list[Fan] = []
    if f"{i}/fans" in arrays:
        fans = [
            Fan(int(step), int(index), candidates, modes)
            for (step, index), candidates, modes in zip(
                arrays[f"{i}/fan_steps"], arrays[f"{i}/fans"], arrays[f"{i}/fan_modes"], strict=True
            )
        ]
    frames: list[bytes] = []
    steps: list[int] = []
    if f"{i}/frames" in arrays:
        data, ends = arrays[f"{i}/frames"].tobytes(), np.cumsum(arrays[f"{i}/frame_sizes"])
        frames = [data[int(end - size) : int(end)] for end, size in zip(ends, arrays[f"{i}/frame_sizes"], strict=True)]
        steps = [int(step) for step in arrays[f"{i}/frame_steps"]]
    return EpisodeResult(
        **{name: row[name] for name in _ROW},
        latency_ms=[float(value) for value in arrays[f"{i}/latency_ms"]],
        actions=arrays[f"{i}/actions"],
        states=arrays[f"{i}/states"],
        fans=fans,
        frames=frames,
        frame_steps=steps,
    )
