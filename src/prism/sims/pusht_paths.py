"""Ways round the T for a disc: where it can push, and how it gets there without touching.

Everything is in the T's own frame (origin at the middle of the bar's outer edge, v along the stem), in pixels.
The T's centre of mass is nearly the centre of its circumscribed circle, so a circle about it is the ring road:
leave along a face's normal, follow the ring either way, come in along the other face's normal.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.sims.pusht_features import CORNERS

Point = tuple[float, float]

RADIUS = 15.0  # of the disc
CENTRE: Point = (0.0, 45.0)  # of mass
RING = 103.0  # all of the T within 77 of the centre, the disc's radius, and room
CLEARANCE = 4.0  # kept while walking
_EDGE = np.roll(CORNERS, -1, axis=0) - CORNERS  # (8, 2)
_EDGE_SQUARED = (_EDGE * _EDGE).sum(-1)


@dataclass(frozen=True)
class Contact:
    """A place on the outline and the outward normal there."""

    point: Point
    normal: Point

    def stand(self, gap: float) -> Point:
        """Centre of a disc that is `gap` from touching."""
        reach = RADIUS + gap
        return self.point[0] + reach * self.normal[0], self.point[1] + reach * self.normal[1]

    def on_ring(self) -> Point:
        """Where the line out along the normal meets the ring."""
        (px, py), (nx, ny) = self.stand(0.0), self.normal
        dx, dy = px - CENTRE[0], py - CENTRE[1]
        along = dx * nx + dy * ny
        out = -along + math.sqrt(max(along * along + RING * RING - dx * dx - dy * dy, 0.0))
        return px + out * nx, py + out * ny


def contacts(spacing: float) -> tuple[Contact, ...]:
    """Places to push, about `spacing` apart; in the two inner corners the disc needs room on both sides."""
    found = []
    for start, normal, length, low, high in (
        ((-60.0, 0.0), (0.0, -1.0), 120.0, 4.0, 116.0),  # outer edge of the bar
        ((60.0, 0.0), (1.0, 0.0), 30.0, 4.0, 26.0),  # ends of the bar
        ((-60.0, 0.0), (-1.0, 0.0), 30.0, 4.0, 26.0),
        ((15.0, 30.0), (0.0, 1.0), 45.0, 18.0, 41.0),  # inner edges of the bar
        ((-60.0, 30.0), (0.0, 1.0), 45.0, 4.0, 27.0),
        ((15.0, 30.0), (1.0, 0.0), 90.0, 18.0, 86.0),  # sides of the stem
        ((-15.0, 30.0), (-1.0, 0.0), 90.0, 18.0, 86.0),
        ((-15.0, 120.0), (0.0, 1.0), 30.0, 4.0, 26.0),  # end of the stem
    ):
        along = (1.0, 0.0) if normal[0] == 0.0 else (0.0, 1.0)
        count = max(2, round((high - low) / spacing) + 1)
        assert high <= length
        found += [
            Contact((start[0] + s * along[0], start[1] + s * along[1]), normal) for s in np.linspace(low, high, count)
        ]
    return tuple(found)


def outline(spacing: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Middles of pieces of the outline, `spacing` long, and unit normals there, (N, 2) each."""
    points, normals = [], []
    for corner, edge in zip(CORNERS, _EDGE, strict=True):
        length = float(np.hypot(*edge))
        count = max(1, round(length / spacing))
        points.append(corner + (np.arange(count)[:, None] + 0.5) / count * edge)
        normals.append(np.tile((edge[1] / length, -edge[0] / length), (count, 1)))
    return np.concatenate(points), np.concatenate(normals)


