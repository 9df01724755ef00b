"""Where things are, drawn flat: the views of a task's world, what moves in them, and where candidates would lead.

No renderer is needed: the simulator's recorded states are enough. Push-T and MetaWorld have scenes; other tasks have
no views here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.sims import pusht_features

Float = NDArray[np.float64]
_SIZE = 400.0  # width of a view, in SVG units
_METAWORLD_STEP = 0.01  # metres a unit of action displaces the hand by


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


def views(task: str, states: Float, everything: Sequence[Float]) -> tuple[View, ...]:
    """The views of one episode (T + 1, S). `everything` (states of all episodes shown) sets a common frame."""
    if task.startswith("pusht"):
        return (_pusht_view(states),)
    if task.startswith("metaworld-") and states.shape[1] == 39:
        frame = np.concatenate([_metaworld_points(one).reshape(-1, 3) for one in everything])
        return (
            _metaworld_view("From above", (0, 1), states, frame),
            _metaworld_view("From the side", (1, 2), states, frame),
        )
    return ()


def future(task: str, state: Float, candidates: Float) -> Float:
    """Where each candidate (K, Tp, Da) would take the robot from here, in world coordinates, (K, Tp + 1, D)."""
    if task.startswith("pusht"):
        start = np.broadcast_to(state[:2], (len(candidates), 1, 2))
        return np.concatenate([start, candidates], axis=1)
    start = np.broadcast_to(state[:3], (len(candidates), 1, 3))
    steps = np.cumsum(np.clip(candidates[..., :3], -1, 1) * _METAWORLD_STEP, axis=1)
    return np.concatenate([start, start + steps], axis=1)


def _pusht_view(states: Float) -> View:
    scale = _SIZE / pusht_features.SIZE
    outline = pusht_features.CORNERS * scale
    goal = np.asarray(pusht_features.keypoints(pusht_features.GOAL) * scale, dtype=np.float64)
    block = np.column_stack([states[:, 2:4] * scale, np.degrees(states[:, 4])])
    agent = np.column_stack([states[:, :2] * scale, np.zeros(len(states))])
    return View(
        title="Seen from above",
        height=_SIZE,
        backdrop=f'<polygon class="goal" points="{points_text(goal)}"/>',
        movers=(
            Mover("object", f'<polygon points="{points_text(outline)}"/>', block, trail=False),
            Mover("hand", f'<circle r="{15 * scale:.1f}"/>', agent, trail=True),
        ),
        axes=(0, 1),
        low=np.zeros(2),
        scale=scale,
        down=True,
    )


def _metaworld_points(states: Float) -> Float:
    """Hand, object, second object (the hand again where there is none) and goal, (T, 4, 3)."""
    second = states[:, 11:14] if np.abs(states[:, 11:14]).max() > 1e-6 else states[:, 0:3]
    return np.stack([states[:, 0:3], states[:, 4:7], second, states[:, 36:39]], axis=1)


def _metaworld_view(title: str, axes: tuple[int, int], states: Float, frame: Float) -> View:
    low, high = frame[:, axes].min(axis=0) - 0.06, frame[:, axes].max(axis=0) + 0.06
    if axes[1] == 2:
        low[1] = min(low[1], -0.03)  # the table, at z = 0, is part of the picture
    span = high - low
    width = max(span[0], span[1] / 0.75)  # 4:3, as the simulator's pictures
    height = 0.75 * width
    low = (low + high) / 2 - np.array([width, height]) / 2
    if axes[1] == 2:
        low[1] = min(low[1], -0.03)
    scale = _SIZE / width
    view = View(title, round(height * scale), "", (), axes, low, scale)

    points = view.project(_metaworld_points(states))  # (T, 4, 2)
    still = np.zeros(len(states))
    names = [("object", '<rect x="-7" y="-7" width="14" height="14" rx="3"/>', 1)]
    if np.abs(states[:, 11:14]).max() > 1e-6:
        names.append(("object two", '<rect x="-6" y="-6" width="12" height="12" rx="6"/>', 2))
    names.append(("hand", '<circle r="7"/>', 0))
    movers = tuple(
        Mover(css, shape, np.column_stack([points[:, index], still]), trail=True) for css, shape, index in names
    )
    x, y = points[0, 3]
    backdrop = f'<g class="goal" transform="translate({x:.1f} {y:.1f})"><circle r="11"/><path d="M-5 0H5M0-5V5"/></g>'
    if axes[1] == 2:
        table = view.project(np.zeros(3))[1]
        backdrop = f'<line class="table" x1="0" x2="{_SIZE:.0f}" y1="{table:.1f}" y2="{table:.1f}"/>' + backdrop
    return View(title, view.height, backdrop, movers, axes, low, scale)


def points_text(points: Float) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
