"""Push-T: push the T onto its outline with a disc. Three variants of the same world: state, keypoints, pixels; and
`pusht-edge`, the state variant from starts that are ambiguous.

Protocol: 300 steps at 10 Hz, action = target position of the disc in [0, 512]^2, score = min(1, coverage / 0.95),
success (and end) at coverage > 0.95. Evaluation seeds are 100000 + i, their starts gym-pusht's (PushTPhysics.reset).

The world is gym-pusht's own bodies in pymunk, stepped without its Python overhead. Same constants, same order of
floating-point operations, so the same trajectory bit for bit; only what costs time and changes nothing is left out
(numpy on pairs of numbers, a callback that counts contacts, shapely polygons rebuilt every step). Tests compare both.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prism.data.episodes import EpisodeSource
from prism.errors import PrismError
from prism.sensors import SensorSpec
from prism.sims.environment import Array, Simulation

from prism_sims.pusht_features import GOAL, IMAGE_SIZE, SIZE, VARIANTS, Variant, features, sensor_specs

Float = NDArray[np.float64]

SUCCESS_COVERAGE = 0.95
_SUBSTEPS, _DT, _KP, _KV = 10, 0.01, 100.0, 20.0
_BAR = (-60.0, 0.0, 60.0, 30.0)  # left, low, right, high, in the T's own frame
_STEM = (-15.0, 30.0, 15.0, 120.0)
AREA = 120.0 * 30.0 + 30.0 * 90.0
_DOUBT = 1e-9  # coverage this near to the threshold is decided by gym-pusht's own formula


def _gym() -> Any:
    """A gym-pusht environment, imported without a window, a sound device or a banner."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", UserWarning)  # pygame's use of pkg_resources
            from gym_pusht.envs.pusht import PushTEnv
    except ImportError as error:
        raise PrismError(f"gym-pusht is not installed ({error.name}): pip install 'prism-policy[sims]'") from error
    return PushTEnv()


def _clipped_area(corners: list[tuple[float, float]], box: tuple[float, float, float, float]) -> float:
    """Area of a convex polygon inside an axis-aligned box: cut off one side after the other, then the shoelace sum."""
    left, low, right, high = box
    for axis, limit, sign in ((0, left, 1.0), (0, right, -1.0), (1, low, 1.0), (1, high, -1.0)):
        kept: list[tuple[float, float]] = []
        previous = corners[-1]
        before = sign * (previous[axis] - limit)
        for corner in corners:
            here = sign * (corner[axis] - limit)
            if (here >= 0.0) != (before >= 0.0):
                t = before / (before - here)
                kept.append((previous[0] + t * (corner[0] - previous[0]), previous[1] + t * (corner[1] - previous[1])))
            if here >= 0.0:
                kept.append(corner)
            previous, before = corner, here
        if len(kept) < 3:
            return 0.0
        corners = kept
    twice = 0.0
    x0, y0 = corners[-1]
    for x1, y1 in corners:
        twice += x0 * y1 - x1 * y0
        x0, y0 = x1, y1
    return abs(twice) / 2.0


def coverage(x: float, y: float, angle: float) -> float:
    """Share of the goal T that a T at (x, y, angle) covers, in [0, 1]."""
    turn = -float(GOAL[2])
    cos, sin = math.cos(turn), math.sin(turn)
    dx, dy = x - float(GOAL[0]), y - float(GOAL[1])
    if dx * dx + dy * dy > 270.0**2:  # no corner is further than 121 from its origin
        return 0.0
    ox, oy = cos * dx - sin * dy, sin * dx + cos * dy
    cos, sin = math.cos(angle + turn), math.sin(angle + turn)
    area = 0.0
    for left, low, right, high in (_BAR, _STEM):
        corners = [
            (ox + cos * u - sin * v, oy + sin * u + cos * v)
            for u, v in ((left, low), (right, low), (right, high), (left, high))
        ]
        area += _clipped_area(corners, _BAR) + _clipped_area(corners, _STEM)
    return area / AREA


