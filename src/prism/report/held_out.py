"""A run that was trained on a dataset alone has no simulator to be rolled out in: its plans stand beside what was
recorded, on episodes that were held out of the training. The policy sees the recorded observations, never its own
mistakes, so a small error is needed for success, but does not prove it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.controller import Controller
from prism.data.episodes import Episode, EpisodeSource
from prism.data.inspect import as_picture
from prism.evaluation.sensor_use import CANDIDATES, SensorReport, percent
from prism.io.files import replace_file
from prism.report.charts import Series, line_chart, number
from prism.report.pages import picture, render_page
from prism.report.rerun_log import RerunLog
from prism.report.run_page import Log, training_curves
from prism.sensors import decode_text

Float = NDArray[np.float64]
_EPISODES, _STEPS = 5, 400  # shown at most
_FEW = 3  # held-out episodes; where there are fewer, some that it was trained on stand beside them
_SHOTS = 5  # pictures of each camera
_PART = 32  # steps read at once: pictures are as large as they were recorded
_CHOSEN, _NEAREST, _MEAN = "chosen plan", "nearest candidate", "mean action"


@dataclass(frozen=True)
class Replay:
    """One episode: what was done, what the controller would have done, both (T, Da) in robot units."""

    episode: int
    recorded: Float
    predicted: Float
    errors: dict[str, list[Float]]  # of each plan: (steps, ) mean over dimensions, in half ranges of the demonstrations
    held_out: bool = True
    starts: tuple[int, ...] = ()  # the step that each plan begins at


def replay(
    controller: Controller,
    source: EpisodeSource,
    episode: int,
    rerun: RerunLog | None = None,
    first: int = 0,
    held_out: bool = True,
) -> Replay:
    """The controller, shown the recorded observations of an episode one after the other; `first`: its first step in
    the recording for rerun."""
    moves = moving(controller)
    length = min(int(source.lengths[episode]), _STEPS)
    recorded, scale = source.read(episode, 0, length, streams=()).actions.astype(np.float64), controller.scale
    predicted, starts, errors = list[Float](), list[int](), dict[str, list[Float]]({_CHOSEN: [], _NEAREST: []})
    controller.reset(episode)
    for step in range(length):
        if step % _PART == 0:
            part = source.read(episode, step, min(step + _PART, length))
        plans = len(controller.replans)
        shown = _shown(part, step % _PART, controller)
        predicted.append(controller.act(shown).astype(np.float64))
        plan = controller.last_plan if len(controller.replans) > plans else None
        if rerun is not None:
            spec = controller.policy.spec
            rerun.at(first + step, spec.fps)
            rerun.observe(spec.sensors, shown)
            rerun.vector("actions/recorded", recorded[step], spec.action.names)
            rerun.vector("actions/executed", predicted[step], spec.action.names)
            if plan is not None:
                rerun.plan(plan.candidates, plan.modes, plan.info.index, spec.action.kind)
        if plan is not None:
            rest = recorded[step : step + len(plan.actions)]
            starts.append(step)
            apart = (np.abs(plan.candidates[:, : len(rest)] - rest) / scale)[..., moves]  # (K, steps, Da')
            errors[_CHOSEN].append((np.abs(plan.actions[: len(rest)] - rest) / scale)[:, moves].mean(axis=-1))
            errors[_NEAREST].append(apart[apart.mean(axis=(1, 2)).argmin()].mean(axis=-1))
    return Replay(episode, recorded, np.stack(predicted), errors, held_out, tuple(starts))


def moving(controller: Controller) -> NDArray[np.bool_]:
    """(Da,) which dimensions of an action move in the demonstrations; all, where that is not known."""
    moves: NDArray[np.bool_] = controller.policy.normalizer.action_moves.cpu().numpy() > 0
    return moves if moves.any() else np.ones_like(moves)


def _shown(episode: Episode, step: int, controller: Controller) -> dict[str, NDArray[np.generic] | str]:
    shown: dict[str, NDArray[np.generic] | str] = {}
    for sensor in controller.policy.spec.sensors:
        if sensor.name not in episode.present or episode.present[sensor.name][step]:
            value = episode.streams[sensor.name][step]
            shown[sensor.name] = decode_text(value) if sensor.kind == "text" else value
    return shown


def over_the_horizon(replays: Sequence[Replay], name: str) -> list[float]:
    """Mean error at each step of a plan, over all plans that reach it."""
    plans = [error for one in replays for error in one.errors[name]]
    return [float(np.mean([plan[h] for plan in plans if len(plan) > h])) for h in range(max(map(len, plans)))]


def shown_episodes(held_out: Sequence[int], trained: Sequence[int]) -> list[tuple[int, bool]]:
    """At most _EPISODES that were held out, spread evenly; filled up to _FEW with some that it was trained on."""
    chosen = [(episode, True) for episode in _spread(held_out, _EPISODES)]
    return chosen + [(episode, False) for episode in _spread(trained, _FEW - len(chosen))]


def _spread(episodes: Sequence[int], count: int) -> list[int]:
    count = max(0, min(count, len(episodes)))
    return [int(episodes[round(i * (len(episodes) - 1) / max(1, count - 1))]) for i in range(count)]


def write_held_out(
    path: Path,
    controller: Controller,
    source: EpisodeSource,
    held_out: Sequence[int],
    trained: Sequence[int],
    log: Log,
    rerun: RerunLog | None = None,
    sensors: SensorReport | None = None,
) -> Path:
    """The page, of episodes that were held out and, where these are few, of some that it was trained on. `sensors`:
    what was measured of them."""
    replays: list[Replay] = []
    for episode, unseen in shown_episodes(held_out, trained):
        first = sum(len(done.recorded) for done in replays)
        replays.append(replay(controller, source, episode, rerun, first, unseen))
    films = [_films(controller, source, one) for one in replays]
    name = path.resolve().parent.name
    replace_file(path, render(name, replays, films, controller, log, sensors).encode())
    return path


def render(
    name: str,
    replays: Sequence[Replay],
    films: Sequence[Sequence[dict[str, Any]]],
    controller: Controller,
    log: Log,
    sensors: SensorReport | None = None,
) -> str:
    spec, fps, moves = controller.policy.spec, controller.policy.spec.fps or 1.0, moving(controller)
    names = list(spec.action.names or [f"action {i}" for i in range(spec.action_dim)])
    judged = [one for one in replays if one.held_out] or list(replays)  # those that it was trained on say little
    constant = np.concatenate([one.recorded for one in judged]).mean(axis=0)
    _add_mean_action(replays, constant, controller.scale, moves)
    unit = max(float(np.mean([_plan_error(one, _MEAN) for one in judged])), 1e-12)
    curves = [
        Series(which, [step / fps for step in range(len(curve))], curve, css)
        for which, css in ((_CHOSEN, "s0"), (_NEAREST, "s1"), (_MEAN, "s2"))
        if (curve := over_the_horizon(judged, which))
    ]
    yardsticks, basis = _yardsticks(judged, unit, sensors)
    return render_page(
        "held_out.html",
        title=f"PRISM: {name}",
        steps=_STEPS,
        held_out=sum(one.held_out for one in replays),
        mean_action=number(sensors.mean_action if sensors is not None else unit),
        yardsticks=yardsticks,
        full=max(1.0, *(row["share"] for row in yardsticks)),
        basis=basis,
        sensors=sensors,
        percent=percent,
        constant=[label for label, moved in zip(names, moves, strict=True) if not moved],
        horizon=line_chart(curves, "Error over the plan", "seconds into the plan", last=False),
        dimensions=_dimensions(names, judged, constant, controller.scale, moves),
        table=[
            (
                one.episode,
                len(one.recorded),
                "yes" if one.held_out else "no, trained on",
                number(_plan_error(one)),
                _share(one),
            )
            for one in replays
        ],
        episodes=[_episode(one, shots, names, moves, fps) for one, shots in zip(replays, films, strict=True)],
        training=training_curves(log),
        candidates=controller.config.candidates,
        exec_horizon=controller.config.exec_horizon,
    )


def _plan_error(one: Replay, which: str = _CHOSEN) -> float:
    """Mean error of the plans of an episode, over their whole length."""
    return float(np.mean(np.concatenate(one.errors[which]))) if one.errors[which] else 0.0


def _share(one: Replay) -> str:
    return percent(_plan_error(one) / max(_plan_error(one, _MEAN), 1e-12))


def _add_mean_action(replays: Sequence[Replay], constant: Float, scale: Float, moves: NDArray[np.bool_]) -> None:
    """The errors of a constant, at the steps that the plans are about."""
    for one in replays:
        apart = (np.abs(one.recorded - constant) / scale)[:, moves].mean(axis=-1)
        plans = zip(one.starts, one.errors[_CHOSEN], strict=True)
        one.errors[_MEAN] = [apart[start : start + len(error)] for start, error in plans]


def _yardsticks(
    judged: Sequence[Replay], unit: float, sensors: SensorReport | None
) -> tuple[list[dict[str, Any]], str]:
    if sensors is None:
        share = float(np.mean([_plan_error(one) for one in judged])) / unit
        rows, basis = [("this policy", share, "")], "The chosen plans of the episodes below."
    else:
        rows = [("this policy", sensors.error, "")]
        if sensors.without_cameras is not None:
            rows.append(("its cameras absent", sensors.without_cameras, "weak"))
        basis = f"{sensors.windows} windows of {sensors.episodes} held-out episodes, {CANDIDATES} candidates each."
    rows.append(("mean action", 1.0, "weak"))
    return [{"name": name, "share": share, "words": percent(share), "css": css} for name, share, css in rows], basis


def _dimensions(
    names: Sequence[str], replays: Sequence[Replay], constant: Float, scale: Float, moves: NDArray[np.bool_]
) -> list[tuple[str, ...]]:
    error = np.concatenate([np.abs(one.predicted - one.recorded) for one in replays]).mean(axis=0)
    usual = np.concatenate([np.abs(one.recorded - constant) for one in replays]).mean(axis=0)
    return [
        (name, number(float(here)), f"{100 * here / (2 * half):.1f} %", percent(here / max(base, 1e-12)))
        for name, here, base, half, moved in zip(names, error, usual, scale, moves, strict=True)
        if moved
    ]


def _films(controller: Controller, source: EpisodeSource, one: Replay) -> list[dict[str, Any]]:
    """Pictures of each camera, evenly over an episode."""
    fps = controller.policy.spec.fps or 1.0
    steps = np.unique(np.linspace(0, len(one.recorded) - 1, _SHOTS).round().astype(int)).tolist()
    films = []
    for spec in (s for s in source.sensors if s.kind in ("rgb", "depth", "tactile")):
        shots = []
        for step in steps:
            part = source.read(one.episode, step, step + 1, streams=[spec.name])
            if spec.name not in part.present or part.present[spec.name][0]:
                frame = as_picture(spec, part.streams[spec.name][0])
                shots.append({"time": f"{step / fps:.1f} s", "address": picture(frame)})
        films.append({"name": spec.name, "shots": shots})
    return films


def _episode(
    one: Replay,
    films: Sequence[dict[str, Any]],
    names: Sequence[str],
    moves: NDArray[np.bool_],
    fps: float,
) -> dict[str, Any]:
    seconds = (np.arange(len(one.recorded)) / fps).tolist()
    figures = []
    for i in np.flatnonzero(moves).tolist():
        curves = [
            Series("recorded", seconds, one.recorded[:, i].tolist(), "s1"),
            Series("predicted", seconds, one.predicted[:, i].tolist(), "s0"),
        ]
        figures.append({"name": names[i], "chart": line_chart(curves, names[i], "seconds", last=False, zero=False)})
    whose = "held out" if one.held_out else "trained on"
    words = f"{whose}, {len(one.recorded)} steps, error {_share(one)} of the mean action's"
    return {"number": one.episode, "words": words, "films": films, "figures": figures}
