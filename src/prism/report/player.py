"""Episodes to watch: pictures and flat views that move with them, with the candidates of every replan.

The views need no renderer: the simulator's recorded states are enough, where the task has a Scene. Python projects
everything to SVG units once; the page's small script only moves shapes and swaps pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from prism.evaluation.results import EpisodeResult, Fan
from prism.report.charts import drawing
from prism.sims.task_table import TASKS

Float = NDArray[np.float64]
SIZE = 400.0  # width of a view, in SVG units
_COLOURS = 4  # modes m0 .. m3 of the style sheet; more than that share the last


@dataclass(frozen=True)
class Mover:
    """Something that moves: an SVG shape around the origin, and x, y, angle in degrees at each step."""

    css: str
    shape: str
    track: Float  # (T + 1, 3) in the view's units
    trail: bool


@dataclass(frozen=True)
class View:
    title: str
    height: float  # the width is always 400
    backdrop: str  # SVG
    movers: tuple[Mover, ...]
    axes: tuple[int, int]  # which world coordinates are right and up
    low: Float  # (2,) world coordinates of the lower left corner
    scale: float  # SVG units a world unit
    down: bool = False  # the second coordinate grows downwards, as in pictures

    def project(self, points: Float) -> Float:
        """World points (..., D) -> (..., 2) in the view's units."""
        flat = (points[..., list(self.axes)] - self.low) * self.scale
        return np.stack([flat[..., 0], flat[..., 1] if self.down else self.height - flat[..., 1]], axis=-1)


class Scene(Protocol):
    """How a task's recorded states are drawn (sims.tasks.Task.scene)."""

    def views(self, states: Float, everything: Sequence[Float]) -> tuple[View, ...]:
        """The views of one episode (T + 1, S). `everything` (states of all episodes shown) sets a common frame."""
        ...

    def future(self, state: Float, candidates: Float) -> Float:
        """Where each candidate (K, Tp, Da) would take the robot from here, in world coordinates, (K, Tp + 1, D)."""
        ...


def scene_of(task: str) -> Scene | None:
    """None: a task without one, or of a package that is not installed here."""
    make = TASKS[task].scene if task in TASKS else None
    return None if make is None else make()


def points_text(points: Float) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Film:
    """One recorded episode and its views."""

    episode: EpisodeResult
    views: tuple[View, ...]
    scene: Scene | None
    exec_horizon: int

    def state(self, step: int) -> Float:
        return np.asarray(self.episode.states[step], dtype=np.float64)

    def curves(self, view: View, fan: Fan) -> Float:
        """Candidates in a view's units, (K, Tp + 1, 2)."""
        assert self.scene is not None  # there is no view without one
        return view.project(self.scene.future(self.state(fan.step), fan.candidates.astype(np.float64)))


def films(task: str, episodes: Sequence[EpisodeResult], exec_horizon: int) -> list[Film]:
    """The episodes that were recorded, successes first, all seen in the same frame."""
    recorded = [episode for episode in episodes if episode.frames or episode.fans]
    recorded.sort(key=lambda episode: (not episode.success, episode.seed))
    everything = [episode.states.astype(np.float64) for episode in recorded]
    scene = scene_of(task)
    return [
        Film(episode, () if scene is None else scene.views(states, everything), scene, exec_horizon)
        for episode, states in zip(recorded, everything, strict=True)
    ]


def mode_class(fan: Fan) -> list[str]:
    """CSS class of each candidate: modes in the order of their size, so that the largest has the first colour."""
    sizes = np.bincount(fan.modes)
    rank = {int(mode): min(i, _COLOURS - 1) for i, mode in enumerate(np.argsort(-sizes, kind="stable"))}
    return [f"m{rank[int(mode)]}" for mode in fan.modes]


def fan_picture(film: Film, view: View, fan: Fan) -> Markup:
    """One replan as a still: the scene, all candidates in the colour of their mode, the chosen one on top."""
    curves = film.curves(view, fan)
    parts = [view.backdrop]
    parts += [
        f'<path class="trail {mover.css}" d="{_path(mover.track[: fan.step + 1, :2])}"/>'
        for mover in view.movers
        if mover.trail
    ]
    parts += [_placed(mover.css, mover.shape, mover.track[fan.step]) for mover in view.movers]
    for k, css in enumerate(mode_class(fan)):
        parts.append(f'<path class="candidate {css}" d="{_path(curves[k])}"/>')
    parts.append(f'<path class="chosen" d="{_path(curves[fan.index])}"/>')
    parts.append(f'<path class="chosen now" d="{_path(curves[fan.index][: film.exec_horizon + 1])}"/>')
    modes = int(fan.modes.max()) + 1
    label = f"Seed {film.episode.seed}, step {fan.step}: {len(curves)} candidates in {modes} mode{'s' * (modes > 1)}"
    box = f"0 0 400 {view.height:g}"
    return drawing(f'<svg class="scene" viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>')


def telling_fans(shown: Sequence[Film], count: int = 6) -> list[tuple[Film, View, Fan]]:
    """The replans whose candidates differ most, measured where the picture shows it, not all from one moment."""
    ranked = []
    for number, film in enumerate(shown):
        for view in film.views:
            for fan in film.episode.fans:
                ends = film.curves(view, fan)
                ranked.append((float(ends.std(axis=0).mean()), number, film, view, fan))
    ranked.sort(key=lambda item: -item[0])
    chosen: list[tuple[int, Film, View, Fan]] = []
    for _, number, film, view, fan in ranked:
        near = [
            1 for other, _, _, seen in chosen if other == number and abs(seen.step - fan.step) < 3 * film.exec_horizon
        ]
        share = [1 for other, *_ in chosen if other == number]
        if not near and len(share) <= count // max(1, len(shown)):
            chosen.append((number, film, view, fan))
        if len(chosen) == count:
            break
    return [(film, view, fan) for _, film, view, fan in sorted(chosen, key=lambda item: (item[0], item[3].step))]


def film_data(film: Film) -> dict[str, Any]:
    """The player of one episode, and the data of its script. Without a script, the first picture."""
    episode = film.episode
    frames = [base64.b64encode(frame).decode() for frame in episode.frames]
    return {
        "seed": episode.seed,
        "success": episode.success,
        "steps": episode.steps,
        "first": frames[0] if frames else "",
        "views": [{"title": v.title, "height": f"{v.height:g}", "backdrop": drawing(v.backdrop)} for v in film.views],
        "data": {
            "steps": episode.steps,
            "frames": frames,
            "frameSteps": episode.frame_steps,
            "exec": film.exec_horizon,
            "views": [_view_data(film, view) for view in film.views],
        },
    }


def _view_data(film: Film, view: View) -> dict[str, Any]:
    return {
        "movers": [
            {
                "css": mover.css,
                "shape": mover.shape,
                "trail": mover.trail,
                "track": [[round(float(x), 1) for x in row] for row in mover.track],
            }
            for mover in view.movers
        ],
        "fans": [
            {
                "step": fan.step,
                "index": fan.index,
                "modes": mode_class(fan),
                # whole SVG units are finer than a screen pixel here, and half the bytes
                "curves": np.rint(film.curves(view, fan)).astype(int).reshape(len(fan.candidates), -1).tolist(),
            }
            for fan in film.episode.fans
        ],
    }


def _path(points: Float) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _placed(css: str, shape: str, at: Float) -> str:
    return f'<g class="mover {css}" transform="translate({at[0]:.1f} {at[1]:.1f}) rotate({at[2]:.1f})">{shape}</g>'
