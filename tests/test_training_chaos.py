"""tools/chaos: kill -9 at random moments, resume each time: the end is that of an undisturbed run, bit for bit."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from prism.errors import PrismError
from prism.training import checkpoint

TOOL = Path(__file__).resolve().parent.parent / "tools" / "chaos"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = SourceFileLoader("chaos", str(TOOL))
    spec = importlib.util.spec_from_loader("chaos", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(tool: ModuleType, tmp_path: Path, kills: int) -> None:
    summary = tool.chaos(tmp_path, kills, steps=8 if kills == 2 else 40, seed=kills)
    assert summary["kills"] == kills
    assert summary["runs"] >= 1


def test_damage_does_not_pass(tool: ModuleType, tmp_path: Path) -> None:
    tool.write_demonstrations(tmp_path / "data")
    tool.train_once(tmp_path / "data", tmp_path / "run", steps=2)
    assert tool.count_intact(tmp_path / "run") == 1
    newest = checkpoint.folder_of(tmp_path / "run", 2) / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(PrismError, match=r"model\.safetensors"):
        tool.count_intact(tmp_path / "run")