class PushTPhysics:
    """Agent (a kinematic disc under PD control) and block (a T that slides with friction) in a walled square."""

    def __init__(self) -> None:
        self._gym = _gym()
        self._place()

    def _place(self) -> None:
        """Fresh bodies, as gym-pusht makes at every reset (which also forgets cached contacts), minus its callback."""
        import pymunk

        gym = self._gym
        gym.space = space = pymunk.Space()
        space.gravity = 0, 0
        space.damping = 0.0
        corners = ((5, 506), (5, 5), (506, 5), (506, 506))
        space.add(*(gym.add_segment(space, corners[a], corners[b], 2) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))))
        gym.agent = gym.add_circle(space, (256, 400), 15)
        gym.block, gym._block_shapes = gym.add_tee(space, (256, 300), 0)
        gym.goal_pose = GOAL.copy()
        self._space, self._agent, self._block = space, gym.agent, gym.block

    def reset(self, seed: int) -> None:
        """gym-pusht's start for this seed; Diffusion Policy's own environment starts elsewhere."""
        rng = np.random.default_rng(seed)  # what gymnasium makes of a seed
        agent = [int(rng.integers(50, 450)), int(rng.integers(50, 450))]
        block = [int(rng.integers(100, 400)), int(rng.integers(100, 400))]
        angle = float(rng.uniform(-np.pi, np.pi))
        self._place()
        self._agent.position = agent
        self._block.position = block
        self._block.angle = angle  # after the position: turns about the centre of mass and so moves the origin
        self._space.step(_DT)

    def set_state(self, state: NDArray[np.floating[Any]], velocity: tuple[float, float] = (0.0, 0.0)) -> None:
        """Put agent and block exactly there (5,): gym-pusht's own way moves the block when it turns it."""
        self._place()
        self._pose(state)
        self._space.step(_DT)  # as gym-pusht does; separates what overlaps
        self._agent.velocity = velocity

    def jump(self, state: NDArray[np.floating[Any]], velocity: tuple[float, float]) -> None:
        """set_state for planners, 20 times faster: keeps the bodies and their cached contacts, takes no step."""
        self._pose(state)
        self._agent.velocity = velocity
        self._block.velocity = (0.0, 0.0)
        self._block.angular_velocity = 0.0

    def _pose(self, state: NDArray[np.floating[Any]]) -> None:
        ax, ay, bx, by, angle = (float(v) for v in state)
        self._agent.position = (ax, ay)
        self._block.angle = angle  # turns about the centre of mass, hence first
        self._block.position = (bx, by)

    def step(self, x: float, y: float) -> None:
        """One control period (0.1 s): ten sub-steps of a = kp (target - p) - kv v, v += a dt, then the solver."""
        agent, space_step = self._agent, self._space.step
        vx, vy = agent.velocity
        for _ in range(_SUBSTEPS):
            px, py = agent.position
            vx += (_KP * (x - px) + _KV * (0.0 - vx)) * _DT
            vy += (_KP * (y - py) + _KV * (0.0 - vy)) * _DT
            agent.velocity = (vx, vy)
            space_step(_DT)

    def state(self) -> NDArray[np.float64]:
        """Agent xy, block xy, block angle in [0, 2 pi), (5,)."""
        (ax, ay), (bx, by) = self._agent.position, self._block.position
        return np.array([ax, ay, bx, by, self._block.angle % (2 * np.pi)])

    @property
    def velocity(self) -> tuple[float, float]:
        vx, vy = self._agent.velocity
        return float(vx), float(vy)

    def coverage(self) -> float:
        block = self._block
        (x, y), angle = block.position, block.angle
        value = coverage(x, y, angle)
        if abs(value - SUCCESS_COVERAGE) < _DOUBT:
            return float(self._gym._get_coverage())
        return value

    def draw(self, size: int) -> NDArray[np.uint8]:
        """gym-pusht's own picture, (size, size, 3)."""
        return np.asarray(self._gym._get_img(self._gym._draw(), size, size), dtype=np.uint8)

    def draw_state(self, state: NDArray[np.floating[Any]], size: int) -> NDArray[np.uint8]:
        """The picture of a given state; leaves the world there, without a step of physics."""
        self._pose(state)
        self._space.reindex_shapes_for_body(self._agent)
        self._space.reindex_shapes_for_body(self._block)
        return self.draw(size)

    def close(self) -> None:
        self._gym.close()


# -- the ambiguous start (App. B.1, Fig. 5): the agent between block and goal, in front of the T's top edge

AXIS: Float = np.array([np.sqrt(0.5), -np.sqrt(0.5)])  # from the stem to the bar, and on to the agent
SIDE: Float = np.array([-np.sqrt(0.5), -np.sqrt(0.5)])  # left, seen from the agent to the block
BEYOND = 110.0  # how far past the goal the block lies, pixels
GAP = 40.0  # from the bar's edge to the agent's centre
REACH = 60.0  # half the bar: how far along the edge the starts go
_SHIFT, _TURN = 6.0, 0.05  # standard deviations of the block's pose in `pusht-edge`: pixels, radians


def edge_start(offset: float, beyond: float = BEYOND, gap: float = GAP) -> Float:
    """Agent xy, block xy, block angle (5,), `offset` along the edge.

    The block lies on the axis of Push-T's mirror symmetry, beyond its goal, with the bar's outer edge towards the goal.
    The agent has to walk round it to push it back; at offset 0 the scene is its own mirror image.
    """
    block = GOAL[:2] - beyond * AXIS
    agent = block + gap * AXIS + offset * SIDE
    return np.concatenate([agent, block, GOAL[2:]])


