"""Scripted experts for CALVIN's 34 commands.

They see robot_obs and scene_obs of this moment (calvin_scene.Scene) and nothing else: no memory, no contacts, no target
pose of the controller. So what they do is a function of what the variants `-state` show, and can be imitated.
A command is a Move: the pose to go to and whether the fingers close. The hand comes to a thing along an axis, through
a funnel around it: the further off it is sideways, the further out it stays,

    out = min(hover, slope (sideways - tolerance)),    a = limit(GAIN (target - hand) / 2 cm)

so that a hand that misses backs out and comes again. What a seed changes is the pace and where exactly it takes hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prism_sims.calvin_checkout import BLOCKS
from prism_sims.calvin_scene import FIXTURES, Scene, Vector

if TYPE_CHECKING:
    from prism_sims.calvin import CalvinEnv

MOVE_UNIT, TURN_UNIT = 0.02, 0.05  # metres and radians that an action of 1 asks for
GAIN, TURN_GAIN = 0.35, 0.3
UP, FRONT, RIGHT = np.array([0.0, 0.0, 1.0]), np.array([0.0, -1.0, 0.0]), np.array([1.0, 0.0, 0.0])
STRAIGHT = np.pi / 2  # yaw: fingers side by side in x
INTO_PANEL, INTO_CABINET = np.pi / 3, np.pi / 4  # tilts
BLOCK = 0.04  # metres: height of a block, and its width where the fingers take it
HELD = 0.05  # fingers that are further apart hold nothing


@dataclass(frozen=True)
class Move:
    """The next target of the hand."""

    target: Vector  # (3,)
    yaw: float = STRAIGHT  # a half turn more or less is the same
    tilt: float = 0.0  # from pointing down towards pointing away from the robot
    closed: bool = False
    speed: float = 0.6  # of 0.6 m/s


@dataclass(frozen=True)
class Style:
    """Random variation between demonstrations of the same start."""

    pace: float
    offset: Vector  # (3,) metres

    @staticmethod
    def draw(seed: int) -> Style:
        rng = np.random.default_rng([seed, 7])
        return Style(rng.uniform(0.85, 1.0), rng.uniform(-0.003, 0.003, 3) * [1.0, 1.0, 0.3])


def wrapped(angle: float, period: float = 2 * np.pi) -> float:
    """The same angle, nearest to 0."""
    return float((angle + period / 2) % period - period / 2)


def funnel(scene: Scene, goal: Vector, axis: Vector = UP, hover: float = 0.1, tolerance: float = 0.008) -> Vector:
    """The next target on the way to `goal`, which is entered against `axis`."""
    away = scene.hand - goal
    out = float(away @ axis)
    beside = away - out * axis
    if axis[2] < 0.9 and scene.hand[2] < 0.52 and np.linalg.norm(beside) > 0.05:  # things lie on the table: over them
        return np.asarray(scene.hand + 0.06 * UP)
    wanted = float(np.clip(4.0 * (np.linalg.norm(beside) - tolerance), 0.0, hover))
    stay = float(np.clip((wanted - out) / 0.03 - 0.5, 0.0, 1.0))  # within the funnel's wall: first out of it
    return np.asarray(goal + wanted * axis + stay * beside)


def is_at(scene: Scene, goal: Vector, axis: Vector, beside: float, above: float) -> bool:
    away = scene.hand - goal
    out = float(away @ axis)
    return out < above and float(np.linalg.norm(away - out * axis)) < beside


def pointing_back(yaw: float, tilt: float) -> Vector:
    """(3,) from the finger tips to the palm."""
    return np.array([-np.sin(tilt) * np.cos(yaw), -np.sin(tilt) * np.sin(yaw), np.cos(tilt)])


# ---------------------------------------------------------------------------------------------------- things on joints


def drawer(scene: Scene, direction: float) -> Move:
    """Closed fingers behind the bar; then pull it, or push the front."""
    hook = scene.holds["drawer"]
    if is_at(scene, hook, UP, 0.045, 0.02):
        along = direction * scene.axes["drawer"]
        return Move(np.array([hook[0], scene.hand[1], hook[2]]) + 0.06 * along, closed=True)
    return Move(funnel(scene, hook, hover=0.16), closed=True)


def slider(scene: Scene, direction: float) -> Move:
    """Open fingers on both sides of the handle; then sideways."""
    handle = scene.holds["slider"] + [0.0, -0.005, -0.02]
    if is_at(scene, handle, FRONT, 0.035, 0.02):
        along = direction * scene.axes["slider"]
        return Move(np.array([scene.hand[0], handle[1], handle[2]]) + 0.06 * along)
    return Move(funnel(scene, handle, FRONT))


def switch(scene: Scene, direction: float) -> Move:
    """Tilted fingers between bar and panel, below or above the bar; then along the panel."""
    axis = direction * scene.axes["switch"]
    goal = scene.holds["switch"] - 0.04 * axis - 0.02 * pointing_back(STRAIGHT, INTO_PANEL)
    back = pointing_back(STRAIGHT, INTO_PANEL)
    if is_at(scene, goal, back, 0.035, 0.02):
        along = float((scene.hand - goal) @ axis)
        return Move(goal + (along + 0.05) * axis, tilt=INTO_PANEL, closed=True)
    return Move(funnel(scene, goal, back, hover=0.1), tilt=INTO_PANEL, closed=True)


def button(scene: Scene) -> Move:
    top = scene.holds["button"]
    pressing = is_at(scene, top, UP, 0.02, 0.03)
    return Move(top - 0.03 * UP if pressing else funnel(scene, top, hover=0.07), closed=True)


# -------------------------------------------------------------------------------------------------------------- blocks


def turned_like(scene: Scene, block: str) -> float:
    """The hand's yaw that takes a block across its narrow side; the nearest of the two."""
    yaw = float(scene.turn[2])
    return yaw + wrapped(float(scene.blocks[block][5]) - yaw, np.pi)


