"""The studies that train or roll out, on small fakes and on a run of a few steps."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prism_client.messages import PlanInfo
from rich.console import Console

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.metrics import Difference
from prism.experiments.comparison import Row
from prism.experiments.recipes import recipe, with_budget
from prism.experiments.run_folder import Run
from prism.experiments.trial import TrialId
from prism.experiments.workflow import train_experiment
from prism.io.jsonconfig import with_settings
from prism.methods.presets import build_policy
from prism.methods.prism import PrismPolicy
from prism.normalize import Normalizer, compute_statistics
from prism.objective import ObjectiveConfig
from prism.rows import quantile
from prism.selection import SelectionConfig
from research import (
    ablations,
    demonstrations,
    failures,
    modality_dropout,
    replan,
    selection,
    threshold,
)
from tests.baseline_fakes import small_method

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PRISM of a few steps on the shipped Push-T demonstrations."""
    folder = tmp_path_factory.mktemp("studies") / "pusht"
    settings = ["train.threads=1", "train.log_every=2", "policy.encoder.mix_width=32", "policy.encoder.mix_blocks=1"]
    settings += ["train.val_fraction=0.0", "train.batch_size=16", "demonstrations.mirror=false"]
    train_experiment(with_settings(with_budget(recipe("pusht"), steps=6), settings), folder, console=QUIET)
    return folder


def test_rates_are_read_from_a_run_under_its_rule(run: Path) -> None:
    config = threshold.Config(runs=(f"short={run}",), steps=6, warmup=2)
    entry = threshold.read_rates(config)["short"]["batch"]
    assert entry["steps"] == 6
    assert 0.0 <= entry["rejection_rate"] <= 1.0
    with pytest.raises(PrismError, match="NAME=RUN"):
        threshold.Config(runs=("short",))


def test_every_rule_is_applied_to_a_policy_that_is_there(run: Path, tmp_path: Path) -> None:
    config = threshold.Config(
        work=tmp_path, tasks=(), runs=(f"short={run}",), steps=6, warmup=2, batch_sizes=(8, 32), draws=10, candidates=8
    )
    study = threshold.run(config, QUIET)
    entries = study.figures["on_policies"]["short"]
    for rule in ("own", "relative", "row", "batch"):
        assert entries[rule]["rejection_rate"] == pytest.approx(0.2, abs=0.05), rule
    assert entries["row"]["fallback_rate"] == 0.0
    assert entries["paper"]["clamped"] == 1.0  # its quantile of all pairs is far above 0.2
    assert set(study.figures["calibration"]) == {"untrained", "trained"}
    assert study.figures["calibration"]["trained"]["own"]["32"]["cv"] > 0
    threshold.show(study, QUIET)
    threshold.draw(study)


def test_a_rule_measures_as_the_policy_does(run: Path) -> None:
    experiment = with_settings(Run(run).experiment, ["policy.objective.discount=0.5", "policy.objective.eps=0.1"])
    windows = threshold.windows_of(experiment)
    source = windows.source
    spec = experiment.policy.spec(source.sensors, source.action_dim, source.fps)
    policy = build_policy(spec, 0, Normalizer.from_statistics(compute_statistics(source)))
    assert isinstance(policy, PrismPolicy)
    config, order = threshold.Config(rules=("own",), draws=5), np.random.default_rng([0, 8])
    found = threshold.calibrate(policy, windows, 8, 4, config)["own"]["mean"]
    batches = [order.choice(len(windows), 8, replace=False) for _ in range(5)]
    drafts = [threshold.draft(policy, windows, batch, 4, seed) for seed, batch in enumerate(batches)]
    own = [policy.objective.distances(*one, None).own for one in drafts]
    assert found == pytest.approx(np.mean([float(quantile(distance, config.quantile)) for distance in own]))
    assert threshold.form(policy) == {"eps": 0.1, "discount": 0.5}


