"""Nothing between two plans is lost: an event at any step reaches the next plan, whatever T_o and T_a."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prism_client import Executor, RemotePlanner

from prism.cli import main
from prism.controller import Controller, ControllerConfig
from prism.data.episodes import Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.data.history import feels_events, memory, stacked, unseen, with_history
from prism.data.loader import BatchOrder, read_batch
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.experiments.recipes import recipe
from prism.experiments.share import lerobot_config
from prism.inference.backends import load_backend
from prism.inference.window import Window, batched
from prism.methods.prism import PrismPolicy
from prism.policy import PolicySpec
from prism.sensors import SensorSpec
from tests.data_fakes import MemorySource
from tests.policy_fakes import VECTORS, small_config, small_policy
from tests.server_fakes import serving

TO, TA = 2, 8
FORCE = SensorSpec("force", "vector", (3,))
SOUND = SensorSpec("audio", "audio", (80,), sample_rate=800)
SKIN = SensorSpec("skin", "tactile", (12, 12, 2))
CONTROL = ControllerConfig(exec_horizon=TA, candidates=4)


def policy_of(*sensors: SensorSpec) -> PrismPolicy:
    return small_policy(small_config(obs_horizon=TO, pred_horizon=16), (VECTORS[0], *sensors)).eval()


def quiet(sensors: tuple[SensorSpec, ...]) -> dict[str, Any]:
    return {s.name: np.full(s.shape, 100 if s.dtype == np.uint8 else 0.01, s.dtype) for s in sensors}


def readings(sensors: tuple[SensorSpec, ...], steps: int, name: str, at: int | None) -> list[dict[str, Any]]:
    """Nothing happens, but at step `at` to one sensor."""
    shown = [quiet(sensors) for _ in range(steps)]
    if at is not None:
        loud = shown[at][name]
        shown[at][name] = (255 - loud) if loud.dtype == np.uint8 else np.sin(np.arange(loud.size)).astype(np.float32)
    return shown


# ------------------------------------------------------------------------------------------------ what a policy sees


def slow(source: MemorySource, episode: int, step: int, name: str, to: int, history: int) -> tuple[Any, list[bool]]:
    """(To, H, ...) of one window, reading by reading: the definition."""
    whole = source.episodes[episode]
    mask = whole.present.get(name, np.ones(whole.length, np.bool_))
    stacks, there = [], []
    for t in range(step - to + 1, step + 1):
        steps = [max(i, 0) for i in range(max(t, 0) - history + 1, max(t, 0) + 1)]
        known = [i for i in steps if mask[i]]
        there.append(bool(known))
        filled = [max([k for k in known if k <= i], default=known[0]) if known else i for i in steps]
        stacks.append(np.stack([whole.streams[name][i] for i in filled]))
    return np.stack(stacks), there


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 3), st.integers(2, 6), st.integers(0, 9))
def test_windows_match_the_slow_definition(lengths: list[int], to: int, history: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sensors = (VECTORS[0], FORCE, SOUND)
    episodes = []
    for length in lengths:
        streams = {s.name: rng.normal(size=(length, *s.shape)).astype(np.float32) for s in sensors}
        holes = {s.name: rng.random(length) > 0.4 for s in (FORCE, SOUND)}
        episodes.append(Episode(streams, np.zeros((length, 2), np.float32), holes))
    source = MemorySource(episodes, sensors)
    windows = Windows(source, to, 2, history={"force": history, "audio": history})
    where = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    batch = windows.batch(np.arange(len(windows)))
    source.read_together = 4  # type: ignore[misc]
    blocks = Windows(source, to, 2, history={"force": history, "audio": history})
    order = BatchOrder(len(blocks), len(blocks), 0, blocks=blocks.blocks)
    shuffled, indices = read_batch(blocks, order, 0), order.indices(0).tolist()
    assert batch.observation.streams["proprio"].shape == (len(where), to, 3)
    for row, (episode, step) in enumerate(where):
        for name in ("force", "audio"):
            wanted, there = slow(source, episode, step, name, to, history)
            for found, at in ((batch, row), (shuffled, indices.index(row))):
                assert found.observation.present[name][at].tolist() == there
                seen = found.observation.streams[name][at].numpy()
                assert np.array_equal(seen[there], wanted[there])


def test_the_controller_shows_what_training_showed() -> None:
    sensors = (VECTORS[0], replace(FORCE, history=5), replace(SOUND, history=3))
    rng = np.random.default_rng(0)
    streams = {s.name: rng.normal(size=(9, *s.shape)).astype(np.float32) for s in sensors}
    mask = np.array([1, 0, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    source = MemorySource([Episode(streams, np.zeros((9, 3), np.float32), {"force": mask})], sensors)
    windows = Windows(source, TO, 2, history={s.name: s.steps for s in sensors})
    window = Window(policy_of(*sensors[1:]).spec)
    for step in range(9):
        shown = {name: values[step] for name, values in streams.items() if name != "force" or mask[step]}
        window.observe(shown)
        trained, acted = windows.batch(np.array([step])).observation, batched([window], torch.device("cpu"))
        for name in streams:
            assert torch.equal(trained.present[name], acted.present[name])
            assert torch.equal(trained.streams[name], acted.streams[name])


def test_steps_that_nobody_sent_are_filled_in_as_far_as_the_history_goes() -> None:
    window = Window(policy_of(replace(FORCE, history=4)).spec)
    for value, missed in ((0.0, 0), (6.0, 5)):
        shown = {"proprio": np.zeros(3, np.float32), "force": np.full(3, value, np.float32)}
        gained = window.observe(shown, missed=missed)
    assert [step[0]["force"][-1, 0] for step in gained] == [2, 3, 4, 5, 6]
    assert [step[0]["force"][:, 0].tolist() for step in window.steps] == [[2, 3, 4, 5], [3, 4, 5, 6]]


# -------------------------------------------------------------------------------------------------------- an impulse


def plans(policy: PrismPolicy, shown: list[dict[str, Any]]) -> Any:
    """The second plan of a controller that plans every TA steps."""
    controller = Controller(policy, CONTROL)
    for observation in shown:
        controller.act(observation)
    assert controller.last_plan is not None
    assert controller.last_plan.info.step == TA
    return controller.last_plan.candidates


@pytest.mark.parametrize("spec", [FORCE, SOUND, SKIN], ids=["force", "sound", "skin"])
def test_an_impulse_at_any_step_changes_the_next_plan(spec: SensorSpec) -> None:
    (long,) = with_history((spec,), TO, TA)
    policy, forgetful = policy_of(long), policy_of(spec)
    sensors = policy.spec.sensors
    silent, silent_too = (plans(own, readings(sensors, TA + 1, "", None)) for own in (policy, forgetful))
    heard = [not np.array_equal(plans(policy, readings(sensors, TA + 1, spec.name, at)), silent) for at in range(1, 9)]
    assert all(heard)
    lost = [np.array_equal(plans(forgetful, readings(sensors, 9, spec.name, at)), silent_too) for at in range(1, 9)]
    assert lost == [True] * 6 + [False] * 2  # without a history only the window's two steps are seen


def test_an_impulse_reaches_the_next_plan_of_a_server_too() -> None:
    """Through prism-client and the server's kept tokens."""
    policy = policy_of(*with_history((FORCE, SOUND), TO, TA))
    sensors = policy.spec.sensors
    with serving(policy, CONTROL) as server:

        def executed(at: int | None) -> Any:
            with Executor(RemotePlanner(f"ws://127.0.0.1:{server.port}"), asynchronous=False) as executor:
                assert executor.planner.info.memory == TO + TA - 1
                executor.reset(3)
                return [executor.act(shown) for shown in readings(sensors, TA + 1, "force", at)][-1]

        silent = executed(None)
        assert np.array_equal(executed(None), silent)
        assert not any(np.array_equal(executed(at), silent) for at in range(1, TA + 1))