def random_edge_start(seed: int) -> Float:
    """A start of `pusht-edge`: anywhere along the edge, the block a little off its place."""
    rng = np.random.default_rng([seed, 5])
    state = edge_start(rng.uniform(-REACH, REACH), gap=GAP + rng.uniform(0.0, 10.0))
    shift, turn = rng.normal(0.0, _SHIFT, 2), rng.normal(0.0, _TURN)
    moved: Float = state + np.concatenate([shift, shift, [turn]])
    return moved


# -- the environment

MAX_STEPS = 300
FPS = 10.0
_PICTURE = 256


class PushTEnv(Simulation):
    """gym-pusht behind prism's interface, bit for bit the same world; the vector variants never draw."""

    def __init__(self, name: str = "pusht", max_steps: int = MAX_STEPS) -> None:
        if name not in VARIANTS:
            raise PrismError(f"unknown Push-T task '{name}'; use one of {', '.join(VARIANTS)}")
        if max_steps < 1:
            raise PrismError(f"max_steps {max_steps} is out of range: at least 1")
        self.variant: Variant = VARIANTS[name]
        self.physics = PushTPhysics()
        super().__init__(name, sensor_specs(self.variant), [0.0, 0.0], [SIZE, SIZE], FPS, max_steps)

    def _start(self, seed: int) -> None:
        if self.name == "pusht-edge":
            self.physics.set_state(random_edge_start(seed))
        else:
            self.physics.reset(seed)

    def reset_to_state(self, state: NDArray[np.floating[Any]]) -> dict[str, Array]:
        """Start from agent xy, block xy, block angle, (5,): for sweeps over starts."""
        state = np.asarray(state, dtype=np.float64)
        if state.shape != (5,) or not np.isfinite(state).all():
            raise PrismError(f"{self.name}: a state is 5 finite numbers (agent xy, block xy, angle), not {state!r}")
        self.physics.set_state(state)
        return self._begin()

    def _advance(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        self.physics.step(float(action[0]), float(action[1]))
        coverage = self.physics.coverage()
        return min(1.0, coverage / SUCCESS_COVERAGE), coverage > SUCCESS_COVERAGE

    def _observe(self) -> dict[str, Array]:
        streams: dict[str, Array] = dict(features(self.physics.state(), self.variant))
        if self.variant == "pixels":
            streams["rgb_static"] = self.physics.draw(IMAGE_SIZE)
        return streams

    def state(self) -> NDArray[np.float64]:
        """Agent xy, block xy, block angle in [0, 2 pi), (5,)."""
        return self.physics.state()

    @property
    def recorded_sensors(self) -> tuple[SensorSpec, ...]:
        """The raw state, from which the sensors of every variant follow; and pictures, where they are drawn anyway."""
        pictures = [SensorSpec("img", "rgb", sensor.shape) for sensor in self.sensors if sensor.kind == "rgb"]
        return (SensorSpec("state", "vector", (5,)), *pictures)

    def record(self, observation: dict[str, Array]) -> dict[str, Array]:
        record: dict[str, Array] = {"state": self.state().astype(np.float32)}
        if "rgb_static" in observation:
            record["img"] = observation["rgb_static"]
        return record

    def render(self) -> NDArray[np.uint8]:
        return self.physics.draw(_PICTURE)

    def close(self) -> None:
        self.physics.close()


@functools.cache
def _drawing_board() -> PushTPhysics:
    return PushTPhysics()


def render_state(state: NDArray[np.floating[Any]], size: int = IMAGE_SIZE) -> NDArray[np.uint8]:
    """The picture of a state (5,) -> (size, size, 3): what the pixels variant shows there, to a pixel or two.

    The exceptions are pixels where bar and stem meet: which of them is painted last depends on the world's history.
    """
    return _drawing_board().draw_state(state, size)


def contradictions(source: EpisodeSource) -> list[str]:
    """What contradicts the task in recordings of the state: demonstrations end with the block on the goal."""
    last = [(episode, int(length)) for episode, length in enumerate(source.lengths)]
    rows = [source.read(e, n - 1, n, streams=["state"]).streams["state"][0, 2:5] for e, n in last]
    ends = np.stack(rows).astype(np.float64)
    covered = float(np.median([coverage(*map(float, end)) for end in ends]))
    if covered > 0.5:
        return []
    x, y, angle = np.median(ends, axis=0)
    return [
        f"half of the episodes end with less than {max(covered, 0.01):.0%} of the goal covered (the block at "
        f"({x:.0f}, {y:.0f}), turned {np.degrees(angle):.0f} degrees; the goal at ({GOAL[0]:.0f}, {GOAL[1]:.0f}), "
        f"turned {np.degrees(GOAL[2]):.0f}): demonstrations of another goal?"
    ]
