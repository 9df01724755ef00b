"""Sensors that fail while the robot runs: diagnosed, absent, logged once, back by themselves."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.inference.health import SensorMonitor, as_spec
from prism.inference.window import Window
from prism.selection import SelectionConfig
from prism.sensors import SensorSpec, decode_text
from tests.policy_fakes import small_config, small_policy

FORCE = SensorSpec("force", "vector", (3,), limits=(-50.0, 50.0), max_repeats=2)
RGB = SensorSpec("rgb", "rgb", (4, 4, 3), limits=(2.0, 253.0), max_repeats=3, max_age=0.1)
DEPTH = SensorSpec("depth", "depth", (4, 4), clip=(0.1, 2.0), limits=(0.2, 1.5))
TEXT = SensorSpec("text", "text", (16,))
AUDIO = SensorSpec("audio", "audio", (8,), sample_rate=80)


def _monitor(*sensors: SensorSpec) -> SensorMonitor:
    return SensorMonitor(sensors, 10.0)


def test_nan_is_absent_and_comes_back_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = _monitor(FORCE)
    seen = []
    with caplog.at_level(logging.INFO, "prism.inference.health"):
        for i in range(12):
            value = np.full(3, np.nan if i in (3, 4, 5, 8) else i, dtype=np.float64)
            reading, present = monitor.read(FORCE, value)
            monitor.step()
            assert np.isfinite(reading).all()
            assert reading.dtype == np.float32
            seen.append(present)
    assert [i for i, present in enumerate(seen) if not present] == [3, 4, 5, 8]
    assert monitor.counts["force", "nan"] == 4
    assert monitor.faults == {}
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert "'force' holds NaN or infinity at step 3" in caplog.records[0].message
    assert "'force' is back at step 6" in caplog.records[1].message


def test_frozen_beyond_the_spec(caplog: pytest.LogCaptureFixture) -> None:
    monitor = _monitor(RGB)
    frame = np.full((4, 4, 3), 100, np.uint8)
    present = [monitor.read(RGB, frame)[1] for _ in range(6)]
    assert present == [True, True, True, True, False, False]  # three repeats are within the spec
    assert monitor.faults == {"rgb": "frozen"}
    frame[0, 0, 0] += 1  # the driver fills the same buffer again
    assert monitor.read(RGB, frame)[1]
    assert "at most 3" in caplog.text
    monitor.reset()
    assert monitor.read(RGB, frame)[1]
    free = SensorSpec("free", "rgb", (4, 4, 3))
    assert all(_monitor(free).read(free, frame)[1] for _ in range(50))


def test_a_frozen_depth_camera_with_holes() -> None:
    spec = SensorSpec("depth", "depth", (4, 4), max_repeats=1)
    monitor = _monitor(spec)
    frame = np.full((4, 4), 0.7, np.float32)
    frame[0, 0] = np.nan
    assert [monitor.read(spec, frame)[1] for _ in range(4)] == [True, True, False, False]
    assert monitor.faults == {"depth": "frozen"}
    frame[0, 0] = 0.7  # the hole is gone: another reading
    assert monitor.read(spec, frame)[1]


def test_out_of_range() -> None:
    monitor = _monitor(FORCE, RGB, DEPTH)
    assert monitor.read(FORCE, np.array([0, 50, -50]))[1]
    assert not monitor.read(FORCE, np.array([0, 50.1, 0]))[1]
    assert not monitor.read(FORCE, np.array([0, 0, -51]))[1]
    assert not monitor.read(RGB, np.zeros((4, 4, 3), np.uint8))[1]  # the lens cap is on
    half = np.zeros((4, 4, 3), np.uint8)
    half[:2] = 255  # black and white pixels are fine, a black picture is not
    assert monitor.read(RGB, half)[1]
    assert not monitor.read(DEPTH, np.zeros((4, 4), np.float32))[1]
    assert not monitor.read(DEPTH, np.full((4, 4), 3.0, np.float32))[1]
    some = np.full((4, 4), np.nan, np.float32)
    some[0, 0] = 0.7
    reading, present = monitor.read(DEPTH, some)  # a depth camera that has holes is a healthy one
    assert present
    assert reading[0, 0] == np.float32(0.7)
    assert reading.sum() == np.float32(0.7)
    assert not monitor.read(DEPTH, np.full((4, 4), np.inf, np.float32))[1]
    assert monitor.faults["depth"] == "nan"


def test_late() -> None:
    monitor = _monitor(RGB, TEXT)
    frames = iter(np.arange(10, 60, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3))
    assert monitor.read(RGB, next(frames), age=0.1)[1]
    assert not monitor.read(RGB, next(frames), age=0.11)[1]
    assert monitor.faults["rgb"] == "late"
    assert not monitor.read(RGB, next(frames), age=float("nan"))[1]
    assert monitor.read(RGB, next(frames))[1]  # nobody knows: believed
    assert monitor.read(AUDIO, np.zeros(8), age=0.3)[1]  # three periods of 10 Hz
    assert not monitor.read(AUDIO, np.zeros(8), age=0.31)[1]


def test_missing_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    monitor = _monitor(FORCE)
    reading, present = monitor.read(FORCE, None)
    assert not present
    assert reading.shape == (3,)
    assert monitor.faults == {"force": "missing"}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_wrong_shapes_and_types_are_errors() -> None:
    with pytest.raises(PrismError, match=r"'rgb'.*\(4, 4, 3\).*\(4, 4\)"):
        as_spec(RGB, np.zeros((4, 4), np.uint8))
    with pytest.raises(PrismError, match=r"images are uint8.*float64"):
        as_spec(RGB, np.zeros((4, 4, 3)))
    with pytest.raises(PrismError, match="text is UTF-8"):
        as_spec(TEXT, np.zeros(16))
    with pytest.raises(PrismError, match="a vector is numbers"):
        as_spec(FORCE, np.array(["a", "b", "c"]))
    assert decode_text(as_spec(TEXT, "open it")) == "open it"
    assert as_spec(DEPTH, np.ones((4, 4), np.float64)).dtype == np.float32


def test_controller_acts_on_every_kind_and_through_faults() -> None:
    sensors = (FORCE, SensorSpec("rgb", "rgb", (24, 24, 3), max_repeats=1), DEPTH, TEXT, AUDIO)
    policy = small_policy(small_config(), sensors)
    config = ControllerConfig(exec_horizon=1, candidates=2, selection=SelectionConfig(rule="first"))
    controller = Controller(policy, config)
    frame = np.full((24, 24, 3), 99, np.uint8)
    observation = {
        "force": np.zeros(3),
        "rgb": frame,
        "depth": np.full((4, 4), 0.5),
        "text": "push the red button"[:16],
        "audio": np.zeros(8),
    }
    for i in range(5):
        action = controller.act({**observation, "force": np.full(3, float(i))}, ages={"depth": 0.01})
        assert np.isfinite(action).all()
    assert controller.health.faults == {"rgb": "frozen"}
    window = controller.planner.window
    assert [present["rgb"] for _, present in window.steps] == [False, False]
    assert window.steps[-1][0]["text"].dtype == np.uint8
    controller.act({**observation, "rgb": frame + 1, "force": np.full(3, 9.0)})
    assert controller.health.faults == {}


@pytest.mark.parametrize("spec", [SensorSpec("rgb", "rgb", (24, 24, 3)), SensorSpec("state", "vector", (3,))])
def test_a_driver_with_one_buffer_does_not_rewrite_the_window(spec: SensorSpec) -> None:
    window = Window(small_policy(small_config(), (spec,)).spec)
    buffer = np.zeros(spec.shape, spec.dtype)
    for value in (10, 20):
        buffer[...] = value
        window.observe({spec.name: buffer})
    buffer[...] = 30
    assert [float(streams[spec.name].mean()) for streams, _ in window.steps] == [10, 20]


def test_readings_that_a_guard_has_watched_are_not_judged_twice() -> None:
    """It leaves out what is frozen or late; what the policy was trained on is still checked."""
    watched = SensorMonitor((FORCE, RGB), 10.0, watched=("force",))
    present = [watched.read(FORCE, np.ones(3), age=9.0)[1] for _ in range(9)]
    assert all(present)
    assert not watched.read(FORCE, np.full(3, 99.0))[1]
    assert watched.faults == {"force": "range"}
    assert not watched.read(FORCE, None)[1]
    assert not watched.read(RGB, np.full((4, 4, 3), 99, np.uint8), age=9.0)[1], "of this one nobody else is asked"