def test_without_a_training_the_other_figures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PrismError("the simulator is not there")

    monkeypatch.setattr(threshold, "train_run", fail)
    study = threshold.run(threshold.Config(work=tmp_path, tasks=("pusht",), rules=("own",)), QUIET)
    assert study.figures["calibration"] == {}
    assert [line.partition(":")[0] for line in study.missing] == ["pusht-own", "calibration"]


@pytest.mark.parametrize(
    ("cv", "verdict"), [(0.03, "confirmed"), (0.055, "cannot be tested here"), (0.08, "not confirmed")]
)
def test_a_variation_has_an_error_of_its_own(cv: float, verdict: str) -> None:
    entry = {"cv": cv, "cv_ema": 0.0, "clamped": 0.0, "effective_samples": None, "pairs": 100}
    table = {"trained": {"paper": {"64": entry}}}
    assert threshold.claims_on_batches(table, draws=100)[0].verdict == verdict


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (ObjectiveConfig(scope="own"), "own"),
        (ObjectiveConfig(), "batch"),
        (ObjectiveConfig(relative=0.5), "relative"),
        (ObjectiveConfig(relative=1.0), "row"),
        (ObjectiveConfig(rule="paper"), "paper"),
    ],
)
def test_a_rule_has_the_name_that_the_study_gives_it(objective: ObjectiveConfig, name: str) -> None:
    assert threshold.rule_name(objective) == name


def test_selection_rules_are_measured_once_and_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(config: Any, policy: Path, task: str, controller: Any) -> dict[str, Any]:
        calls.append(controller.selection.rule)
        switches = {"proxy_score": 9.0, "first": 4.0, "commit": 0.5}[controller.selection.rule]
        episodes = {"success": [1.0, 0.0] * 4, "score": [0.7, 0.6] * 4, "jerk": [0.1, 0.2] * 4}
        return {**episodes, "mode_switches": [switches, switches + 1] * 4, "avoidable_switches": [switches] * 8}

    monkeypatch.setattr(selection, "measure", measure)
    rules: tuple[Any, ...] = ("proxy_score", "first", "commit")
    config = selection.Config(runs=(run,), work=tmp_path, rules=rules, exec_horizons=(8,), episodes=8)
    for _ in range(2):
        study = selection.run(config, QUIET)
    assert calls == ["proxy_score", "first", "commit"]
    assert [claim.verdict for claim in study.claims] == ["not confirmed", "not confirmed"]
    assert "step-" in study.settings["policies"][0]
    assert str(run) not in str(study.to_json())
    selection.show(study, QUIET)
    selection.draw(study)
    with pytest.raises(PrismError, match="same weights"):
        selection.subjects((run, run))


def test_a_late_plan_is_measured_in_real_time(run: Path, tmp_path: Path) -> None:
    config = replan.Config(runs=(run,), work=tmp_path, exec_horizons=(8, 16), delays=(0, 200), episodes=1)
    study = replan.run(config, QUIET)
    (row,) = study.figures["horizons"]  # a plan of 16 has no remainder to go on from: said, not averaged over
    assert (row["method"], row["exec_horizon"], row["policies"]) == ("prism", 8, 1)
    assert len(study.missing) == 1
    assert "ta-16" in study.missing[0]
    assert [(row["way"], row["delay"]) for row in study.figures["delays"]] == [
        (way, [steps]) for way in replan.WAYS for steps in (0, 2)
    ]
    assert replan.run(config, QUIET).figures == study.figures
    replan.show(study, QUIET)
    assert len(replan.draw(study).axes) == 4
    assert len(replan.draw(replace(study, figures={**study.figures, "delays": []})).axes) == 2, "no empty panel"
    assert replan.draw(replace(study, figures={**study.figures, "horizons": [], "delays": []})).axes, (
        "nothing was played"
    )


def subject(run: Path, name: str, seed: int, *settings: str, **changes: Any) -> selection.Subject:
    experiment = with_settings(Run(run).experiment, [f"train.seed={seed}", *settings])
    return selection.Subject(Path(name), replace(experiment, **changes), name, name)


