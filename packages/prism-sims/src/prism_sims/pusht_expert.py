"""An expert for Push-T that knows the simulator, solves the task, and goes round the block either way.

It thinks in pushes: a place on the T's outline and a depth. The disc slides on the T without friction and the T
stops when it is not pushed, so a push obeys a small law (see `push_poses`), cheap enough to search sequences of
three pushes over every place and depth. The first push of the best sequence, with the walk to it, is rehearsed in
a copy of the simulator at several depths; the best rehearsal is played, then everything is planned again.

Demonstrations of the same start differ: a coin, drawn from the seed, decides on which side of the T's axis the
expert would rather push and which way round it walks, unless that costs too much.

Walks are planned in the T's own frame (origin at the middle of the bar's outer edge, v along the stem), in pixels. The
T's centre of mass is nearly the centre of its circumscribed circle, so a circle about it is the ring road: leave along
a face's normal, follow the ring either way, come in along the other face's normal.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_sims.pusht import AREA, SUCCESS_COVERAGE, PushTEnv, PushTPhysics
from prism_sims.pusht_features import CORNERS, GOAL, SIZE, keypoints

Array = NDArray[np.float64]
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
    for start, normal, low, high in (
        ((-60.0, 0.0), (0.0, -1.0), 4.0, 116.0),  # outer edge of the bar
        ((60.0, 0.0), (1.0, 0.0), 4.0, 26.0),  # ends of the bar
        ((-60.0, 0.0), (-1.0, 0.0), 4.0, 26.0),
        ((15.0, 30.0), (0.0, 1.0), 18.0, 41.0),  # inner edges of the bar
        ((-60.0, 30.0), (0.0, 1.0), 4.0, 27.0),
        ((15.0, 30.0), (1.0, 0.0), 18.0, 86.0),  # sides of the stem
        ((-15.0, 30.0), (-1.0, 0.0), 18.0, 86.0),
        ((-15.0, 120.0), (0.0, 1.0), 4.0, 26.0),  # end of the stem
    ):
        along = (1.0, 0.0) if normal[0] == 0.0 else (0.0, 1.0)
        count = max(2, round((high - low) / spacing) + 1)
        steps = np.linspace(low, high, count)
        found += [Contact((start[0] + s * along[0], start[1] + s * along[1]), normal) for s in steps]
    return tuple(found)


def outline(spacing: float) -> tuple[Array, Array]:
    """Middles of pieces of the outline, `spacing` long, and unit normals there, (N, 2) each."""
    points, normals = [], []
    for corner, edge in zip(CORNERS, _EDGE, strict=True):
        length = float(np.hypot(*edge))
        count = max(1, round(length / spacing))
        points.append(corner + (np.arange(count)[:, None] + 0.5) / count * edge)
        normals.append(np.tile((edge[1] / length, -edge[0] / length), (count, 1)))
    return np.concatenate(points), np.concatenate(normals)


def distance_to_outline(points: Array) -> Array:
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
    (x, y), (dx, dy) = start, (start[0] - CENTRE[0], start[1] - CENTRE[1])
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


def _bearing(point: Point) -> float:
    return math.atan2(point[1] - CENTRE[1], point[0] - CENTRE[0])


def _arc(start: Point, end: Point, turn: int) -> list[Point]:
    """Points on the ring from one bearing to another, counter-clockwise for turn = 1."""
    a = _bearing(start)
    angle = (turn * (_bearing(end) - a)) % (2 * math.pi)
    pieces = max(1, math.ceil(angle / 0.35))
    steps = (a + turn * angle * i / pieces for i in range(pieces + 1))
    return [(CENTRE[0] + RING * math.cos(s), CENTRE[1] + RING * math.sin(s)) for s in steps]


def route(start: Point, contact: Contact, gap: float, turn: int) -> list[Point] | None:
    """Way points from `start` to where the disc stands before a push, round the T in the direction `turn`
    (0: straight, or None if the T is in the way)."""
    end = contact.stand(gap)
    if turn == 0:
        return [start, end] if is_free(start, end, min(CLEARANCE, gap)) else None
    out, gate = _way_out(start), contact.on_ring()
    points = [start, *out, *_arc(out[-1] if out else start, gate, turn), gate, end]
    return _shortcut(points, min(CLEARANCE, gap))


def _shortcut(points: list[Point], margin: float) -> list[Point]:
    """Leave out way points that a straight line can skip, never more than a third of the ring at once: the way
    round stays the way round."""
    kept, i = [points[0]], 0
    while i < len(points) - 1:
        j = i + 1
        for candidate in range(i + 2, len(points)):
            turned = (_bearing(points[candidate]) - _bearing(points[i]) + math.pi) % (2 * math.pi) - math.pi
            if abs(turned) > 2.0:
                break
            if is_free(points[i], points[candidate], margin):
                j = candidate
        kept.append(points[j])
        i = j
    return kept


def path_length(points: list[Point]) -> float:
    return sum(math.dist(a, b) for a, b in itertools.pairwise(points))


def resample(points: list[Point], spacing: float) -> Array:
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


# -- the expert


WALK_SPEED, PUSH_SPEED = 18.0, 9.0  # pixels a step, of the target; people reach 20
GAP = 6.0  # from the block, where a walk ends and a push begins
SPACING = 11.0  # between the places where it considers pushing
DEPTH_STEP, MAX_DEPTH = 2.0, 104.0
BEAM = 40  # sequences kept while searching
PUSHES = 3  # looked ahead
TASTE = 8.0  # steps that it spends rather than push on the side it does not like
DETOUR = 230.0  # pixels that it walks further to go round its own way
WHIM = 1.5  # steps, scale of the random part of every choice
_INERTIA = 3000.0  # of the block, whose mass is 1
_MARGIN = 6.0  # of the square, where no target is put
_WALL = 12.0  # of the square, where no push may bring the T
_HULL = ((-60.0, 0.0), (60.0, 0.0), (60.0, 30.0), (15.0, 120.0), (-15.0, 120.0), (-60.0, 30.0))
_FIXED_STEPS = 4.0  # what every push costs besides its length
# Deliberately more than it takes: with a modest guess, tiny pushes that settle nothing look cheapest.
_LAST_STEPS, _STEPS_PER_RADIAN, _STEPS_PER_PIXEL = 15.0, 70.0, 0.7
_BINS = (0.0, 9.0, 25.0, 50.0)  # depths: each is worth a try


def _turn(angle: Array, vectors: Array) -> Array:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * vectors[..., 0] - sin * vectors[..., 1], sin * vectors[..., 0] + cos * vectors[..., 1]], -1)


_GOAL_CENTRE = GOAL[:2] + _turn(GOAL[2:3], np.asarray(CENTRE)[None])[0]


# For `uncovered`
_RIM_SPACING = 7.5  # divides the length of every edge
_RIM, _NORMALS = outline(_RIM_SPACING)
_GOAL_RIM = GOAL[:2] + _turn(GOAL[2:3], _RIM)
_GOAL_NORMALS = _turn(GOAL[2:3], _NORMALS)


def _remaining(poses: Array) -> tuple[Array, Array]:
    """Angle and distance of the centre of mass from the goal."""
    turn = np.abs((poses[..., 2] - GOAL[2] + np.pi) % (2 * np.pi) - np.pi)
    centre = poses[..., :2] + _turn(poses[..., 2], np.asarray(CENTRE))
    return turn, np.linalg.norm(centre - _GOAL_CENTRE, axis=-1)


def uncovered(poses: Array) -> Array:
    """Share of the goal that a T near it leaves free, to first order: half the integral of |displacement along the
    normal| over the outline, divided by the area, (N, 3) -> (N,)."""
    cos, sin = np.cos(poses[:, 2:3]), np.sin(poses[:, 2:3])
    x = poses[:, 0:1] + cos * _RIM[:, 0] - sin * _RIM[:, 1] - _GOAL_RIM[:, 0]
    y = poses[:, 1:2] + sin * _RIM[:, 0] + cos * _RIM[:, 1] - _GOAL_RIM[:, 1]
    return np.asarray(0.5 * _RIM_SPACING * np.abs(x * _GOAL_NORMALS[:, 0] + y * _GOAL_NORMALS[:, 1]).sum(-1) / AREA)


def push_poses(poses: Array, places: tuple[Contact, ...], step: float, count: int) -> tuple[Array, NDArray[np.bool_]]:
    """Where straight pushes take the T: (P, 3) -> poses (P, C, count, 3) after every `step` pixels of push against
    the normal at each place, and whether the disc is still on that face, (P, C, count).

    Contact without friction, block without memory: if the disc advances by u along the inward normal n at lever r
    from the centre of mass, the impulse is j = u / (1 + (r x n)^2 / I), the T moves by j n and turns by j (r x n) / I.
    """
    point = np.array([place.point for place in places])  # (C, 2), in the T's frame
    normal = np.array([place.normal for place in places])
    low, high = _face_bounds(places)
    tangent = np.stack([-normal[:, 1], normal[:, 0]], -1)
    offset = (point * normal).sum(-1)  # of the face's line
    theta = np.repeat(poses[:, 2:3], len(places), axis=1)  # (P, C)
    centre = poses[:, None, :2] + _turn(theta, np.asarray(CENTRE))  # (P, C, 2)
    lever0 = point - np.asarray(CENTRE)
    disc = centre + _turn(theta, lever0 + RADIUS * normal)  # (P, C, 2)
    heading = _turn(theta, -normal)  # fixed while the block turns
    on_face = np.ones(theta.shape, dtype=np.bool_)
    out, valid = np.empty((*theta.shape, count, 3)), np.empty((*theta.shape, count), dtype=np.bool_)
    for k in range(count):
        disc = disc + step * heading
        local = _turn(-theta, disc - centre) + np.asarray(CENTRE)
        along = (local * tangent).sum(-1)
        on_face = on_face & (along > low) & (along < high)
        depth = np.maximum(offset + RADIUS - (local * normal).sum(-1), 0.0)
        touch = local - (local * normal).sum(-1, keepdims=True) * normal + offset[:, None] * normal
        arm = touch - np.asarray(CENTRE)
        cross = -(arm[..., 0] * normal[:, 1] - arm[..., 1] * normal[:, 0])  # r x inward normal
        impulse = depth / (1.0 + cross * cross / _INERTIA)
        centre = centre + impulse[..., None] * _turn(theta, -normal)
        theta = theta + impulse * cross / _INERTIA
        out[..., k, :2] = centre - _turn(theta, np.asarray(CENTRE))
        out[..., k, 2] = theta
        valid[..., k] = on_face
    return out, valid


def _face_bounds(places: tuple[Contact, ...]) -> tuple[Array, Array]:
    """For each place, how far along the face (tangent coordinate) the disc may slide."""
    low, high = [], []
    for place in places:
        (px, py), (nx, ny) = place.point, place.normal
        on_line = np.abs((CORNERS - (px, py)) @ (nx, ny)) < 1e-6
        along = CORNERS @ (-ny, nx)
        here = px * -ny + py * nx
        below, above = along[on_line & (along <= here)], along[on_line & (along >= here)]
        low.append(below.max())
        high.append(above.min())
    return np.array(low), np.array(high)


class PushTExpert:
    """Plans and plays pushes in `env`; everything random comes from the seed given to reset."""

    def __init__(self, env: PushTEnv) -> None:
        self._env = env
        self._model = PushTPhysics()
        self._places = contacts(SPACING)
        self._stands = np.array([place.stand(GAP) for place in self._places])
        gates = np.array([place.on_ring() for place in self._places])
        self._gate_angles = np.arctan2(gates[:, 1] - CENTRE[1], gates[:, 0] - CENTRE[0])
        self._way_in = np.linalg.norm(gates - self._stands, axis=-1)
        self._travel = self._travel_steps()
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 7])
        self.side = 1 if self._rng.random() < 0.5 else -1
        self._targets: deque[Array] = deque()
        self._first = True

    def act(self) -> NDArray[np.float32]:
        if not self._targets:
            self._targets.extend(self._plan())
            self._first = False
        return self._targets.popleft().astype(np.float32)

    # ---- search

    def _plan(self) -> list[Array]:
        state, velocity = self._env.state(), self._env.physics.velocity
        for place, depth, aim in self._sequences(state):
            if played := self._rehearse(state, velocity, self._places[place], depth, aim):
                return played
        return [np.clip(state[:2] + self._rng.normal(0.0, 40.0, 2), _MARGIN, SIZE - _MARGIN)]  # boxed in: shake free

    def _sequences(self, state: Array) -> list[tuple[int, float, Array]]:
        """First pushes (place, depth, pose aimed at) of the best sequences, best first."""
        count = int(MAX_DEPTH / DEPTH_STEP)
        depths: Array = DEPTH_STEP * np.arange(1, count + 1, dtype=np.float64)
        push_steps = depths / PUSH_SPEED + _FIXED_STEPS  # (count,)
        poses = state[None, 2:5]
        cost = np.zeros(1)
        start: NDArray[np.int64] | None = None  # (P,) index of the first push
        travel = self._approach_steps(state)[None]  # (P, C)
        firsts: list[tuple[int, float, Array]] = []
        best: dict[int, float] = {}
        for level in range(PUSHES):
            after, valid = push_poses(poses, self._places, DEPTH_STEP, count)
            stands = poses[:, None, :2] + _turn(poses[:, 2:3], self._stands)  # room for the disc where a push begins
            valid &= ((stands > _MARGIN) & (stands < SIZE - _MARGIN)).all(-1, keepdims=True)
            valid &= self._inside(after)
            price = cost[:, None, None] + travel[:, :, None] + push_steps
            if level == 0:
                liked = np.array([np.sign(place.point[0]) * self.side >= 0 for place in self._places])
                price = price + np.where(liked, 0.0, TASTE)[:, None]
                price = price + self._rng.gumbel(0.0, WHIM, len(self._places))[:, None]
            turn, distance = _remaining(after)
            to_go = _LAST_STEPS + _STEPS_PER_RADIAN * turn + _STEPS_PER_PIXEL * distance
            total = np.where(valid, price + to_go, np.inf)
            # poses that solve the task cost nothing more; coverage is worth computing only near the goal
            near = (distance < 4.0) & (turn < 0.08) & valid
            solved = uncovered(after[near]) < 1.0 - SUCCESS_COVERAGE - 0.003
            total[near] = np.where(solved, price[near], total[near])
            chosen = _best_per_bin(total, depths)[:BEAM]
            if not len(chosen):
                break
            p, c, k = np.unravel_index(chosen, total.shape)
            if level == 0:
                firsts = [(int(b), float(depths[d]), after[a, b, d]) for a, b, d in zip(p, c, k, strict=True)]
                start = np.arange(len(chosen))
            else:
                assert start is not None
                start = start[p]
            for origin, value in zip(start, total[p, c, k], strict=True):
                best[int(origin)] = min(best.get(int(origin), math.inf), float(value))
            poses, cost, travel = after[p, c, k], price[p, c, k], self._travel[c]
        return [firsts[i] for i in sorted(best, key=lambda i: best[i])]

    @staticmethod
    def _inside(poses: Array) -> NDArray[np.bool_]:
        """Whether the T stays clear of the walls."""
        x, y, cos, sin = poses[..., 0], poses[..., 1], np.cos(poses[..., 2]), np.sin(poses[..., 2])
        clear = np.ones(x.shape, dtype=np.bool_)
        for u, v in _HULL:
            across, down = x + (u * cos - v * sin), y + (u * sin + v * cos)
            clear &= (across > _WALL) & (across < SIZE - _WALL) & (down > _WALL) & (down < SIZE - _WALL)
        return clear

    def _approach_steps(self, state: Array) -> Array:
        """Steps from where the disc is to each place, (C,); round its own way on the first walk."""
        x, y = _to_local(state, state[:2])
        here = _bearing((x, y))
        out = abs(math.dist((x, y), CENTRE) - RING)
        angle = self._gate_angles - here
        ways = {turn: RING * ((turn * angle) % (2 * np.pi)) for turn in (1, -1)}
        around = np.minimum(ways[1], ways[-1])
        if self._first:
            mine, other = ways[self.side], ways[-self.side]
            around = np.where(mine - other < DETOUR, mine, other)
        straight = np.linalg.norm(self._stands - (x, y), axis=-1)
        nearby = (straight < 50.0) & (not self._first)
        return np.asarray(np.where(nearby, straight, 0.8 * (out + around) + self._way_in) / WALK_SPEED)

    def _route(self, agent: Point, place: Contact) -> list[Point] | None:
        """The way to a place: the shortest one, but on the first walk of an episode its own way round."""
        ways = {turn: route(agent, place, GAP, turn) for turn in (0, 1, -1)}
        lengths = {turn: path_length(way) for turn, way in ways.items() if way is not None}
        if self._first:
            lengths[self.side] -= DETOUR
        return ways[min(lengths, key=lambda turn: lengths[turn])]

    def _travel_steps(self) -> Array:
        """Steps from the end of one push to the start of another, (C, C): straight on one face, else out, round, in."""
        between = np.abs((self._gate_angles[:, None] - self._gate_angles + np.pi) % (2 * np.pi) - np.pi)
        around = 0.8 * (self._way_in[:, None] + self._way_in) + 0.9 * RING * between  # short cuts save a little
        straight = np.linalg.norm(self._stands[:, None] - self._stands, axis=-1)
        normals = np.array([place.normal for place in self._places])
        same = (np.abs(normals[:, None] - normals).max(-1) < 1e-9) & (straight < 60.0)
        return np.asarray(np.where(same, straight, around) / WALK_SPEED)

    # ---- rehearsal

    def _rehearse(
        self, state: Array, velocity: tuple[float, float], place: Contact, depth: float, aim: Array
    ) -> list[Array]:
        """Targets for the walk and the push; the depth that comes nearest to the pose aimed at. Empty: do not."""
        way = self._route(_to_local(state, state[:2]), place)
        if way is None:
            return []
        best: list[Array] = []
        best_value = math.inf
        for slow in (1.0, 0.6):
            walk = [_to_world(state, p) for p in resample(way, slow * WALK_SPEED)]
            walk = [np.clip(t, _MARGIN, SIZE - _MARGIN) for t in walk]
            self._model.jump(state, velocity)
            for target in walk:
                self._model.step(*target)
            moved = np.abs(self._model.state()[2:4] - state[2:4]).max()
            if moved < 2.0:
                break
        else:
            return []
        arrived, speed = self._model.state(), self._model.velocity
        inward = -_turn(state[4:5], np.asarray(place.normal))[0]
        begin = _to_world(state, np.asarray(place.stand(GAP)))
        for extra in (-4.5, -3.0, -1.5, 0.0, 1.5, 3.0, 4.5):
            if depth + extra <= 0.5:
                continue
            depths = _profile(GAP + depth + extra, PUSH_SPEED)
            push = [np.clip(begin + d * inward, 0.0, SIZE) for d in depths]
            self._model.jump(arrived, speed)
            covered = 0.0
            for target in push:
                self._model.step(*target)
                covered = max(covered, self._model.coverage())
                if covered > SUCCESS_COVERAGE:
                    break
            pose = self._model.state()[2:5]
            value = float(np.linalg.norm(keypoints(pose) - keypoints(aim), axis=-1).mean())
            if covered > SUCCESS_COVERAGE:
                value = -1.0
            if value < best_value:
                best, best_value = walk + push, value
        return best


def _profile(distance: float, speed: float) -> list[float]:
    """Positions of the target along a push: constant speed, then slower, then at rest until the disc has arrived."""
    tail = [0.55 * speed, 0.3 * speed, 0.15 * speed]
    cruise = max(distance - sum(tail), 0.0)
    steps = [speed] * int(cruise // speed)
    if cruise % speed > 1e-9:
        steps.insert(0, cruise % speed)
    if distance < sum(tail):
        tail = [distance * t / sum(tail) for t in tail]
    return [float(d) for d in np.cumsum(steps + tail)] + [distance] * 2


def _best_per_bin(total: Array, depths: Array) -> NDArray[np.int64]:
    """Flat indices into total (P, C, K) of the best depth of each bin of each place, best first."""
    found = []
    for low, high in zip(_BINS, (*_BINS[1:], np.inf), strict=True):
        inside = np.flatnonzero((depths > low) & (depths <= high))
        if len(inside):
            best = inside[0] + total[..., inside].argmin(-1)  # (P, C)
            found.append(np.ravel_multi_index((*np.indices(best.shape), best), total.shape).ravel())
    index = np.concatenate(found)
    index = index[np.isfinite(total.flat[index])]
    return index[np.argsort(total.flat[index], kind="stable")]


def _to_local(state: Array, point: Array) -> Point:
    local = _turn(-state[4:5], (point - state[2:4])[None])[0]
    return float(local[0]), float(local[1])


def _to_world(state: Array, point: Array) -> Array:
    return np.asarray(state[2:4] + _turn(state[4:5], np.asarray(point)[None])[0])
