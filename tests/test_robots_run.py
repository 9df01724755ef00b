"""prism record and prism run on the twin, as a user types them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mujoco")
pytest.importorskip("prism_client")


from prism.cli import main
from prism.data import open_dataset
from prism.data.formats.episode_folders import COMMANDS, RecordingSource
from prism.data.formats.store_writer import DatasetWriter
from prism.experiments.run_folder import Run
from prism.robots.contract import ROBOTS, Robot, make_robot
from prism.sensors import SensorSpec, decode_text
from tests.test_report_rerun import FakeRerun

TWIN = ("--robot", "ur5e-twin", "--option", "realtime=false")
TASK = ("--robot", "ur5e-twin", "--option", "realtime=false", "rate=10")  # the tabletop itself


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robots") / "insert"
    assert main(["record", str(path), *TWIN, "--teleop", "scripted", "--episodes", "3"]) == 0
    return path


@pytest.fixture(scope="module")
def trained(recorded: Path) -> Path:
    run = recorded.parent / "run"
    small = ("--set", "policy.obs_horizon=2", "policy.pred_horizon=8", "controller.exec_horizon=4")
    assert main(["train", str(recorded), "--steps", "4", "--out", str(run), *small]) == 0
    return run


def test_a_run_for_the_viewer(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sensors, candidates and commands on one time line, episode behind episode; also of a dry run."""
    fake, file = FakeRerun(), tmp_path / "run.rrd"
    monkeypatch.setitem(sys.modules, "rerun", fake)  # type: ignore[arg-type]
    drive_it = ["run", str(trained), *TWIN, "--seconds", "2", "--out", str(tmp_path / "kept"), "--rerun", str(file)]
    assert main([*drive_it, "--episodes", "2"]) == 0
    assert file.is_file()
    steps: dict[str, list[int]] = {}
    for entity, _, static, step in fake.logged:
        if not static:
            steps.setdefault(entity, []).append(step)
    sensors = {f"sensors/{spec.name}" for spec in RecordingSource(tmp_path / "kept").sensors}
    assert sensors | {"episode", "actions/executed", "plan/candidates", "plan/chosen"} <= steps.keys()
    assert steps["actions/executed"] == list(range(int(RecordingSource(tmp_path / "kept").lengths.sum())))
    assert len(steps["episode"]) == 2
    assert steps["plan/candidates"] == steps["plan/chosen"]
    assert len(steps["plan/chosen"]) > 4
    capfd.readouterr()
    assert main(drive_it) == 2
    assert "run.rrd exists already: remove it, or choose another name" in capfd.readouterr().err
    fake.logged.clear()
    corrected = ["--dry-run", "--teleop", "scripted"]  # who takes over in a dry run corrects nothing
    assert main([*drive_it[:-1], str(tmp_path / "dry.rrd"), *corrected]) == 0
    assert (tmp_path / "dry.rrd").is_file()
    assert {"actions/planned"} == {entity for entity, *_ in fake.logged if entity.startswith("actions/")}
    assert len(RecordingSource(tmp_path / "kept").lengths) == 2
    assert not (tmp_path / "kept-corrections").exists()


def test_training_knows_the_kind_of_what_was_recorded(trained: Path) -> None:
    assert Run(trained).experiment.controller.selection.grippers == (3,)
    assert Run(trained).spec.action.kind == "delta"


