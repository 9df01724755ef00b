"""--sensor: preprocessing and health that a foreign format cannot state, kept with the dataset and the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prism import cli
from prism.data import open_dataset
from prism.data.convert import convert
from prism.data.formats.store_writer import DatasetWriter
from prism.data.formats.table import Column, action_spec
from prism.data.views import with_sensor_settings
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.sensors import ActionSpec, SensorSpec, action_spec_of
from prism.training.checkpoint import load_policy
from tests.data_fakes import counting_source
from tests.data_files import LENGTHS, write_calvin, write_lerobot_v3, write_robomimic

SETTINGS = ("agentview_image.crop=12,12", "*_image.random_shift=2", "robot0_eef_pos.limits=-5,5", "robot0_*.fps=50")


def test_settings_reach_the_dataset_and_change_no_data(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "set.hdf5")
    plain, told = open_dataset(path), open_dataset(path, sensors=SETTINGS)
    specs = {spec.name: spec for spec in told.sensors}
    assert specs["agentview_image"].crop == (12, 12)
    assert [specs[name].random_shift for name in ("agentview_image", "robot0_eye_in_hand_image")] == [2, 2]
    assert specs["robot0_eef_pos"].limits == (-5, 5)
    assert specs["robot0_gripper_qpos"].fps == 50
    np.testing.assert_array_equal(told.read(1).streams["agentview_image"], plain.read(1).streams["agentview_image"])
    assert Windows(told, 2, 4).blocks is not None  # what the view is of still says how it is read
    convert(told, tmp_path / "own")
    convert(open_dataset(tmp_path / "own"), tmp_path / "lerobot", "lerobot")
    for again in (open_dataset(tmp_path / "own"), open_dataset(tmp_path / "lerobot")):
        assert {spec.name: spec for spec in again.sensors} == specs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop=2,2", "write SENSOR.KEY=VALUE"),
        ("cam.kind=depth", "KEY is one of fps, crop"),
        ("cam.crop", "write SENSOR.KEY=VALUE"),
        ("front.crop=2,2", "memory has no sensor 'front'; it has where, cam"),
        ("cam.crop=99,99", "crop (99, 99) is larger than the image"),
        ("cam.crop=12", "expected a list, found 12"),
        ("where.resize=12,12", "are for images, not vector"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(PrismError) as error:
        with_sensor_settings(counting_source([3], images=True), [text])
    assert str(error.value).startswith(f"--sensor {text}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tolerance_is_for_recordings_with_time_stamps(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="aligned already"):
        open_dataset(write_calvin(tmp_path / "set"), tolerance=0.1)


def test_straight_from_a_foreign_format_with_less_data_and_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """CALVIN's layout, a fifth of it, sensors of every kind; the checkpoint knows the preprocessing."""
    monkeypatch.chdir(tmp_path)
    write_calvin(tmp_path / "play")
    sizes = ["rgb_*.resize=16,16", "depth_*.clip=0.5,3", "rgb_static.random_shift=1"]
    less = ["--fraction", "0.2", "--sensor", *sizes, "--set", "train.batch_size=2", "policy.encoder.rgb=small"]
    assert cli.main(["train", "play", "--steps", "1", *less, "train.val_fraction=0.0"]) == 0
    said = capfd.readouterr()
    assert f"{round(0.2 * sum(LENGTHS))} windows" in said.err
    assert "next: prism report runs/play" in said.out  # there is no task to roll it out on
    stored = json.loads(Path("runs/play/experiment.json").read_text())["demonstrations"]
    assert (stored["fraction"], stored["sensors"]) == (0.2, sizes)
    specs = {spec.name: spec for spec in load_policy(Path("runs/play")).spec.sensors}
    assert specs["rgb_static"].resize == (16, 16)
    assert specs["depth_gripper"].clip == (0.5, 3)
    assert cli.main(["train", "play", "--out", "o", "--steps", "1", "--demonstrations", "9"]) == cli.EXIT_USER
    assert "9 demonstrations were asked for, there are 3 to train on" in capfd.readouterr().err


def test_inspect_says_version_rates_and_preprocessing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lerobot_v3(tmp_path / "set")
    assert cli.main(["data", "inspect", str(path), "--sensor", "top.crop=24,24", "top.fps=5"]) == 0
    said = capsys.readouterr().out
    assert "LeRobot v3.0" in said
    assert "5 Hz" in said
    assert "10 Hz" in said
    assert "'top': cut to 24 x 24" in said


