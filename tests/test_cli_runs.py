"""From demonstrations to a measured run through the command line, on a dataset small enough for seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prism_client import ActionKind

from prism import cli
from prism.cli import serve
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.evaluation.play import IncompleteError
from prism.evaluation.results import EvaluationResult, load_result, recording_path
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import Run
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Observation

JOINTS = (SensorSpec("joints", "vector", (3,)),)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where nothing of this machine is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "no-data"))
    monkeypatch.delenv("PRISM_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def pushes(workplace: Path) -> Path:
    """Four short wanderings in Push-T's raw state, enough to train on and to hold one out."""
    path = workplace / "pushes"
    rng = np.random.default_rng(0)
    with DatasetWriter(path, (SensorSpec("state", "vector", (5,)),), action_dim=2, fps=10.0, task="pusht") as writer:
        for _ in range(4):
            state = np.cumsum(rng.normal(0, 3, (30, 5)), axis=0) + np.array([256, 256, 200, 300, 1])
            writer.add({"state": state.astype(np.float32)}, (state[:, :2] + 5).astype(np.float32))
    return path


def last_step(run: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def test_a_run_whose_kind_of_actions_was_seen_in_the_data_goes_on(
    workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dataset that does not say that its actions are changes of a pose: the same command goes on, also with more
    steps; so does a run that began with its network; and what a person stated is not overruled by what is seen."""
    moves = np.cumsum(np.random.default_rng(0).normal(0, 0.002, (2, 40, 3)), axis=1)
    poses = np.cumsum(moves, axis=1)
    for name, actions in (("changes", moves), ("poses", poses)):
        with DatasetWriter(workplace / name, JOINTS, 3, 10.0, "t") as writer:
            for before, done in zip(poses - moves, actions, strict=True):
                writer.add({"joints": before}, done)
    for words, how, kind in (
        (["changes"], "; seen in the data;", "delta"),
        (["changes", "--init", "runs/0"], "; seen in the data;", "delta"),
        (["poses"], "; seen in the data;", "absolute"),
        (["poses", "--action-kind", "delta"], "", "delta"),
    ):
        run = workplace / "runs" / str(len(list(workplace.glob("runs/*"))))
        for more in (["--steps", "1"], ["--steps", "2", "--resume"]):
            assert cli.main(["train", *words, "--out", str(run), *more]) == 0
            assert f"{kind} ({ActionKind(kind).meaning}){'' if '--resume' in more else how}" in capfd.readouterr().err
            assert Run(run).spec.action.kind == kind
        assert last_step(run) == 2
    assert cli.main(["train", "poses", "--set", "controller.selection.action_kind=delta"]) == cli.EXIT_USER
    assert "'action_kind' is not a setting any more; use --action-kind" in capfd.readouterr().err


def test_a_network_goes_on_with_actions_of_its_own_kind_alone(
    workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """--init: poses and changes of a pose are other numbers, whether the data say what they are or show it."""
    moves = np.cumsum(np.random.default_rng(0).normal(0, 0.002, (2, 40, 3)), axis=1)
    poses, noise = np.cumsum(moves, axis=1), np.random.default_rng(1).normal(0, 0.02, (2, 40, 3))
    for name, kind, actions in (
        ("poses", None, poses),
        ("changes", None, moves),
        ("hidden", None, noise),
        ("absolute", ActionKind.ABSOLUTE, noise),
        ("delta", ActionKind.DELTA, noise),
        ("velocity", ActionKind.VELOCITY, noise),
    ):
        with DatasetWriter(workplace / name, JOINTS, 3, 10.0, "t", action=ActionSpec(kind=kind)) as writer:
            for before, done in zip(poses - moves, actions, strict=True):
                writer.add({"joints": before}, done)
        if name != "hidden":
            assert cli.main(["train", name, "--steps", "1", "--out", f"runs/{name}"]) == 0
    for data, init, kinds in (
        (["changes"], "poses", "absolute, those of the data delta;"),
        (["poses"], "changes", "delta, those of the data absolute;"),
        (["delta"], "absolute", "absolute, those of the data delta;"),
        (["absolute"], "delta", "delta, those of the data absolute;"),
        (["velocity"], "delta", "delta, those of the data velocity;"),
        (["poses", "--action-kind", "delta"], "poses", "absolute, those of the data delta;"),
        (["hidden", "--action-kind", "delta"], "poses", "absolute, those of the data delta;"),
    ):
        capfd.readouterr()
        assert cli.main(["train", *data, "--init", f"runs/{init}", "--steps", "1", "--out", "no"]) == cli.EXIT_USER
        error = capfd.readouterr().err
        assert f"--init runs/{init}: the run's actions are {kinds}" in error
        assert not Path("no").exists()
    for data, init, kind in (
        (["hidden"], "changes", "delta"), (["changes", "--action-kind", "absolute"], "poses", "absolute"),
    ):  # fmt: skip
        out = f"runs/{init}-more"
        assert cli.main(["train", *data, "--init", f"runs/{init}", "--steps", "1", "--out", out]) == 0
        assert Run(out).spec.action.kind == kind, "what the data do not show is as in the run"


def test_train_resume_and_evaluate(
    pushes: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path("runs/pusht")
    train = ["train", "pusht", "--data", str(pushes), "--seed", "3"]
    assert cli.main([*train, "--steps", "3"]) == 0
    assert "prism eval runs/pusht" in capfd.readouterr().out
    assert last_step(run) == 3
    experiment = json.loads((run / "experiment.json").read_text())
    assert experiment["demonstrations"]["path"] == str(pushes)
    assert experiment["train"]["seed"] == 3
    assert experiment["train"]["steps"] == 3

    # A file without a setting is from before it was added, and has its default; an unknown one is refused.
    assert experiment["policy"]["objective"].pop("relative") == 0.0
    (run / "experiment.json").write_text(json.dumps(experiment))
    assert Experiment.load(run).policy.objective.relative == 0.0  # type: ignore[union-attr]
    experiment["policy"]["objective"]["relative"] = 0.0
    (run / "experiment.json").write_text(json.dumps({**experiment, "temperature": 1}))
    with pytest.raises(PrismError, match=r"experiment\.json: unknown key 'temperature'"):
        Experiment.load(run)
    (run / "experiment.json").write_text(json.dumps(experiment))

    # Nor over an experiment without its training, which is not what a start that failed leaves.
    other = run.with_name("other")
    other.mkdir()
    (other / "experiment.json").write_bytes((run / "experiment.json").read_bytes())
    capfd.readouterr()
    assert cli.main([*train, "--steps", "3", "--out", str(other)]) == cli.EXIT_USER
    assert "experiment.json is there without its training: move it, or choose another --out" in capfd.readouterr().err
    assert [path.name for path in other.iterdir()] == ["experiment.json"]

    # Never silently over an existing run; --resume needs none of the options again.
    assert cli.main([*train, "--steps", "3"]) == cli.EXIT_USER
    assert "--resume" in capfd.readouterr().err
    assert cli.main(["train", "pusht", "--resume"]) == 0
    assert last_step(run) == 3
    assert cli.main(["train", "pusht", "--resume", "--steps", "2"]) == cli.EXIT_USER
    assert "steps = 3 there, 2 now" in capfd.readouterr().err
    assert cli.main(["train", "pusht", "--resume", "--steps", "4"]) == 0  # a larger budget: it goes on
    assert last_step(run) == 4

    evaluate = ["eval", str(run), "--episodes", "1", "--workers", "1", "--candidates", "2", "--json", "result.json"]
    assert cli.main(evaluate) == 0
    result = json.loads(Path("result.json").read_text())
    assert result["task"] == "pusht"
    assert result["episodes"] == 1
    assert result["controller"]["candidates"] == 2
    for key in ("score", "success", "jerk"):
        assert isinstance(result[key], float)
    capfd.readouterr()
    assert cli.main(evaluate) == cli.EXIT_USER
    assert capfd.readouterr().err == (
        "prism: error: result.json exists already: remove it, choose another name, or pass --overwrite\n"
    )
    assert cli.main(["eval", str(run), "--selection", "best"]) == cli.EXIT_USER
    assert "selection.rule = 'best' is unknown" in capfd.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("prism.experiments.run_folder.evaluate", None)  # it is refused before any process is started
        assert cli.main(["eval", str(run), "--set", "exec_horizon=16"]) == cli.EXIT_USER
    assert "use exec_horizon < 16" in capfd.readouterr().err
    check_lost_episodes_behind_a_backend(run, monkeypatch, capfd)


def check_lost_episodes_behind_a_backend(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are an error there too; the recording of the run stays eager's."""
    path = recording_path(run, "pusht")
    before = path.read_bytes()
    result = replace(load_result(path), lost=("a worker died 3 times at seed 100001",))

    def lose(*arguments: object, **options: object) -> EvaluationResult:
        raise IncompleteError(result)

    monkeypatch.setattr("prism.experiments.run_folder.evaluate", lose)
    monkeypatch.setattr("prism.experiments.run_folder.Run.example_frames", lambda *_: [])
    assert cli.main(["eval", str(run), "--backend", "compile"]) == cli.EXIT_USER
    shown = capfd.readouterr()
    assert "1 of 2 episodes are kept" in shown.err
    assert "pusht" in shown.out
    assert path.read_bytes() == before
    assert cli.main(["eval", str(run), "--backend", "compile", "--report"]) == cli.EXIT_USER
    shown = capfd.readouterr()
    assert "--report shows the recording in the run" in shown.err
    assert shown.out == ""


def test_the_command_to_go_on_names_the_method(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = SimpleNamespace(val_loss=None, step=3, seconds=1.0, stopped_by="SIGINT")
    monkeypatch.setattr("prism.experiments.workflow.train_experiment", lambda *_, **__: stopped)
    with pytest.raises(SystemExit, match="130"):  # so that `train && eval` stops
        cli.main(["train", "pusht", "--method", "diffusion"])
    assert "next: prism train pusht --method diffusion --resume\n" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="130"):
        cli.main(["train", "pusht", "--out", "mine"])
    assert "next: prism train pusht --out mine --resume\n" in capfd.readouterr().out


def test_human_data_that_is_not_there(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "pusht-human", "--steps", "3"]) == cli.EXIT_USER
    error = capfd.readouterr().err
    assert "prism data collect pusht-human" in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_damaged_data_leaves_no_run_behind(pushes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    actions = np.load(pushes / "actions.npy")
    actions[7, 1] = np.nan
    np.save(pushes / "actions.npy", actions)
    assert cli.main(["train", "pusht", "--data", str(pushes), "--steps", "3"]) == cli.EXIT_USER
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "actions.npy" in error
    assert "damaged" in error
    assert not Path("runs").exists()


def test_data_of_another_task(pushes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """MetaWorld has no such sensors: said when training starts, not when the first rollout fails."""
    status = cli.main(["train", "metaworld-drawer-open", "--data", str(pushes), "--steps", "3"])
    assert status == cli.EXIT_USER
    assert "metaworld-drawer-open" in capfd.readouterr().err
    assert not Path("runs").exists()


def check_export_and_backends(run: Path) -> None:
    """`prism export` and what `prism serve --backend onnx-int8` starts, of a run whose frames are in its dataset."""
    pytest.importorskip("onnxruntime")
    assert cli.main(["export", str(run), "--onnx", "exported"]) == 0
    assert {path.name for path in Path("exported").iterdir()} >= {"plan.onnx", "fusion.onnx", "metadata.json"}
    assert cli.main(["export", str(run), "--onnx", "exported"]) == cli.EXIT_USER
    frames = Run(run).example_frames(count=5)
    assert [frame["state"].shape for frame in frames] == [(5,)] * 5
    policies = [serve.Serve(run, backend=backend, seed=1)._server().policy for backend in ("eager", "onnx-int8")]
    horizon = policies[0].spec.obs_horizon
    window = Observation(
        {"state": torch.from_numpy(np.stack([frames[0]["state"]] * horizon))[None]},
        {"state": torch.ones(1, horizon, dtype=torch.bool)},
    )
    plans = [policy.sample(window, 2, Random(0)) for policy in policies]
    assert torch.allclose(*plans, atol=30.0)  # of 512 pixels


def test_a_dataset_alone(pushes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(pushes), "--steps", "2"]) == 0
    assert json.loads(Path("runs/pushes/experiment.json").read_text())["task"] is None
    capfd.readouterr()
    assert cli.main(["eval", "runs/pushes"]) == cli.EXIT_USER
    check_export_and_backends(Path("runs/pushes"))
    assert "--task" in capfd.readouterr().err
    assert cli.main(["report", "runs/pushes"]) == 0
    page = Path("runs/pushes/report.html").read_text()
    assert page.count(">recorded</span>") == 2 * page.count("<h3>Episode "), "a curve a dimension"
    assert "<b>All are episodes that it was trained on</b>" in page, "three demonstrations: none is held out"
    assert "nearest candidate" in page