def holds(scene: Scene, block: str) -> bool:
    away = scene.blocks[block][:3] - scene.hand
    return scene.is_closing and scene.width < HELD and float(np.linalg.norm(away)) < 0.035


def grasp(scene: Scene, block: str, tilt: float = 0.0) -> Move:
    """Along the fingers, which close where the block is between them."""
    goal, yaw = scene.blocks[block][:3], turned_like(scene, block)
    back = pointing_back(yaw, tilt)
    is_turned = abs(wrapped(yaw - scene.turn[2])) < 0.1 and abs(scene.turn[1] + tilt) < 0.15
    ready = is_turned and is_at(scene, goal, back, 0.012, 0.01)
    return Move(funnel(scene, goal, back), yaw, tilt, closed=ready)


def lift(scene: Scene, block: str, tilt: float = 0.0) -> Move:
    if holds(scene, block):
        return Move(scene.hand + 0.08 * UP, turned_like(scene, block), tilt, closed=True)
    return grasp(scene, block, tilt)


def rotate(scene: Scene, block: str, direction: float) -> Move:
    """Left is counterclockwise, seen from above. The fingers open at the end: only a block on the table counts."""
    if holds(scene, block):
        left = wrapped(STRAIGHT + direction * 1.65 - float(scene.turn[2])) * direction
        return Move(scene.hand - 0.003 * UP, float(scene.turn[2]) + 0.5 * direction, closed=left > 0.1)
    return grasp(scene, block)


def push(scene: Scene, block: str, along: Vector) -> Move:
    """Closed fingers behind the block; then along."""
    at = scene.blocks[block][:3]
    away = scene.hand - at
    behind = float(-away @ along)
    beside = float(abs(away @ np.cross(UP, along)))
    if away[2] < 0.02 and beside < 0.02 and 0.02 < behind < 0.09:
        return Move(at + 0.06 * along, closed=True, speed=0.4)
    return Move(funnel(scene, at - 0.07 * along), closed=True)


def nearest(scene: Scene) -> str:
    return min(BLOCKS, key=lambda block: float(np.linalg.norm(scene.blocks[block][:3] - scene.hand)))


def put(scene: Scene, goal: Vector, tilt: float = 0.0) -> Move:
    """Carries the block in the hand to `goal`, lets go there, and backs out; one that was lost is picked up again."""
    yaw = float(scene.turn[2]) + wrapped(STRAIGHT - float(scene.turn[2]), np.pi)
    back, block = pointing_back(yaw, tilt), nearest(scene)
    if not holds(scene, block):
        is_there = np.linalg.norm(scene.blocks[block][:3] - goal) < 0.045
        return Move(scene.hand + 0.08 * back, yaw, tilt) if is_there else grasp(scene, block)
    arrived = is_at(scene, goal, back, 0.015, 0.012) and abs(scene.turn[1] + tilt) < 0.15
    return Move(funnel(scene, goal, back, hover=0.12), yaw, tilt, closed=not arrived, speed=0.5)


def place_in_drawer(scene: Scene) -> Move:
    return put(scene, scene.holds["drawer"] + [0.0, 0.11, 0.04])


def place_in_slider(scene: Scene) -> Move:
    """Into the half of the cabinet that the door leaves open, beside what lies there."""
    door = scene.holds["slider"] - scene.joints["slider"] * scene.axes["slider"]  # where it is closed on the right
    middle, aside = (-0.28, 0.075) if scene.joints["slider"] < 0.14 else (0.03, -0.08)
    goal = np.array([door[0] + middle, door[1] + 0.07, 0.475])
    taken = any(np.linalg.norm(scene.blocks[b][:2] - goal[:2]) < 0.06 for b in BLOCKS if b != nearest(scene))
    return put(scene, goal + (aside if taken else 0.0) * RIGHT, INTO_CABINET)


