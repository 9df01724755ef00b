"""Push-T datasets seen through the environment's sensors."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from prism_sims.pusht import PushTEnv
from prism_sims.pusht_features import PushTDemonstrations, Variant, mirror_action, mirror_state

from prism.data import open_dataset
from prism.data.formats.store import StoreSource
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.sensors import SensorSpec

HUMAN = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "pusht_cchi_v7_replay.zarr.zip"
STATE = SensorSpec("state", "vector", (5,))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> StoreSource:
    """Two short episodes of states and actions, and what the environment showed."""
    path = tmp_path_factory.mktemp("pusht") / "raw"
    with DatasetWriter(path, [STATE], action_dim=2, fps=10.0, task="pusht") as writer:
        for seed, length in ((0, 6), (1, 9)):
            env = PushTEnv()
            env.reset(seed)
            rng = np.random.default_rng(seed)
            states, actions = [], []
            for _ in range(length):
                states.append(env.state())
                actions.append(rng.uniform(100, 400, 2).astype(np.float32))
                env.step(actions[-1])
            writer.add({"state": np.array(states)}, np.array(actions))
    return StoreSource(path)


@pytest.mark.parametrize("variant", ["state", "keypoints", "pixels"])
def test_shows_what_the_environment_shows(recorded: StoreSource, variant: Variant) -> None:
    source = PushTDemonstrations(recorded, variant)
    env = PushTEnv("pusht" if variant == "state" else f"pusht-{variant}")
    assert source.sensors == env.sensors
    for episode, length in enumerate(recorded.lengths):
        got = source.read(episode)
        expected = env.reset(episode)
        for step in range(length):
            for name, value in expected.items():
                assert got.streams[name].dtype == value.dtype
                difference = np.abs(got.streams[name][step].astype(np.float64) - value)
                if name == "rgb_static":  # states are kept in float32: a corner may round to the next pixel
                    assert (difference.max(-1) > 0).sum() < 30
                else:
                    assert difference.max() < 1e-3
            expected = env.step(got.actions[step]).observation


def test_mirror_appends_images(recorded: StoreSource) -> None:
    source = PushTDemonstrations(recorded, "state", mirror=True)
    assert list(source.lengths) == [6, 9, 6, 9]
    raw = recorded.read(1)
    other = PushTDemonstrations(recorded, "state").read(1)
    mirrored = source.read(3)
    assert np.allclose(mirrored.actions, mirror_action(raw.actions))
    assert mirrored.actions.dtype == np.float32
    state = mirror_state(raw.streams["state"].astype(np.float64))
    assert np.allclose(mirrored.streams["proprio"], state[:, :2], atol=1e-3)
    assert not np.allclose(mirrored.streams["object_state"], other.streams["object_state"])
    part = source.read(3, 2, 5, ["proprio"])
    assert set(part.streams) == {"proprio"}
    assert np.array_equal(part.streams["proprio"], mirrored.streams["proprio"][2:5])


def test_mirrored_pixels_are_the_picture_of_the_mirrored_state(recorded: StoreSource) -> None:
    from prism_sims.pusht import render_state

    source = PushTDemonstrations(recorded, "pixels", mirror=True)
    shown = source.read(3).streams["rgb_static"]
    states = mirror_state(recorded.read(1).streams["state"].astype(np.float64))
    for image, state in zip(shown, states, strict=True):
        expected = render_state(state)
        # edges fall half a pixel apart, because the picture has an even number of pixels; areas agree
        assert np.abs(image.astype(int) - expected).mean() < 4.0
        assert np.abs(image.astype(int) - expected[::-1]).mean() > 6.0


def test_survives_pickling(recorded: StoreSource) -> None:
    source = PushTDemonstrations(recorded, "pixels", mirror=True)
    source.read(0)
    again = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 5000
    assert np.array_equal(again.read(2).streams["rgb_static"], source.read(2).streams["rgb_static"])


def test_other_data_is_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a", [SensorSpec("state", "vector", (7,))], 2, 10.0, "x") as writer:
        writer.add({"state": np.zeros((3, 7))}, np.zeros((3, 2)))
    with pytest.raises(PrismError, match=r"'state' is of shape \(7,\)"):
        PushTDemonstrations(StoreSource(tmp_path / "a"), "state")
    with DatasetWriter(tmp_path / "b", [SensorSpec("proprio", "vector", (5,))], 2, 10.0, "x") as writer:
        writer.add({"proprio": np.zeros((3, 5))}, np.zeros((3, 2)))
    with pytest.raises(PrismError, match="'state' is missing"):
        PushTDemonstrations(StoreSource(tmp_path / "b"), "state")
    with DatasetWriter(tmp_path / "c", [STATE], 3, 10.0, "x") as writer:
        writer.add({"state": np.zeros((3, 5))}, np.zeros((3, 3)))
    with pytest.raises(PrismError, match="3 dimensions"):
        PushTDemonstrations(StoreSource(tmp_path / "c"), "state")


@pytest.mark.skipif(not HUMAN.exists(), reason="human demonstrations are not on this machine")
def test_human_demonstrations() -> None:
    human = open_dataset(HUMAN)
    source = PushTDemonstrations(human, "pixels", mirror=True)
    assert len(source.lengths) == 412
    episode = source.read(0, 0, 4)
    assert episode.streams["rgb_static"].shape == (4, 96, 96, 3)
    assert episode.streams["rgb_static"].dtype == np.uint8
    assert "img" in {sensor.name for sensor in human.sensors}
    # the stored pictures are what our simulator draws of the stored states, but for the mark at the target
    drawn = PushTDemonstrations(_Without(human), "pixels").read(0, 0, 4).streams["rgb_static"]
    assert np.abs(drawn.astype(int) - episode.streams["rgb_static"]).mean() < 3.0


class _Without:
    """A dataset that forgot its images."""

    def __init__(self, source: object) -> None:
        self._source = source
        self.sensors = (STATE,)

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)