def test_a_client_that_leaves_steps_out_is_told_what_it_loses(caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_of(*with_history((FORCE,), TO, TA))
    with serving(policy, CONTROL) as server, caplog.at_level(logging.WARNING):
        planner = RemotePlanner(f"ws://127.0.0.1:{server.port}")
        for executed in (None, TA):
            planner.client.infer(quiet(policy.spec.sensors), executed=executed)
        planner.close()
    assert "7 steps since the last plan were not sent: the readings of 'force' are lost" in caplog.text


@pytest.mark.parametrize("backend", ["eager", "onnx", "onnx-int8"])
def test_back_ends_agree_about_a_history(backend: str) -> None:
    if backend != "eager":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    policy = policy_of(*with_history((FORCE, SOUND, SKIN), TO, TA))
    frames = readings(policy.spec.sensors, 6, "skin", 3)
    _, agreement = load_backend(backend, policy, frames)
    assert agreement.max_difference_scaled <= agreement.limit


# ------------------------------------------------------------------------------------------------------ the defaults


def test_which_sensors_get_one_and_how_long_it_is() -> None:
    names = [FORCE, SOUND, SKIN, SensorSpec("ft.wrist_left", "vector", (6,)), SensorSpec("tactile", "vector", (6,))]
    others = [VECTORS[0], SensorSpec("rgb", "rgb", (9, 9, 3)), SensorSpec("left_shift", "vector", (2,))]
    assert all(map(feels_events, names))
    assert not any(map(feels_events, others))
    assert [s.steps for s in with_history((*names, *others), TO, TA)] == [8] * 5 + [1] * 3
    assert [s.steps for s in with_history((FORCE,), 2, 2)] == [1]  # every step is in a window
    assert [s.steps for s in with_history((replace(FORCE, history=1), SOUND), TO, TA, 5)] == [1, 5]
    assert unseen((FORCE, *others), TO, TA) == ["force"]
    large = SensorSpec("rgb_tactile", "tactile", (160, 120, 6))  # CALVIN's: said, not read eight times as often
    assert with_history((large,), TO, TA) == (large,)
    assert unseen((large,), TO, TA) == ["rgb_tactile"]
    assert unseen(with_history(names, TO, TA), TO, TA) == []
    assert memory(with_history(names, TO, TA), TO) == 9
    for experiment in (recipe("tabletop-insert-left"), recipe("tabletop-insert-left-pixels")):
        for steps in (1, 2, 8, 16):
            asked = replace(experiment, controller=replace(experiment.controller, exec_horizon=steps))
            found = asked.sensors((FORCE, SOUND, SKIN))
            assert unseen(found, asked.policy.obs_horizon, steps) == []


def test_training_says_what_is_never_seen_and_what_cannot_be_rolled_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "data", (VECTORS[0], FORCE), 3, 10.0, "x") as writer:
        for _ in range(3):
            q = rng.normal(size=(20, 3)).astype(np.float32)
            writer.add({"proprio": q, "force": q}, q)
    said = {}
    cases = {"default": [], "off": ["history=1"], "short": ["policy.pred_horizon=8"]}
    for name, settings_ in cases.items():
        setting = ["--set", "train.batch_size=4", "controller.exec_horizon=8", *settings_]
        assert main(["train", str(tmp_path / "data"), "--steps", "1", "--out", str(tmp_path / name), *setting]) == 0
        said[name] = " ".join(capsys.readouterr().err.split())
    assert "force (8 readings in a time step)" in said["default"]
    assert "never seen" not in said["default"]
    assert "steps of 'force' between two plans are never seen: --sensor force.history=8" in said["off"]
    assert "warning: selection.rule = 'commit' compares with the unexecuted remainder" in said["short"]


