"""How Push-T and MetaWorld are drawn in a report: recorded states -> flat views (prism.report.player.Scene)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from prism.report.player import SIZE, Float, Mover, View, points_text

from prism_sims import pusht_features

_METAWORLD_STEP = 0.01  # metres a unit of action displaces the hand by


class PushTScene:
    def views(self, states: Float, everything: Sequence[Float]) -> tuple[View, ...]:
        return (_pusht_view(states),)

    def future(self, state: Float, candidates: Float) -> Float:
        start = np.broadcast_to(state[:2], (len(candidates), 1, 2))
        return np.concatenate([start, candidates], axis=1)


class MetaWorldScene:
    def views(self, states: Float, everything: Sequence[Float]) -> tuple[View, ...]:
        frame = np.concatenate([_metaworld_points(one).reshape(-1, 3) for one in everything])
        return (
            _metaworld_view("From above", (0, 1), states, frame),
            _metaworld_view("From the side", (1, 2), states, frame),
        )

    def future(self, state: Float, candidates: Float) -> Float:
        start = np.broadcast_to(state[:3], (len(candidates), 1, 3))
        steps = np.cumsum(np.clip(candidates[..., :3], -1, 1) * _METAWORLD_STEP, axis=1)
        return np.concatenate([start, start + steps], axis=1)


def _pusht_view(states: Float) -> View:
    scale = SIZE / pusht_features.SIZE
    outline = pusht_features.CORNERS * scale
    goal = np.asarray(pusht_features.keypoints(pusht_features.GOAL) * scale, dtype=np.float64)
    block = np.column_stack([states[:, 2:4] * scale, np.degrees(states[:, 4])])
    agent = np.column_stack([states[:, :2] * scale, np.zeros(len(states))])
    return View(
        title="Seen from above",
        height=SIZE,
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
    scale = SIZE / width
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
        backdrop = f'<line class="table" x1="0" x2="{SIZE:.0f}" y1="{table:.1f}" y2="{table:.1f}"/>' + backdrop
    return View(title, view.height, backdrop, movers, axes, low, scale)
