"""prism record on the twin, as a user types it: episodes, films (of prism run too), pages, LeRobot."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")

from prism.cli import main
from prism.cli.run import Run
from prism.data import open_dataset
from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.data.formats.film import FilmWriter
from prism.data.formats.video import VideoWriter
from prism.errors import PrismError
from prism.robots.contract import ROBOTS, Reading, Robot, make_robot
from prism.robots.recording import Recording, Trace
from prism.sensors import SensorSpec, action_spec_of
from tests.test_report_rerun import FakeRerun

TWIN = ("--robot", "ur5e-twin", "--option", "realtime=false")
TASK = ("--robot", "ur5e-twin", "--option", "realtime=false", "rate=10")  # the tabletop itself
SCRIPTED = ("--teleop", "scripted", "--episodes")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robots") / "insert"
    assert main(["record", str(path), *TWIN, *SCRIPTED, "3"]) == 0
    return path


def test_a_recording_is_what_the_task_shows(tmp_path: Path) -> None:
    """Streams of 40 and 10 a second, brought to one rate, are the observations of the simulated task."""
    recorded = tmp_path / "task"
    assert main(["record", str(recorded), *TASK, "--teleop", "scripted", "--episodes", "3"]) == 0
    from prism.sims.collect import demonstrate
    from prism.sims.task_table import make_env, make_expert

    env = make_env("tabletop-insert-left")
    source = open_dataset(recorded)
    assert source.fps == 10
    assert action_spec_of(source) == make_robot("ur5e-twin").actions.spec
    expert = make_expert("tabletop-insert-left", env)
    for number, said in enumerate(RecordingSource(recorded).provenances):
        attempt = demonstrate(env, expert, said["seed"])
        episode = source.read(number)
        assert np.array_equal(episode.actions, attempt.actions)
        for name, values in attempt.streams.items():
            assert np.allclose(episode.streams[name], values, atol=1e-5), name
        assert said["commanded_by"] == [["script", len(attempt.actions)]]
        assert said["success"] is True


def test_a_step_is_five_commands(recorded: Path) -> None:
    """At 50 commands a second: what is recorded of a step is the sum of what was sent, and nothing else moved."""
    source = RecordingSource(recorded)
    assert source.fps == 10
    for number in range(3):
        episode = source.read(number)
        with np.load(recorded / f"episode-{number:06d}" / COMMANDS, allow_pickle=False) as sent:
            assert np.allclose(np.diff(sent["time"]), 0.02)
            assert np.array_equal(np.unique(sent["step"]), np.arange(episode.length))
            sums = np.stack([sent["command"][sent["step"] == step].sum(0) for step in range(episode.length)])
            assert np.abs(np.diff(sent["command"][:, :3], axis=0)).max() <= 6.0 / 50 / 50 / 0.03 + 1e-5, "acceleration"
        assert np.allclose(episode.actions[:, :3], sums[:, :3], atol=1e-5)
        moved = np.diff(episode.streams["proprio"][:, :3], axis=0)
        assert np.abs(moved - 0.03 * episode.actions[:-1, :3]).max() < 0.012, "the hand follows"


def test_the_same_command_adds_episodes(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "more"
    for _ in range(2):
        assert main(["record", str(path), *TWIN, "--teleop", "scripted", "--episodes", "1"]) == 0
    assert [said["seed"] for said in RecordingSource(path).provenances] == [0, 1]
    other = ("--robot", "ur5e-twin", "--option", "realtime=false", "task=tabletop-rattle")
    assert main(["record", str(path), *other, "--teleop", "scripted", "--episodes", "1"]) == 2
    assert len(open_dataset(path).lengths) == 2


def test_finished_episodes_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    words = [sys.executable, "-m", "prism.cli", "record", str(path), *TWIN, "--teleop", "scripted", "--episodes", "500"]
    there = 0
    for more, how in ((1, signal.SIGKILL), (2, signal.SIGHUP), (5, signal.SIGKILL)):
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = 0
        for line in process.stdout:
            said += line.startswith("episode ")
            if said == more:
                break
        process.send_signal(how)
        process.communicate()
        assert process.returncode == (-9 if how == signal.SIGKILL else 129)
        assert (path / "page.html").exists() == (there > 0), "a lost terminal ends it as Ctrl-C does, with the page"
        source = RecordingSource(path)
        assert len(source.lengths) >= there + said, "an episode that was said to be recorded is gone"
        for episode in range(len(source.lengths)):
            assert source.read(episode).length == source.lengths[episode]
        there = len(source.lengths)
    seeds = [said["seed"] for said in RecordingSource(path).provenances]
    assert seeds == sorted(set(seeds))


def test_an_episode_whose_commands_do_not_fit_on_the_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not half of one: steps without what was commanded."""
    twin = ("--robot", "ur5e-twin", "--option", "realtime=false", "--teleop", "scripted")
    words = ["record", str(tmp_path / "x"), *twin]

    def full(_: object, name: str, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("prism.data.formats.store_writer.DatasetWriter.attach", full)
        assert main([*words, "--episodes", "1"]) == 2
    assert not list((tmp_path / "x").glob("episode-*"))
    assert main([*words, "--text", " "]) == 2


def test_a_robot_that_cannot_be_reached_does_not_keep_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {name: make_robot("ur5e-twin", ["realtime=false"]) for name in ("led", "leads")}
    for name, robot in made.items():
        monkeypatch.setitem(ROBOTS._rows, name, lambda robot=robot: robot)

    def unreachable() -> None:
        assert made["leads"].health().ok
        raise PrismError("no answer")

    made["leads"].actions = replace(made["leads"].actions, pose_dims=4)  # it tells its gripper too
    made["led"].connect = unreachable  # type: ignore[method-assign]
    assert main(["record", str(tmp_path / "x"), "--robot", "led", "--teleop", "leader=leads"]) == 2
    assert made["leads"].health().reason == "not connected"


def test_a_recording_refuses_a_stranger(recorded: Path, tmp_path: Path) -> None:
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.fps = 25.0
    with pytest.raises(PrismError, match="with another rate; use"):
        Recording(recorded, robot, "tabletop-insert-left")
    robot.fps = 10.0
    robot.actions = replace(robot.actions, spec=replace(robot.actions.spec, kind="velocity"))
    with pytest.raises(PrismError, match="with another action space; use"):
        Recording(recorded, robot, "tabletop-insert-left")


# ------------------------------------------------------------------ cameras

EYE = SensorSpec("rgb_eye", "rgb", (48, 64, 3), fps=25.0)


def make_seeing() -> Robot:
    """The twin with a camera of 25 frames a second, each of which shows its own number."""
    robot = make_robot("ur5e-twin", ["realtime=false"])
    robot.sensors = (*robot.sensors, EYE)
    read, begin = robot.read, [0.0]

    def seeing() -> dict[str, Reading]:
        found = read()
        begin[0] = begin[0] if robot.now() >= begin[0] else robot.now()
        number = int((robot.now() - begin[0]) * EYE.fps + 1e-6)
        return {**found, EYE.name: Reading(picture(number), begin[0] + number / EYE.fps)}

    robot.read = seeing  # type: ignore[method-assign]
    return robot


def picture(number: int) -> np.ndarray[Any, Any]:
    """A bright square on grey, elsewhere in each frame."""
    pixels = np.full(EYE.shape, 60, np.uint8)
    row, column = 8 * (number // 8 % 6), 8 * (number % 8)
    pixels[row : row + 8, column : column + 8] = 220
    return pixels


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setitem(ROBOTS._rows, "seeing", make_seeing)
    return ("--robot", "seeing", *SCRIPTED)


def test_cameras_are_compressed_while_they_are_recorded(seeing: tuple[str, ...], tmp_path: Path) -> None:
    """Every frame is in the film, and every step has the one that was nearest: as without video, but for the codec."""
    pytest.importorskip("av")
    film, raw = tmp_path / "film", tmp_path / "raw"
    assert main(["record", str(film), *seeing, "2"]) == 0
    assert main(["record", str(raw), *seeing, "2", "--no-video"]) == 0
    assert (film / "episode-000000" / "rgb_eye.mp4").is_file()
    assert not (film / "episode-000000" / "rgb_eye.npy").exists()
    ours, theirs = open_dataset(film), open_dataset(raw)
    for number in range(2):
        one, other = ours.read(number), theirs.read(number)
        assert np.array_equal(one.actions, other.actions)
        assert one.streams["rgb_eye"].shape == (one.length, *EYE.shape)
        away = np.abs(one.streams["rgb_eye"].astype(int) - other.streams["rgb_eye"].astype(int))
        assert away.mean() < 3, "another frame: more than 6"
        part = ours.read(number, 3, 7, streams=["rgb_eye"]).streams["rgb_eye"]
        assert np.array_equal(part, one.streams["rgb_eye"][3:7])
    sizes = [sum(f.stat().st_size for f in path.rglob("*rgb_eye*")) for path in (film, raw)]
    assert 4 * sizes[0] < sizes[1]
    assert "'rgb_eye' is kept as h264 video: nearly the same pixels" in ours.notes
    assert not [child.name for child in film.iterdir() if child.name.startswith(".tmp")]
    assert main(["train", str(film), "--steps", "2", "--out", str(tmp_path / "run")]) == 0


def test_a_damaged_film_is_one_line(seeing: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("av")
    assert main(["record", str(tmp_path / "d"), *seeing, "1"]) == 0
    file = tmp_path / "d" / "episode-000000" / "rgb_eye.mp4"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40] + bytes(40))
    with pytest.raises(PrismError, match=r"rgb_eye.mp4: damaged: fails its checksum"):
        open_dataset(tmp_path / "d").read(0)
    assert open_dataset(tmp_path / "d").read(0, streams=["proprio"]).length
    file.unlink()
    with pytest.raises(PrismError, match="not found"):
        open_dataset(tmp_path / "d").read(0)


def test_a_page_and_a_lerobot_dataset_at_the_end(
    seeing: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    data, out = tmp_path / "d", tmp_path / "lerobot"
    for count in (1, 2):
        assert main(["record", str(data), *seeing, "1", "--lerobot", str(out)]) == 0
        theirs, ours = open_dataset(out), open_dataset(data)
        assert theirs.lengths.tolist() == ours.lengths.tolist()
        assert len(theirs.lengths) == count
    away = theirs.read(1).streams["rgb_eye"].astype(int) - ours.read(1).streams["rgb_eye"].astype(int)
    assert np.abs(away).mean() < 4
    page = (data / "page.html").read_text()
    for words in (
        "Rates and gaps of the sensors",
        "longest gap",
        "rgb_eye",
        "Episode lengths",
        "constant",
        "data:image/png",
    ):
        assert words in page, words
    assert str(data / "page.html") in capsys.readouterr().out
    said = RecordingSource(data).provenances[0]["streams"]
    assert said["rgb_eye"]["rate"] == pytest.approx(25, abs=1)
    assert main(["record", str(tmp_path / "other"), *seeing, "1", "--lerobot", str(out)]) == 2
    assert "holds other episodes" in capsys.readouterr().err
    assert main(["record", str(tmp_path / "other"), *seeing, "1", "--lerobot", str(data)]) == 2
    assert "is not a LeRobot dataset" in capsys.readouterr().err
    assert not (tmp_path / "other").exists(), "refused before anything moves"


KILLED = """
import sys
from prism.cli import main
from prism.robots.contract import ROBOTS
from tests.test_robots_record import make_seeing
ROBOTS._rows["seeing"] = make_seeing
sys.exit(main(sys.argv[1:]))
"""


def test_films_survive_kill_9(tmp_path: Path) -> None:
    """Killed while it films: what was finished is there, and the next recording clears away what was not."""
    pytest.importorskip("av")
    path, there = tmp_path / "killed", 0
    words = [sys.executable, "-c", KILLED, "record", str(path), "--robot", "seeing", *SCRIPTED, "500"]
    for more in (0, 1, 3):
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = 0
        for line in process.stdout:
            said += line.startswith("episode ")
            if said == more and (more or line.startswith("as video")):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if said:
            source = RecordingSource(path)
            assert len(source.lengths) >= there + said, "an episode that was said to be recorded is gone"
            for episode in range(there, len(source.lengths)):
                assert source.read(episode).streams["rgb_eye"].shape[0] == source.lengths[episode]
            there = len(source.lengths)
    with Recording(path, make_seeing(), "tabletop-insert-left").alone():
        assert not list(path.glob(".tmp*"))


# ------------------------------------------------------------------ cameras of prism run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that sees the camera; it has learned nothing."""
    path = tmp_path_factory.mktemp("seeing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROBOTS._rows, "seeing", make_seeing)
        assert main(["record", str(path / "data"), "--robot", "seeing", *SCRIPTED, "1"]) == 0
    small = ("--set", "policy.obs_horizon=1", "policy.pred_horizon=8", "controller.exec_horizon=4")
    assert main(["train", str(path / "data"), "--steps", "2", "--out", str(path / "run"), *small]) == 0
    return path / "run"


def test_a_run_is_filmed_as_a_recording_is(
    seeing: tuple[str, ...], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second of the policy, then the script: episodes, their report, a replay, corrections, the viewer."""
    pytest.importorskip("av")
    fake, film, raw = FakeRerun(), tmp_path / "film", tmp_path / "raw"
    monkeypatch.setitem(sys.modules, "rerun", fake)  # type: ignore[arg-type]
    words = ["run", str(trained), *seeing[:2], "--episodes", "2", "--seconds", "3", "--teleop", "scripted"]
    assert main([*words, "--out", str(film), "--rerun", str(tmp_path / "run.rrd")]) == 0
    assert main([*words, "--out", str(raw), "--no-video"]) == 0
    ours, theirs = RecordingSource(film), RecordingSource(raw)
    for number in range(2):
        folder = f"episode-{number:06d}"
        assert (film / folder / "rgb_eye.mp4").is_file()
        assert not (film / folder / "rgb_eye.npy").exists()
        assert (raw / folder / "rgb_eye.npy").is_file()
        one, other = ours.read(number), theirs.read(number)
        assert np.array_equal(one.actions, other.actions)
        away = np.abs(one.streams["rgb_eye"].astype(int) - other.streams["rgb_eye"].astype(int))
        assert away.mean() < 3, "another frame: more than 6"
    pictures = [what for entity, what, static, _ in fake.logged if entity == "sensors/rgb_eye" and not static]
    assert len(pictures) == ours.lengths.sum(), "the viewer gets pictures, not numbers of frames"
    fixed, plain = (RecordingSource(path.with_name(f"{path.name}-corrections")) for path in (film, raw))
    assert fixed.lengths.tolist() == plain.lengths.tolist()
    for number in range(len(fixed.lengths)):
        away = fixed.read(number).streams["rgb_eye"].astype(int) - plain.read(number).streams["rgb_eye"].astype(int)
        assert np.abs(away).mean() < 3
    assert (fixed.folder(0) / "rgb_eye.mp4").samefile(film / "episode-000000" / "rgb_eye.mp4"), "in no more space"
    assert not [child.name for child in film.iterdir() if child.name.startswith(".tmp")]
    assert main(["report", str(film)]) == 0
    assert (film / "report.html").read_text().count("rgb_eye, ") >= 12, "six pictures an episode"
    again = ["--replay", str(film / "episode-000000"), "--seconds", "3", "--out", str(tmp_path / "again")]
    assert main(["run", *seeing[:2], *again]) == 0
    first, second = (source.read(0).streams["rgb_eye"] for source in (ours, RecordingSource(tmp_path / "again")))
    shown = min(len(first), len(second))
    assert np.abs(first[:shown].astype(int) - second[:shown].astype(int)).mean() < 3


def _interrupted(how: signal.Signals, trained: Path, path: Path) -> RecordingSource:
    """A run that is stopped while its third episode, or a later one, is filmed."""
    run = ["run", str(trained), "--robot", "seeing", "--out", str(path), "--seconds"]
    words = [sys.executable, "-c", KILLED, *run, "6", "--episodes", "500"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("episode 2 "):
            break
    while not list(path.glob(".tmp*/rgb_eye.mp4")):  # the next one is being filmed
        assert process.poll() is None
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    return RecordingSource(path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_films_of_a_run_survive(how: signal.Signals, trained: Path, tmp_path: Path) -> None:
    """kill -9 loses the episode that is being driven and no other; Ctrl-C keeps what there is of that one too."""
    pytest.importorskip("av")
    for attempt in range(3):  # stopped before its first step, an episode leaves nothing: then once more
        path = tmp_path / str(attempt)
        source = _interrupted(how, trained, path)
        assert len(source.lengths) >= 2, "an episode that was said to be recorded is gone"
        for episode in range(len(source.lengths)):
            assert source.read(episode).streams["rgb_eye"].shape[0] == source.lengths[episode]
        kept = "by the operator" in [said["stopped"] for said in source.provenances]
        if kept or how == signal.SIGKILL:
            break
    assert kept == (how == signal.SIGINT)
    with Recording(path, make_seeing(), "tabletop-insert-left").alone():
        assert not list(path.glob(".tmp*"))


def test_pictures_that_wait_to_be_compressed_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prism.data.formats.film._WAITING", 8 * 16 * 16 * 3)
    going = threading.Event()
    compress = VideoWriter.add

    def slow(self: VideoWriter, frames: Any) -> None:
        going.wait(20)
        compress(self, frames)

    monkeypatch.setattr(VideoWriter, "add", slow)
    camera = SensorSpec("rgb", "rgb", (16, 16, 3))
    robot = cast(Any, SimpleNamespace(sensors=(camera,), rate=10.0))
    for choice in ("drop", "stop"):
        going.clear()
        film = FilmWriter(tmp_path / choice, camera, 10.0)
        trace = Trace(robot, {"rgb": film}, on_overrun=choice)
        for number in range(40):
            pixels = np.full((16, 16, 3), number, np.uint8)
            seen = cast(
                Any, SimpleNamespace(observation={"rgb": pixels}, readings={"rgb": Reading(pixels, number / 10)})
            )
            trace.see(seen)
            trace.see(seen)  # the same reading again
        assert film._queue.qsize() <= 9
        assert 30 <= film.dropped <= 32
        assert trace.overrun() == ("rgb" if choice == "stop" else "")
        assert len(trace._stamps["rgb"]) == 40 - film.dropped, "what was dropped never came"
        going.set()
        done = film.close()
        assert done is not None
        assert done.frames == 40 - film.dropped
        said = [record.message for record in caplog.records if "comes faster than it is compressed" in record.message]
        assert len(said) == 1
        caplog.clear()


def test_a_policy_of_the_hub_is_recorded_here() -> None:
    robot = make_robot("ur5e-twin")
    for given in ("hf://me/policy", "hf://me/policy@main", "hf://me/policy@refs/pr/1"):
        assert Run(Path(given), robot="ur5e-twin")._out(robot) == Path("recordings/policy")
