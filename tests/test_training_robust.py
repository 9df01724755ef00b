"""Training for sensors that fail: absent for a step or a span, frozen, covered, noisy; off by default."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from prism_client import ActionKind

from prism.cli import main
from prism.data.formats.store_writer import DatasetWriter
from prism.encoders.vision import camera_of, draw_shift
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.normalize import Normalizer
from prism.rows import PartRandom, Random
from prism.sensors import ActionSpec, SensorSpec, encode_text
from prism.training.config import TrainConfig
from prism.training.faults import RobustConfig, disturbed
from prism.types import Batch, Observation

RGB = SensorSpec("rgb_wrist", "rgb", (16, 24, 3), random_shift=4)
DEPTH = SensorSpec("depth_wrist", "depth", (16, 24), random_shift=4)
FORCE = SensorSpec("force", "vector", (3,), history=4)
SOUND = SensorSpec("audio", "audio", (20,), sample_rate=200)
TEXT = SensorSpec("text", "text", (8,))
SENSORS = (RGB, DEPTH, FORCE, SOUND, TEXT)
TO = 4


def batch(rows: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    streams, present = {}, {}
    for spec in SENSORS:
        shape = (rows, TO, *spec.step_shape)
        pixels = torch.randint(1, 255, shape, generator=rng, dtype=torch.uint8)
        streams[spec.name] = pixels if spec.dtype == np.uint8 else torch.rand(shape, generator=rng) + 0.1
        present[spec.name] = torch.ones(rows, TO, dtype=torch.bool)
    return Batch(Observation(streams, present), torch.zeros(rows, 2, 2), torch.ones(rows, 2, dtype=torch.bool))


def faulty(given: Batch, rng: Random | None = None, **chances: float) -> Observation:
    normalizer = Normalizer({"force": 3}, 2)
    normalizer.vector_scale.fill_(10.0)
    return disturbed(given, SENSORS, normalizer, RobustConfig(**chances), rng or Random(1)).observation


def test_nothing_is_drawn_or_copied_unless_it_is_asked_for() -> None:
    given = batch(3)
    assert disturbed(given, SENSORS, Normalizer({"force": 3}, 2), RobustConfig(), Random(1)) is given
    assert not TrainConfig(steps=1).robust.disturbs
    assert not RobustConfig(limits=True).disturbs


def test_single_steps_are_lost_independently_and_never_all_sensors() -> None:
    seen = faulty(batch(2000), step_dropout=0.5)
    kept = torch.stack([seen.present[s.name] for s in SENSORS[:-1]]).float()  # (M, B, To)
    assert kept.any(0).all()
    assert seen.present["text"].all()
    mean = 0.5 + 0.5**4 / 4  # one of four is spared where all would be lost
    assert kept.mean((1, 2)).tolist() == pytest.approx([mean] * 4, abs=0.02)
    apart = ((kept[0, :, 0] > 0) & (kept[0, :, 1] == 0)).float().mean()
    assert float(apart) == pytest.approx(mean * (1 - mean), abs=0.03)  # one step says nothing of the next


def test_a_span_begins_or_ends_inside_the_window() -> None:
    seen = faulty(batch(4000), span_dropout=0.5).present
    kept = seen["force"][seen["rgb_wrist"].all(1)].int()  # rows in which nothing is spared
    runs = {"".join(map(str, row)) for row in kept.tolist()}
    assert runs == {"1111", "1110", "1100", "1000", "0000", "0111", "0011", "0001"}  # one change at most
    for mode in runs - {"1111", "0000"}:
        share = (kept == torch.tensor([int(c) for c in mode])).all(1).float().mean()
        assert float(share) == pytest.approx(0.5 / 8, abs=0.02)


def test_a_frozen_sensor_repeats_one_reading_and_an_absent_one_none() -> None:
    given = batch(400)
    given.observation.present["audio"][:, 0] = False
    seen = faulty(given, frozen=0.99)
    before, after = given.observation.streams["audio"], seen.streams["audio"]
    starts = set()
    for old, new in zip(before, after, strict=True):
        changed = [step for step in range(TO) if not torch.equal(old[step], new[step])]
        starts.add(changed[0] if changed else TO)
        assert all(torch.equal(new[step], old[changed[0] - 1]) for step in changed)
        assert changed == list(range(changed[0], TO)) if changed else True
    assert starts == {2, 3, TO}  # never a repetition of the absent step 0
    assert torch.equal(seen.streams["text"], given.observation.streams["text"])


def test_a_rectangle_covers_colour_and_depth_of_a_camera_alike() -> None:
    given = batch(300)
    seen = faulty(given, occlusion=0.5)
    covered = seen.streams["depth_wrist"] == 0
    hit = covered.flatten(1).any(1)
    assert float(hit.float().mean()) == pytest.approx(0.5, abs=0.1)
    assert (covered == covered[:, :1]).all()  # the whole window
    for row in torch.nonzero(hit)[:, 0].tolist():
        ys, xs = (torch.nonzero(covered[row, 0].any(axis))[:, 0] for axis in (1, 0))
        assert 2 <= len(ys) <= 8
        assert 3 <= len(xs) <= 12
        assert covered[row, 0, ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1].all()
        picture = seen.streams["rgb_wrist"][row]
        assert len(picture[covered[row]].unique()) == 1
        outside = ~covered[row]
        assert torch.equal(picture[outside], given.observation.streams["rgb_wrist"][row][outside])


def test_noise_has_the_size_of_its_sensor() -> None:
    given = batch(400)
    seen = faulty(given, noise=0.5, noise_size=0.1)
    sizes = {}
    for spec in SENSORS[:-1]:
        difference = seen.streams[spec.name].float() - given.observation.streams[spec.name].float()
        hit = difference.flatten(1).abs().amax(1) > 0
        assert float(hit.float().mean()) == pytest.approx(0.5, abs=0.1)
        sizes[spec.name] = float(difference[hit].std())
    assert sizes["audio"] == pytest.approx(0.1, rel=0.1)
    assert sizes["force"] == pytest.approx(1.0, rel=0.1)  # of a standard deviation of 10
    assert sizes["depth_wrist"] == pytest.approx(0.1, rel=0.15)
    assert 20 < sizes["rgb_wrist"] < 26  # of 255, clipped at both ends
    assert (seen.streams["depth_wrist"] > 0).all()


def test_a_row_gets_the_same_faults_in_every_split_of_the_batch() -> None:
    chances = dict.fromkeys(("step_dropout", "span_dropout", "frozen", "occlusion", "noise"), 0.4)
    given = batch(6)
    whole = faulty(given, Random(5), **chances)
    part = Batch(
        Observation(
            {name: value[2:5] for name, value in given.observation.streams.items()},
            {name: value[2:5] for name, value in given.observation.present.items()},
        ),
        given.actions[2:5],
        given.action_valid[2:5],
    )
    own = faulty(part, PartRandom(5, 2, 3, 6), **chances)
    for spec in SENSORS:
        assert torch.equal(own.streams[spec.name], whole.streams[spec.name][2:5])
        assert torch.equal(own.present[spec.name], whole.present[spec.name][2:5])


def test_colour_and_depth_of_one_camera_move_together() -> None:
    assert camera_of(RGB) == camera_of(DEPTH) == "wrist"
    half = SensorSpec("depth_wrist", "depth", (8, 12), random_shift=2)
    drawn: dict[str, object] = {}
    rng = Random(0)
    colour, depth, small = (draw_shift(50, spec, rng, drawn) for spec in (RGB, DEPTH, half))  # type: ignore[arg-type]
    other = draw_shift(50, replace(RGB, name="rgb_static"), rng, drawn)  # type: ignore[arg-type]
    assert colour is not None
    assert other is not None
    assert depth is not None
    assert torch.equal(colour, depth)
    assert torch.equal(small, (colour / 2).round().long())  # type: ignore[arg-type]
    assert not torch.equal(colour, other)


def test_wrong_chances_are_refused() -> None:
    with pytest.raises(PrismError, match=r"train.robust.*frozen"):
        RobustConfig(frozen=1.0)
    with pytest.raises(PrismError, match=r"train.robust.*noise_size"):
        RobustConfig(noise_size=0.0)


def test_robust_trains_resumes_and_says_what_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    sensors = (
        SensorSpec("rgb_wrist", "rgb", (16, 16, 3)),
        replace(DEPTH, shape=(16, 16)),
        SensorSpec("q", "vector", (2,)),
    )
    with DatasetWriter(tmp_path / "data", (*sensors, TEXT), 2, 10.0, "x") as writer:
        for _ in range(4):
            streams = {
                "rgb_wrist": rng.integers(90, 110, (20, 16, 16, 3), dtype=np.uint8),
                "depth_wrist": rng.uniform(0.9, 1.1, (20, 16, 16)).astype(np.float32),
                "q": rng.uniform(-1, 1, (20, 2)).astype(np.float32),
                "text": np.tile(encode_text("go", 8), (20, 1)),
            }
            writer.add(streams, streams["q"])
    run = tmp_path / "run"
    arguments = ["train", str(tmp_path / "data"), "--robust", "--set", "train.batch_size=8", "--out", str(run)]
    assert main([*arguments, "--steps", "4"]) == 0
    asked = json.loads((run / "experiment.json").read_text())
    assert asked["train"]["robust"]["span_dropout"] == 0.1
    assert asked["policy"]["encoder"]["dropout"] == 0.1
    limits = {spec.name: spec.limits for spec in Run(run).spec.sensors}
    assert limits["q"] == pytest.approx((-3, 3), abs=0.2)
    assert limits["rgb_wrist"] == pytest.approx((50, 177), abs=3)
    assert limits["depth_wrist"] == pytest.approx((0.5, 2.0), abs=0.03)
    assert limits["text"] is None
    controller = Run(run).controller(set=["candidates=2"])
    good = {"rgb_wrist": np.full((16, 16, 3), 100, np.uint8), "q": np.zeros(2, np.float32), "text": "go"}
    controller.act({**good, "depth_wrist": np.ones((16, 16), np.float32)})
    assert not controller.health.faults
    controller.act(
        {**good, "rgb_wrist": np.zeros((16, 16, 3), np.uint8), "depth_wrist": np.full((16, 16), 9.0, np.float32)}
    )
    assert controller.health.faults == {"rgb_wrist": "range", "depth_wrist": "range"}
    capsys.readouterr()


def test_ten_steps_with_faults_are_five_a_resume_and_five_more(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sensors, poses = (SensorSpec("q", "vector", (2,)), FORCE), ActionSpec(kind=ActionKind.ABSOLUTE)
    with DatasetWriter(tmp_path / "data", sensors, 2, 10.0, "x", action=poses) as writer:
        for _ in range(3):
            q = rng.normal(size=(20, 2)).astype(np.float32)
            writer.add({"q": q, "force": rng.normal(size=(20, 3)).astype(np.float32)}, q)
    common = ["train", str(tmp_path / "data"), "--robust", "--set", "train.batch_size=8", "train.threads=1"]
    assert main([*common, "train.checkpoint_every=5", "--steps", "10", "--out", str(tmp_path / "a")]) == 0
    assert main([*common, "train.checkpoint_every=5", "--steps", "10", "--out", str(tmp_path / "b")]) == 0
    first, second = (Run(tmp_path / name) for name in "ab")
    for checkpoint in second.checkpoints[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    assert main(["train", str(tmp_path / "data"), "--out", str(tmp_path / "b"), "--resume"]) == 0
    ours, theirs = (run.policy().state_dict() for run in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
