"""The protocol of comparisons: verdicts, Holm's correction, tuning episodes, and one grid of executions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.errors import PrismError
from prism.evaluation import metrics
from prism.experiments.comparison import Contestant, folder_of, summarise
from prism.experiments.trial import EvaluationPlan, TrialId
from research import execution, final
from tests.comparison_fakes import MSE, PRISM, config, finish


def test_holm_is_the_textbook_procedure() -> None:
    """Holm 1979: sort, multiply by m, m - 1, ..., keep them growing."""
    assert metrics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert metrics.holm([0.6, 0.7]) == [1.0, 1.0]
    assert metrics.holm([]) == []


def verdicts(out: Path, seeds: tuple[int, ...], scores: dict[str, list[float]]) -> dict[str, str]:
    episodes = len(next(iter(scores.values())))
    asked = config(
        *(Contestant(name, "prism" if name == "prism" else "mse") for name in scores),
        seeds=seeds,
        evaluation=EvaluationPlan(episodes=episodes, curve=(0.5,), curve_episodes=2),
    )
    for name, values in scores.items():
        for seed in seeds:
            finish(out, TrialId("pusht", name, seed), values)
    return {row.contestant: row.verdict for row in summarise(out, asked, {}).rows}


def test_verdicts_look_at_success_and_score(tmp_path: Path) -> None:
    """A score of .95 is a success, one of .85 is none; the fakes count success from .9 on."""
    scores = {"prism": [0.95] * 12, "worse": [0.5] * 12, "scored": [1.0] * 12, "same": [0.95] * 12}
    found = verdicts(tmp_path, (0, 1, 2), scores)
    assert found == {
        "prism": "",
        "worse": "behind",
        "scored": "depends on the metric",  # a higher score, as many successes
        "same": "not decided",
    }


def test_fewer_than_three_trainings_give_no_verdict(tmp_path: Path) -> None:
    found = verdicts(tmp_path, (0, 1), {"prism": [0.95] * 12, "worse": [0.5] * 12})
    assert found["worse"] == "needs 3 trainings"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "pusht-1"}, "2 training seeds; a verdict needs 3"),
        ({"chosen_on": ("200000",)}, "write FIRST-LAST"),
        ({"chosen_on": ("99000-100001",)}, "settings were chosen on 99000-100001; play others: --first-seed 100002"),
    ],
)
def test_what_the_protocol_forbids_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PrismError, match=words):
        config(**changes)


def test_a_trial_says_which_protocol_it_keeps() -> None:
    asked = config(seeds=(0, 1, 2), protocol="pusht-1", chosen_on=("200000-200029",))
    spec = asked.spec(TrialId("pusht", "mse", 0))
    assert (spec.protocol, spec.chosen_on) == ("pusht-1", ("200000-200029",))


def test_every_method_has_the_same_grid_of_executions() -> None:
    names = [name for name, _ in execution.executions()]
    assert len(names) == len(set(names)) == 18
    rows = [
        {"method": method, "execution": name, "success": success, "score": 0.5, "jerk": jerk}
        for method in ("prism", "act")
        for name, success, jerk in ((names[0], 0.5, 0.2), (names[1], 0.5, 0.1), (names[2], 0.4, 0.0))
    ]
    chosen = ",".join(f"controller.{one}" for one in dict(execution.executions())[names[1]])
    assert execution.best(rows) == {"prism": chosen, "act": chosen}, "the lower jerk decides between equals"


def test_a_final_table_is_made_of_two_comparisons(tmp_path: Path) -> None:
    evaluation = EvaluationPlan(episodes=3, first_seed=3_000_000, curve=())
    asked = config(PRISM, MSE, seeds=(0, 1, 2), protocol="p", chosen_on=("200000-200029",), evaluation=evaluation)
    for name in ("published", "best"):
        for contestant in (PRISM, MSE):
            for seed in asked.seeds:
                id = TrialId("pusht", contestant.name, seed)
                finish(tmp_path / name, id, [0.95, 0.5, 1.0])
                folder = folder_of(tmp_path / name, id)
                result = json.loads((folder / "result.json").read_text())
                result |= {"contestant": id.contestant, "weights": f"{seed:064x}", "trained_by": {"commit": "abc1234"}}
                result["info"]["commit"] = "abc1234"
                (folder / "result.json").write_text(json.dumps(result))
                asked.spec(id).save(folder)
                experiment_of(folder)
        (tmp_path / name / "comparison.json").write_text('{"command": "prism compare pusht"}')
    table = final.table_of(tmp_path / "published", tmp_path / "best", "protocol-p")
    assert list(final._lacks(table)) == []
    assert table["methods"]["mse"]["best"]["score"] == pytest.approx([2.45 / 3] * 3)
    assert table["budget"] == {"clock": "wall", "steps": 4}

    changed = folder_of(tmp_path / "best", TrialId("pusht", "mse", 1)) / "result.json"
    changed.write_text(changed.read_text().replace(f"{1:064x}", f"{9:064x}"))
    with pytest.raises(PrismError, match="other weights in"):
        final.table_of(tmp_path / "published", tmp_path / "best", "protocol-p")


def experiment_of(folder: Path) -> None:
    from prism.experiments.recipes import recipe, with_budget

    with_budget(recipe("pusht"), steps=4).save(folder)
