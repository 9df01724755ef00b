"""tools/house: its keys, and the bars of the house."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARS = {"files": 150, "lines": 23_000, "commands": 15, "longest_function": 80, "readme_lines": 160}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = SourceFileLoader("house", str(ROOT / "tools" / "house"))
    spec = importlib.util.spec_from_loader("house", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    file = tmp_path_factory.mktemp("house") / "house.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["house", "--json", str(file)])
        assert tool.main() == 0
        assert tool.main() == 2, "nothing is overwritten unasked"
    found: dict[str, int] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("key", [*BARS, "files_to_train", "files_to_act"])
def test_house_counts(house: dict[str, int], key: str) -> None:
    assert house[key] > 0


def test_the_ways_pass_where_they_must(house: dict[str, dict[str, list[str]]]) -> None:
    ways = house["files_on_the_way"]
    assert {"data/loader.py", "methods/prism.py", "objective.py", "training/step.py"} <= set(ways["train"])
    assert {"controller.py", "methods/prism.py", "selection.py"} <= set(ways["act"])
    assert not [file for file in ways["act"] if file.startswith(("training/", "data/"))]


@pytest.mark.parametrize("key", sorted(BARS))
def test_bars_of_the_house(house: dict[str, int], key: str) -> None:
    assert house[key] <= BARS[key], f"tools/house: {key} is {house[key]}, the bar is {BARS[key]}"
