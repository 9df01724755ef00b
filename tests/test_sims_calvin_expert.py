"""CALVIN's scripted experts: in the real simulator where it is checked out ($PRISM_CALVIN), in a small world of ours
where it is not: a hand that follows its commands, and things that a hand moves."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("yaml")

from numpy.typing import NDArray
from prism_sims import calvin
from prism_sims.calvin import CalvinEnv, World
from prism_sims.calvin_checkout import BLOCKS, TASKS
from prism_sims.calvin_expert import SKILLS, Style, action, wrapped
from prism_sims.calvin_scene import FIXTURES, Fixture, Scene, object_state, proprio, read_fixtures

from prism.sims.collect import demonstrate
from prism.sims.task_table import make_env, make_expert
from tests.calvin_fakes import FakeSim, make_world

real = pytest.mark.skipif("PRISM_CALVIN" not in os.environ, reason="no checkout of CALVIN: set PRISM_CALVIN")
FRAMES = {
    "slider": Fixture(np.array([0.04, 0.02, 0.57]), np.array([-1.0, 0.0, 0.0])),
    "drawer": Fixture(np.array([0.18, -0.21, 0.36]), np.array([0.0, -1.0, 0.0])),
    "button": Fixture(np.array([-0.12, -0.12, 0.484]), np.array([0.0, 0.0, -1.0])),
    "switch": Fixture(np.array([0.3, 0.02, 0.53]), np.array([0.0, 0.5, np.sqrt(0.75)])),
}


@dataclass
class Toy:
    """No physics: fingers that are at a thing move it."""

    hand: NDArray[np.float64] = field(default_factory=lambda: np.array([0.03, -0.23, 0.57]))
    turn: NDArray[np.float64] = field(default_factory=lambda: np.array([3.09, -0.03, 1.5]))
    width: float = 0.08
    closing: bool = False
    joints: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIXTURES, 0.0))
    blocks: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = {"red_block": (0.05, -0.12), "blue_block": (0.23, -0.12), "pink_block": (0.07, 0.09)}
        for block in BLOCKS:
            self.blocks.setdefault(block, np.array([*places[block], 0.46, 0.0, 0.0, 1.4]))

    def state(self) -> NDArray[np.float64]:
        robot = [*self.hand, *self.turn, self.width, *np.zeros(7), -1.0 if self.closing else 1.0]
        scene = [*self.joints.values(), 0.0, 0.0, *np.concatenate(list(self.blocks.values()))]
        return np.array([*robot, *scene])

    def scene(self) -> Scene:
        return Scene.read(FRAMES, self.state())

    def step(self, command: NDArray[np.float32]) -> None:
        assert np.abs(command).max() <= 1.0
        before, self.closing = self.scene(), bool(command[6] < 0)
        self.hand = self.hand + 0.02 * command[:3]
        self.turn = np.array([wrapped(angle) for angle in self.turn + 0.05 * command[3:6]])
        moved = self.hand - before.hand
        near = [block for block in BLOCKS if np.linalg.norm(before.blocks[block][:3] - before.hand) < 0.02]
        self.width = (0.04 if near else 0.0) if self.closing else 0.08
        for block in near if self.closing and before.width < 0.05 else ():
            self.blocks[block][:3] += moved
            self.blocks[block][5] += 0.05 * command[5]
        for name in FIXTURES:
            if np.linalg.norm(before.holds[name] - before.hand) < 0.05:
                self.joints[name] = max(self.joints[name] + float(moved @ FRAMES[name].axis), 0.0)


def play(toy: Toy, command: str, steps: int = 150) -> Toy:
    for _ in range(steps):
        scene = toy.scene()
        toy.step(action(scene, SKILLS[command](scene), Style.draw(3)))
    return toy


def test_every_command_has_a_skill() -> None:
    assert set(SKILLS) == set(TASKS)


MOVED = {"open_drawer": "drawer", "move_slider_left": "slider", "turn_on_lightbulb": "switch", "turn_on_led": "button"}


@pytest.mark.parametrize("command", MOVED)
def test_things_on_joints_are_moved(command: str) -> None:
    thing = MOVED[command]
    assert play(Toy(), command).joints[thing] > (0.01 if thing == "button" else 0.1)


def test_a_block_is_lifted_and_turned() -> None:
    assert play(Toy(), "lift_red_block_table", 60).blocks["red_block"][2] > 0.52
    assert play(Toy(), "rotate_blue_block_left", 70).blocks["blue_block"][5] > 1.4 + np.pi / 3
    assert play(Toy(), "rotate_blue_block_right", 70).blocks["blue_block"][5] < 1.4 - np.pi / 3


def test_a_hand_that_starts_below_the_table_comes_out_first() -> None:
    toy = Toy(hand=np.array([0.18, -0.21, 0.36]))  # behind the drawer's bar
    path = []
    for _ in range(60):
        path.append(toy.hand)
        scene = toy.scene()
        toy.step(action(scene, SKILLS["lift_red_block_table"](scene), Style.draw(0)))
    assert all(at[2] > 0.44 for at in path if at[1] > -0.17)
    assert toy.blocks["red_block"][2] > 0.5


def test_an_expert_is_a_function_of_what_is_seen_and_of_its_seed() -> None:
    scene = Toy().scene()
    for skill in SKILLS.values():
        first, again = (action(scene, skill(scene), Style.draw(seed)) for seed in (1, 1))
        np.testing.assert_array_equal(first, again)
        assert first.shape == (7,)
    moves = [action(scene, SKILLS["open_drawer"](scene), Style.draw(seed)) for seed in (1, 2)]
    assert not np.array_equal(*moves)


def test_joints_are_read_from_the_loaded_world() -> None:
    found = read_fixtures(FakeSim())
    assert set(found) == set(FIXTURES)
    np.testing.assert_allclose(found["button"].hold, [0.0, 0.024, 0.0])  # the joint stands at 0.25 along its axis
    np.testing.assert_allclose(found["drawer"].axis, [1.0, 0.0, 0.0])


def test_what_a_state_variant_shows() -> None:
    toy = Toy()
    toy.joints["drawer"] = 0.1
    shown = object_state(FRAMES, toy.state())
    assert shown.shape == (54,)
    np.testing.assert_allclose(shown[:4], [0.0, 0.1, 0.0, 0.0])
    np.testing.assert_allclose(shown[9:12], [0.15, -0.08, -0.21], atol=1e-6)  # the drawer's bar from the hand
    half = Toy()
    half.blocks["red_block"][5] += np.pi
    np.testing.assert_allclose(object_state(FRAMES, half.state()), object_state(FRAMES, Toy().state()), atol=1e-6)
    flipped = Toy(turn=np.array([-3.14, 0.0, 1.5]))
    near = Toy(turn=np.array([3.14, 0.0, 1.5]))
    np.testing.assert_allclose(proprio(flipped.state()), proprio(near.state()), atol=0.01)


def test_recordings_hold_each_sensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: World = make_world(tmp_path)
    monkeypatch.setattr(calvin, "world", lambda path=None: made)
    env = CalvinEnv("open_drawer")
    names = [spec.name for spec in env.recorded_sensors]
    assert names == ["rgb_static", "depth_static", "rgb_gripper", "depth_gripper", "rgb_tactile", "robot_obs", "text"]
    assert list(env.record(env.reset(0))) == names
    plain = CalvinEnv("open_drawer", "state")
    assert [spec.name for spec in plain.recorded_sensors] == ["proprio", "object_state", "text"]
    assert set(plain.reset(0)) == {"proprio", "object_state", "text"}
    assert plain.render() is not None
    assert made.sim.cameras == []
    env.reset(0)
    assert made.sim.cameras


@real
@pytest.mark.filterwarnings("ignore")  # pybullet's and gym's
@pytest.mark.parametrize("command", ["open_drawer", "turn_on_lightbulb", "lift_pink_block_slider", "stack_block"])
def test_experts_do_it_in_the_real_thing_whatever_was_played_before(command: str) -> None:
    env = make_env(f"calvin-{command}-state")
    expert = make_expert(env.name, env)
    first = demonstrate(env, expert, 5)
    assert first.success
    assert demonstrate(env, expert, 6, noise=0.1).success
    again = demonstrate(env, expert, 5)
    np.testing.assert_array_equal(first.actions, again.actions)
