"""`prism study trends`: verdicts from paired intervals, seeds that are missing, and a run of a few steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from prism.errors import PrismError
from prism.experiments.recipes import Experiment
from prism.methods import METHODS
from research import trends
from research.report import Study, decided
from tests.baseline_fakes import build, small_method
from tests.policy_fakes import save_run

QUIET = Console(quiet=True)


def _found(config: trends.Config, mean: dict[tuple[str, float, str], float]) -> dict[Any, Any]:
    """Episodes that differ a lot, trials that differ by what is asked."""
    rng = np.random.default_rng(0)
    hard = rng.uniform(-0.3, 0.3, size=config.episodes)
    found: dict[Any, Any] = {}
    for (method, share, count), value in mean.items():
        for seed in config.seeds:
            scores = (value + hard + rng.normal(0, 0.01, config.episodes)).tolist()
            found.setdefault((method, share, seed), {})[count] = {"score": scores, "success": [0.0] * len(scores)}
    return found


def _verdicts(found: dict[Any, Any], config: trends.Config) -> dict[tuple[str, str], str]:
    figures = trends.summarise(found, config)
    study = Study("trends", figures, tuple(trends.claims(figures, config)), {"recipe": "pusht", "budget": "1 step"})
    trends.show(study, QUIET)
    return {(claim.paper.split()[1], claim.ours.split(":")[0]): claim.verdict for claim in study.claims}


def test_trends_are_decided_by_paired_intervals() -> None:
    config = trends.Config(methods=("flow_matching", "rectified_flow", "mse"))
    flow = {("flow_matching", 0.05, "1"): 0.3, ("flow_matching", 0.05, "5"): 0.4}
    flow |= {("flow_matching", 0.95, "1"): 0.5, ("flow_matching", 0.95, "5"): 0.7}
    straight = {("rectified_flow", 0.05, "own"): 0.5, ("rectified_flow", 0.95, "own"): 0.45}
    mse = {("mse", 0.05, "own"): 0.5, ("mse", 0.95, "own"): 0.5}
    found = _found(config, {**flow, **straight, **mse})
    assert _verdicts(found, config) == {
        ("demonstrations", "flow_matching"): "confirmed",
        ("demonstrations", "rectified_flow"): "not confirmed",
        ("demonstrations", "mse"): "cannot be tested here",
        ("evaluations", "flow_matching"): "confirmed",
        ("than", "rectified_flow"): "not confirmed",
    }
    three = {"seeds": 3}
    assert decided({"low": -0.1, "high": 0.1, "p": 0.5} | three)[0] == "cannot be tested here"
    assert decided({"low": 0.7, "high": 0.7, "p": 1.0} | three)[0] == "cannot be tested here", "one episode"


def test_a_missing_seed_is_stated_and_left_out_of_both_sides() -> None:
    config = trends.Config(methods=("mse",))
    found = _found(config, {("mse", 0.05, "own"): 0.4, ("mse", 0.95, "own"): 0.6})
    del found["mse", 0.05, 1]
    figures = trends.summarise(found, config)
    assert [value is None for value in figures["scores"]["mse"]["0.05"]["own"]] == [False, True, False]
    assert figures["trends"]["data"]["mse"]["seeds"] == 2
    (claim,) = trends.claims(figures, config)
    assert claim.verdict == "cannot be tested here", "two trainings"
    assert "n = 2; 2 of the 3 training seeds" in claim.note
    both = [found["mse", 0.95, seed]["own"]["score"] for seed in (0, 2)]
    assert figures["trends"]["data"]["mse"]["after"] == pytest.approx(np.mean(both)), "of the seeds that both have"
    del found["mse", 0.05, 0], found["mse", 0.05, 2]
    assert trends.claims(trends.summarise(found, config), config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "name methods"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
        ({"shares": (0.9, 0.1)}, "growing"),
        ({"shares": (0.5, 1.0)}, "between 0 and 1"),
        ({"evaluations": (5, 1)}, "growing"),
        ({"evaluations": ()}, "growing"),
        ({"seeds": ()}, "seed"),
        ({"minutes": 0.0}, "above 0"),
    ],
)
def test_impossible_trends_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        trends.Config(**changes)


def test_every_method_has_a_training_of_each_share_and_seed() -> None:
    config = trends.Config(methods=tuple(METHODS), set=("train.batch_size=8",))
    for method in METHODS:
        experiment = config.experiment(method, 0.05, 3)
        assert (experiment.method, experiment.train.seed, experiment.train.batch_size) == (method, 3, 8)
        assert experiment.train.val_fraction == pytest.approx(0.95)
    train = trends.Config(minutes=5.0).experiment("mse", 0.05, 0).train
    assert (train.minutes, train.steps, train.clock) == (5.0, 0, "cpu")


def test_diffusion_is_asked_from_where_it_was_meant_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trends, "load_policy", lambda run: build(small_method("diffusion")))
    once, often = (trends.load_asked(Path("run"), n).config for n in (1, 5))  # type: ignore[attr-defined]
    assert (once.visited(), often.visited()) == ([90], [90, 72, 54, 36, 18])


def test_weights_are_kept_and_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A student learns from the teacher of its share and seed; training and rollouts are replaced."""
    trained: list[tuple[str, str | None]] = []
    asked: list[tuple[str, int]] = []

    def train(experiment: Experiment, folder: Path, console: Console) -> None:
        if not folder.exists():
            folder.mkdir(parents=True)
            experiment.save(folder)
            trained.append((folder.name, experiment.teacher))

    def evaluate(policy: Any, *_: Any, **__: Any) -> Any:
        loaded = policy()
        asked.append((loaded.spec.method, loaded.config.evaluations))
        return SimpleNamespace(episodes=[SimpleNamespace(score=0.5, success=False)])

    monkeypatch.setattr(trends, "train_run", train)
    monkeypatch.setattr(trends, "evaluate", evaluate)
    monkeypatch.setattr(trends, "load_policy", lambda run: build(small_method(Experiment.load(run).method)))
    config = trends.Config(work=tmp_path, methods=("rectified_flow", "flow_matching"), shares=(0.05,), seeds=(0,))
    figures = trends.run(config, QUIET).figures
    teacher, student = "flow_matching-0.05-seed-0", "rectified_flow-0.05-seed-0"
    assert trained == [(teacher, None), (student, str(tmp_path / "runs" / teacher))]
    assert asked == [("rectified_flow", 1), ("flow_matching", 1), ("flow_matching", 5)]
    assert figures["score"] == {
        "rectified_flow": {"0.05": {"own": 0.5}},
        "flow_matching": {"0.05": {"1": 0.5, "5": 0.5}},
    }
    trends.run(config, QUIET)
    assert len(asked) == 3, "trials that are there are not computed again"


def test_runs_that_are_there_are_asked_more_and_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (4, 7):
        folder = tmp_path / "given" / str(seed)
        save_run(folder, build(small_method("flow_matching"), seed=seed))
        trends.Config().experiment("flow_matching", 0.95, seed).save(folder)

    def evaluate(policy: Any, *_: Any, **__: Any) -> Any:
        score = 0.1 * policy().config.evaluations
        return SimpleNamespace(episodes=[SimpleNamespace(score=score, success=False)] * 8)

    monkeypatch.setattr(trends, "evaluate", evaluate)
    runs = tuple(sorted((tmp_path / "given").iterdir()))
    study = trends.run(trends.Config(work=tmp_path / "work", runs=runs), QUIET)
    (claim,) = study.claims
    assert (study.seeds, claim.verdict) == ((4, 7), "confirmed")
    assert "runs trained before, 8 episodes, given policies: 2" in claim.note
    assert str(tmp_path) not in str({**study.to_json(), "command": ""})
    assert trends.Config(runs=runs).trained == ()
