"""The tabletop: in each task one sense tells what the others do not, and the experts act on that sense alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("mujoco")

from prism_sims import offscreen
from prism_sims import tabletop_model as parts
from prism_sims.tabletop import COMMANDS, Height, Insert, Rattle, make_tabletop
from prism_sims.tabletop_arm import RATE, TabletopEnv
from prism_sims.tabletop_expert import TabletopExpert, loudness, make_tabletop_expert, surface_below

from prism.data.formats.store import StoreSource
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations, record_if_missing
from prism.sensors import decode_text, encode_text
from prism.sims import task_table
from prism.sims.environment import StepResult
from prism.sims.view import sentence_of

TASKS = ("insert-left", "insert-right", "rattle", "height", "can", "nest", *COMMANDS)


def play(env: TabletopEnv, expert: TabletopExpert, seed: int) -> StepResult:
    env.reset(seed)
    expert.reset(seed)
    while not (result := env.step(expert.act())).done:
        pass
    return result


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_it(task: str) -> None:
    env = make_tabletop(task)
    expert = make_tabletop_expert(env)
    assert all(play(env, expert, seed).success for seed in range(40, 46))


@pytest.mark.parametrize(
    ("task", "sense"), [("insert-left", "tactile"), ("rattle", "audio"), ("height", "depth_wrist")]
)
def test_without_the_sense_the_expert_fails(task: str, sense: str) -> None:
    """The same expert, shown another episode's first reading of the sense: what it needs is nowhere else."""
    env = make_tabletop(task)
    expert = make_tabletop_expert(env)
    blank = env.reset(1000)[sense]
    won = 0
    for seed in range(16):
        env.reset(seed)
        expert.reset(seed)
        done = False
        while not done:
            env.seen[sense] = blank
            result = env.step(expert.act())
            done = result.done
        won += result.success
    assert won <= 11 if task == "rattle" else won <= 7


def test_the_hole_is_beside_where_it_seems() -> None:
    env = make_tabletop("insert-left")
    assert isinstance(env, Insert)
    offsets = []
    for seed in range(30):
        env.reset(seed)
        offsets.append(np.abs(env.hole_at - env.middle)[:2])
    assert np.max(offsets) <= Insert.OFFSET
    clearance = parts.HOLE - parts.PEG
    assert (np.max(offsets, axis=1) > clearance).mean() > 0.8, "most often the place where it seems is not good enough"


def test_the_torque_tells_where_the_hole_is() -> None:
    env = make_tabletop("insert-right")
    assert isinstance(env, Insert)
    expert = make_tabletop_expert(env)
    right = told = 0
    for seed in range(20):
        env.reset(seed)
        expert.reset(seed)
        while not (result := env.step(expert.act())).done and result.observation["tactile"][2] < 1.0:
            pass
        wrench = result.observation["tactile"]
        if result.done:  # it fell in at once
            continue
        carried = np.array([-wrench[4], wrench[3]]) / wrench[2]
        off = (env.foot() - env.hole_at)[:2]
        clear = (np.abs(off) > 0.004) & (np.abs(carried) > 0.0015)
        right += int((np.sign(carried) == np.sign(off))[clear].sum())
        told += int(clear.sum())
    assert told > 15
    assert right > 0.8 * told


def test_nothing_drawn_and_no_weight_tells_the_secret() -> None:
    env = make_tabletop("rattle")
    assert isinstance(env, Rattle)
    boxes = set()
    for seed in range(8):
        env.reset(seed)
        boxes.add(env.full)
        mass = {name: float(env.model.body(name).mass[0]) for name in ("left", "right")}
        mass[env.full] += float(env.model.body("ball").mass[0])
        assert mass["left"] == pytest.approx(mass["right"])
    assert boxes == {"left", "right"}
    if offscreen.backend() is None:
        pytest.skip(offscreen.rendering_hint() or "")
    import mujoco

    hole = make_tabletop("insert-left", "pixels")
    before = hole.reset(1)
    hole.model.body("hole_left").pos[:2] += 0.005
    mujoco.mj_forward(hole.model, hole.data)
    after = hole._observe()
    hole.close()
    for name in ("rgb_static", "rgb_wrist"):
        assert np.array_equal(before[name], after[name])


def test_only_the_box_with_the_ball_rattles() -> None:
    env = make_tabletop("rattle")
    assert isinstance(env, Rattle)
    expert = make_tabletop_expert(env)
    heard: dict[str, list[float]] = {"left": [], "right": []}
    for seed in range(8):
        env.reset(seed)
        expert.reset(seed)
        loud = 0.0
        for _ in range(22):  # the left box is shaken
            loud += loudness(env.step(expert.act()).observation["audio"])
        heard[env.full].append(loud)
    assert min(heard["left"]) > 3 * max(heard["right"])
    pure = np.sin(2 * np.pi * 900 * np.arange(400) / RATE).astype(np.float32)
    assert loudness(pure) > 100 * loudness(np.sin(2 * np.pi * 180 * np.arange(400) / RATE).astype(np.float32))


