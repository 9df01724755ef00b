"""The CALVIN adapter against a fake of calvin_env; against the real one where it is checked out ($PRISM_CALVIN)."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("yaml")

from prism_sims import calvin
from prism_sims.calvin import CalvinEnv, World, realise
from prism_sims.calvin_checkout import (
    BLOCKS,
    LENGTH,
    TASKS,
    Chains,
    Checkout,
    Rule,
    after,
    find_checkout,
    fnv_32,
    starts,
)

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.evaluation.play import check_fits, run_episode
from prism.normalize import Normalizer
from prism.policy import Draw, LossOutput, Policy, PolicySpec
from prism.rows import Random
from prism.sensors import SensorSpec, decode_text
from prism.sims.task_table import make_env
from tests import test_sims_conformance as suite
from tests.calvin_fakes import FakeSim, make_world, write_checkout

import torch  # isort: skip

SUITE: tuple[Callable[..., None], ...] = (
    suite.test_specs_hold,
    suite.test_same_seed_gives_bit_identical_episodes_whatever_came_before,
    suite.test_observations_are_the_callers_to_keep,
    suite.test_actions_are_clipped,
    functools.partial(suite.test_an_action_that_is_not_a_number_is_refused, value=np.nan),
    suite.test_pictures_for_people_change_nothing,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("calvin"))


@pytest.fixture
def fake(made: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(calvin, "world", lambda path=None: made)
    return made


@pytest.mark.parametrize("check", SUITE, ids=lambda check: getattr(check, "__name__", "not a number"))
@pytest.mark.parametrize("task", ["calvin", "calvin-open_drawer", "calvin-unstack_block", "calvin-open_drawer-state"])
def test_conformance_of_the_adapter(fake: World, task: str, check: Callable[..., None]) -> None:
    check(make_env(task))


@pytest.mark.skipif("PRISM_CALVIN" not in os.environ, reason="no checkout of CALVIN: set PRISM_CALVIN")
@pytest.mark.parametrize("check", SUITE, ids=lambda check: getattr(check, "__name__", "not a number"))
@pytest.mark.filterwarnings("ignore")  # pybullet's and gym's
def test_conformance_of_the_real_thing(check: Callable[..., None]) -> None:
    check(make_env("calvin-stack_block"))


def test_34_commands_and_their_names() -> None:
    assert len(TASKS) == len(set(TASKS)) == 34
    with pytest.raises(PrismError, match="calvin-open_drawer"):
        make_env("calvin-open_drawr")


def test_a_command_is_done_or_times_out(fake: World) -> None:
    env = CalvinEnv("open_drawer")
    first = env.reset(100_000)
    assert decode_text(first["text"]) == "please open drawer"
    assert env.max_steps == 360
    pull = np.array([1, 0, 0, 0, 0, 0, 0.3], dtype=np.float32)
    results = [env.step(pull) for _ in range(6)]
    assert [r.success for r in results] == [False] * 5 + [True]
    assert results[-1].done
    assert results[-1].score == 1.0
    with pytest.raises(PrismError, match="reset"):
        env.step(pull)
    env.reset(100_001)
    last = [env.step(np.zeros(7, np.float32)) for _ in range(360)][-1]
    assert last.done
    assert not last.success
    assert env.state().shape == (39,)
    env.close()


def test_a_process_has_one_world(fake: World) -> None:
    first, second = CalvinEnv("open_drawer"), CalvinEnv()
    first.reset(0)
    second.reset(0)
    with pytest.raises(PrismError, match="one CALVIN world"):
        first.step(np.zeros(7, np.float32))
    first.reset(0)
    first.step(np.zeros(7, np.float32))


def test_a_chain_goes_on_until_a_command_fails(fake: World) -> None:
    env = CalvinEnv()
    env.reset(100_004)
    assert len(env.goals) == LENGTH
    scores, texts = [], []
    for index, goal in enumerate(env.goals[:3]):
        assert env.goal_index == index
        lamp = 1.0 if env.state()[15 + 5] < 0.5 else -1.0
        first, second = {"open_drawer": (1.0, 0.0), "close_drawer": (-1.0, 0.0)}.get(goal, (0.0, lamp))
        while env.goal_index == index:
            result = env.step(np.array([first, second, 0, 0, 0, 0, 1], dtype=np.float32))
        scores.append(result.score)
        texts.append(decode_text(result.observation["text"]))
    assert scores == pytest.approx([0.2, 0.4, 0.6])
    assert texts == [f"please {goal.replace('_', ' ')}" for goal in env.goals[1:4]]
    result = [env.step(np.zeros(7, np.float32)) for _ in range(360)][-1]
    assert result.done
    assert not result.success
    assert result.score == pytest.approx(0.6)


class Puller(Policy):
    """Looks at the instruction and moves the drawer or the light; it also remembers how often it was asked."""

    def __init__(self, bytes_of_text: int) -> None:
        super().__init__()
        sensors = (SensorSpec("robot_obs", "vector", (15,)), SensorSpec("text", "text", (bytes_of_text,)))
        self.spec = PolicySpec("puller", {}, sensors, 7, 30.0, 2, 12)
        self.normalizer = Normalizer.empty(sensors, 7)

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        raise NotImplementedError

    def sample(self, observation: object, candidates: int, rng: Random) -> torch.Tensor:
        text = decode_text(observation.streams["text"][0, -1].numpy())  # type: ignore[attr-defined]
        plan = torch.zeros(1, candidates, 12, 7)
        if "drawer" in text and ("open" in text or "close" in text):
            plan[..., 0] = 1.0 if "open" in text else -1.0
        else:
            plan[..., :4, 1], plan[..., 4:8, 1] = 1.0, -1.0  # it cannot see the lamp: up and down
        return plan


def test_a_policy_plays_a_chain_and_starts_anew_with_each_command(fake: World) -> None:
    env, policy = CalvinEnv(), Puller(80)  # reserves other bytes for text than the environment
    check_fits(env, policy.spec)
    controller = Controller(policy, ControllerConfig(exec_horizon=8, candidates=2))
    result = run_episode(env, controller, 100_000)
    assert result.success
    assert result.score == 1.0
    assert result.replans >= LENGTH
    assert result.replans == len(result.latency_ms)


def test_every_start_allows_its_command(fake: World) -> None:
    rules, categories = fake.checkout.rules()
    chains = Chains(rules, categories)
    for task in TASKS:
        for number in range(3):
            state = chains.start_for(task, number)
            assert len(after(state, rules[task])) == 1
            robot_obs, scene_obs, special = realise(fake.place, state)
            assert robot_obs.shape == (15,)
            assert scene_obs.shape == (24,)
            assert special == any(state[b] in ("grasped", "drawer", "stacked_top", "stacked_bottom") for b in BLOCKS)
    sim = fake.sim
    assert isinstance(sim, FakeSim)
    env = CalvinEnv("place_in_drawer")
    before = sim.settled
    env.reset(1)
    assert sim.settled == before + 22
    grasped = next(b for b in BLOCKS if chains.start_for("place_in_drawer", (-1 - 1) % 2**32)[b] == "grasped")
    at = 6 + 6 * BLOCKS.index(grasped)
    np.testing.assert_array_equal(env.state()[15 + at : 15 + at + 3], env.state()[:3])  # in the hand


def test_chains_are_valid_reproducible_and_uniform() -> None:
    """The count of ways against brute force, on rules small enough for it."""
    names = ("open_drawer", "close_drawer", "turn_on_led", "turn_off_led", "move_slider_left", "move_slider_right", "x")
    states = {"open": ("drawer", "closed", "open"), "on_led": ("led", 0, 1), "left": ("slider", "right", "left")}
    rules: dict[str, tuple[Rule, ...]] = {"x": (Rule({"grasped": 0}, {}),)}
    for name in names[:-1]:
        key, low, high = next(v for k, v in states.items() if k.split("_")[-1] in name or v[0] in name)
        rises = any(word in name for word in ("open", "on_led", "left"))
        rules[name] = (Rule({key: low if rises else high}, {key: high if rises else low}),)
    rules |= {"y": (Rule({"drawer": "open"}, {}), Rule({"led": 1}, {})), "z": (Rule({"led": [0, 1]}, {}),)}
    categories = {name: i for i, name in enumerate((*names, "y", "z"))}
    chains = Chains(rules, categories)
    start, tasks = chains.chain(17)
    assert chains.chain(17) == (start, tasks)
    assert Chains(rules, categories).chain(17) == (start, tasks)

    def valid(sequence: tuple[str, ...]) -> bool:
        state: dict[str, object] = dict(start)
        for task in sequence:
            options = after(state, rules[task])
            if len(options) != 1:
                return False
            state = options[0]
        return True

    everything = {seq for seq in itertools.permutations(rules, LENGTH) if valid(seq)}
    assert tasks in everything
    assert chains._count(tuple(start.items()), frozenset(), LENGTH) == len(everything)
    drawn = Counter(chains.chain(17 + 192 * i)[1] for i in range(300))  # the same start every 192nd time
    assert set(drawn) <= everything
    assert max(drawn.values()) < 12 * 300 / len(everything) + 8
    assert len(starts()) == 192
    assert len({str(chains.chain(i)[0]) for i in range(192)}) == 192  # each start once


def test_the_hash_of_a_start() -> None:
    assert fnv_32("") == 0
    prime = 16777619
    assert fnv_32("a") == ord("a") * prime % 2**32  # two bytes: "a", 0
    assert fnv_32("ab") == (ord("a") * prime**2 % 2**32 ^ ord("b")) * prime % 2**32


def test_a_checkout_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_checkout(tmp_path / "calvin")
    monkeypatch.setenv("PRISM_CALVIN", str(root))
    found = find_checkout()
    assert found == find_checkout(root / "calvin_env") == Checkout(root / "calvin_env")
    assert found.sentences()["open_drawer"] == "please open drawer"
    rules, categories = found.rules()
    assert set(rules) == set(categories) == set(TASKS)
    robot_obs, scene_obs = found.placement()(starts()[0])
    assert robot_obs.shape == (15,)
    assert scene_obs.shape == (24,)


def test_without_a_checkout_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRISM_CALVIN", raising=False)
    calvin.world.cache_clear()
    with pytest.raises(PrismError, match="git clone"):
        find_checkout(tmp_path / "nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrismError, match=r"CALVIN is not here: git clone .* pip install .*--calvin PATH"):
        make_env("calvin")
    env_alone = tmp_path / "calvin_env"
    (env_alone / "calvin_env" / "envs").mkdir(parents=True)
    (env_alone / "conf").mkdir()
    with pytest.raises(PrismError, match=r"new_playtable_validation\.yaml is not there; give the whole checkout"):
        find_checkout(env_alone).sentences()


def test_damaged_checkouts_are_named(tmp_path: Path) -> None:
    root = write_checkout(tmp_path / "calvin")
    found = find_checkout(root)
    sequences = root / "calvin_models" / "calvin_agent" / "evaluation" / "multistep_sequences.py"
    sequences.write_text("tasks = {}\n")
    with pytest.raises(PrismError, match=r"multistep_sequences\.py: 'task_categories' is not there"):
        found.rules()
    sequences.write_text("def (:")
    with pytest.raises(PrismError, match=r"multistep_sequences\.py: not readable"):
        found.rules()
    (root / "calvin_models/conf/annotations/new_playtable_validation.yaml").write_text("a: [")
    with pytest.raises(PrismError, match=r"validation\.yaml: not readable"):
        found.sentences()