# --------------------------------------------------------------------------- what the actions are


def pose_dataset(path: Path, spec: ActionSpec | None = None) -> Path:
    rng = np.random.default_rng(0)
    turns = rng.normal(size=(9, 4))
    actions = np.concatenate([rng.normal(size=(9, 3)), turns / np.linalg.norm(turns, axis=1, keepdims=True)], axis=1)
    with DatasetWriter(path, [SensorSpec("s", "vector", (2,))], 7, 10.0, "turn", action=spec) as writer:
        writer.add({"s": rng.normal(size=(9, 2))}, actions)
    return path


def test_the_quaternions_of_the_actions_are_said_by_the_user_or_the_dataset(tmp_path: Path) -> None:
    plain = pose_dataset(tmp_path / "plain")
    assert action_spec_of(open_dataset(plain)) == ActionSpec()
    for text in ("action.quaternions=3:7", "action.quaternions=3"):
        assert action_spec_of(open_dataset(plain, sensors=[text])).quaternions == (3,)
    stated = ActionSpec(tuple("abcdefg"), (3,), "so101")
    stored = pose_dataset(tmp_path / "stored", stated)
    assert action_spec_of(open_dataset(stored)) == stated
    assert action_spec_of(open_dataset(stored, sensors=["action.quaternions="])).quaternions == ()
    for bad, words in (("3:8", "write FIRST:END"), ("4:8", "do not fit 7"), ("0:4,3:7", "do not fit"), ("x", "FIRST")):
        with pytest.raises(PrismError, match=words):
            open_dataset(plain, sensors=[f"action.quaternions={bad}"])


def test_names_and_robot_survive_conversion_both_ways(tmp_path: Path) -> None:
    stated = ActionSpec(("x", "y", "z", "qx", "qy", "qz", "qw"), (3,), "so101")
    there = convert(open_dataset(pose_dataset(tmp_path / "a", stated)), tmp_path / "b", to="lerobot").path
    info = json.loads((there / "meta/info.json").read_text())
    assert (info["robot_type"], info["features"]["action"]["names"]) == ("so101", list(stated.names))
    (there / "meta/prism.json").unlink()  # as another program would have written it: read off the names
    back = open_dataset(convert(open_dataset(there), tmp_path / "c").path)
    assert action_spec_of(back) == stated


def test_a_rate_that_differs_from_the_stored_one_is_refused(tmp_path: Path) -> None:
    path = pose_dataset(tmp_path / "a")
    assert open_dataset(path, fps=10.0).fps == 10
    with pytest.raises(PrismError, match=r"says 10 steps a second, not 50; leave --fps out"):
        open_dataset(path, fps=50.0)


@pytest.mark.parametrize(
    ("names", "found"),
    [("x y z qx qy qz qw", (3,)), ("qw qx qy qz grip", (0,)), ("l_quat.x l_quat.y l_quat.z l_quat.w", (0,)),
     ("vx vy vz vw", ()), ("x y z w", ()), ("qx qy qz", ()), ("j1 j2 j3 j4 j5", ())],
)  # fmt: skip
def test_quaternions_by_the_names_of_dimensions(names: str, found: tuple[int, ...]) -> None:
    listed = tuple(names.split())
    column = Column("action", (len(listed),), np.dtype(np.float32), names=listed)
    assert action_spec([column]).quaternions == found
    joined = [Column("pos", (3,), np.dtype(np.float32)), Column("cmd_quat", (4,), np.dtype(np.float32))]
    assert action_spec(joined).quaternions == (3,)


def test_convert_of_a_recipe_takes_the_options_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "convert", "pusht", str(tmp_path / "out"), "--episodes", "0-1", "--without", "object_state"]
    assert cli.main([*words, "--sensor", "proprio.limits=0,512"]) == 0
    made = open_dataset(tmp_path / "out")
    assert len(made.lengths) == 2
    assert [(spec.name, spec.limits) for spec in made.sensors] == [("proprio", (0, 512))]
    assert cli.main(["data", "convert", "pusht", str(tmp_path / "other"), "--fps", "5"]) == 2
    assert "'pusht' is a recipe" in capsys.readouterr().err