def test_policies_of_one_row_differ_in_their_seed_alone(run: Path) -> None:
    first, second = subject(run, "runs/a", 0), subject(run, "runs/b", 1)
    flow = replace(subject(run, "runs/flow", 0).experiment, policy=small_method("flow_matching"))
    other = replace(first, path=Path("runs/flow"), experiment=flow)
    assert replan.by_method([first, other, second]) == {"prism": [first, second], "flow_matching": [other]}
    taught = [
        subject(run, f"runs/{n}", n, teacher=f"old/trials/pusht/flow/seed-{n}", init=f"a-seed-{n}") for n in (3, 4)
    ]
    assert replan.by_method(taught) == {"prism": taught}
    for wrong, said in (
        (subject(run, "runs/wide", 1, "policy.generator.width=128"), r"policy\.generator\.width = 128 there"),
        (subject(run, "runs/long", 0, "train.steps=9"), r"train\.steps = 9 there, 6 now"),
        (subject(run, "runs/again", 0), "seed 0, as runs/a"),
        (subject(run, "runs/taught", 1, teacher="old/trials/pusht/wide/seed-1"), "teacher = pusht/wide/seed there"),
    ):
        with pytest.raises(PrismError, match=said) as refused:
            replan.by_method([first, wrong])
        assert wrong.name in str(refused.value)
        assert "\n" not in str(refused.value)


def test_how_late_each_policy_is_and_how_many_there_are(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [replace(subject(run, str(seed), seed), path=run) for seed in (4, 1)]
    played = {key: [1.0, 0.0] for key in ("success", "score", "jerk", "mode_switches")}
    monkeypatch.setattr(replan, "subjects", lambda runs: (found, "pusht"))
    monkeypatch.setattr(replan, "_pace", lambda config, trials, task, one: (100.0 * int(one.sha256), 100.0))
    monkeypatch.setattr(replan, "_play", lambda *_: played)
    study = replan.run(replan.Config(runs=(run,), work=tmp_path, exec_horizons=(8,), delays=(200,)), QUIET)
    (row,) = study.figures["horizons"]
    assert (row["policies"], row["delay"]) == (2, [1, 4])
    assert study.figures["delays"][0]["delay"] == [2]
    assert study.seeds == (1, 4), "of the trainings, not of the episodes"
    said = Console(width=200, record=True, quiet=False, file=io.StringIO())
    replan.show(study, said)
    assert re.search(r"prism +│ +8 +│ +2 +│ +1, 4 ", said.export_text())
    assert [text.get_text() for text in replan.draw(study).axes[0].get_legend().get_texts()] == ["prism (n = 2)"]


def test_rules_are_judged_over_policies_that_have_both() -> None:
    def trial(switches: float) -> dict[str, Any]:
        values = {key: [0.5] * 8 for key in ("success", "score", "jerk")}
        return {**values, "mode_switches": [switches, switches + 2] * 4, "avoidable_switches": [switches] * 8}

    found = {("first", 8): {0: trial(4), 1: trial(6), 2: trial(5)}, ("proxy_score", 8): {0: trial(1), 2: trial(2)}}
    figures = selection.summarise(found)
    first, proxy = figures["rows"]
    assert (first["policies"], proxy["policies"]) == (3, 2)
    assert first["by_policy"]["mode_switches"] == [5.0, 7.0, 6.0]
    assert (figures["fewer_switches"]["8"]["proxy_score"]["mean"], proxy["mode_switches"]) == (3.0, 2.5)
    (claim,) = selection.claims(figures)
    assert (claim.verdict, claim.note) == ("confirmed", "Ta = 8, given policies: 2")
    assert "2.5 switches" in claim.ours
    assert "5.5, 50%" in claim.ours, "of the two policies that both have, not of all three"


def test_a_rule_is_measured_without_restless() -> None:
    plain = ControllerConfig(selection=SelectionConfig(restless=2))
    assert selection.controller_of(plain, "proxy_score", 4).selection.restless == 0


def test_failures_of_a_young_policy_are_sorted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = failures.Config(runs=(run,), work=tmp_path, episodes=1)
    study = failures.run(config, QUIET)
    assert study.figures["failures"] == 1
    assert sum(study.figures["classes"].values()) == pytest.approx(1.0)
    assert [row["policy"] for row in study.figures["per_episode"]] == [0]
    assert str(run) not in str(study.to_json())
    failures.show(study, QUIET)
    failures.draw(study)
    monkeypatch.setattr(failures, "measure", lambda *_: pytest.fail("rolled out again"))
    assert failures.run(config, QUIET).figures == study.figures


def _signals(**changes: Any) -> failures.Signals:
    plain = {"seed": 0, "success": False, "score": 0.3, "jerk": 0.1, "invalid": 0.0, "absent": 0.0, "flicker": 0}
    return failures.Signals(**{**plain, "switches": 0, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["other"]),
        ({"score": 0.97}, ["near_miss"]),
        ({"jerk": 0.3}, ["jerk"]),
        ({"flicker": 2, "jerk": 0.3}, ["flicker", "jerk"]),
        ({"absent": 0.2, "invalid": 0.5}, ["invalid", "occlusion"]),
    ],
)
def test_signals_name_the_class(changes: dict[str, Any], expected: list[str]) -> None:
    assert failures.fitting(_signals(**changes), usual_jerk=0.1) == expected