def stack(scene: Scene) -> Move:
    """Onto the block on the table that is nearest to the hand."""
    others = [scene.blocks[block][:3] for block in BLOCKS if block != nearest(scene)]
    below = min(others, key=lambda at: float(np.linalg.norm(at[:2] - scene.hand[:2]) + 10 * max(at[1], -0.02)))
    return put(scene, below + (BLOCK + 0.004) * UP)


def unstack(scene: Scene) -> Move:
    """Lifts the block that lies on another one."""
    return lift(scene, max(BLOCKS, key=lambda block: float(scene.blocks[block][2])))


def push_into_drawer(scene: Scene) -> Move:
    """Over the front edge of the table; the one that is nearest to it, of those on the table and above the drawer."""
    front = scene.holds["drawer"] - scene.joints["drawer"] * scene.axes["drawer"]
    on_table = [block for block in BLOCKS if scene.blocks[block][2] > front[2] + 0.05 and scene.blocks[block][1] < 0.0]
    if not on_table:
        return Move(scene.hand + 0.08 * UP, closed=True)
    chosen = min(on_table, key=lambda b: float(10 * scene.blocks[b][1] + abs(scene.blocks[b][0] - front[0])))
    return push(scene, chosen, FRONT)


def leave(scene: Scene, command: str) -> Move | None:
    """Lets go of what an earlier command of a chain was about, and comes out of it; None: the hand is free."""
    block = scene.blocks[nearest(scene)][:3] - scene.hand
    if command.startswith(("push", "turn", "move", "open", "close")) and np.linalg.norm(block) < 0.025:
        return Move(scene.hand + (0.0 if scene.is_closing else 0.06) * UP, float(scene.turn[2]))
    around = {name: scene.hand - scene.holds[name] for name in FIXTURES}
    beside, slope = around["slider"], around["switch"]
    if "slider" not in command.split("_")[1] and abs(beside[0]) < 0.06 and beside[1] > -0.07 and abs(beside[2]) < 0.07:
        return Move(scene.hand + 0.06 * FRONT, float(scene.turn[2]), -float(scene.turn[1]))
    if "lightbulb" not in command and abs(slope[0]) < 0.06 and slope[1] > -0.06 and abs(slope[2]) < 0.08:
        return Move(scene.hand + 0.06 * pointing_back(STRAIGHT, INTO_PANEL), tilt=INTO_PANEL, closed=scene.is_closing)
    if "drawer" not in command and scene.hand[2] < scene.holds["drawer"][2] + 0.13 and scene.hand[1] < -0.18:
        return Move(scene.hand + 0.06 * UP, float(scene.turn[2]), closed=scene.is_closing)
    return None


Skill = Callable[[Scene], Move]


def _skills() -> dict[str, Skill]:
    skills: dict[str, Skill] = {
        "open_drawer": partial(drawer, direction=1.0),
        "close_drawer": partial(drawer, direction=-1.0),
        "move_slider_left": partial(slider, direction=1.0),
        "move_slider_right": partial(slider, direction=-1.0),
        "turn_on_lightbulb": partial(switch, direction=1.0),
        "turn_off_lightbulb": partial(switch, direction=-1.0),
        "turn_on_led": button,
        "turn_off_led": button,
        "place_in_drawer": place_in_drawer,
        "place_in_slider": place_in_slider,
        "push_into_drawer": push_into_drawer,
        "stack_block": stack,
        "unstack_block": unstack,
    }
    for block in BLOCKS:
        for place, tilt in (("table", 0.0), ("slider", INTO_CABINET), ("drawer", 0.0)):
            skills[f"lift_{block}_{place}"] = partial(lift, block=block, tilt=tilt)
        for side, sign in (("left", 1.0), ("right", -1.0)):
            skills[f"rotate_{block}_{side}"] = partial(rotate, block=block, direction=sign)
            skills[f"push_{block}_{side}"] = partial(push, block=block, along=-sign * RIGHT)
    return skills


SKILLS = _skills()


class CalvinExpert:
    def __init__(self, env: CalvinEnv) -> None:
        self._env, self._style = env, Style.draw(0)

    def reset(self, seed: int) -> None:
        self._style = Style.draw(seed)

    def act(self) -> NDArray[np.float32]:
        scene = self._env.scene()
        scene = replace(scene, hand=scene.hand - self._style.offset)
        command = self._env.goals[self._env.goal_index]
        return action(scene, leave(scene, command) or SKILLS[command](scene), self._style)


def action(scene: Scene, move: Move, style: Style) -> NDArray[np.float32]:
    away = move.target - scene.hand
    step = style.pace * GAIN * away / MOVE_UNIT
    step *= min(1.0, move.speed * style.pace / max(float(np.abs(step).max()), 1e-9))
    roll, pitch, yaw = scene.turn
    turn = np.array([wrapped(np.pi - roll), wrapped(-move.tilt - pitch), wrapped(move.yaw - yaw, np.pi)])
    turn = np.clip(TURN_GAIN * turn / TURN_UNIT, -1.0, 1.0)
    return np.concatenate([step, turn, [-1.0 if move.closed else 1.0]]).astype(np.float32)