def test_depth_tells_the_height() -> None:
    env = make_tabletop("height")
    assert isinstance(env, Height)
    for seed in range(10):
        seen = env.reset(seed)
        for _ in range(12):
            way = np.clip(seen["object_state"][:2] / 0.03, -1, 1)
            seen = env.step(np.array([*way, 0.0, 1.0], np.float32)).observation
        true = float(env.hand()[2] - env.body("stand")[2])
        found = surface_below(seen["depth_wrist"], seen["object_state"][:2].astype(np.float64))
        assert found == pytest.approx(true, abs=2e-3)


@pytest.mark.parametrize("press", [False, True])
def test_the_block_breaks(press: bool) -> None:
    env = make_tabletop("height")
    assert isinstance(env, Height)
    env.reset(3)
    for _ in range(30):
        way = np.clip((env.body("stand") - env.hand())[:2] / 0.03, -1, 1)
        result = env.step(np.array([*way, -1.0 if press else 0.0, 1.0 if press else -1.0], np.float32))
    assert env.broken
    assert not result.success


def test_the_can_breaks_when_it_is_let_go_in_the_air() -> None:
    env = make_tabletop("can")
    expert = make_tabletop_expert(env)
    env.reset(2)
    expert.reset(2)
    for _ in range(30):
        env.step(expert.act())
    assert not env.broken  # type: ignore[attr-defined]
    for _ in range(10):
        env.step(np.array([0.0, 0.0, 0.0, -1.0], np.float32))
    assert env.broken  # type: ignore[attr-defined]


def test_words_differ_in_one_scene() -> None:
    starts = [make_tabletop(command).reset(4) for command in COMMANDS]
    assert all(np.array_equal(starts[0]["object_state"], start["object_state"]) for start in starts)
    assert [decode_text(start["text"]) for start in starts] == list(COMMANDS.values())
    with pytest.raises(PrismError, match="tabletop-hang"):
        make_tabletop("juggle")


def test_a_task_has_one_sentence() -> None:
    """What a policy of several tasks is told is what the environment says."""
    for task in TASKS:
        assert sentence_of(f"tabletop-{task}") == make_tabletop(task).words
    for command in COMMANDS:
        assert sentence_of(f"tabletop-{command}") == decode_text(make_tabletop(command).reset(0)["text"])


def test_commands_are_demonstrated_in_scenes_of_their_own(tmp_path: Path) -> None:
    rows = [task_table.TASKS[f"tabletop-{command}"] for command in COMMANDS]
    first = sorted(row.first_seed for row in rows)
    assert min(b - a for a, b in itertools.pairwise(first)) >= 1000
    path = record_if_missing(
        Demonstrations("expert", 1, path=str(tmp_path / "data")), "tabletop-ball", Console(quiet=True)
    )
    assert StoreSource(path).provenance["first_seed"] == task_table.TASKS["tabletop-ball"].first_seed > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_an_expert_without_memory(command: str) -> None:
    """Another expert, asked in the middle of an episode, does the same: one observation tells all it acts on."""
    env = make_tabletop(command)
    expert = make_tabletop_expert(env)
    env.reset(7)
    expert.reset(7)
    for _ in range(15):
        action = expert.act()
        assert np.array_equal(make_tabletop_expert(env).act(), action)
        env.step(action)


def test_a_cup_that_was_dropped_is_taken_again() -> None:
    env = make_tabletop("stack-blue")
    expert = make_tabletop_expert(env)
    env.reset(3)
    while env.body("blue")[2] < 0.03:
        env.step(expert.act())
    for _ in range(4):  # let go, a few centimetres above the table
        env.step(np.array([0.0, 0.0, 0.0, -1.0], np.float32))
    assert env.body("blue")[2] < 0.01
    while not (result := env.step(expert.act())).done:
        pass
    assert result.success


def test_the_expert_does_what_the_sentence_says() -> None:
    """Told another sentence, it does the other thing: success of that command, not of this one."""
    env, other = make_tabletop("stack-blue"), make_tabletop("ball")
    expert = make_tabletop_expert(env)
    env.reset(2)
    expert.reset(2)
    for _ in range(70):
        env.seen["text"] = encode_text(COMMANDS["ball"], 48)
        result = env.step(expert.act())
    assert not result.success
    other.reset(2)
    other.data.qpos[:], other.data.qvel[:] = env.data.qpos, env.data.qvel
    other._refresh()
    assert other.succeeded()
