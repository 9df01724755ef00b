"""The public interface, as a user imports it: `import prism`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prism_client import ActionKind

import prism
from prism.data.formats.store_writer import DatasetWriter
from prism.methods.prism import PrismPolicy
from prism.sensors import ActionSpec, SensorSpec


def test_import_is_light_and_says_what_there_is() -> None:
    code = "import sys, prism; print('torch' in sys.modules, 'numpy' in sys.modules, *sorted(prism.__all__))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split()[:2] == ["False", "False"]
    names = done.stdout.split()[2:]
    assert names == sorted(prism.__all__)
    assert set(names) <= set(dir(prism))
    for name in names:
        assert getattr(prism, name) is getattr(prism, name)
        assert name == "__version__" or getattr(prism, name).__doc__, f"{name} is not documented"
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        prism.tran  # noqa: B018


def test_threads_sleep_at_barriers_in_a_script_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = "import os, prism; prism.train; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "passive\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> prism.Run:
    out = tmp_path_factory.mktemp("runs") / "pusht"
    return prism.train(
        "pusht", steps=20, out=out, demonstrations=4, progress=False, set=["train.batch_size=8", "train.threads=1"]
    )


def test_train_evaluate_act(trained: prism.Run) -> None:
    assert trained.experiment.train.steps == 20
    assert trained.checkpoints[-1] == trained.weights()
    result = prism.evaluate(trained, episodes=2, set=["candidates=2"], workers=1, progress=False)
    assert result.summary()["episodes"] == 2
    assert result.controller.candidates == 2
    assert trained.recording().is_file()
    assert trained.metrics["tasks"]["pusht"]["episodes"] == 2

    controller = prism.load_run(trained.folder).controller()
    assert controller.config == trained.experiment.controller
    shapes = {sensor.name: sensor.shape for sensor in trained.spec.sensors}
    observation = {name: np.full(shape, 100.0, dtype=np.float32) for name, shape in shapes.items()}
    episodes = []
    for _ in range(2):
        controller.reset(seed=0)
        episodes.append([controller.act(observation).tolist() for _ in range(3)])
    assert np.shape(episodes[0]) == (3, 2)
    assert episodes[0] == episodes[1]
    missing = dict(list(observation.items())[:1])
    assert controller.act(missing).shape == (2,)  # a sensor that is left out is absent
    with pytest.raises(prism.PrismError, match="knows no sensor 'rgb_wirst'"):
        controller.act({**observation, "rgb_wirst": np.zeros(3)})


def test_a_controller_has_the_settings_of_its_run(trained: prism.Run, tmp_path: Path) -> None:
    """And not the defaults: Push-T from people is restless, MetaWorld's actions are changes."""
    from dataclasses import replace

    from prism.experiments.recipes import recipe

    stored = replace(recipe("pusht-human").controller, ensemble=0.01)
    experiment = replace(trained.experiment, controller=stored)
    experiment.save(tmp_path)
    shutil.copytree(trained.folder / "checkpoints", tmp_path / "checkpoints")
    run = prism.load_run(tmp_path)
    assert run.controller().config == stored
    other = run.controller(candidates=3, selection="overlap", set=["selection.restless=0"]).config
    assert (other.candidates, other.selection.rule, other.selection.restless) == (3, "overlap", 0)
    assert other.ensemble == 0.01


def test_a_checkpoint_is_a_run_too(trained: prism.Run, tmp_path: Path) -> None:
    inside = prism.load_run(trained.weights())
    assert inside.folder.resolve() == trained.folder.resolve()
    assert inside.settings == trained.settings
    alone = tmp_path / "robot"
    alone.mkdir()
    for name in ("config.json", "model.safetensors", "checksums.json", "sensor_use.json"):
        (alone / name).write_bytes((trained.weights() / name).read_bytes())
    copied = prism.load_run(alone)
    assert copied.policy().spec == trained.spec
    with pytest.raises(prism.PrismError, match=r"experiment\.json does not exist"):
        _ = copied.experiment


