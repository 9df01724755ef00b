"""What actions measure: units that convert, and numbers that can only be of another unit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from prism_client import ActionKind

from prism import cli
from prism.data import open_dataset
from prism.data.formats.robomimic import kind_of_controller
from prism.data.formats.store_writer import DatasetWriter
from prism.data.guess_kind import guess_kind
from prism.data.mixture import Member, Mixture
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.sensors import ActionSpec, SensorSpec
from prism.units import apart, factor

JOINTS = (SensorSpec("proprio", "vector", (3,)),)
DELTA = ActionSpec(kind=ActionKind.DELTA)


def record(
    path: Path, size: float = 1.0, unit: float = 1.0, kind: str = "delta", spec: ActionSpec | None = None
) -> Path:
    """Changes or poses (`kind`) of a pose in `unit`, 10 steps a second; an action of 1 is `size` of the motion."""
    moves = np.cumsum(np.random.default_rng(0).normal(0, 0.002, (3, 60, 3)), axis=1)
    poses = np.cumsum(moves, axis=1)
    with DatasetWriter(path, JOINTS, 3, 10.0, "t", action=spec) as writer:
        for before, change, pose in zip(poses - moves, moves, poses, strict=True):
            writer.add({"proprio": unit * before}, unit / size * (pose if kind == "absolute" else change))
    return path


def test_units_convert() -> None:
    assert factor("mm", "m") == pytest.approx(0.001)
    assert factor("deg/s", "rad/s") == pytest.approx(math.pi / 180)
    assert factor("N", "N") == 1.0
    assert factor("m", "rad") is factor("m", "m/s") is factor("N", "m") is None


def test_spreads_apart_are_another_unit() -> None:
    one = np.array([0.02, 0.03, 0.0])
    assert apart(one, one * [1, 15, 1]) is None
    assert apart(57.3 * one, one) == pytest.approx(57.3)
    assert apart(one, np.zeros(3)) is None


@pytest.mark.parametrize(
    ("size", "kind", "said"),
    [
        (1.0, "delta", ""),
        (1.3, "delta", ""),  # the arm lags behind
        (0.1, None, "'proprio', but an action of 1 is 0.1 of motion: a velocity at 10 Hz? pass --action-kind velocity"),
        (0.02, None, "1 is 0.02 of motion: changes in another unit, or normalised? pass --action-kind delta --sensor "),
        (0.001, None, "action.scale=0.001, or velocity"),
    ],
)
def test_changes_are_as_large_as_the_motion(size: float, kind: str | None, said: str, tmp_path: Path) -> None:
    """A correlation alone called metres a second, millimetres and normalised numbers "delta"."""
    guess = guess_kind(open_dataset(record(tmp_path / "data", size)))
    assert guess.kind == kind
    assert said in guess.why
    stated = open_dataset(tmp_path / "data", sensors=(f"action.scale={size:g}",))
    assert guess_kind(stated).kind == "delta"


def test_units_and_scale_are_stated_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "data", spec=ActionSpec(("x", "y", "gripper"), kind=ActionKind.DELTA))
    words = ("action.units=mm", "action.scale=0.5")
    action = open_dataset(path, sensors=words).action_spec  # type: ignore[attr-defined]
    assert (action.units, action.scale) == (("mm", "mm", ""), (0.5, 0.5, 1.0))
    assert ActionSpec.from_json(action.to_json(), "here") == action
    sensor = [word for text in words for word in ("--sensor", text)]
    assert cli.main(["data", "inspect", str(path), *sensor]) == 0
    assert "units mm mm -, an action of 1 is 0.5 0.5 1 of them" in " ".join(capsys.readouterr().out.split())
    for text, error in (
        ("action.units=mm,mm", "action.units has 2 entries for 3 action dimensions"),
        ("action.scale=-1", "use numbers above 0"),
        ("action.scale=big", "write numbers, for example action.scale=0.05"),
    ):
        with pytest.raises(PrismError, match=error):
            open_dataset(path, sensors=(text,))
    run = tmp_path / "run"
    assert cli.main(["train", str(path), "--steps", "1", "--out", str(run), *sensor]) == 0
    assert Run(run).spec.action == action
    with pytest.raises(PrismError, match=r"says that action\.units is"):
        open_dataset(path, sensors=("action.units=mm", "action.units=m"))


@pytest.mark.parametrize(
    ("configs", "kind"),
    [
        ({"type": "OSC_POSE", "control_delta": True}, "delta"),
        ([{"type": "OSC_POSE", "control_delta": False}] * 2, "absolute"),
        ({"type": "BASIC", "body_parts": {"right": {"type": "OSC_POSE", "input_type": "delta"}}}, "delta"),
        ({"type": "JOINT_VELOCITY"}, None),
        (None, None),
    ],
)
def test_robomimic_says_the_kind_by_its_controller(configs: object, kind: str | None) -> None:
    assert kind_of_controller({"controller_configs": configs}) == kind


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"kind": "absolute"}, "they look absolute"),  # merged into "delta"
        ({"size": 0.02}, "the data do not show it. If they are delta, too, pass --action-kind delta"),
        ({"unit": 57.3, "spec": DELTA}, "actions spread 57.3 times as far"),  # degrees for radians
        ({"spec": ActionSpec(kind=ActionKind.DELTA, units=("deg",) * 3)}, "action.units is"),
    ],
)
def test_datasets_of_other_actions_do_not_mix(second: dict[str, object], said: str, tmp_path: Path) -> None:
    first = ActionSpec(kind=ActionKind.DELTA, units=("rad",) * 3)
    one = Member(open_dataset(record(tmp_path / "one", spec=first)))
    assert Mixture([one, Member(open_dataset(record(tmp_path / "same")))]).action_spec == first
    with pytest.raises(PrismError, match=said):
        Mixture([one, Member(open_dataset(record(tmp_path / "two", **second)))])  # type: ignore[arg-type]


def test_a_network_does_not_go_on_in_millimetres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--init took them: its first loss was 3927, without a word."""
    monkeypatch.chdir(tmp_path)
    metres = ActionSpec(kind=ActionKind.DELTA, units=("m",) * 3)
    stated = ActionSpec(kind=ActionKind.DELTA, units=("mm",) * 3)
    for name, unit, spec in (("m", 1.0, metres), ("mm", 1000.0, DELTA), ("said", 1.0, stated)):
        record(Path(name), unit=unit, spec=spec)
    assert cli.main(["train", "m", "--steps", "1", "--out", "run"]) == 0
    assert cli.main(["train", "m", "--init", "run", "--steps", "1", "--out", "more"]) == 0
    capsys.readouterr()
    for data, said in (
        ("mm", "actions spread 1000 times as far in the data"),
        ("said", "the run's units of actions are"),
    ):
        assert cli.main(["train", data, "--init", "run", "--steps", "1", "--out", "no"]) == cli.EXIT_USER
        assert said in " ".join(capsys.readouterr().err.split())
        assert not Path("no").exists()


def test_an_unknown_kind_is_asked_for_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was assumed to be absolute, and training went on; a resume with another one did not say what differs."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).normal(size=(2, 40, 3))
    with DatasetWriter(Path("noise"), JOINTS, 3, 10.0, "t") as writer:
        for actions in noise:
            writer.add({"proprio": noise[0]}, actions)
    assert cli.main(["train", "noise", "--steps", "1", "--out", "run"]) == cli.EXIT_USER
    assert "unknown kind of action" in (said := capsys.readouterr().err)
    assert "pass --action-kind absolute, delta or velocity" in " ".join(said.split())
    assert not Path("run").exists()
    assert cli.main(["train", "noise", "--action-kind", "delta", "--steps", "1", "--out", "run"]) == 0
    again = ["train", "noise", "--steps", "2", "--out", "run", "--resume", "--action-kind"]
    assert cli.main([*again, "absolute"]) == cli.EXIT_USER
    assert "describes another policy (action.kind = delta there, absolute now)" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.main([*again, "delta"]) == 0
