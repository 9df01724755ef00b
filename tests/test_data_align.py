"""Time alignment: exact at the samples, between them in between, absent in gaps, never across them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.data.align import (
    AlignConfig,
    Timed,
    align,
    audio_windows,
    camera_clock,
    check_times,
    continuous_quaternions,
    hold,
    interpolate,
    nearest,
    pick,
)
from prism.errors import PrismError
from prism.sensors import SensorSpec


@st.composite
def stamps(draw: st.DrawFn, least: int = 1) -> Any:
    steps = draw(st.lists(st.integers(0, 400), min_size=least - 1, max_size=30))
    return 100.0 + np.cumsum([draw(st.integers(0, 1000)), *steps]) / 1000.0


clocks = st.lists(st.integers(-500, 9000), min_size=1, max_size=30).map(lambda ms: 100.0 + np.sort(ms) / 1000.0)


@given(stamps(), clocks)
def test_nearest_and_hold_against_the_obvious(times: Any, clock: Any) -> None:
    for t, near, last in zip(clock, nearest(times, clock), hold(times, clock), strict=True):
        assert abs(times[near] - t) == pytest.approx(np.abs(times - t).min(), abs=1e-12)
        before = np.flatnonzero(times <= t)
        assert last == (before[-1] if len(before) else 0)


@given(stamps(), clocks, st.integers(1, 600))
def test_presence_is_a_sample_within_the_tolerance(times: Any, clock: Any, milliseconds: int) -> None:
    tolerance = milliseconds / 1000 + 1e-7  # not a tie
    _, here = pick(times, clock, tolerance, "nearest")
    np.testing.assert_array_equal(here, [np.abs(times - t).min() <= tolerance for t in clock])
    _, held = pick(times, clock, tolerance, "hold")
    np.testing.assert_array_equal(held, [((times <= t) & (times >= t - tolerance)).any() for t in clock])
    values = np.random.default_rng(0).normal(size=(len(times), 2))
    _, interpolated = interpolate(times, values, clock, tolerance)
    np.testing.assert_array_equal(interpolated, here)


@given(stamps(least=2), clocks, st.integers(1, 600))
def test_interpolation(times: Any, clock: Any, milliseconds: int) -> None:
    tolerance = milliseconds / 1000 + 1e-7
    line = np.stack([2 * times + 1, -times], axis=1)  # a straight line is reproduced wherever it is interpolated
    out, here = interpolate(times, line, clock, tolerance)
    assert out.dtype == np.float32
    for i, t in enumerate(clock):
        if not here[i]:
            continue
        before, after = times[times <= t], times[times >= t]
        if len(before) and len(after) and after[0] - before[-1] <= 2 * tolerance:
            np.testing.assert_allclose(out[i], [2 * t + 1, -t], rtol=1e-6)
        else:  # not across a gap: the nearest sample as it is
            distance = np.abs(times - t)
            close = line[distance <= distance.min() + 1e-9].astype(np.float32)
            assert any(np.array_equal(out[i], row) for row in close)
    exact, present = interpolate(times, line, times, tolerance)
    assert present.all()
    np.testing.assert_allclose(exact, line, rtol=1e-6)


def rotation(axis: Any, angle: float) -> Any:
    axis = np.asarray(axis, np.float64) / np.linalg.norm(axis)
    return np.concatenate([np.sin(angle / 2) * axis, [np.cos(angle / 2)]])


@given(st.floats(-3, 3), st.floats(-3.0, 3.0), st.floats(0, 1), st.sampled_from([1, -1]), st.integers(0, 100))
def test_quaternions_take_the_shorter_arc_at_constant_speed(
    start: float, turn: float, weight: float, sign: int, seed: int
) -> None:
    axis = np.random.default_rng(seed).normal(size=3)
    ends = np.stack([rotation(axis, start), sign * rotation(axis, start + turn)])
    out, _ = interpolate(np.array([0.0, 1.0]), ends, np.array([weight]), 1.0, quaternions=(0,))
    expected = rotation(axis, start + weight * turn)  # |turn| < pi, so this is the shorter way
    assert abs(abs(float(out[0] @ expected)) - 1) < 1e-5
    assert abs(float(np.linalg.norm(out[0])) - 1) < 1e-6


def test_signs_of_quaternions_do_not_jump() -> None:
    path = np.stack([rotation([0, 0, 1], angle) for angle in np.linspace(0, 9, 40)])
    flipped = path * np.random.default_rng(0).choice([-1, 1], (40, 1))
    poses = np.concatenate([np.zeros((40, 3)), flipped], axis=1)
    smooth = continuous_quaternions(poses, (3,))[:, 3:]
    assert (np.sum(smooth[1:] * smooth[:-1], axis=1) > 0).all()
    np.testing.assert_allclose(np.abs(np.sum(smooth * path, axis=1)), 1)
    with pytest.raises(PrismError, match="quaternion at step 0 has length 0"):
        interpolate(np.array([0.0, 1.0]), np.zeros((2, 4)), np.array([0.5]), 1.0, (0,))


@given(st.floats(-6, 6), st.sampled_from([None, 0, 3]), st.integers(0, 100))
def test_episodes_begin_with_the_same_sign_of_a_quaternion(angle: float, scalar: int | None, seed: int) -> None:
    axis = np.random.default_rng(seed).normal(size=3)
    path = np.stack([rotation(axis, angle + turn) for turn in np.linspace(0, 4, 9)])
    one, other = (continuous_quaternions(sign * path, (0,), scalar) for sign in (1, -1))
    np.testing.assert_array_equal(one, other)
    first = one[0] if scalar is None else one[0, [scalar]]
    assert first[np.argmax(np.abs(first))] >= 0
    np.testing.assert_array_equal(continuous_quaternions(-np.eye(4)[:1], (0,), 3), np.eye(4)[:1])  # w = 0


@given(stamps(least=2), st.integers(1, 60))
def test_clock(times: Any, rate: int) -> None:
    clock = camera_clock(times, rate)
    ticks = times[0] + np.arange(len(clock)) / rate
    assert (np.abs(clock - ticks) <= 0.5 / rate + 1e-9).all()
    assert (np.diff(clock) > 0).all()
    assert clock[0] == times[0]
    assert len(clock) == int((times[-1] - times[0]) * rate + 1e-6) + 1
    for t, tick in zip(clock, ticks, strict=True):
        assert t in times or t == pytest.approx(tick)


def test_audio_windows_end_at_the_step_and_never_span_a_gap() -> None:
    rate, chunk = 100, 10
    times = np.array([0.0, 0.1, 0.2, 0.5, 0.6])  # 0.3 .. 0.5 was not recorded
    samples = np.arange(50, dtype=np.float32)
    clock = np.array([0.0, 0.05, 0.1, 0.25, 0.3, 0.35, 0.55, 0.6, 0.7, 0.75])
    out, here = audio_windows(times, np.full(5, chunk), samples, rate, clock, 8, 0.05)
    assert here.tolist() == [False, False, True, True, True, False, False, True, True, False]
    np.testing.assert_array_equal(out[2], np.arange(2, 10))
    np.testing.assert_array_equal(out[4], np.arange(22, 30))
    np.testing.assert_array_equal(out[7], np.arange(32, 40))
    assert not out[5].any()
    jittered = times + np.array([0, 0.012, -0.009, 0.01, 0])  # stamps are never exact; samples are
    again, present = audio_windows(jittered, np.full(5, chunk), samples, rate, clock, 8, 0.05)
    np.testing.assert_array_equal(again[here & present][:3], out[here & present][:3])
    assert present[2]
    assert present[4]


def test_audio_of_another_rate_than_it_is_said_to_have() -> None:
    chunks, samples = np.full(40, 20), np.zeros(800, np.float32)
    clock = np.arange(1.0, 3.0, 0.1)
    stereo = np.arange(40) * 0.1  # 20 values are 10 samples of two channels
    with pytest.raises(PrismError, match=r"chunk \d+ of the audio begins .* is it one channel of 100 samples"):
        audio_windows(stereo, chunks, samples, 100, clock, 8, 0.1)
    late = np.arange(40) * 0.2 - np.linspace(0, 0.25, 40)  # less than a chunk and the tolerance: jitter
    assert audio_windows(late, chunks, samples, 100, clock, 8, 0.1)[1].all()


def test_a_clock_that_was_set_while_it_recorded_is_refused_before_memory_is_taken() -> None:
    times = np.arange(300) / 30
    times[200:] += 30 * 86400
    with pytest.raises(PrismError, match="time stamps jump by 2592000 s after stamp 199; cut the recording"):
        camera_clock(times, 30)
    with pytest.raises(PrismError, match="time stamps jump by 2592000 s after stamp 199; cut the recording"):
        audio_windows(times, np.full(300, 100), np.zeros(30_000), 3000, np.array([1.0]), 8, 0.1)
    assert len(camera_clock(np.array([0.0, 90.0]), 100)) == 9001  # a pause is none


def test_errors_name_the_stream() -> None:
    turn = SensorSpec("turn", "vector", (4,))
    camera = Timed(SensorSpec("cam", "rgb", (1, 1, 3)), np.arange(3) / 10, np.zeros((3, 1, 1, 3), np.uint8))
    with pytest.raises(PrismError, match="'turn': the quaternion at step 0 has length 0"):
        align({"cam": camera, "turn": Timed(turn, camera.times, np.zeros((3, 4)), (0,))}, "cam", AlignConfig(10))
    jumped = Timed(camera.spec, np.array([0.0, 0.1, 1e6]), camera.values)
    with pytest.raises(PrismError, match="'cam': time stamps jump"):
        align({"cam": jumped}, "cam", AlignConfig(10))


def test_all_streams_together() -> None:
    rng = np.random.default_rng(0)
    camera = 5 + np.arange(30) / 29.7 + rng.normal(0, 0.001, 30)
    force_times = 5 + np.sort(rng.uniform(0, 1, 400))
    force_times = force_times[(force_times < 5.4) | (force_times > 5.7)]
    streams = {
        "cam": Timed(SensorSpec("cam", "rgb", (1, 1, 3)), camera, np.arange(90, dtype=np.uint8).reshape(30, 1, 1, 3)),
        "force": Timed(SensorSpec("force", "vector", (1,)), force_times, force_times[:, None]),
        "say": Timed(SensorSpec("say", "text", (4,)), np.array([5.2]), np.array([[65, 0, 0, 0]], np.uint8)),
        "mic": Timed(SensorSpec("mic", "audio", (100,), sample_rate=1000), np.array([5.0]), np.zeros(1000, np.float32)),
    }
    result = align(streams, "cam", AlignConfig(rate=10, tolerance=0.03))
    assert len(result.clock) == 10
    assert {name: len(values) for name, values in result.streams.items()} == dict.fromkeys(streams, 10)
    here = result.present["force"]
    np.testing.assert_allclose(result.streams["force"][here, 0], result.clock[here], atol=0.03)
    assert not here[5:7].any()
    assert here[[0, 1, 2, 3, 8]].all()
    assert result.present["cam"].all()
    assert result.present["say"].tolist() == (result.clock >= 5.2).tolist()  # an instruction lasts until the next
    assert result.present["mic"].tolist() == [False] + [True] * 9
    said = {gap.name: str(gap) for gap in result.gaps}
    assert "complete" in said["cam"]
    assert f"{10 * int((~here).sum())}.0% of the steps" in said["force"]
    with pytest.raises(PrismError, match="no stream 'eye'"):
        align(streams, "eye", AlignConfig(rate=10))


def test_bad_times() -> None:
    with pytest.raises(PrismError, match=r"bag 3, 'force': time stamps go backwards by 0\.5\d* s after sample 1"):
        check_times(np.array([0.0, 1.0, 0.5, 2.0]), "bag 3, 'force'")
    with pytest.raises(PrismError, match="stamp 1 is not a number"):
        check_times(np.array([0.0, np.nan]), "x")
    with pytest.raises(PrismError, match="no time stamps"):
        check_times(np.array([]), "x")
    for bad in ({"rate": 0.0}, {"rate": 10.0, "tolerance": -1.0}):
        with pytest.raises(PrismError, match="positive number"):
            AlignConfig(**bad)
