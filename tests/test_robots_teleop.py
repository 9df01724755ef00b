"""robots/teleop.py with fakes of the devices, and what a recording survives: a full disk, keys of a person."""

from __future__ import annotations

import dataclasses
import errno
import os
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism.cli import main
from prism.data.formats import store_writer
from prism.data.formats.episode_folders import RecordingSource
from prism.errors import PrismError
from prism.robots import loop
from prism.robots.contract import ActionSpace, Reading, Robot, make_robot
from prism.robots.guard import Seen
from prism.robots.loop import Keys
from prism.robots.teleop import Gamepad, Keyboard, Leader, Motion, Script, SpaceMouse, Sticks, make_teleop

SEEN = Seen(1.0, {}, {}, {}, {})
TWIN = ("--robot", "ur5e-twin", "--option", "realtime=false")


@pytest.fixture
def robot() -> Iterator[Robot]:
    made = make_robot("ur5e-twin", ["realtime=false"])
    yield made
    made.close()


class Stick:
    name = "gamepad"

    def __init__(self) -> None:
        self.motion, self.error = Motion(), False

    def read(self) -> Motion:
        if self.error:
            raise OSError(errno.ENODEV, "No such device")
        return self.motion

    def close(self) -> None: ...


def test_sticks_move_at_half_of_the_speed_limit_and_take_over(robot: Robot) -> None:
    device = Stick()
    teleop = Sticks(robot, device)
    teleop.start(0)
    assert teleop.act(SEEN, "") is not None
    assert not teleop.wants("", None, None), "nobody touches it"
    device.motion = Motion((1.0, -0.5, 0.05, 9.0), closed=True)
    action = teleop.act(SEEN, "")
    full = 0.5 * 0.3 / 10 / 0.03  # half of 0.3 m/s for a tenth of a second, in units of 3 cm
    assert action is not None
    assert np.allclose(action, [full, -0.5 * full, 0.0, 1.0]), "a stick that is nearly in its middle is in its middle"
    assert teleop.wants("", None, None)
    device.motion = Motion((float("nan"),) * 3)
    action = teleop.act(SEEN, "")
    assert action is not None
    assert np.allclose(action, [0, 0, 0, 1.0]), "the gripper stays closed"
    device.error = True
    with pytest.raises(PrismError, match="gamepad: the device is gone"):
        teleop.act(SEEN, "")


def test_who_takes_over_drops_nothing(robot: Robot) -> None:
    """The gripper stays as the policy had it, until the person moves it."""
    holds, device = np.array([0.1, 0.0, 0.0, 0.6], np.float32), Stick()
    keyboard, sticks = Keyboard(robot), Sticks(robot, device)
    for teleop, taking, pressing in (
        (keyboard, ("t", Motion()), ("g", Motion())),
        (sticks, ("", Motion((1.0,))), ("", Motion((1.0,), closed=False))),
        (sticks, ("", Motion((), takes=True)), ("", Motion((), None, True, toggles=True))),
    ):
        teleop.start(0)
        device.motion = Motion()
        for keys, device.motion, gripper in (
            ("", Motion(), -1.0),
            (*taking, 0.6),
            ("", taking[1], 0.6),
            (*pressing, -1.0),
        ):
            action = teleop.act(SEEN, keys)
            assert action is not None
            assert action[3] == pytest.approx(gripper)
            teleop.wants(keys, action, holds)