def test_flicker_counts_switches_close_together() -> None:
    def replan(step: int, avoidable: bool) -> PlanInfo:
        return PlanInfo(step, mode_switch=avoidable, avoidable_switch=avoidable)

    far = [replan(i, i in (0, 8)) for i in range(10)]
    close = [replan(i, i in (4, 6)) for i in range(10)]
    assert (failures.flicker(far), failures.flicker(close), failures.flicker([])) == (1, 2, 0)


def test_jerk_is_measured_against_the_episodes_that_succeeded() -> None:
    rows = [_signals(success=True, jerk=0.1), _signals(success=True, jerk=0.1), _signals(jerk=0.25)]
    found = failures.sort_failures(rows)
    assert found["classes"]["jerk"] == 1.0
    assert found["success"] == pytest.approx(2 / 3)
    assert failures.claims(failures.sort_failures(rows[:2]))[0].verdict == "cannot be tested here"


@pytest.mark.parametrize(
    ("count", "failures_", "verdict"),
    [
        (0, 10, "cannot be tested here"),  # 0 of 10 may be 10 %
        (9, 10, "not confirmed"),
        (0, 100, "not confirmed"),
        (12, 100, "confirmed"),
        (17, 100, "cannot be tested here"),
        (22, 100, "not confirmed"),
    ],
)
def test_a_share_of_few_failures_says_little(count: int, failures_: int, verdict: str) -> None:
    assert failures.judged(count, failures_, 0.10, 0.15)[0] == verdict


@pytest.mark.parametrize(
    ("count", "failures_", "low", "high"), [(0, 40, 0.05, 0.1), (1, 30, 0, 0.01), (0, 40, 0.01, 0.02)]
)
def test_a_share_that_is_outside_is_never_confirmed(count: int, failures_: int, low: float, high: float) -> None:
    assert failures.judged(count, failures_, low, high)[0] == "cannot be tested here"


def _row(name: str, score: float, low: float | None = None, high: float = 0.0, seeds: int = 3) -> Row:
    difference = None if low is None else Difference((low + high) / 2, low, high, 0.01, seeds, 50)
    return Row(
        *("pusht", name, "prism", tuple(range(seeds)), seeds, score, (score, score), 0.5, (0.4, 0.6), difference, None),
        *(0.02, 1.0, 3.0, 5.0, 100.0, 10.0, 1000, 16, 8, ()),
    )