def test_specs_from_before_there_was_a_history_are_read_and_written_as_they_were() -> None:
    assert "history" not in FORCE.to_json()
    long = replace(FORCE, history=8)
    assert SensorSpec.from_json(long.to_json()) == long
    old = small_config().spec((FORCE,), 3, 10.0).to_json()
    assert PolicySpec.from_json(old).sensors[0].steps == 1


def test_what_a_history_is_not_for() -> None:
    with pytest.raises(PrismError, match="it is for vectors, touch and sound"):
        SensorSpec("rgb", "rgb", (9, 9, 3), history=4)
    with pytest.raises(PrismError, match="up to 1000 steps"):
        replace(FORCE, history=-1)
    with pytest.raises(PrismError, match="anchor 'proprio' is one reading"):
        small_policy(small_config(anchor="proprio"), (replace(VECTORS[0], history=3),))
    with pytest.raises(PrismError, match="the history of 'force' has no place in LeRobot"):
        lerobot_config(policy_of(replace(FORCE, history=4)).spec, CONTROL)


def test_a_stack_is_filled_with_the_reading_before() -> None:
    values = np.arange(4.0)[:, None]
    filled, there = stacked(values, np.array([False, True, False, True]))
    assert filled[:, 0].tolist() == [1, 1, 1, 3]
    assert bool(there)
    assert not stacked(values, np.zeros(4, np.bool_))[1]


def test_a_server_is_told_another_sentence_at_any_step() -> None:
    words = SensorSpec("text", "text", (24,))
    policy = policy_of(words)
    with serving(policy, CONTROL) as server:

        def plan(first: str, second: str) -> Any:
            with Executor(RemotePlanner(f"ws://127.0.0.1:{server.port}"), asynchronous=False) as executor:
                executor.reset(3)
                told = [first] * TA + [second]
                return [executor.act({"proprio": np.zeros(3, np.float32), "text": text}) for text in told][-1]

        assert np.array_equal(plan("push", "push"), plan("push", "push"))
        assert not np.array_equal(plan("push", "push"), plan("push", "pull"))