def test_a_gamepad_by_evdev(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = types.SimpleNamespace(
        **{
            "ABS_X": 0,
            "ABS_Y": 1,
            "ABS_RX": 3,
            "ABS_RY": 4,
            "EV_KEY": 1,
            "BTN_SOUTH": 304,
            "BTN_EAST": 305,
            "BTN_TL": 310,
        }
    )

    class Pad:
        values: dict[int, int] = {0: 255, 1: 0, 3: 128, 4: 128}  # noqa: RUF012

        def __init__(self, path: str) -> None:
            self.path = path

        def capabilities(self) -> dict[int, list[int]]:
            return {1: [304] if self.path == "/dev/input/event7" else [30]}

        def absinfo(self, code: int) -> Any:
            return types.SimpleNamespace(value=self.values[code], min=0, max=255)

        def active_keys(self) -> list[int]:
            return [304, 310]

        def close(self) -> None: ...

    fake = types.SimpleNamespace(ecodes=codes, InputDevice=Pad, list_devices=lambda: ["/dev/input/event0"])
    monkeypatch.setitem(sys.modules, "evdev", fake)
    with pytest.raises(PrismError, match="none is connected"):
        Gamepad()
    fake.list_devices = lambda: ["/dev/input/event0", "/dev/input/event7"]
    motion = Gamepad().read()
    assert motion.axes[:2] == (1.0, -1.0), "pushed away and to the right: forwards, and to the right"
    assert (motion.closed, motion.takes) == (True, True)


def test_a_spacemouse_by_hid(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[bytes] = []

    class Mouse:
        def __init__(self, path: bytes) -> None:
            assert path == b"/dev/hidraw3"

        def read(self, size: int) -> bytes:
            return reports.pop(0) if reports else b""

        def close(self) -> None: ...

    keyboard = {"vendor_id": 0x046D, "product_string": "Keyboard", "path": b"/dev/hidraw0"}
    mouse = {"vendor_id": 0x256F, "product_string": "SpaceMouse Compact", "path": b"/dev/hidraw3"}
    nameless = {"vendor_id": 0x046D, "product_string": None, "path": b"/dev/hidraw1"}
    fake = types.SimpleNamespace(enumerate=lambda: [keyboard, nameless], Device=Mouse)
    monkeypatch.setitem(sys.modules, "hid", fake)
    with pytest.raises(PrismError, match="none is connected"):
        SpaceMouse()
    fake.enumerate = lambda: [keyboard, nameless, mouse]
    device = SpaceMouse()
    reports += [struct.pack("<B3h", 1, 0, -350, 175), struct.pack("<BB", 3, 1)]
    motion = device.read()
    assert motion.axes[:3] == (1.0, 0.0, -0.5)
    assert (motion.closed, motion.toggles) == (None, True)
    assert not device.read().toggles, "held down: once"
    reports += [struct.pack("<BB", 3, 0), struct.pack("<BB", 3, 3), struct.pack("<B3h", 1, 0, 0, 0)]
    motion = device.read()
    assert (motion.toggles, motion.takes) == (True, True), "pressed once more"
    assert not any(motion.axes)


@pytest.mark.parametrize("name", ["evdev", "hid"])
def test_a_package_that_is_missing_is_named(name: str, robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrismError, match=f"pip install {name}"):
        make_teleop({"evdev": "gamepad", "hid": "spacemouse"}[name], robot, True)


def test_a_leader_is_followed(robot: Robot) -> None:
    leader = make_robot("ur5e-twin", ["realtime=false"])
    at = np.array([0.4, 0.0, 0.2, 0.01], np.float32)
    leader.read = lambda: {"proprio": Reading(at, 0.0)}  # type: ignore[method-assign]
    kept, leader.actions = leader.actions, ActionSpace(robot.actions.spec)
    with pytest.raises(PrismError, match="does not report"):
        Leader(robot, leader)
    leader.actions = kept
    with pytest.raises(PrismError, match="does not report the 4 numbers"):
        Leader(robot, leader)  # its gripper is not measured as it is commanded
    leader.actions = dataclasses.replace(kept, pose_dims=4)
    teleop = Leader(robot, leader)
    teleop.start(0)
    first = teleop.act(SEEN, "")
    at[0] += 0.015
    second = teleop.act(SEEN, "")
    assert first is not None
    assert second is not None
    assert np.allclose(first[:3], 0), "where it is when the episode begins is no motion"
    assert np.allclose(second[:3], [0.5, 0, 0], atol=1e-6)
    assert [teleop.wants(key, None, None) for key in ("", "t", "", "t", "")] == [False, True, True, False, False]
    with pytest.raises(PrismError, match="which arm leads"):
        make_teleop("leader", robot, True)
    with pytest.raises(PrismError, match="unknown teleoperation 'joystick'"):
        make_teleop("joystick", robot, True)


def test_a_leader_with_a_base_is_refused() -> None:
    """What follows its pose are velocities: their differences would be sent as such."""
    dogs = [make_robot("go2-twin", ["realtime=false"]) for _ in range(2)]
    with pytest.raises(PrismError, match="does not report the 14 numbers"):
        Leader(*dogs)


def test_a_script_takes_over_where_the_policy_is_wrong_for_two_steps(robot: Robot) -> None:
    robot.connect()
    teleop = Script(robot)
    teleop.start(0)
    mine, wrong = np.zeros(4), np.array([0.3, 0, 0, 0])
    said = [teleop.wants("", mine, policys) for policys in (wrong, mine, wrong, wrong, *[mine] * 6)]
    assert said == [False, False, False, True, True, True, True, True, True, False]


def test_noise_disturbs_what_is_executed_and_not_what_is_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "noisy"
    words = ["--teleop", "scripted", "--episodes", "2", "--noise", "0.05"]
    assert main(["record", str(folder), *TWIN, *words]) == 0
    source = RecordingSource(folder)
    assert source.provenances[0]["noise"] == 0.05
    with np.load(folder / "episode-000000" / "commands.npz", allow_pickle=False) as sent:
        steps = [sent["command"][sent["step"] == step].sum(0) for step in range(source.lengths[0])]
    apart = np.abs(source.read(0).actions[:-1, :3] - np.stack(steps)[:-1, :3])
    assert 0.01 < apart.mean() < 0.2
    assert main(["record", str(folder), *TWIN, *words[:3], "1", "--noise", "2"]) == 2


# ------------------------------------------------------------------ a person at a terminal


def test_keys_move_the_robot(robot: Robot) -> None:
    teleop = Keyboard(robot)
    teleop.start(0)
    action = teleop.act(SEEN, "ig")
    assert action is not None
    assert action[0] > 0
    assert action[3] == 1.0
    assert not teleop.wants("i", None, None)
    assert teleop.wants("t", None, None)


class Pressed(Keys):
    """A person who presses one key, after some steps."""

    def __init__(self, key: str) -> None:
        self.is_terminal, self._left = False, iter(["", "", "", key])

    def pressed(self, wait: float = 0.0) -> str:
        return next(self._left, "")


@pytest.mark.parametrize(("key", "said"), [("d", "seed 0: discard"), ("r", "seed 0: redo")])
def test_a_person_discards_an_episode_or_does_it_again(
    key: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--teleop", "scripted", "--episodes", "1", "--seconds", "1", "--failures"]
    monkeypatch.setattr(loop, "Keys", lambda: Pressed(key))
    assert main(["record", str(tmp_path / "x"), *TWIN, *words]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert f"episode 1 of 1 (seed {int(key == 'd')})" in shown
    assert len(RecordingSource(tmp_path / "x").lengths) == 1


# ------------------------------------------------------------------ a full disk


def test_a_full_disk_loses_no_finished_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, real, left = tmp_path / "full", store_writer.sync, [20]

    def sync(file: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(store_writer, "sync", sync)
    assert main(["record", str(folder), *TWIN, "--teleop", "scripted", "--episodes", "50"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    source = RecordingSource(folder)
    assert f"could not be written: the disk is full. {len(source.lengths)} episodes are there; free some" in error
    assert 1 <= len(source.lengths) < 10
    for episode in range(len(source.lengths)):
        assert source.read(episode).length == source.lengths[episode]
    monkeypatch.setattr(store_writer, "sync", real)
    assert main(["record", str(folder), *TWIN, "--teleop", "scripted", "--episodes", "1"]) == 0
    assert len(RecordingSource(folder).lengths) == len(source.lengths) + 1, "and it goes on when there is room"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where closing a file fails once more, with what was still to be written to it."""
    folder, real = tmp_path / "full", store_writer.DatasetWriter._start_file

    def start(writer: store_writer.DatasetWriter, name: str, *what: Any) -> None:
        real(writer, name, *what)
        if writer.path.name == "episode-000001":
            writer._files[name].close()
            writer._files[name] = open("/dev/full", "w+b")  # noqa: SIM115

    monkeypatch.setattr(store_writer.DatasetWriter, "_start_file", start)
    assert main(["record", str(folder), *TWIN, "--teleop", "scripted", "--episodes", "5"]) == 2
    said = f"{folder} could not be written: the disk is full. 1 episodes are there; free some space"
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "episode-000000", "page.html"]
