"""The table of departures from the paper, beside the settings that do depart."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from prism_sims.tasks import CALVIN, GO2, METAWORLD, PUSHT, ROBOSUITE, TABLETOP

from prism.controller import ControllerConfig
from prism.experiments.recipes import Experiment, own_data, recipe, with_preset
from prism.io.jsonconfig import to_json
from prism.methods import presets
from prism.training.config import TrainConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "deviations.md"
# No part of the method: what the run is called, how much of which data it has, its budget and housekeeping, and what a
# task says of its actions.
LEFT_OUT = (
    *("name", "task", "teacher", "init", "demonstrations.kind", "demonstrations.episodes", "demonstrations.path"),
    *("train.minutes", "train.steps", "train.seed", "train.threads", "train.val_fraction", "train.log_every"),
    *("selection.action_kind", "selection.grippers"),
)


def flat(data: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        inner = f"{path}.{key}" if path else key
        deeper = isinstance(value, dict) and value and inner != "policy.encoder.text.things"
        found |= flat(value, inner) if deeper else {inner: value}
    return found


def settings(experiment: Experiment) -> dict[str, Any]:
    """By the names of the page."""
    plain = flat(to_json(experiment))
    short = {key.removeprefix("policy.").replace("controller.selection.", "selection."): plain[key] for key in plain}
    return {key: value for key, value in short.items() if key not in LEFT_OUT}


def literal(experiment: Experiment) -> Experiment:
    """The paper's, with undisturbed experts and a sentence that is an input like others."""
    one = with_preset(experiment, "paper-literal")
    text = replace(one.policy.encoder.text, things={})
    train = replace(
        one.train, ema_max_decay=TrainConfig(steps=1).ema_max_decay
    )  # of no effect without averaged weights
    return replace(
        one,
        policy=replace(one.policy, encoder=replace(one.policy.encoder, text=text)),
        demonstrations=replace(one.demonstrations, noise=0.0, beyond=0),
        train=train,
    )


def shipped() -> list[Experiment]:
    """Every recipe once, and the presets."""
    families = (PUSHT, METAWORLD, ROBOSUITE, TABLETOP, GO2, CALVIN)
    tasks = {(task.recipe, task.beyond > 0): name for family in families for name, task in family.items()}
    human = recipe("pusht-human")
    sized = [with_preset(human, name) for name in presets.PRESETS if name != "paper-literal"]
    return [own_data(Path("own.zarr")), human, *sized, *map(recipe, tasks.values())]


def departures() -> set[str]:
    found = set()
    for ours in shipped():
        here, there = settings(ours), settings(literal(ours))
        found |= {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)}
    return found


def rows() -> list[list[str]]:
    table = PAGE.read_text(encoding="utf-8").split("## Settings")[1].split("## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_departure_has_a_row_and_every_row_departs() -> None:
    named = [name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(named) == len(set(named)), "a setting has two rows"
    found = departures()
    assert {key for key in found if not any(fnmatch(key, name) for name in named)} == set(), "without a row"
    assert {name for name in named if not any(fnmatch(key, name) for key in found)} == set(), "departs no more"


def test_every_row_has_its_evidence_or_says_that_there_is_none() -> None:
    for setting, *_, evidence in rows():
        assert re.search(r"not measured|[Pp]roof|\d", evidence), setting


@pytest.mark.parametrize(("name", "value"), [("scope", "batch"), ("soft_weight", 0.02), ("relative", 0.0)])
def test_presets_and_recipes_have_the_papers_objective(name: str, value: object) -> None:
    for ours in shipped():
        assert getattr(ours.policy.objective, name) == value, ours.name  # type: ignore[attr-defined]


def test_the_literal_paper_executes_plans_as_they_are() -> None:
    """human Push-T smooths its plans, which once stayed on in paper-literal."""
    one = with_preset(recipe("pusht-human"), "paper-literal")
    assert replace(one.controller, selection=ControllerConfig().selection) == ControllerConfig(8, 8, join=0)
    assert (one.train.betas, one.history) == ((0.9, 0.999), 1)
