"""The tabletop: holes have to be felt, contacts are heard, the words differ, the expert does what they say."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

if importlib.util.find_spec("robosuite") is None:  # importing it here would set MUJOCO_GL for the whole process
    pytest.skip("needs robosuite", allow_module_level=True)

from prism.errors import PrismError
from prism.sensors import decode_text
from prism.sims import offscreen
from prism.sims.tabletop import COMMANDS, HOLE, JITTER, PEG, TabletopEnv
from prism.sims.tabletop_expert import TabletopExpert
from prism.sims.tabletop_senses import RATE, Microphone


@pytest.fixture(scope="module")
def insertion() -> Iterator[TabletopEnv]:
    env = TabletopEnv("insert-left")
    yield env
    env.close()


def test_the_expert_inserts_and_its_senses_tell_the_story(insertion: TabletopEnv) -> None:
    env = insertion
    expert = TabletopExpert(env)
    first = env.reset(2)
    expert.reset(2)
    assert decode_text(first["text"]) == "put the peg in the left hole"
    assert not first["tactile_image"].any()
    assert not first["audio"].any()
    held, loud, done = 0, [], False
    while not done:
        result = env.step(expert.act())
        done = result.done
        both = result.observation["tactile_image"].reshape(-1, 2).any(axis=0).all()
        assert env.held() or not both, "fingertips feel only what they touch"
        held += both
        loud.append(float(np.abs(result.observation["audio"]).max()))
    assert result.success
    assert held > 20
    assert max(loud) > 0.05
    assert np.median(loud) < 0.3 * max(loud), "a click, not a hum"


def test_words_differ_in_one_scene() -> None:
    assert len({command.words for command in COMMANDS.values()}) == len(COMMANDS) == 4
    states = []
    for name in ("stack-red", "stack-blue"):
        env = TabletopEnv(name)
        states.append((env.reset(4)["object_state"], env.reset(4)["text"]))
        env.close()
    assert np.array_equal(states[0][0], states[1][0])
    assert not np.array_equal(states[0][1], states[1][1])
    with pytest.raises(PrismError, match="stack-red"):
        TabletopEnv("juggle")


def test_the_hole_is_beside_what_is_drawn(insertion: TabletopEnv) -> None:
    offsets = []
    for seed in range(30):
        insertion.reset(seed)
        offsets.append((insertion.true_hole("left") - insertion.drawn("left"))[:2])
    spread = np.abs(np.array(offsets))
    assert spread.max() <= JITTER
    clearance = HOLE - PEG[0]
    assert (spread.max(axis=1) > clearance).mean() > 0.5, "most often the drawn middle is not good enough"


def test_cameras_do_not_show_where_the_hole_is() -> None:
    if offscreen.backend() is None:
        pytest.skip(offscreen.rendering_hint() or "")
    import mujoco

    env = TabletopEnv("insert-left", "pixels")
    before = env.reset(1)
    sim = env.sim_env.sim
    sim.model.body_pos[sim.model.body_name2id("hole_left")][:2] += 0.005
    mujoco.mj_forward(sim.model._model, sim.data._data)
    after = env._pictures()
    env.close()
    for name in ("rgb_static", "rgb_wrist"):
        assert np.array_equal(before[name], after[name])


def test_a_click_rings_and_dies_away() -> None:
    microphone = Microphone()
    samples = RATE // 20
    quiet = [np.zeros(2)] * 25
    assert not microphone.step(quiet, samples).any()
    knock = microphone.step([np.array([0.0, 20.0])] * 25, samples)
    assert 0.1 < np.abs(knock).max() < 1.0
    spectrum = np.abs(np.fft.rfft(knock))
    assert abs(np.fft.rfftfreq(samples, 1 / RATE)[int(spectrum.argmax())] - 1350) < 60
    rest = microphone.step([np.array([0.0, 20.0])] * 25, samples)  # a force that stays makes no sound
    assert np.abs(rest).max() < 0.05 * np.abs(knock).max()
    grasp = Microphone().step([np.array([20.0, 0.0])] * 25, samples)
    assert abs(np.fft.rfftfreq(samples, 1 / RATE)[int(np.abs(np.fft.rfft(grasp)).argmax())] - 410) < 60
