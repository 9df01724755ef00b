"""`prism serve` as a user types it: a checkpoint, a client, Ctrl-C; and what goes wrong before it starts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prism.cli import main
from prism.cli.serve import Serve, _announce
from prism.errors import PrismError
from prism.experiments.run_folder import Run
from prism.sensors import ActionSpec
from tests.policy_fakes import ACTION_DIM, save_run, small_config, small_policy
from tests.server_fakes import OpenPi, see

SOON = ("--set", "exec_horizon=2")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", small_policy(kind=None))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_serves_a_checkpoint_until_ctrl_c(how: signal.Signals, run: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open-sesame\n")
    code = "import sys; from prism.cli import main; sys.exit(main(sys.argv[1:]))"
    options = [
        "--port",
        "0",
        "--set",
        "exec_horizon=2",
        "--action-kind",
        "absolute",
        "--api-key-file",
        str(tmp_path / "key"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(run), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        greeting: list[str] = []
        while not greeting or "Ctrl-C" not in greeting[-1]:
            greeting.append(process.stdout.readline())
            assert greeting[-1], process.communicate()
        assert "ws://127.0.0.1:" in greeting[0]
        assert "object_state" in "".join(greeting)  # the table of sensors
        assert "required: proprio, object_state." in "".join(greeting)
        assert "(absolute)" in greeting[-1]
        with OpenPi(int(greeting[0].rsplit(":", 1)[1]), "open-sesame") as client:
            assert client.infer(see())["actions"].shape == (4, ACTION_DIM)
            with pytest.raises(RuntimeError):
                client.infer({"proprio": np.zeros(9)})
        process.send_signal(how)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()  # does nothing to one that has ended
        process.communicate()
    assert process.returncode == (0 if how == signal.SIGINT else 129), err
    assert "stopped after 1 requests of 1 clients" in out
    assert "sensor 'proprio': the policy was trained with shape (3,)" in err
    assert "Traceback" not in err


def test_a_hold_is_not_guessed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody said what the actions are: the server says so, and tells executors nothing, which then do not start."""
    server = Serve(run, port=0, set=SOON[1:])._server()
    _announce(server)
    assert "unknown kind of action" in capsys.readouterr().out
    assert "kind" not in server.metadata()["action"]
    for kind, taken in (("absolute", []), ("delta", [1]), ("velocity", [1])):
        about = Serve(run, port=0, set=(*SOON[1:], "selection.grippers=[1]"), action_kind=kind)._server().metadata()
        assert (about["action"]["kind"], about["keep"]) == (kind, taken)
    with pytest.raises(PrismError, match="--action-kind jump: use one of absolute, delta, velocity"):
        Serve(run, port=0, set=SOON[1:], action_kind="jump")._server()


def test_a_checkpoint_copied_alone_knows_its_hold(tmp_path: Path) -> None:
    """Without experiment.json: the kind of the actions and the gripper come from the weights' own description."""
    policy = small_policy()
    action = ActionSpec(("x", "y", "gripper"), kind="delta")
    policy.spec = dataclasses.replace(policy.spec, action=action)
    alone = Run(save_run(tmp_path / "run", policy)).weights()
    selection = Run(alone).settings.selection
    assert selection.grippers == (2,)
    about = Serve(alone, port=0)._server().metadata()
    assert (about["action"]["kind"], about["keep"]) == ("delta", [2])


@pytest.mark.parametrize(("planned", "executed"), [(2, 1), (8, 4), (9, 8), (16, 8)])
def test_a_checkpoint_copied_alone_leaves_something_of_a_plan(planned: int, executed: int, tmp_path: Path) -> None:
    """The rest is what the next plan is compared with."""
    run = Run(save_run(tmp_path / "run", small_policy(small_config(pred_horizon=planned))))
    assert run.controller().config.exec_horizon == executed


def test_what_cannot_be_served_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "does not exist"),
        ([str(tmp_path)], "is not a run of `prism train`"),
        ([str(run), "--port", "70000"], "is not a port"),
        ([str(run), "--map", "x"], "KEY=SENSOR"),
        ([str(run), "--map", "x=arm"], "no sensor 'arm'"),
        ([str(run), "--api-key-file", str(tmp_path / "nokey")], "cannot be read"),
        ([str(run), "--api-key-file", str(tmp_path / "empty")], "one ASCII word"),
        ([str(run), "--set", "exec_horizon=99"], "exceeds"),
        ([str(run), "--threads", "0"], "threads = 0"),
        ([str(run), "--device", "tpu"], "--device tpu is unknown: use auto, cpu, cuda, mps"),
        ([str(run), "--device", "cuda", "--backend", "onnx"], "--backend onnx runs on the CPU"),
        ([str(run), "--max-message-mb", "nan"], "--max-message-mb nan"),
        ([str(run), "--rate", "nan"], "rate = nan"),
        ([str(run), "--set", "exec_horizon=2", "--host", "203.0.113.7", "--no-key"], "cannot listen"),
        ([str(run), "--host", "0.0.0.0"], "--no-key if anyone there may send requests and watch"),
    ):
        assert main(["serve", *arguments]) == 2, arguments
        err = capsys.readouterr().err
        assert words in err, arguments
        assert err.count("\n") == 1


def test_a_key_that_no_client_can_send_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("", "two words", "schl\u00fcssel"):
        monkeypatch.setenv("PRISM_API_KEY", key)
        assert main(["serve", str(run)]) == 2
        assert "PRISM_API_KEY: the API key must be one ASCII word" in capsys.readouterr().err