def test_ablations_are_decided_by_intervals() -> None:
    rows = {
        "prism": _row("prism", 0.8),
        "rule-none": _row("rule-none", 0.7, -0.15, -0.05),
        "rule-paper": _row("rule-paper", 0.6, -0.3, -0.1),
        "scope-own": _row("scope-own", 0.8, -0.05, 0.05),
    }
    verdicts = {claim.where: claim.verdict for claim in ablations.claims(rows, {})}
    assert verdicts == {"Sec. 5, Fig. 6b": "confirmed", "Sec. 4.4": "cannot be tested here"}
    rows["rule-none"] = _row("rule-none", 0.9, 0.05, 0.15)
    assert ablations.claims(rows, {})[0].verdict == "not confirmed"
    once = {name: replace(row, seeds=(0,)) for name, row in rows.items()}
    assert {claim.verdict for claim in ablations.claims(once, {})} == {"cannot be tested here"}, "one training of each"
    apart = _row("scope-own", 0.9, 0.05, 0.15)  # three seeds each, and one that both have
    assert apart.difference is not None
    for common, verdict in ((3, "not confirmed"), (1, "cannot be tested here")):
        row = replace(apart, difference=replace(apart.difference, seeds=common))
        assert ablations.claims({**rows, "scope-own": row}, {})[1].verdict == verdict
    study = ablations.summarise(ablations.Config(factors=("rule", "scope")), rows, {}, [])
    ablations.show(study, QUIET)
    ablations.draw(study)


def test_a_rise_that_ends_is_seen_between_variants() -> None:
    worse, better = (-0.2, -0.05), (0.05, 0.2)
    rows = {"prism": _row("prism", 0.8)}
    rows |= {name: _row(name, 0.7, *worse) for name in ("favor-16", "favor-512", "heads-1")}
    rows |= {name: _row(name, 0.9, *better) for name in ("heads-8", "heads-16")}

    def between(low: float, high: float, seeds: int = 3) -> Difference:
        return Difference((low + high) / 2, low, high, 0.5, seeds, 50)

    def verdict(where: str, pairs: ablations.Pairs) -> str:
        return next(claim.verdict for claim in ablations.claims(rows, pairs) if claim.where.endswith(where))

    features, untold = ("favor-512", "favor-16"), "cannot be tested here"
    assert verdict("7b", {features: between(-0.1, 0.1)}) == untold, "both are worse than exact attention, alike"
    assert verdict("7b", {features: between(0.01, 0.1)}) == "confirmed"
    assert verdict("7b", {features: between(0.01, 0.1, seeds=1)}) == untold, "one training that both have"
    rows |= {name: _row(name, 0.7, *worse) for name in ("K-2", "K-4")}
    rows |= {name: _row(name, 0.9, *better) for name in ("K-16", "K-32")}
    for where, one, middle, most in (("7a", "heads-1", "heads-8", "heads-16"), ("7d", "K-4", "K-16", "K-32")):
        before, after = (middle, one), (most, middle)
        assert verdict(where, {before: between(0.1, 0.3), after: between(-0.1, 0.1)}) == "confirmed"
        assert verdict(where, {before: between(0.0, 0.1), after: between(-0.1, 0.1)}) == untold, "as large a rise fits"
        assert verdict(where, {after: between(-0.1, 0.1)}) == untold
        assert verdict(where, {before: between(0.1, 0.3), after: between(0.01, 0.1)}) == "not confirmed", "it rises on"
        assert {before, after} <= set(ablations.PAIRS)
    rows["heads-8"] = _row("heads-8", 0.8, -0.05, 0.05)
    rises = {("heads-8", "heads-1"): between(0.0, 0.2), ("heads-16", "heads-8"): between(0.01, 0.1)}
    assert verdict("7a", rises) == "not confirmed", "however it came to 8"


