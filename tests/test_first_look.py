"""A robot, a client or a script that shows a policy something else than its training data: refused in one line.

One policy of every kind of sensor is trained for two steps; then its readings come in other units, orders and sizes
through each way in: Controller.act, prism-client's Executor, and an unmodified client of the server.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prism_client.messages import Plan, PolicyInfo, SensorInfo

pytest.importorskip("prism_client")

from prism_client import Executor, PlanError, Reply, Step, first_look

from prism.controller import Controller
from prism.data import statistics
from prism.data.episodes import Array, Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.experiments.workflow import train
from prism.inference import health
from prism.inference.backends import load_backend
from prism.inference.lanes import LocalPlanner
from prism.sensors import SensorSpec
from prism.training import start
from tests.data_fakes import MemorySource
from tests.server_fakes import OpenPi, serving

SENSORS = (
    SensorSpec("pose", "vector", (7,)),  # position, unit quaternion w x y z
    SensorSpec("tilt", "vector", (3,)),  # small angles, radians
    SensorSpec("rgb_table", "rgb", (24, 32, 3)),
    SensorSpec("rgb_wrist", "rgb", (24, 32, 3)),
    SensorSpec("depth_table", "depth", (24, 32)),
    SensorSpec("sound", "audio", (160,), sample_rate=1600),
)


def seen_by_the_robot(rng: np.random.Generator) -> dict[str, Array]:
    """A bright scene: a white table with a red box near one corner and a small blue ball anywhere; no mean colour."""
    q = np.array([0.02, 0.99, 0.1, 0.05]) + rng.normal(0, 0.02, 4)
    table = np.full((24, 32, 3), 225.0)
    table[14:20, 4:12] = (200, 60, 50)
    y, x = rng.integers(0, 10), rng.integers(14, 26)
    table[y : y + 4, x : x + 4] = (50, 80, 190)
    wrist = np.full((24, 32, 3), 90.0) + np.linspace(0, 80, 32)[None, :, None]
    depth = np.full((24, 32), 0.8) + rng.normal(0, 0.05)
    depth[:3] = 0.0  # not measured
    time = np.arange(160) / 1600
    tone = 0.2 * np.sin(2 * np.pi * 200 * time + rng.uniform(0, 6)) + rng.normal(0, 0.01, 160)

    def noisy(picture: Array) -> Array:
        return (picture + rng.normal(0, 4, picture.shape) + rng.normal(0, 3)).clip(0, 255).astype(np.uint8)

    return {
        "pose": np.concatenate([rng.uniform(-0.3, 0.3, 3), q / np.linalg.norm(q)]).astype(np.float32),
        "tilt": rng.uniform(-0.05, 0.05, 3).astype(np.float32),
        "rgb_table": noisy(table),
        "rgb_wrist": noisy(wrist),
        "depth_table": depth.astype(np.float32),
        "sound": tone.astype(np.float32),
    }


def demonstrations(count: int = 6, length: int = 20) -> list[Episode]:
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(count):
        steps = [seen_by_the_robot(rng) for _ in range(length)]
        streams = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        episodes.append(Episode(streams, rng.uniform(-1, 1, (length, 2)).astype(np.float32)))
    return episodes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("look")
    with DatasetWriter(folder / "data", SENSORS, 2, 10.0, "look") as writer:
        for episode in demonstrations():
            writer.add(episode.streams, episode.actions)
    small = ["policy.obs_horizon=2", "policy.pred_horizon=8", "controller.exec_horizon=4", "train.batch_size=4"]
    return train(folder / "data", folder / "run", steps=2, set=small, action_kind="absolute", progress=False)


def bgr(seen: dict[str, Array]) -> dict[str, Array]:
    return {"rgb_table": seen["rgb_table"][..., ::-1].copy()}


def swapped(seen: dict[str, Array]) -> dict[str, Array]:
    return {"rgb_table": seen["rgb_wrist"], "rgb_wrist": seen["rgb_table"]}


def other_order(seen: dict[str, Array]) -> dict[str, Array]:
    return {"pose": np.concatenate([seen["pose"][:3], np.roll(seen["pose"][3:], -1)])}


WRONG: dict[str, tuple[Any, str]] = {
    "BGR on a bright scene": (bgr, "what was red is blue: are red and blue swapped"),
    "a black camera": (lambda seen: {"rgb_wrist": np.zeros_like(seen["rgb_wrist"])}, "the picture is black"),
    "swapped cameras": (swapped, "are the cameras swapped"),
    "one camera twice": (lambda seen: {"rgb_wrist": seen["rgb_table"]}, "show the same picture"),
    "depth in millimetres": (lambda seen: {"depth_table": 1000 * seen["depth_table"]}, "is it in millimetres"),
    "depth of nothing": (lambda seen: {"depth_table": 0 * seen["depth_table"]}, "no pixel was measured"),
    "sound as int16": (lambda seen: {"sound": (32767 * seen["sound"]).astype(np.int16)}, "Divide by 32768"),
    "counts as float": (lambda seen: {"sound": 32767 * seen["sound"]}, "Divide by 32768"),
    "x y z w for w x y z": (other_order, "is it x y z w, where training had w x y z"),
    "angles for a rotation": (lambda seen: {"pose": 3 * seen["pose"]}, "in training they were a unit quaternion"),
    "small angles in degrees": (lambda seen: {"tilt": np.degrees(seen["tilt"])}, "is it in degrees"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_move_a_robot_wrongly_is_refused_whoever_shows_it(case: str, trained: Run) -> None:
    change, words = WRONG[case]
    honest = seen_by_the_robot(np.random.default_rng(7))
    shown = {**honest, **change(honest)}
    controller = trained.controller()
    with pytest.raises(PrismError, match=words) as refused:
        controller.act(shown)
    assert "--trust-sensors" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert controller.act(honest).shape == (2,)
    planner = LocalPlanner(load_backend("eager", trained.policy())[0], trained.settings)
    with Executor(planner, asynchronous=False, action_kind="absolute") as executor:
        with pytest.raises(PlanError, match=words):
            executor.act(shown)
        assert executor.act(honest).shape == (2,)
    with serving(trained.policy(), trained.settings) as server, OpenPi(server.port) as client:
        with pytest.raises(RuntimeError, match=words):
            client.infer(shown)
        assert "warnings" not in client.infer(honest)


def test_who_trusts_the_sensors_says_so(trained: Run) -> None:
    honest = seen_by_the_robot(np.random.default_rng(7))
    shown = {**honest, **bgr(honest)}
    Controller(trained.policy(), trained.settings, look=False).act(shown)
    with serving(trained.policy(), trained.settings, trust_sensors=True) as server, OpenPi(server.port) as client:
        assert client.infer(shown)["absent"] == []


def test_honest_readings_pass_without_a_word(trained: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Of 60 other scenes of the same table; what is far and no mistake is a warning."""
    caplog.set_level(logging.WARNING)
    info = [health.trained_on(spec, trained.policy().normalizer) for spec in trained.spec.sensors]
    rng = np.random.default_rng(11)
    for _ in range(60):
        assert first_look.look(info, seen_by_the_robot(rng)) == first_look.look([], {})
    honest = seen_by_the_robot(rng)
    controller = trained.controller()
    controller.act({**honest, "rgb_table": honest["rgb_table"] // 3, "sound": None})
    assert "sensor 'sound' is not in the first observation" in caplog.text
    assert "sensor 'rgb_table': the picture's mean is" in caplog.text


DOUBTS: dict[str, tuple[Any, str]] = {
    "another sample rate": (lambda seen: {"sound": NOISE}, "its spectrum is unlike any in training"),
    "silence": (lambda seen: {"sound": 0 * seen["sound"]}, "the sound's level is 0"),
    "a farther place": (lambda seen: {"depth_table": 4 * seen["depth_table"]}, "is it the same place"),
    "one angle alone": (lambda seen: {"tilt": np.array([0.2, 0, 0], np.float32)}, "is it in degrees"),
}
NOISE = np.random.default_rng(5).uniform(-0.3, 0.3, 160).astype(np.float32)


@pytest.mark.parametrize("case", DOUBTS)
def test_what_may_be_right_is_a_warning(case: str, trained: Run) -> None:
    change, words = DOUBTS[case]
    info = [health.trained_on(spec, trained.policy().normalizer) for spec in trained.spec.sensors]
    honest = seen_by_the_robot(np.random.default_rng(7))
    found = first_look.look(info, {**honest, **change(honest)})
    assert not found.wrong
    assert [doubt for doubt in found.doubts if words in doubt]
    assert len(found.doubts) == 1


def test_a_reading_far_beyond_the_training_data_is_absent_and_the_client_is_told(trained: Run) -> None:
    """An error value of a driver was believed where the data set no limits."""
    rng = np.random.default_rng(3)
    controller = trained.controller()
    controller.act(seen_by_the_robot(rng))
    controller.act({**seen_by_the_robot(rng), "tilt": np.array([0, 1e30, 0], np.float32)})
    assert controller.health.faults == {"tilt": "range"}
    with serving(trained.policy(), trained.settings, allow_absent=True) as server, OpenPi(server.port) as client:
        assert client.infer(seen_by_the_robot(rng))["absent"] == []
        broken = {**seen_by_the_robot(rng), "tilt": np.array([0, 1e30, 0], np.float32)}
        reply = client.infer(broken)
        assert reply["absent"] == ["tilt"]
        assert "sensor 'tilt' is out of range" in reply["warnings"][0]
        assert client.infer(seen_by_the_robot(rng))["absent"] == []


def test_a_policy_without_statistics_is_looked_at_as_before() -> None:
    """Of a run from before they were kept: the mean colour alone."""
    orange = SensorInfo("eye", "rgb", (24, 32, 3), colour=(170.0, 110.0, 50.0))
    shown = np.broadcast_to(np.array([50, 110, 170], np.uint8), (24, 32, 3))
    assert "BGR for RGB" in first_look.look([orange], {"eye": shown}).wrong
    assert not first_look.look([orange], {"eye": shown[..., ::-1]}).wrong
    assert not first_look.look([replace(orange, colour=())], {"eye": shown}).wrong


def test_pictures_and_sound_are_cut_as_the_slow_definition_says() -> None:
    rng = np.random.default_rng(0)
    for size in ((24, 32), (7, 5), (8, 8), (33, 17)):
        picture = rng.uniform(0, 255, (*size, 3))
        pooled = F.adaptive_avg_pool2d(torch.from_numpy(picture).permute(2, 0, 1)[None], first_look.GRID)
        np.testing.assert_allclose(first_look.cells(picture), pooled[0].flatten(1).T.numpy(), rtol=1e-6)
    for samples in (16, 160, 1600):
        tone = np.sin(2 * np.pi * 2 * np.arange(samples) / samples)  # bin 2 of the spectrum alone
        edges = np.unique(np.geomspace(1, samples // 2 + 1, 9).round())
        shares = np.full(8, -6.0)
        shares[np.searchsorted(edges, 2, side="right") - 1] = 0
        np.testing.assert_allclose(first_look.spectrum(tone), shares, atol=1e-4)


def test_statistics_say_what_the_slow_definition_says() -> None:
    episodes = demonstrations()
    specs = {spec.name: spec for spec in statistics.with_seen(SENSORS, MemorySource(episodes, SENSORS))}
    shown = [e.streams["rgb_table"][i].astype(np.float64) for e in episodes for i in (0, 10, 19)]
    seen = specs["rgb_table"].seen
    assert seen is not None
    np.testing.assert_allclose(seen["grid"], np.mean([first_look.cells(p) for p in shown], axis=0).ravel(), rtol=2e-3)
    assert seen["bright"] == pytest.approx([min(p.mean() for p in shown), max(p.mean() for p in shown)], rel=1e-3)
    pose = specs["pose"].seen
    assert pose is None, "its range is that of the statistics, which were not given"
    found = statistics._found_rotations(np.concatenate([e.streams["pose"] for e in episodes]).astype(np.float64))
    assert [one["first"] for one in found] == [3]


class Slow:
    """A planner whose first plan takes `waits` seconds of its own clock, and every later one none."""

    info = PolicyInfo(action_dim=1, pred_horizon=8, exec_horizon=4, fps=10.0)

    def __init__(self, waits: float) -> None:
        self.now, self._waits, self._replies = 0.0, waits, list[Reply]()

    def submit(self, step: Step) -> None:
        self._replies.append(Reply(step, plan=Plan(np.zeros((8, 1), np.float32)), is_plan=True))

    def poll(self, timeout: float = 0.0) -> Reply | None:
        if self._waits and not timeout:
            return None
        self.now, self._waits = self.now + self._waits, 0.0
        return self._replies.pop() if self._replies else None

    def trouble(self) -> str:
        return ""

    def reset(self, seed: int | None = None) -> None: ...
    def close(self) -> None: ...


def loop(waits: float, period: float, catches_up: bool) -> str:
    """200 steps `period` apart; what is said of their rate."""
    planner, due = Slow(waits), 0.0
    with Executor(planner, clock=lambda: planner.now, action_kind="absolute") as executor:
        for _ in range(200):
            try:
                executor.act({"proprio": np.zeros(1, np.float32)})
            except PlanError as error:
                return str(error)
            due = (due if catches_up else planner.now) + period
            planner.now = max(planner.now + 0.001, due)
    return ""


def test_a_metronome_that_catches_up_after_its_first_plan_is_no_fast_loop() -> None:
    """It was refused with "25.7 steps a second"; one that is really too fast is refused all the same."""
    assert loop(1.5, 0.1, catches_up=True) == ""
    assert loop(8.0, 0.1, catches_up=True) == ""
    assert loop(1.5, 0.1, catches_up=False) == ""
    assert "steps a second, the policy's data have 10" in loop(1.5, 0.04, catches_up=True)
    assert "the loop makes 25 steps a second" in loop(0.1, 0.04, catches_up=False)
    assert "the loop makes 5 steps a second" in loop(0.1, 0.2, catches_up=False)


def test_a_run_from_before_goes_on_whether_or_not_it_says_what_was_seen(trained: Run) -> None:
    """A resumed run is compared with its checkpoint, whose sensors may be without statistics."""
    spec = trained.spec
    older = replace(spec, sensors=tuple(replace(sensor, seen=None) for sensor in spec.sensors))
    assert start._plain(spec) == start._plain(older)
    assert start._plain(spec) != start._plain(replace(spec, sensors=spec.sensors[1:]))
