"""Push-T: the same world as gym-pusht, and its mirror symmetry."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from numpy.typing import NDArray
from prism_sims import pusht
from prism_sims.pusht import PushTEnv, render_state
from prism_sims.pusht_features import GOAL, keypoints, mirror_action, mirror_state

from prism.errors import PrismError

Array = NDArray[np.float64]


def busy_actions(seed: int, steps: int) -> Array:
    """Targets that wander about the middle, so that the disc keeps meeting the block."""
    rng = np.random.default_rng(seed)
    anchors = np.repeat(rng.uniform(120, 400, (steps // 8 + 1, 2)), 8, axis=0)[:steps]
    return (anchors + rng.normal(0, 5, (steps, 2))).astype(np.float32)


def test_same_as_gym_pusht() -> None:
    reference = pusht._gym()
    env = PushTEnv()
    moved = 0.0
    for seed in (100_000, 100_001, 5):
        start, _ = reference.reset(seed=seed)
        env.reset(seed)
        assert np.array_equal(start, env.state())
        for action in busy_actions(seed, 120):
            expected, reward, terminated, _, info = reference.step(action)
            result = env.step(action)
            assert np.array_equal(expected, env.state())
            assert abs(result.score - reward) < 1e-12
            assert result.success == terminated == info["is_success"]
            if terminated:
                break
        moved += float(np.abs(expected[2:4] - start[2:4]).max())
    assert moved > 20, "the block must have been pushed, or the test says nothing"


def test_coverage_against_shapely() -> None:
    reference = pusht._gym()
    reference.reset(seed=0)
    rng = np.random.default_rng(0)
    for scale in (2.0, 20.0, 100.0):
        for _ in range(100):
            x, y, angle = GOAL + rng.normal(0, 1, 3) * (scale, scale, scale / 50)
            reference.block.angle = angle
            reference.block.position = (x, y)
            assert abs(pusht.coverage(x, y, angle) - reference._get_coverage()) < 1e-12
    assert abs(pusht.coverage(*GOAL) - 1.0) < 1e-12
    assert pusht.coverage(600.0, 600.0, 0.0) == 0.0


def test_pixels_are_gym_pushts() -> None:
    reference = pusht._gym()
    env = PushTEnv("pusht-pixels")
    reference.reset(seed=1)
    image = env.reset(1)["rgb_static"]
    assert np.array_equal(image, reference._render())
    for action in busy_actions(3, 20):
        reference.step(action)
        image = env.step(action).observation["rgb_static"]
        assert np.array_equal(image, reference._render())
        again = render_state(env.state())
        assert (np.abs(again.astype(int) - image).max(-1) > 0).sum() <= 4


def test_reset_to_state_is_exact() -> None:
    env = PushTEnv()
    state = np.array([100.0, 120.0, 300.0, 280.0, 2.5])
    env.reset_to_state(state)
    assert np.allclose(env.state(), state, atol=1e-9)
    env.reset_to_state(np.array([50.0, 50.0, *GOAL]))
    result = env.step(np.array([50.0, 50.0], dtype=np.float32))
    assert result.success
    assert result.done
    assert result.score == 1.0
    with pytest.raises(PrismError, match="5 finite numbers"):
        env.reset_to_state(np.full(5, np.nan))
    with pytest.raises(PrismError, match="5 finite numbers"):
        env.reset_to_state(np.zeros(4))


def test_mirrored_start_and_actions_give_the_mirrored_trajectory() -> None:
    env, other = PushTEnv(), PushTEnv()
    errors: list[float] = []
    for seed in range(12):
        env.reset(seed)
        for step, action in enumerate(busy_actions(seed, 60)):
            state, velocity = env.state(), env.physics.velocity
            if step % 5 == 0:  # compare over half a second; contacts are chaotic beyond
                env.physics.set_state(state, velocity)
                other.reset_to_state(mirror_state(env.state()))
                other.physics.set_state(mirror_state(state), (-velocity[1], -velocity[0]))
            a, b = env.step(action), other.step(mirror_action(action).astype(np.float32))
            expected, got = mirror_state(env.state()), other.state()
            corners = keypoints(got[2:])
            pushed = np.abs(env.state()[2:4] - state[2:4]).max() > 0.5
            if pushed and corners.min() > 15 and corners.max() < 497:  # the walls are one pixel off the symmetry
                turn = (expected[4] - got[4] + np.pi) % (2 * np.pi) - np.pi
                errors.append(max(float(np.abs(expected[:4] - got[:4]).max()), 60 * abs(turn)))
                assert abs(a.score - b.score) < 0.02
    assert len(errors) > 40, "the block must have been pushed, or the test says nothing"
    assert np.median(errors) < 1e-4
    assert max(errors) < 1.0