def test_run_drives_and_records(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = []
    for name in ("a", "b"):
        words = ["--episodes", "2", "--seconds", "1", "--out", str(tmp_path / name)]
        assert main(["run", str(trained), *TWIN, *words, "--json", str(tmp_path / f"{name}.json")]) == 0
        source = RecordingSource(tmp_path / name)
        assert source.lengths.tolist() == [10, 10]
        assert source.provenances[0]["commanded_by"] == [["policy", 10]]
        with np.load(tmp_path / name / "episode-000000" / COMMANDS, allow_pickle=False) as played:
            assert len(played["command"]) == 50
            assert played["plan_step"].tolist() == [0, 4, 8]
            assert np.array_equal(played["plan"][0], played["candidates"][0, played["chosen"][0]])
        assert source.provenances[0]["success"] is False
        sent.append(source.read(1).actions)
    assert np.array_equal(*sent), "as fast as it can be computed, a run repeats itself"
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["success"] == 0
    assert told["episodes"][0]["commands"] == 50
    shown = capsys.readouterr().out
    assert "z: 0.02 to 0.42 m, 0.3 m/s, 6 m/s2" in shown
    assert "force: 45 N ('tactile')" in shown


@pytest.mark.parametrize("kind", ["below a file", "a file", "read-only", "forbidden"])
def test_where_nothing_can_be_written_is_one_line(
    recorded: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "x" if kind == "below a file" else tmp_path / "file"
    said = "a file is where a folder should be; choose another path"
    if kind in ("read-only", "forbidden"):  # the tests may run as a user who may write everywhere
        target, number = tmp_path / "x", errno.EROFS if kind == "read-only" else errno.EACCES
        said = "the folder is read-only; allow writing to it" if kind == "read-only" else "permission denied; allow it"
        said += ", or choose another path"
        mkdir = Path.mkdir

        def refuse(path: Path, *args: Any, **options: Any) -> None:
            if path == target:
                raise OSError(number, os.strerror(number), str(path))
            mkdir(path, *args, **options)

        monkeypatch.setattr(Path, "mkdir", refuse)
    capfd.readouterr()
    for words in (
        ["record", str(target), *TWIN, "--teleop", "scripted", "--episodes", "1"],
        ["run", str(trained), *TWIN, "--out", str(target)],
        ["train", str(recorded), "--steps", "2", "--out", str(target)],
    ):
        assert main(words) == 2
        assert capfd.readouterr().err.splitlines()[-1] == f"prism: error: {target}: {said}", words[0]


def test_the_policy_is_computed_where_it_was_asked_for(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that believes it has a GPU: which device the weights are sent to. Without one: refused, at once."""
    real, asked = Run.policy, []

    def policy(run: Run, device: Any = "cpu", **more: Any) -> Any:
        asked.append(str(device))
        return real(run, "cpu", **more)

    monkeypatch.setattr(Run, "policy", policy)
    words = ["run", str(trained), *TWIN, "--seconds", "0.5", "--out", str(tmp_path / "o")]
    for more in (
        ["--device", "cuda"],
        ["--device", "auto"],
        ["--device", "cpu"],
        [],
        ["--device", "cuda", "--live", "0"],
    ):
        with monkeypatch.context() as gpu:
            gpu.setattr(torch.cuda, "is_available", lambda: True)
            assert main([*words, *more]) == 0, more
    assert asked == ["cuda", "cuda", "cpu", "cuda", "cuda"]
    assert len(RecordingSource(tmp_path / "o").lengths) == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    capsys.readouterr()
    for device, said in (
        ("cuda", "PyTorch sees no cuda device here; use --device cpu"),
        ("tpu", "is unknown: use auto"),
    ):
        assert main([*words, "--device", device]) == 2
        assert said in capsys.readouterr().err
    assert main(["run", "--server", "ws://127.0.0.1:1", *TWIN, "--device", "cuda"]) == 2
    assert "give them to prism serve" in capsys.readouterr().err
    assert len(asked) == 5
    assert main([*words, "--device", "auto"]) == 0
    assert asked[5:] == ["cpu"]


def test_a_limits_file_holds_for_the_policy(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("speed = [0.03, 0.03, 0.03, 1000]")
    words = ["--limits", str(file), "--seconds", "1.5", "--out", str(tmp_path / "out")]
    assert main(["run", str(trained), *TWIN, *words]) == 0
    assert np.abs(RecordingSource(tmp_path / "out").read(0).actions[:, :3]).max() <= 0.1 + 1e-6
    file.write_text("speed = [3.0, 0.03, 0.03, 1000]")
    assert main(["run", str(trained), *TWIN, *words]) == 2


def test_a_dry_run_sends_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Robot] = []

    def make(**options: str) -> Robot:
        made.append(make_robot("ur5e-twin", ["realtime=false"]))
        made[0].send = pytest.fail  # type: ignore[method-assign,assignment]
        return made[0]

    monkeypatch.setitem(ROBOTS._rows, "deaf", make)
    out = tmp_path / "out"
    assert main(["run", str(trained), "--robot", "deaf", "--dry-run", "--seconds", "2", "--out", str(out)]) == 0
    assert not out.exists()


COUNTED = """
import sys
from pathlib import Path
from prism.cli import main
from prism.robots.contract import ROBOTS, make_robot

def make():
    robot, count = make_robot("ur5e-twin", ["realtime=false"]), []
    send = robot.send
    def counted(action):
        count.append(send(action))
        if len(count) == 25:
            Path(sys.argv[1]).touch()
    robot.send = counted
    return robot

ROBOTS._rows["counted"] = make
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("how", ["space", "SIGHUP", "the terminal is gone"])
def test_a_stop_keeps_the_episode(how: str, trained: Path, tmp_path: Path) -> None:
    """After 25 commands, however long they take. A lost terminal ended the program without a stop, and nothing kept."""
    ours, theirs = pty.openpty()
    moves = tmp_path / "moves"
    words = [sys.executable, "-c", COUNTED, str(moves), "run", str(trained), "--robot", "counted"]
    words += ["--out", str(tmp_path / "o")]
    slowly = ("--seconds", "300", "--episodes", "3", "--limits", str(tmp_path / "limits.json"))
    (tmp_path / "limits.json").write_text(json.dumps({"speed": [0.001, 0.001, 0.001, 1000]}))
    process = subprocess.Popen(
        [*words, *slowly], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    try:
        assert process.stdout is not None
        while not moves.exists():
            assert process.poll() is None
            time.sleep(0.05)
        if how == "space":
            os.write(ours, b" ")
        elif how == "SIGHUP":
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGHUP)  # of the shell, and of the kernel
        else:
            os.close(ours)
        rest, error = process.communicate(timeout=60)
    finally:
        process.kill()
        with contextlib.suppress(OSError):
            os.close(ours)
    assert process.returncode == (130 if how == "space" else 129), error
    (said,) = RecordingSource(tmp_path / "o").provenances
    assert said["stopped"] == ("by the operator" if how == "space" else "the terminal was lost")
    if how == "space":
        assert "stopped: by the operator" in rest
    else:
        assert error == "prism: the terminal was lost\n"


def test_without_a_terminal_it_says_how_to_stop(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "space or q: stop now" where no key is read."""
    assert main(["run", str(trained), *TWIN, "--seconds", "0.2", "--out", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().out
    assert f"no terminal, so no keys are read. Stop now: Ctrl-C, or kill {os.getpid()}" in said
    assert "space or q" not in said


@pytest.mark.parametrize("stop", ["key", "Ctrl-C"])
def test_what_was_finished_before_a_stop_is_summarised(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: str
) -> None:
    from prism.robots import loop, program

    real, ends, file = loop.drive, list[Any](), tmp_path / "j"

    def drive(*args: Any, **more: Any) -> Any:
        ends.append(real(*args, **more))
        if len(ends) == 1:
            return ends[0]
        if stop == "Ctrl-C":
            raise KeyboardInterrupt
        return loop.Outcome(None, "by the operator", True, " ")

    monkeypatch.setattr(program, "drive", drive)
    words = ["run", str(trained), *TWIN, "--seconds", "0.5", "--episodes", "3", "--json", str(file)]
    assert main([*words, "--out", str(tmp_path / "o")]) == 130
    assert len(json.loads(file.read_text())["episodes"]) == (2 if stop == "key" else 1)
    assert "0 of 1 succeeded" in capsys.readouterr().out


def test_bad_words_are_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("run", str(trained), "--robot", "ur6"): "'ur6': there are go2-twin, ur5e-twin (a real robot is a file",
        ("run", str(trained), "--robot", "ur6.toml"): "ur6.toml: not found",
        ("run", str(trained)): "--robot NAME is missing",
        ("run", "--robot", "ur5e-twin"): "give a run folder or --server URL",
        ("run", str(tmp_path), "--robot", "ur5e-twin"): "is not a run of `prism train`",
        ("run", str(trained), "--robot", "ur5e-twin", "--option", "task=tabletop-height"): "needs shape (6,)",
        ("run", str(trained), *TWIN, "--limits", "none.toml"): "none.toml: cannot be read",
        ("run", str(trained), *TWIN, "--seconds", "nan"): "--seconds nan is out of range",
        ("run", str(trained), *TWIN, "--first-seed", "-1"): "--first-seed -1 is out of range: use 0 or more",
        ("run", "--server", "http://localhost:1", *TWIN): "is not a server address",
        ("record", str(tmp_path / "x"), *TWIN, "--first-seed", "-1"): "--first-seed -1 is out of range",
        ("run", str(trained), *TWIN, "--out", str(trained)): "is not a recording of a robot",
        ("record", str(tmp_path / "x"), "--robot", "ur6"): "unknown robot 'ur6'",
        ("record", str(tmp_path / "x"), *TWIN, "--teleop", "keyboard"): "needs a terminal",
    }
    for words, said in cases.items():
        assert main(list(words)) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1


def test_the_twin_shows_the_scene_that_the_policy_learned(
    trained: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the recording that the run learned from, or that is replayed; --option decides."""
    other = tmp_path / "right"
    shutil.copytree(recorded, other)
    for file in other.glob("episode-*/dataset.json"):
        manifest = {**json.loads(file.read_text()), "task": "tabletop-insert-right"}
        del manifest["own_checksum"]
        file.write_text(json.dumps(manifest))
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    written = json.loads((run / "experiment.json").read_text())
    written["demonstrations"]["path"] = str(other)
    (run / "experiment.json").write_text(json.dumps(written))
    short = ("--seconds", "0.3", "--out")
    for words, task in (
        (("run", str(run), *TWIN, *short, "a"), "tabletop-insert-right"),
        (("run", "--replay", str(other / "episode-000000"), *TWIN, *short, "b"), "tabletop-insert-right"),
        (("run", str(run), *TWIN, "task=tabletop-insert-left", *short, "c"), ""),
    ):
        assert main([*words[:-1], str(tmp_path / words[-1])]) == 0
        assert (f"ur5e-twin: task={task}, as " in capsys.readouterr().out) is bool(task)
        assert RecordingSource(tmp_path / words[-1]).task == (task or "tabletop-insert-left")
    kept = other.rename(tmp_path / "moved")
    assert main(["run", str(run), *TWIN, *short, str(tmp_path / "d")]) == 0
    said = f"its default: {run} learned from {other}, which is not there any more (--option task=... decides)"
    assert f"warning: ur5e-twin: task=tabletop-insert-left, {said}\n" in capsys.readouterr().out
    kept.rename(other)
    for file in other.glob("episode-*/dataset.json"):
        file.write_text(file.read_text().replace("tabletop-insert-right", "my-kitchen"))
    assert main(["run", str(run), *TWIN, *short, str(tmp_path / "e")]) == 0
    said = f"its default: {run} names no scene of this twin (--option task=... decides)"
    assert f"warning: ur5e-twin: task=tabletop-insert-left, {said}\n" in capsys.readouterr().out
    for file in other.glob("episode-*/dataset.json"):
        file.write_text(file.read_text().replace("my-kitchen", "tabletop-insert-right"))
    written["demonstrations"] |= {"kind": "mixture", "path": None, "parts": [
        {"task": None, "demonstrations": {"kind": "path", "path": str(path)}} for path in (recorded, other)
    ]}  # fmt: skip
    (run / "experiment.json").write_text(json.dumps(written))
    assert main(["run", str(run), *TWIN]) == 2
    assert "learned 2 tasks: choose one, --option task=tabletop-insert-left" in capsys.readouterr().err


def test_the_kind_of_actions_is_seen_in_the_data_or_asked_for(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dataset that does not say what its actions are: delta and absolute ones are told apart, and what cannot be
    seen is not driven with."""
    sensors = (SensorSpec("joints", "vector", (3,)),)
    rng = np.random.default_rng(0)
    moves = np.cumsum(rng.normal(0, 0.02, (6, 40, 3)), axis=1).astype(np.float32) * np.float32(0.1)
    poses = np.cumsum(moves, axis=1)
    before = np.concatenate([np.zeros((6, 1, 3), np.float32), poses[:, :-1]], axis=1)
    for name, actions, said in (
        ("delta", moves, "delta (each is a change of pose); seen in the data"),
        ("absolute", poses, "absolute (each is a pose); seen in the data"),
        ("hidden", rng.normal(size=(6, 40, 3)).astype(np.float32), "unknown kind of action"),
    ):
        with DatasetWriter(tmp_path / name, sensors, 3, 10.0, "t") as writer:
            for shown, done in zip(before, actions, strict=True):
                writer.add({"joints": shown}, done)
        asked = 2 if name == "hidden" else 0
        assert main(["train", str(tmp_path / name), "--steps", "2", "--out", str(tmp_path / "runs" / name)]) == asked
        shown = capsys.readouterr()
        assert said in " ".join(shown.err.split())
        assert asked or "requires joints: never absent in training (--set" in shown.out
        assert main(["data", "inspect", str(tmp_path / name)]) == 0
        inspected = {"delta": "actions look delta", "absolute": "actions look absolute", "hidden": "unknown kind"}
        assert inspected[name] in " ".join(capsys.readouterr().out.split())
    run = Run(tmp_path / "runs" / "delta")
    assert run.spec.action.kind == "delta"
    words = ["train", str(tmp_path / "hidden"), "--steps", "2", "--out", str(tmp_path / "runs" / "stated")]
    assert main([*words, "--action-kind", "delta"]) == 0
    assert Run(tmp_path / "runs" / "stated").spec.action.kind == "delta"
    assert (
        main(["train", str(recorded), "--steps", "2", "--action-kind", "absolute", "--out", str(tmp_path / "x")]) == 2
    )
    assert "says that its actions are delta" in capsys.readouterr().err


def test_a_run_begins_with_the_weights_of_another(trained: Path, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "more"
    words = ["--init", str(trained), "--steps", "1", "--set", "train.learning_rate=1e-12"]
    assert main(["train", str(recorded), *words, "--out", str(out)]) == 0
    ours, theirs = (dict(Run(path).policy().named_parameters()) for path in (out, trained))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert torch.equal(Run(out).policy().normalizer.action_center, Run(trained).policy().normalizer.action_center)
    assert Run(out).experiment.init == str(trained)
    other = tmp_path / "other"
    with DatasetWriter(other, (SensorSpec("joints", "vector", (3,)),), 3, 10.0, "t") as writer:
        writer.add({"joints": np.zeros((9, 3), np.float32)}, np.ones((9, 3), np.float32))
    assert main(["train", str(other), "--init", str(trained), "--steps", "1", "--out", str(tmp_path / "no")]) == 2


def test_a_run_that_is_over_goes_on_with_a_larger_budget(trained: Path, recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert main(["train", str(recorded), "--steps", "6", "--resume", "--out", str(run)]) == 0
    assert Run(run).experiment.train.steps == 6
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1].endswith("6")
    assert main(["train", str(recorded), "--steps", "3", "--resume", "--out", str(run)]) == 2


def test_somebody_takes_over_and_what_they_did_is_kept(trained: Path, tmp_path: Path) -> None:
    """An untrained policy: the script soon does the task, and its steps are a dataset of their own."""
    words = ["--teleop", "scripted", "--episodes", "2", "--out", str(tmp_path / "o")]
    assert main(["run", str(trained), *TWIN, *words]) == 0
    whole, parts = RecordingSource(tmp_path / "o"), RecordingSource(tmp_path / "o-corrections")
    assert whole.provenances[0]["success"] is True
    commanded = [who for who, count in whole.provenances[0]["commanded_by"] for _ in range(count)]
    assert set(commanded) == {"policy", "script"}
    corrected = np.concatenate([parts.read(i).actions for i in range(len(parts.lengths))])
    mine = [whole.read(0).actions[i] for i, who in enumerate(commanded) if who == "script"]
    assert all(any(np.array_equal(row, other) for other in corrected) for row in mine[2:4])
    assert (parts.sensors, parts.fps, parts.action_spec) == (whole.sensors, whole.fps, whole.action_spec)


def test_episodes_are_recorded_with_a_sentence_and_the_policy_is_told_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "told", tmp_path / "run"
    for words in ("insert it", "put it in"):
        record = ["record", str(data), *TASK, "--teleop", "scripted", "--episodes", "1", "--text", words]
        assert main(record) == 0
    source = open_dataset(data)
    assert [decode_text(source.read(n).streams["text"][0]) for n in (0, 1)] == ["insert it", "put it in"]
    assert all(source.read(n).present.get("text", np.ones(1)).all() for n in (0, 1))
    assert main(["train", str(data), "--steps", "2", "--out", str(run)]) == 0
    drive_it = ["run", str(run), *TASK, "--seconds", "1"]
    assert main(drive_it) == 2
    assert "has no sensor 'text', which the policy requires" in capsys.readouterr().err
    played = []
    for words in ("insert it", "put it in", "insert it"):
        out = tmp_path / f"out{len(played)}"
        assert main([*drive_it, "--text", words, "--out", str(out)]) == 0
        episode = open_dataset(out).read(0)
        assert decode_text(episode.streams["text"][-1]) == words
        played.append(episode.actions)
    assert np.array_equal(played[0], played[2])
    assert not np.array_equal(played[0], played[1])
    capsys.readouterr()
    assert main([*drive_it, "--text", "x" * 65, "--out", str(tmp_path / "long")]) == 2
    assert "text of 65 bytes does not fit the 64" in capsys.readouterr().err


def test_a_run_is_shown_and_replayed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o"
    assert main(["run", str(trained), *TWIN, "--seconds", "1", "--out", str(out), "--first-seed", "7"]) == 0
    assert main(["report", str(out)]) == 0
    shown = (out / "report.html").read_text()
    for words in ("1 episodes of ur5e-twin", "0 of 1 succeeded", "highest candidate", "policy 10", "proprio"):
        assert words in shown, words
    drawn = set(re.findall(r'class="curve (\w+)"', shown))
    assert drawn >= {"s0", "s1", "s2", "s3"}
    assert all(f".curve.{one} {{ stroke" in shown for one in drawn), "a line without a colour is not seen"
    again = ["--replay", str(out / "episode-000000"), "--seconds", "1", "--out", str(tmp_path / "again")]
    assert main(["run", *TWIN, *again]) == 0
    first, second = RecordingSource(out), RecordingSource(tmp_path / "again")
    assert second.provenances[0]["commanded_by"] == [["replay", 10]]
    assert second.provenances[0]["seed"] == 7
    assert not (tmp_path / "again-corrections").exists(), "nobody took over"
    twice = [*again[:2], "--seconds", "0.3", "--episodes", "2", "--out", str(tmp_path / "twice")]
    assert main(["run", *TWIN, *twice]) == 0
    assert [said["seed"] for said in RecordingSource(tmp_path / "twice").provenances] == [7, 7], "in the same scene"
    assert np.allclose(first.read(0).actions, second.read(0).actions, atol=0.02), "the limits see it as it was"
    assert np.allclose(first.read(0).streams["proprio"], second.read(0).streams["proprio"], atol=2e-3)
    capsys.readouterr()
    assert main(["run", *TWIN, "--replay", str(tmp_path)]) == 2
    assert "is not a recorded episode" in capsys.readouterr().err


def test_a_live_page_shows_the_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("websockets")
    from prism.robots import loop, program

    real, seen = loop.drive, []

    def drive(*args: Any, **more: Any) -> Any:
        port = args[1].executor.planner.client.uri.rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as page:
            seen.append(page.status)
        return real(*args, **more)

    monkeypatch.setattr(program, "drive", drive)
    assert main(["run", str(trained), *TWIN, "--seconds", "1", "--out", str(tmp_path / "o"), "--live", "0"]) == 0
    assert seen == [200]
    assert RecordingSource(tmp_path / "o").lengths.tolist() == [10]
