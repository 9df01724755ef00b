"""--rerun: what a recording holds, against a fake rerun; against the real one where it is installed (170 MB)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prism.cli import main
from prism.controller import Controller, ControllerConfig
from prism.data import open_dataset
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.evaluation.play import RecordConfig, evaluate
from prism.report.held_out import write_held_out
from prism.report.rerun_log import RerunLog, log_dataset, log_results
from prism.sensors import SensorSpec, encode_text
from tests.evaluation_fakes import make_picture_env, make_point_policy

SENSORS = (
    SensorSpec("rgb_wrist", "rgb", (12, 16, 3)),
    SensorSpec("depth_wrist", "depth", (12, 16)),
    SensorSpec("tactile", "tactile", (8, 8, 6)),
    SensorSpec("audio", "audio", (160,), sample_rate=1600),
    SensorSpec("proprio", "vector", (3,), names=("x", "y", "z")),
    SensorSpec("text", "text", (32,)),
)


class FakeRerun:
    """What prism calls of rerun: keeps (entity, archetype, static, step) and writes a line for each."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str, bool, int]] = []

    def __getattr__(self, archetype: str) -> Any:
        def make(*values: Any, **more: Any) -> Any:
            made = SimpleNamespace(archetype=archetype, values=values, **more)
            made.compress = lambda jpeg_quality: made
            return made

        return make

    def RecordingStream(self, name: str) -> Any:  # noqa: N802
        step, target = [0], [Path()]

        def set_time(timeline: str, sequence: int = 0, duration: float = 0.0) -> None:
            if timeline == "step":
                step[0] = sequence

        def log(entity: str, thing: Any, static: bool = False) -> None:
            self.logged.append((entity, thing.archetype, static, step[0]))

        def disconnect() -> None:
            target[0].write_text("\n".join(map(str, self.logged)))

        return SimpleNamespace(
            save=lambda path: target.__setitem__(0, path), set_time=set_time, log=log, disconnect=disconnect
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRerun:
    made = FakeRerun()
    monkeypatch.setitem(sys.modules, "rerun", made)  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "arm"
    rng = np.random.default_rng(0)
    with DatasetWriter(path, SENSORS, 2, 10.0, "reach") as writer:
        for length in (4, 3):
            streams: dict[str, Any] = {
                sensor.name: rng.integers(0, 255, (length, *sensor.shape)).astype(sensor.dtype) for sensor in SENSORS
            }
            streams["audio"] = rng.uniform(-1, 1, (length, 160)).astype(np.float32)
            streams["text"] = np.stack([encode_text("reach", 32)] * length)
            present = {"rgb_wrist": np.arange(length) > 0}
            writer.add(streams, rng.normal(size=(length, 2)).astype(np.float32), present)
    return path


def test_inspect_writes_every_sensor_on_one_time_line(fake: FakeRerun, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "arm.rrd"
    assert main(["data", "inspect", str(dataset), "--rerun", str(out)]) == 0
    assert out.stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == ["arm.rrd"]
    kinds = {entity: archetype for entity, archetype, static, _ in fake.logged if not static}
    assert kinds == {
        "episode": "TextLog",
        "sensors/rgb_wrist": "Image",
        "sensors/depth_wrist": "DepthImage",
        "sensors/tactile": "Image",
        "sensors/audio": "BarChart",
        "sensors/audio/level": "Scalars",
        "sensors/proprio": "Scalars",
        "sensors/text": "TextDocument",
        "actions/recorded": "Scalars",
    }
    assert ("sensors/proprio", "SeriesLines", True, 0) in fake.logged
    steps = [step for entity, _, _, step in fake.logged if entity == "actions/recorded"]
    assert steps == list(range(7))  # the second episode behind the first
    assert [step for entity, _, _, step in fake.logged if entity == "sensors/rgb_wrist"] == [1, 2, 3, 5, 6]
    assert main(["data", "inspect", str(dataset), "--rerun", str(out)]) == 2  # nothing is overwritten unasked


def test_a_plan_shows_its_candidates(fake: FakeRerun, tmp_path: Path) -> None:
    with RerunLog(tmp_path / "plan.rrd", "arm") as log:
        log.at(3, 10.0)
        for dims in (1, 2, 7):
            log.plan(np.ones((4, 8, dims)), np.array([0, 0, 1, 9]), 2, "delta")
    drawn = [(entity, archetype) for entity, archetype, _, step in fake.logged if step == 3]
    flat, solid = "LineStrips2D", "LineStrips3D"
    assert drawn == [(entity, kind) for kind in (flat, flat, solid) for entity in ("plan/candidates", "plan/chosen")]


def test_the_recorded_episodes_of_an_evaluation(fake: FakeRerun, tmp_path: Path) -> None:
    settings, film = ControllerConfig(exec_horizon=4, candidates=3), RecordConfig(videos=1)
    result = evaluate(make_point_policy, "point", 2, 0, settings, 0, film, False, make_picture_env)
    filmed = next(episode for episode in result.episodes if episode.frames)
    log_results([result], tmp_path / "point.rrd")
    kinds = {entity: archetype for entity, archetype, _, _ in fake.logged}
    assert kinds["sensors/scene"] == "EncodedImage"
    assert kinds["plan/candidates"] == "LineStrips2D"
    executed = [step for entity, _, _, step in fake.logged if entity == "actions/executed"]
    assert executed == list(range(filmed.steps))  # the other episode has no pictures


def test_a_replay_shows_what_was_done_and_what_would_be(fake: FakeRerun, tmp_path: Path) -> None:
    sensors = (SensorSpec("proprio", "vector", (2,)), SensorSpec("goal", "vector", (2,)))
    with DatasetWriter(tmp_path / "line", sensors, 2, 10.0, "line") as writer:
        for _ in range(2):
            states = np.zeros((5, 2), np.float32)
            writer.add({"proprio": states, "goal": states}, states)
    controller = Controller(make_point_policy(), ControllerConfig(exec_horizon=4, candidates=3), scale=np.ones(2))
    with RerunLog(tmp_path / "line.rrd", "line") as log:
        write_held_out(tmp_path / "a.html", controller, open_dataset(tmp_path / "line"), [0, 1], [], [], log)
    for entity in ("sensors/goal", "actions/recorded", "actions/executed"):
        assert [step for name, _, _, step in fake.logged if name == entity] == list(range(10))
    assert [step for name, _, _, step in fake.logged if name == "plan/chosen"] == [0, 4, 5, 9]


def test_what_fails_leaves_nothing_and_the_extra_is_named(
    fake: FakeRerun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError), RerunLog(tmp_path / "a.rrd", "arm"):
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(PrismError, match=r"--rerun needs the package rerun: pip install 'prism-policy\[rerun\]'"):
        RerunLog(tmp_path / "a.rrd", "arm")


@pytest.mark.skipif(importlib.util.find_spec("rerun") is None, reason="the extra rerun is not installed")
def test_the_real_rerun_writes_a_file(dataset: Path, tmp_path: Path) -> None:
    out = log_dataset(open_dataset(dataset), tmp_path / "arm.rrd")
    content = out.read_bytes()
    assert content[:3] == b"RRF"
    for entity in (b"/sensors/rgb_wrist", b"/sensors/depth_wrist", b"/actions/recorded"):
        assert entity in content
