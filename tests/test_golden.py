"""Commands and files of an earlier commit (tests/golden): the same commands today, and the files still open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")
pytest.importorskip("prism_client")

from prism import cli
from prism.data import open_dataset
from prism.data.formats.episode_folders import COMMANDS
from prism.evaluation.results import load_result
from prism.experiments.run_folder import Run
from prism.rows import Random
from prism.types import Observation
from tests.golden import streams
from tests.golden.streams import FOLDER, ROUNDED, STREAMS

STORED = streams.stored()
FILES = FOLDER / "files"
COMMANDS_OF: dict[str, list[str]] = json.loads((FOLDER / "commands.json").read_text())  # that made the files
# Defaults of then that are others today: what a user of such a run has to type to go on with it.
OLD_DEFAULTS = [
    "controller.join=null",
    "controller.margin=null",
    "policy.encoder.sensor_norm=false",
    "policy.generator.attention.length=0",
    "policy.objective.scope=own",
    "policy.objective.soft_weight=0",
    "policy.objective.relative=0.5",
]
REMEDY = "meant to change? python -m tests.golden, and say in the commit which stream changed and why"


@pytest.mark.parametrize("name", STREAMS)
def test_every_way_to_execute_gives_the_stored_commands(name: str) -> None:
    computed, stored = streams.compute(name), STORED[name]
    assert computed.keys() == stored.keys(), REMEDY
    rounded = any(word in name for word in ROUNDED)
    for key, value in computed.items():
        assert value.dtype == stored[key].dtype, REMEDY
        if rounded:
            np.testing.assert_allclose(value, stored[key], rtol=1e-5, atol=1e-6, err_msg=REMEDY)
        else:
            np.testing.assert_array_equal(value, stored[key], err_msg=REMEDY)


def test_no_stored_stream_is_left_out() -> None:
    assert STORED.keys() == STREAMS.keys()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in that holds a copy of the stored files."""
    for entry in FILES.iterdir():
        shutil.copytree(entry, tmp_path / entry.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "no-data"))
    return tmp_path


def candidates(run: Path) -> np.ndarray[Any, Any]:
    """Of the stored policy, for made-up observations."""
    policy = Run(run).policy()
    spec = policy.spec
    rng = np.random.default_rng(0)
    shown, present = {}, {}
    for sensor in spec.sensors:
        rows = rng.uniform(-1.0, 1.0, (2, spec.obs_horizon, *sensor.shape)).astype(np.float32)
        shown[sensor.name] = torch.from_numpy(rows)
        present[sensor.name] = torch.ones(2, spec.obs_horizon, dtype=torch.bool)
    with torch.inference_mode():
        return policy.sample(Observation(shown, present), 3, Random(0)).numpy()


def test_a_run_opens_and_its_policy_gives_the_same_candidates(place: Path) -> None:
    run = Run(place / "run")
    assert run.settings.smoothing == 2
    assert run.settings.exec_horizon == 4
    assert run.settings.selection.rule == "commit"
    stored = np.load(FOLDER / "candidates.npy", allow_pickle=False)
    np.testing.assert_allclose(candidates(place / "run"), stored, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("stored", "task", "kind"),
    [
        ("absolute", "pusht", "absolute"),
        ("delta", "pusht", "delta"),
        ("delta", None, "delta"),
        ("absolute", None, None),
    ],
)
def test_the_kind_of_action_of_an_earlier_run_is_found(
    place: Path, stored: str, task: str | None, kind: str | None
) -> None:
    """It was a setting of the controller; "absolute" was also what nobody had set."""
    file = place / "run" / "experiment.json"
    experiment = json.loads(file.read_text())
    experiment["controller"]["selection"]["action_kind"], experiment["task"] = stored, task
    file.write_text(json.dumps(experiment))
    assert Run(place / "run").policy().spec.action.kind == kind
    alone = shutil.copytree(Run(place / "run").weights(), place / "alone")
    assert Run(alone).spec.action.kind is None


def test_a_run_is_trained_on_and_played(place: Path) -> None:
    assert cli.main([*COMMANDS_OF["train"], *OLD_DEFAULTS, "--resume", "--steps", "6"]) == 0
    assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir()) == ["step-00000006"]
    assert cli.main(["eval", "run", "--episodes", "1", "--workers", "1"]) == 0
    assert load_result(place / "run" / "evaluation" / "pusht.npz").controller.smoothing == 2


def test_an_evaluation_opens(place: Path) -> None:
    metrics = json.loads((place / "run" / "metrics.json").read_text())["tasks"]["pusht"]
    result = load_result(place / "run" / "evaluation" / "pusht.npz")
    summary = result.summary()
    assert (summary["score"], summary["success"], summary["episodes"]) == (
        metrics["score"], metrics["success"], metrics["episodes"],
    )  # fmt: skip
    assert result.controller.smoothing == 2
    assert cli.main(["report", "run"]) == 0


def test_a_recording_opens(place: Path) -> None:
    source = open_dataset(place / "recording")
    episode = source.read(0)
    assert source.lengths.tolist() == [15]
    assert source.action_spec.kind == "delta"  # type: ignore[attr-defined]
    assert episode.actions.shape == (15, 4)
    with np.load(place / "recording" / "episode-000000" / COMMANDS, allow_pickle=False) as file:
        assert file["candidates"].shape[1:] == (3, 8, 4)


def test_a_comparison_opens(place: Path) -> None:
    stored = json.loads((place / "comparison" / "comparison.json").read_text())
    assert cli.main([*COMMANDS_OF["compare"], *OLD_DEFAULTS]) == 0
    made = json.loads((place / "comparison" / "comparison.json").read_text())
    assert made["scores"] == stored["scores"]
    assert made["missing"] == []
