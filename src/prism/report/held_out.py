"""A run that was trained on a dataset alone has no simulator to be rolled out in: its plans stand beside what was
recorded, on episodes that were held out of the training. The policy sees the recorded observations, never its own
mistakes, so a small error is needed for success, but does not prove it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prism.controller import Controller
from prism.data.episodes import Episode, EpisodeSource
from prism.io.files import replace_file
from prism.report.charts import Series, line_chart, number, page, table
from prism.report.rerun_log import RerunLog
from prism.report.run_page import Log, training_curves
from prism.sensors import decode_text

Float = NDArray[np.float64]
_EPISODES, _STEPS = 3, 400  # shown at most
_PART = 32  # steps read at once: pictures are as large as they were recorded
_CHOSEN, _NEAREST = "chosen plan", "nearest candidate"


@dataclass(frozen=True)
class Replay:
    """One episode: what was done, what the controller would have done, both (T, Da) in robot units."""

    episode: int
    recorded: Float
    predicted: Float
    errors: dict[str, list[Float]]  # of each plan: (steps, ) mean over dimensions, in half ranges of the demonstrations


def replay(
    controller: Controller, source: EpisodeSource, episode: int, rerun: RerunLog | None = None, first: int = 0
) -> Replay:
    """The controller, shown the recorded observations of an episode one after the other; `first`: its first step in
    the recording for rerun."""
    length = min(int(source.lengths[episode]), _STEPS)
    recorded, scale = source.read(episode, 0, length, streams=()).actions.astype(np.float64), controller.scale
    predicted, errors = [], dict[str, list[Float]]({_CHOSEN: [], _NEAREST: []})
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
            apart = np.abs(plan.candidates[:, : len(rest)] - rest) / scale  # (K, steps, Da)
            errors[_CHOSEN].append((np.abs(plan.actions[: len(rest)] - rest) / scale).mean(axis=-1))
            errors[_NEAREST].append(apart[apart.mean(axis=(1, 2)).argmin()].mean(axis=-1))
    return Replay(episode, recorded, np.stack(predicted), errors)


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


def write_held_out(
    path: Path,
    controller: Controller,
    source: EpisodeSource,
    episodes: Sequence[int],
    held_out: bool,
    log: Log,
    rerun: RerunLog | None = None,
) -> Path:
    """The page. `held_out`: whether these episodes were; where none was, the page says so."""
    replays: list[Replay] = []
    for episode in episodes[:_EPISODES]:
        replays.append(replay(controller, source, int(episode), rerun, sum(len(done.recorded) for done in replays)))
    replace_file(path, render(path.resolve().parent.name, replays, controller, held_out, log).encode())
    return path


def render(name: str, replays: Sequence[Replay], controller: Controller, held_out: bool, log: Log) -> str:
    spec, fps = controller.policy.spec, controller.policy.spec.fps or 1.0
    names = spec.action.names or [f"action {i}" for i in range(spec.action_dim)]
    whose = "episodes that were held out of the training" if held_out else (
        "<b>episodes that it was trained on</b> (none was held out: train.val_fraction)"
    )  # fmt: skip
    lead = (
        f"Trained on a dataset alone, without a simulator. Shown the recorded observations of {len(replays)} {whose}, "
        f"at most {_STEPS} steps of each: what it would have done, and what was done."
    )
    horizon = [
        Series(which, [step / fps for step in range(len(curve))], curve, css)
        for which, css in ((_CHOSEN, "s0"), (_NEAREST, "s1"))
        if (curve := over_the_horizon(replays, which))
    ]
    chart = line_chart(horizon, "Error over the plan", "seconds into the plan")
    text = "Mean absolute error, in units of half the range of the demonstrations' actions."
    parts = [
        f'<h3>Error over the plan, and by dimension</h3><p>{text}</p><div class="charts">',
        f'<figure class="panel">{chart}</figure>{_dimensions(names, replays, controller.scale)}</div>',
        *(_episode(one, names, fps) for one in replays),
        training_curves(log),
    ]
    note = f"{controller.config.candidates} candidates a plan, {controller.config.exec_horizon} steps executed of each."
    return page(f"PRISM: {name}", lead, "".join(parts), f"<p>{note}</p>")


def _dimensions(names: Sequence[str], replays: Sequence[Replay], scale: Float) -> str:
    error = np.concatenate([np.abs(one.predicted - one.recorded) for one in replays]).mean(axis=0)
    rows = [
        [escape(name), number(float(here)), f"{100 * here / (2 * half):.1f} %"]
        for name, here, half in zip(names, error, scale, strict=True)
    ]
    return table(("Dimension", "Mean error", "of the range"), rows, "Error by dimension")


def _episode(one: Replay, names: Sequence[str], fps: float) -> str:
    seconds = (np.arange(len(one.recorded)) / fps).tolist()
    figures = "".join(
        f'<figure class="panel"><h4>{escape(name)}</h4>'
        + line_chart(
            [
                Series("recorded", seconds, one.recorded[:, i].tolist(), "s1"),
                Series("predicted", seconds, one.predicted[:, i].tolist(), "s0"),
            ],
            name,
            "seconds",
        )
        + "</figure>"
        for i, name in enumerate(names)
    )
    return f'<h3>Episode {one.episode}</h3><div class="charts">{figures}</div>'