def distance_to_outline(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """From points to the T, negative inside, (..., 2) -> (...)."""
    offset = points[..., None, :] - CORNERS  # (..., 8, 2)
    along = np.clip((offset * _EDGE).sum(-1) / _EDGE_SQUARED, 0.0, 1.0)
    best = np.linalg.norm(offset - along[..., None] * _EDGE, axis=-1).min(-1)
    x, y = np.abs(points[..., 0]), points[..., 1]
    inside = ((x < 60) & (y > 0) & (y < 30)) | ((x < 15) & (y >= 30) & (y < 120))
    return np.asarray(np.where(inside, -best, best))


def is_free(a: Point, b: Point, margin: float) -> bool:
    """Whether a disc, grown by `margin`, can go straight from a to b. Where it starts or ends nearer than that, it
    may, as long as it does not get nearer still."""
    pieces = max(1, math.ceil(math.dist(a, b) / 6.0))
    points = np.linspace(a, b, pieces + 1)
    distance = distance_to_outline(points)
    return bool((distance >= min(RADIUS + margin, distance[0], distance[-1]) - 0.5).all())


def _way_out(start: Point) -> list[Point]:
    """Points that lead from somewhere near the T to the ring."""
    x, y = start
    dx, dy = x - CENTRE[0], y - CENTRE[1]
    distance = math.hypot(dx, dy)
    if distance >= RING:
        return []
    if abs(x) > 15 and 30 < y < 120 and abs(x) < 75:  # beside the stem: sideways or along it, whichever is free
        side = math.copysign(1.0, x)
        aside = (side * math.sqrt(max(RING**2 - dy * dy, 0.0)), y)
        if y < 30 + RADIUS + CLEARANCE and abs(x) < 60 + RADIUS:
            lift = 30 + RADIUS + CLEARANCE + 2
            return [(x, lift), (side * math.sqrt(max(RING**2 - (lift - CENTRE[1]) ** 2, 0.0)), lift)]
        return [aside]
    if distance < 1e-6:
        return [(CENTRE[0], CENTRE[1] + RING)]
    return [(CENTRE[0] + RING * dx / distance, CENTRE[1] + RING * dy / distance)]


def _arc(start: Point, end: Point, turn: int) -> tuple[list[Point], float]:
    """Points on the ring from one angle to another, counter-clockwise for turn = 1; and the angle travelled."""
    a = math.atan2(start[1] - CENTRE[1], start[0] - CENTRE[0])
    b = math.atan2(end[1] - CENTRE[1], end[0] - CENTRE[0])
    angle = (turn * (b - a)) % (2 * math.pi)
    pieces = max(1, math.ceil(angle / 0.35))
    steps = (a + turn * angle * i / pieces for i in range(pieces + 1))
    return [(CENTRE[0] + RING * math.cos(s), CENTRE[1] + RING * math.sin(s)) for s in steps], angle


def route(start: Point, contact: Contact, gap: float, turn: int) -> list[Point] | None:
    """Way points from `start` to where the disc stands before a push, round the T in the direction `turn`
    (0: straight, or None if the T is in the way)."""
    end = contact.stand(gap)
    if turn == 0:
        return [start, end] if is_free(start, end, min(CLEARANCE, gap)) else None
    out = _way_out(start)
    gate = contact.on_ring()
    arc, _ = _arc(out[-1] if out else start, gate, turn)
    points = [start, *out, *arc, gate, end]
    return _shortcut(points, min(CLEARANCE, gap))


def _shortcut(points: list[Point], margin: float) -> list[Point]:
    """Leave out way points that a straight line can skip, never more than a third of the ring at once: the way
    round stays the way round."""
    kept = [points[0]]
    i = 0
    while i < len(points) - 1:
        j = i + 1
        for candidate in range(i + 2, len(points)):
            if abs(_angle(points[i], points[candidate])) > 2.0:
                break
            if is_free(points[i], points[candidate], margin):
                j = candidate
        kept.append(points[j])
        i = j
    return kept


def _angle(a: Point, b: Point) -> float:
    """Angle at the centre between two points, in (-pi, pi]."""
    first = math.atan2(a[1] - CENTRE[1], a[0] - CENTRE[0])
    second = math.atan2(b[1] - CENTRE[1], b[0] - CENTRE[0])
    return (second - first + math.pi) % (2 * math.pi) - math.pi


def length(points: list[Point]) -> float:
    return sum(math.dist(a, b) for a, b in itertools.pairwise(points))


def resample(points: list[Point], spacing: float) -> NDArray[np.float64]:
    """Points `spacing` apart along the polyline, the last one included, (N, 2)."""
    corners = np.asarray(points, dtype=np.float64)
    lengths = np.linalg.norm(np.diff(corners, axis=0), axis=1)
    total = float(lengths.sum())
    if total < 1e-9:
        return corners[-1:]
    at = np.concatenate([[0.0], np.cumsum(lengths)])
    count = max(1, math.ceil(total / spacing))
    wanted = np.linspace(0.0, total, count + 1)[1:]
    return np.stack([np.interp(wanted, at, corners[:, axis]) for axis in (0, 1)], axis=1)
