"""The studies: lemmas against what is known, trials that survive a kill, and the summaries of logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prism_sims.pusht import AXIS, SIDE, edge_start
from prism_sims.pusht_features import mirror_state
from rich.console import Console

from prism.errors import PrismError
from prism.experiments.trial import RESULT, TRIAL
from prism.objective import RSIMLE, ObjectiveConfig
from research import language, lemmas, multimodality, report, threshold
from research.__main__ import main
from research.report import Claim, ComputedTrials, Output, Study, show_claims
from research.threshold import claims_on_rates
from tests.policy_fakes import choose_among


@pytest.fixture(scope="module")
def small_lemmas() -> Study:
    config = lemmas.Config(
        sample_sizes=(16, 256, 1024),
        repeats=1000,
        batch_sizes=(8, 64),
        features=(16, 64, 256, 1024),
        bias_features=(16,),
        bias_draws=1500,
    )
    return lemmas.run(config, Console(quiet=True))


def _verdict(study: Study, words: str) -> str:
    return next(claim.verdict for claim in study.claims if words in claim.paper)


def test_lemmas_that_hold_are_confirmed_and_those_that_do_not_are_not(small_lemmas: Study) -> None:
    assert _verdict(small_lemmas, "empirical quantile") == "confirmed"
    assert _verdict(small_lemmas, "variance O(1/m)") == "confirmed"
    assert _verdict(small_lemmas, "log p(x)") == "confirmed"
    assert _verdict(small_lemmas, "tau -> 0") == "not confirmed"
    assert _verdict(small_lemmas, "acceptance rate") == "not confirmed"
    assert _verdict(small_lemmas, "without bias") == "not confirmed"


def test_the_kernel_of_favor_is_unbiased_to_chance(small_lemmas: Study) -> None:
    error, chance = small_lemmas.figures["favor"]["bias"]["16"]["kernel"]
    assert error < 3 * chance


def test_the_literal_rule_rejects_more_the_larger_the_batch(small_lemmas: Study) -> None:
    rejected = small_lemmas.figures["rejection"]
    assert 0.5 < rejected["8"] < rejected["64"] <= 1.0


def test_a_study_is_written_whole_with_its_provenance(small_lemmas: Study, tmp_path: Path) -> None:
    output = Output(tmp_path / "lemmas.json", tmp_path / "lemmas.svg")
    output.check()
    output.write(small_lemmas, lemmas.draw)
    data = json.loads((tmp_path / "lemmas.json").read_text())
    assert {"command", "date", "machine", "seeds", "claims", "study"} <= data.keys()
    assert (tmp_path / "lemmas.svg").stat().st_size > 1000
    with pytest.raises(PrismError, match="overwrite"):
        output.check()
    show_claims(small_lemmas, Console(quiet=True))


def test_a_picture_of_an_unknown_kind_is_refused_before_the_work() -> None:
    with pytest.raises(PrismError, match="svg"):
        Output(plot=Path("a.bmp"))


@pytest.mark.parametrize("seeds", [1, 2, 3])
@pytest.mark.parametrize(("low", "high", "verdict"), [(0.1, 0.3, "confirmed"), (-0.3, -0.1, "not confirmed")])
def test_three_trainings_before_a_verdict_on_them(low: float, high: float, verdict: str, seeds: int) -> None:
    difference = {"low": low, "high": high, "p": 0.001, "seeds": seeds}
    told, note = report.decided(difference)
    assert told == (verdict if seeds == 3 else "cannot be tested here")
    way = "so" if low > 0 else "against it"
    few = f"; {seeds} of the 3 training seeds that a claim takes: {way}, beyond chance on these alone"
    assert note == ("" if seeds == 3 else few)
    assert report.decided(difference, trained=False) == (verdict, ""), "how given policies are executed"


def test_a_finished_cell_is_not_computed_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, Any]:
        calls.append(1)
        return {"value": 3}

    for _ in range(2):
        assert ComputedTrials(tmp_path, Console(quiet=True)).get("a", {"x": 1}, compute) == {"value": 3}
    assert len(calls) == 1
    with pytest.raises(PrismError, match="other settings"):
        ComputedTrials(tmp_path, Console(quiet=True)).get("a", {"x": 2}, compute)


def test_cells_of_several_versions_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, commit in (("a", "abc"), ("b", "def")):
        monkeypatch.setattr(report, "run_info", lambda seed, commit=commit: {"commit": commit})
        ComputedTrials(tmp_path, Console(quiet=True)).get(name, {}, lambda: {"value": 3})
    trials = ComputedTrials(tmp_path, Console(quiet=True))
    assert [trials.get(name, {}, None) for name in ("a", "b", "c")] == [{"value": 3}, {"value": 3}, None]
    assert (trials.commits, trials.missing) == (["abc", "def"], ["c: not there"])


def test_a_status_is_of_what_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of the settings that the call names."""
    folder = tmp_path / "trials" / "seed-0" / "told"
    folder.mkdir(parents=True)
    spec = {**language.Config(minutes=1.0).settings("seeds", "status"), "seed": 0, "part": "told"}
    (folder / TRIAL).write_text(json.dumps(spec))
    (folder / RESULT).write_text(json.dumps({command: [True] for command in language.COMMANDS}))
    words = ["language", "--status", "--seeds", "0", "--work", str(tmp_path)]
    assert main([*words, "--minutes", "1"]) == 0
    assert main([*words, "--minutes", "9"]) == 2
    assert "minutes = 1.0 there, 9.0 now" in capsys.readouterr().err


