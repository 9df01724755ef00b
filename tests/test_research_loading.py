"""Our loader beside LeRobot's: the same windows, ratios round by round, and where the time goes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from prism.errors import PrismError
from research import loading

FAKE = """#!{python}
import json, sys
settings = json.loads(sys.stdin.readline())
assert settings["camera"] == "observation.images.top" and settings["obs_horizon"] == 2
print("a library says hello")
print(json.dumps({{"lerobot": "fake"}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"windows": 10, "seconds": 1.0, "spent": {{"video": 0.75}}}}), flush=True)
"""


def test_ratios_are_of_the_same_round() -> None:
    def rounds(*rates: float) -> list[dict[str, object]]:
        return [{"windows": rate, "seconds": 1.0, "spent": {"decode": 0.25}} for rate in rates]

    found = loading.figures(
        {
            "lerobot": rounds(10, 1, 10),  # the second round was slow for both
            "same_dataset": rounds(50, 5, 50),
            "own_format": rounds(100, 10, 100),
            "cached": rounds(200, 20, 300),
        }
    )
    assert (found["ratio_same_dataset"], found["ratio_own_format"], found["ratio_cached"]) == (5, 10, 20)
    assert found["ratio"] == found["ratio_cached"]
    assert found["ratio_same_dataset_range"] == [5, 5]
    assert found["spent"]["cached"] == {"decode": 0.25, "rest": 0.75}


def test_every_loader_reads_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SIZE", (120, 200))
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    config = loading.Config(lerobot_python=python, codec="h264", episodes=1, rounds=1, seconds=0.01, batch=4)
    result = loading.run(config, Console(quiet=True))
    assert set(result["windows_per_cpu_s"]) == {"lerobot", *loading.OURS}
    assert result["windows_per_cpu_s"]["lerobot"] == 10
    assert result["ratio"] == result["windows_per_cpu_s"]["cached"] / 10
    assert result["loaders"]["same_dataset"]["picture"] == [120, 200, 3]
    assert result["loaders"]["cached"]["picture"] == [58, 96, 3]  # as prism train reads it
    assert result["spent"]["same_dataset"]["decode"] > 0
    assert "decode" not in result["spent"]["cached"]  # made before, not on the way
    loading.show(result, Console(quiet=True))


def test_a_loader_that_fails_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no lerobot here')"]
    with (
        pytest.raises(PrismError, match="the loader 'lerobot' failed: no lerobot here"),
        loading.started("lerobot", command, {}),
    ):
        pass
    with pytest.raises(PrismError, match="no such interpreter"):
        loading.Config(lerobot_python=tmp_path / "absent")
