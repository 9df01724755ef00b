"""The Push-T expert: its model of a push, its ways round the block, its success, its two minds."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gym_pusht")

from prism_sims import pusht_expert as paths
from prism_sims.pusht import PushTEnv, PushTPhysics, coverage
from prism_sims.pusht_expert import PushTExpert, push_poses, uncovered
from prism_sims.pusht_features import GOAL, keypoints

from prism.data.formats.store import StoreSource

PLACES = paths.contacts(11.0)
ASSETS = Path(str(files("prism"))) / "assets" / "pusht_expert"


def test_the_law_of_a_push_is_the_simulators() -> None:
    world = PushTPhysics()
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(25):
        pose = np.array([*rng.uniform(180, 330, 2), rng.uniform(0, 2 * np.pi)])
        number = int(rng.integers(len(PLACES)))
        after, valid = push_poses(pose[None], PLACES, 1.5, 20)
        if not valid[0, number].all():
            continue
        place = PLACES[number]
        cos, sin = np.cos(pose[2]), np.sin(pose[2])
        turn = np.array([[cos, -sin], [sin, cos]])
        start = pose[:2] + turn @ place.stand(2.0)
        world.set_state(np.concatenate([start, pose]))
        end = start - 32.0 * turn @ place.normal
        for target in np.linspace(start, end, 8):
            world.step(*target)
        for _ in range(6):
            world.step(*end)
        difference = keypoints(world.state()[2:]) - keypoints(after[0, number, -1])
        assert np.linalg.norm(difference, axis=-1).max() < 0.5
        checked += 1
    assert checked > 15


def test_uncovered_is_one_minus_coverage_near_the_goal() -> None:
    poses = GOAL + np.random.default_rng(0).normal(0, 1, (200, 3)) * (2, 2, 0.02)
    exact = np.array([1 - coverage(*pose) for pose in poses])
    near = exact < 0.07
    assert near.sum() > 50
    assert np.abs(uncovered(poses) - exact)[near].max() < 0.004


@settings(max_examples=60, deadline=None)
@given(
    x=st.floats(-150, 150),
    y=st.floats(-110, 220),
    number=st.integers(0, len(PLACES) - 1),
    turn=st.sampled_from([0, 1, -1]),
)
def test_walks_never_touch_the_block(x: float, y: float, number: int, turn: int) -> None:
    if paths.distance_to_outline(np.array([x, y])) < paths.RADIUS:
        return
    way = paths.route((x, y), PLACES[number], 6.0, turn)
    if turn == 0 and way is None:
        return
    assert way is not None
    points = paths.resample(way, 2.0)
    assert np.allclose(points[-1], PLACES[number].stand(6.0))
    assert paths.distance_to_outline(points).min() > paths.RADIUS - 1.0


def test_both_ways_round_are_different_ways() -> None:
    top = next(place for place in PLACES if place.normal == (0.0, -1.0) and abs(place.point[0]) < 6)
    start = (0.0, 160.0)  # beyond the stem: the bar's outer edge is on the other side
    one, other = (paths.resample(paths.route(start, top, 6.0, turn) or [], 5.0) for turn in (1, -1))
    assert one[:, 0].min() < -60 - paths.RADIUS
    assert other[:, 0].max() > 60 + paths.RADIUS
    assert one[:, 0].max() < 60
    assert other[:, 0].min() > -60


def play(env: PushTEnv, expert: PushTExpert, start: int, seed: int, steps: int = 300) -> tuple[bool, np.ndarray]:
    env.reset(start)
    expert.reset(seed)
    track = [env.state()[:2]]
    for _ in range(steps):
        result = env.step(expert.act())
        track.append(env.state()[:2])
        if result.done:
            break
    return result.success, np.array(track)


def test_solves_the_task_and_repeats_itself() -> None:
    env = PushTEnv()
    expert = PushTExpert(env)
    tracks = []
    for seed in (100_036, 100_047):
        success, track = play(env, expert, seed, seed)
        assert success
        tracks.append(track)
    fresh_env = PushTEnv()
    _, again = play(fresh_env, PushTExpert(fresh_env), 100_036, 100_036)
    assert np.array_equal(tracks[0], again)


def test_the_coin_splits_demonstrations_of_one_start() -> None:
    env = PushTEnv()
    expert = PushTExpert(env)
    tracks: dict[int, list[np.ndarray]] = {1: [], -1: []}
    for seed in range(12):
        expert.reset(seed)
        if len(tracks[expert.side]) < 2:
            _, track = play(env, expert, 9, seed, steps=25)
            tracks[expert.side].append(track)
    one, other = tracks[1], tracks[-1]

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b, axis=-1).max())

    assert min(apart(a, b) for a in one for b in other) > 80
    assert max(apart(*one), apart(*other)) < 80


def test_shipped_demonstrations() -> None:
    source = StoreSource(ASSETS)
    assert len(source.lengths) >= 200
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 2_000_000
    assert "prism data collect pusht" in source.provenance["command"]
    assert [sensor.name for sensor in source.sensors] == ["state"]
    env = PushTEnv()
    for episode in (0, len(source.lengths) - 1):  # the recorded actions solve the task again
        shown = source.read(episode)
        env.reset_to_state(shown.streams["state"][0])
        success = False
        for action in shown.actions:
            success = success or env.step(action).success
        assert success