def test_a_failed_cell_is_named_and_tried_again(tmp_path: Path) -> None:
    trials = ComputedTrials(tmp_path, Console(quiet=True))

    def fail() -> dict[str, Any]:
        raise PrismError("diverged")

    assert trials.get("a", {}, fail) is None
    assert trials.missing == ["a: diverged"]
    assert trials.get("a", {}, lambda: {"value": 1}) == {"value": 1}
    assert trials.get("b", {}, lambda: {"value": 1 / 0}) is None, "whatever it was, the others go on"
    assert trials.missing[-1] == "b: ZeroDivisionError: division by zero"


def test_a_full_disk_does_not_lose_what_was_computed(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("a file where the folder should be")
    trials = ComputedTrials(tmp_path, Console(quiet=True))
    assert trials.get("a", {}, lambda: {"value": 1}) == {"value": 1}
    assert trials.missing[0].startswith("a: counted, but not kept")


def _line(step: int, rejected: float) -> dict[str, Any]:
    keys = ("fallback_rate", "threshold_clamped", "threshold", "hard")
    return {"step": step, "rejection_rate": rejected, **dict.fromkeys(keys, 0.5)}


def test_rates_leave_the_warm_up_out_and_weigh_lines_by_steps() -> None:
    log = [_line(100, 1.0), _line(200, 0.2), _line(210, 0.9)]
    assert threshold.rates(log, 100)["rejection_rate"] == pytest.approx((100 * 0.2 + 10 * 0.9) / 110)
    with pytest.raises(PrismError, match="longer"):
        threshold.rates(log, 210)


def test_effective_samples_are_the_number_of_independent_values() -> None:
    rng = np.random.default_rng(0)
    samples = rng.exponential(size=(2000, 400))
    values = np.quantile(samples, 0.2, axis=1).tolist()
    entry = threshold.summarise_quantiles(values, torch.tensor(samples[:100].ravel()), 0.2)
    assert entry["effective_samples"] == pytest.approx(400, rel=0.15)


@pytest.mark.parametrize(("relative", "fallback"), [(0.0, True), (1.0, False)])
def test_a_relative_threshold_spares_the_row_that_is_all_near(relative: float, fallback: bool) -> None:
    """Candidates of row 0 are all near its target, those of the others are not: only `relative` sees that."""
    rng = torch.Generator().manual_seed(0)
    target = torch.zeros(10, 4, 2)
    scale = torch.full((10, 1, 1, 1), 1.0)
    scale[0] = 0.01
    candidates = scale * (1 + torch.rand(10, 8, 4, 2, generator=rng))
    objective = RSIMLE(ObjectiveConfig(candidates=8, quantile=0.2, relative=relative), 2)
    logs = choose_among(objective, candidates, target, torch.ones(10, 4, dtype=torch.bool)).logs
    assert float(logs["rejection_rate"]) == pytest.approx(0.2, abs=0.03)
    assert (float(logs["fallback_rate"]) > 0) is fallback


def test_relative_out_of_range_is_one_clear_line() -> None:
    with pytest.raises(PrismError, match=r"objective\.relative"):
        ObjectiveConfig(relative=1.5)


def _trial(rejected: float, fallen: float) -> dict[str, Any]:
    return {"rejection_rate": rejected, "fallback_rate": fallen, "clamped": 0.0}


def test_the_bar_is_held_on_every_task_or_not_at_all() -> None:
    good = claims_on_rates({"a": {"own": _trial(0.21, 0.01)}, "b": {"own": _trial(0.18, 0.04)}}, ("own",), 0.2)
    bad = claims_on_rates({"a": {"own": _trial(0.21, 0.01)}, "b": {"own": _trial(0.2, 0.09)}}, ("own",), 0.2)
    assert [claim.verdict for claim in (*good, *bad)] == ["confirmed", "not confirmed"]
    assert isinstance(good[0], Claim)
    own = claims_on_rates({"a": {"own": {**_trial(0.31, 0.01), "quantile": 0.3}}}, ("own",), 0.2)
    assert own[0].verdict == "confirmed", "a run is held to the quantile that it was trained with"


def test_the_symmetric_start_is_its_own_mirror_image_and_sides_are_told_apart() -> None:
    state = edge_start(0.0)
    assert mirror_state(state) == pytest.approx(state)
    left, right = (edge_start(offset) for offset in (30.0, -30.0))
    assert mirror_state(left) == pytest.approx(right)

    steps = np.linspace(0, 1, 20)[:, None]
    start, beside = left[:2] + 60 * SIDE, left[2:4] - 40 * AXIS + 80 * SIDE
    states = np.concatenate([(1 - steps) * start + steps * beside, np.repeat(left[None, 2:], 20, 0)], axis=1)
    assert multimodality.side_of(states) == "left"
    assert multimodality.side_of(mirror_state(states)) == "right"
    assert multimodality.side_of(np.repeat(state[None], 5, 0)) == "neither"


def test_pushing_the_block_straight_away_is_neither_side() -> None:
    state = edge_start(0.0)
    states = np.repeat(state[None], 30, 0)
    push = -6.0 * np.arange(30)[:, None] * AXIS
    states[:, :2] += push
    states[:, 2:4] += push
    assert multimodality.side_of(states) == "neither"
    assert multimodality.pushed(states)
    assert not multimodality.pushed(np.repeat(state[None], 30, 0)), "who stands still pushes nothing"
    states[-1, :2] = states[-1, 2:4] - 60 * AXIS + 90 * SIDE  # round it, but far too late
    assert multimodality.side_of(states) == "neither"


def _shares(left: float, right: float, pushed: float | None = None) -> dict[str, Any]:
    neither = 1 - left - right
    shares = {"left": left, "right": right, "neither": neither, "pushed": neither if pushed is None else pushed}
    return {**shares, "rollouts": 40, "jerk": 0.1, "score": 0.5}


def test_verdicts_on_modes() -> None:
    shares = {"prism": {"0": _shares(0.4, 0.6)}, "mse": {"0": _shares(0.0, 0.0)}}
    found = multimodality.claims(shares)
    assert [claim.verdict for claim in found] == ["confirmed", "confirmed"]
    assert "every rollout is the same path" in found[1].note
    shares = {"prism": {"0": _shares(0.1, 0.9)}, "mse": {"0": _shares(0.0, 1.0)}}
    assert [claim.verdict for claim in multimodality.claims(shares)] == ["not confirmed", "not confirmed"]
    shares = {"mse": {"0": _shares(0.0, 0.0, pushed=0.0)}}
    assert multimodality.claims(shares)[0].verdict == "not confirmed", "standing still is no average either"
    shares = {"flow_matching": {"0": _shares(0.8, 0.2)}}
    assert multimodality.claims(shares)[0].verdict == "not confirmed", "one side only is no average of the two"


def test_policies_that_are_there_need_no_training() -> None:
    assert multimodality.Config(methods=(), policies=("mse=runs/mse",)).methods == ()
    with pytest.raises(PrismError, match="name a method"):
        multimodality.Config(methods=())
    with pytest.raises(PrismError, match="write NAME=RUN"):
        multimodality.Config(policies=("runs/mse",))
    for name in ("prism", "expert"):
        with pytest.raises(PrismError, match=f"'{name}' is named twice"):
            multimodality.Config(policies=(f"{name}=runs/x",))
    with pytest.raises(PrismError, match="'pusht' is named twice"):
        threshold.Config(runs=("pusht=runs/x",))


def test_a_sweep_without_the_middle_is_refused() -> None:
    with pytest.raises(PrismError, match="symmetric"):
        multimodality.Config(offsets=(10.0,))