def test_every_worker_plays_the_policy_that_the_result_names(
    trained: prism.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a training goes on meanwhile, and writes a newer checkpoint before a worker has loaded its own."""
    from prism.experiments import run_folder as module
    from prism.experiments.run_folder import EvalOptions
    from prism.training.checkpoint import resolve

    shutil.copytree(trained.folder, tmp_path / "run")
    run, evaluate, loaded = prism.load_run(tmp_path / "run"), module.evaluate, list[Path]()
    (old,) = run.checkpoints

    def late(policy: Path, *rest: Any, **options: Any) -> Any:
        shutil.copytree(old, old.with_name("step-00000021"))
        loaded.append(resolve(policy))
        return evaluate(policy, *rest, **options)

    monkeypatch.setattr(module, "evaluate", late)
    result = run.play(EvalOptions(episodes=1, workers=0), progress=False)
    assert loaded[0].name == result.info["checkpoint"]["name"] == old.name


def test_bad_input_is_one_line(trained: prism.Run, tmp_path: Path) -> None:
    with pytest.raises(prism.PrismError, match=r"nowhere does not exist: give the folder of a run"):
        prism.load_run(tmp_path / "nowhere")
    with pytest.raises(prism.PrismError, match=r"is not a run of `prism train`: experiment.json is missing"):
        prism.evaluate(tmp_path)
    with pytest.raises(prism.PrismError, match="holds a run already"):
        prism.train("pusht", steps=1, out=trained.folder, progress=False)
    with pytest.raises(prism.PrismError, match="minutes or steps, not both"):
        prism.train("pusht", steps=1, minutes=1, out=tmp_path / "run", progress=False)
    with pytest.raises(prism.PrismError, match="evaluate the run first"):
        _ = prism.load_run(_copy(trained, tmp_path)).metrics


def _copy(run: prism.Run, folder: Path) -> Path:
    run.experiment.save(folder)
    return folder


def test_ctrl_c_saves_and_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, calls = PrismPolicy.loss, list[int]()

    def interrupted(self: PrismPolicy, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return loss(self, *args, **options)

    monkeypatch.setattr(PrismPolicy, "loss", interrupted)
    asked: dict[str, Any] = {"out": tmp_path / "run", "demonstrations": 4, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT at step 2, all saved"):
        prism.train("pusht", steps=5, set=["train.batch_size=8", "train.threads=1"], **asked)
    assert prism.load_run(tmp_path / "run").weights().name == "step-00000002"
    prism.train("pusht", resume=True, out=tmp_path / "run", progress=False)
    assert prism.load_run(tmp_path / "run").weights().name == "step-00000005"


def test_ten_demonstrations_are_ten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of few episodes none is held out, and what is asked for by number is trained on; the line says both."""
    rng = np.random.default_rng(0)
    for episodes in (10, 40):
        sensors = (SensorSpec("proprio", "vector", (2,)),)
        poses = ActionSpec(kind=ActionKind.ABSOLUTE)
        with DatasetWriter(tmp_path / f"of-{episodes}", sensors, 2, 10.0, "walk", action=poses) as writer:
            for _ in range(episodes):
                walk = np.cumsum(rng.normal(size=(20, 2)), axis=0).astype(np.float32)
                writer.add({"proprio": walk}, walk)
    for episodes, asked, trained, held_out in (
        (10, None, 10, "none"),
        (40, None, 38, "2"),
        (40, 10, 10, "2"),
        (40, 39, 39, "1"),
        (40, 40, 40, "none"),
    ):
        run = tmp_path / f"run-{episodes}-{asked}"
        prism.train(tmp_path / f"of-{episodes}", run, steps=1, demonstrations=asked, set=["train.batch_size=2"])
        said = " ".join(capfd.readouterr().err.split())
        assert f"{trained} episodes, {held_out} held out for validation" in said
        assert "sensors: proprio; 2 actions, absolute (each is a pose)" in said
    with pytest.raises(prism.PrismError, match="41 demonstrations were asked for, there are 40"):
        prism.train(tmp_path / "of-40", tmp_path / "x", steps=1, demonstrations=41, progress=False)