def test_every_variant_of_the_ablations_is_a_setting_of_the_recipe() -> None:
    plain = recipe("pusht")
    for factor, variants in ablations.FACTORS.items():
        for name, settings in variants.items():
            assert with_settings(plain, list(settings)) != plain, (factor, name)
    config = ablations.Config()
    assert (config.comparison().reference, config.comparison().evaluation.first_seed) == ("prism", 200_000)
    with pytest.raises(PrismError, match="unknown factor"):
        ablations.Config(factors=("colour",))


def test_demonstration_counts_have_data_of_their_own(tmp_path: Path) -> None:
    config = demonstrations.Config(work=tmp_path, counts=(2, 5))
    assert config.comparison(2).settings != config.comparison(5).settings


def test_more_demonstrations_are_better_beyond_chance_or_it_is_not_said() -> None:
    config = demonstrations.Config(counts=(2, 5))

    def trials(wins: int, seeds: int) -> dict[TrialId, Any]:
        rows = [{"success": i < wins} for i in range(20)]
        return {TrialId("a", "prism", seed): {"per_episode": rows} for seed in range(seeds)}

    figures: dict[str, Any] = {
        "success": {"prism": {"2": 0.2, "5": 0.6}},
        "success_ci": {"prism": {"2": [0, 0.4], "5": [0.4, 0.8]}},
    }
    untold = "cannot be tested here"
    asked = ((4, 12, 3, "confirmed"), (12, 4, 3, "not confirmed"), (4, 5, 3, untold), (4, 12, 2, untold))
    for few, many, seeds, verdict in asked:
        gain = demonstrations.gain(config, trials(few, seeds), trials(many, 3))
        done = {"seeds_done": {"prism": {"2": seeds, "5": 3}}}
        (claim,) = demonstrations.claims({**figures, **done, "gain": gain}, config)
        assert (claim.verdict, gain["prism"]["seeds"]) == (verdict, seeds)
        assert ("2: 20% [0%, 40%] (2 of 3 seeds)" in claim.ours) == (seeds == 2)
    assert demonstrations.gain(config, {}, trials(4, 3)) == {}


def test_bad_demonstration_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="growing"):
        demonstrations.Config(counts=(5, 2))
    with pytest.raises(PrismError, match="expert"):
        demonstrations.run(demonstrations.Config(work=tmp_path, task="pusht"), QUIET)


def test_modality_judges_a_file_of_the_bench(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="does not exist"):
        modality_dropout.run(modality_dropout.Config(given=tmp_path / "no.json"), QUIET)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(PrismError, match="no 'cost_with_dropout_ci'"):
        modality_dropout.run(modality_dropout.Config(given=tmp_path / "bad.json"), QUIET)


@pytest.mark.parametrize(
    ("hurt", "spared", "verdicts"),
    [
        (8, 8, ("confirmed", "confirmed")),  # of 8 episodes without a sensor, won with dropout in training
        (0, 0, ("not confirmed", "cannot be tested here")),
        (0, 8, ("cannot be tested here", "cannot be tested here")),  # one training of two
    ],
)
def test_modality_is_judged_over_seeds_and_episodes(
    tmp_path: Path, hurt: int, spared: int, verdicts: tuple[str, str]
) -> None:
    def won(count: int) -> list[bool]:
        return [i < count for i in range(8)]

    def seed(count: int) -> dict[str, Any]:
        without = {"nothing": won(8), **dict.fromkeys(modality_dropout.VIEWS, won(0))}
        return {"without": without, "with": {"nothing": won(8), **dict.fromkeys(modality_dropout.VIEWS, won(count))}}

    figures = modality_dropout.summarise({0: seed(hurt), 1: seed(spared)})
    (tmp_path / "given.json").write_text(json.dumps({**figures, "settings": {"task": "a", "seeds": 2}}))
    study = modality_dropout.run(modality_dropout.Config(given=tmp_path / "given.json"), QUIET)
    assert tuple(claim.verdict for claim in study.claims[:2]) == verdicts
    modality_dropout.show(study, QUIET)
