"""Comparisons: the trials, what survives what, and that nothing is averaged in silence."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.cli.compare import Compare
from prism.errors import PrismError
from prism.experiments import trial_places, trial_process
from prism.experiments.comparison import (
    Contestant,
    check_equal,
    check_trials,
    compare,
    experiments_of,
    folder_of,
    prepare,
    summarise,
    trial_ids,
    waits_for,
)
from prism.experiments.demonstrations import open_demonstrations
from prism.experiments.recipes import Experiment, recipe, with_preset
from prism.experiments.trial import EXIT_FAILED, FAILED, RESULT, TRIAL, EvaluationPlan, TrialId, TrialSpec, state_of
from prism.experiments.trial_process import run_trial
from prism.experiments.trials import Trials, next_ready
from prism.experiments.workflow import CURVE
from prism.methods.flow_matching import RectifiedFlowConfig
from tests.comparison_fakes import MSE, PRISM, QUIET, config, finish


def found_at(path: Path, *more: int) -> Any:
    """open_demonstrations that finds them elsewhere, and `more` episodes of these lengths."""

    def opened(*asked: Any) -> Any:
        found, source, copies = open_demonstrations(*asked)
        lengths = np.append(source.lengths, np.array(more, dtype=source.lengths.dtype))
        object.__setattr__(source, "__class__", type("Longer", (type(source),), {"lengths": lengths}))
        return replace(found, path=str(path)), source, copies

    return opened


# -------------------------------------------------------------------------------------------------- the list of trials


def test_contestants_have_names_methods_and_settings() -> None:
    assert Contestant.parse("act") == Contestant("act", "act")
    assert Contestant.parse("k4=prism:policy.objective.candidates=4,train.batch_size=8") == Contestant(
        "k4", "prism", ("policy.objective.candidates=4", "train.batch_size=8")
    )
    fast = Contestant.parse("fast=prism:preset=fast,train.batch_size=8")
    assert fast == Contestant("fast", "prism", ("train.batch_size=8",), "fast")
    betas = Contestant.parse("slow=prism:train.betas=[0.9,0.99],train.batch_size=8")
    assert betas.settings == ("train.betas=[0.9,0.99]", "train.batch_size=8")
    for bad in ("", "=prism", "a=", "a=prism:", "../evil"):
        with pytest.raises(PrismError, match="METHOD"):
            Contestant.parse(bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "--minutes or --steps"),
        ({"minutes": 1.0}, "--minutes or --steps"),
        ({"seeds": ()}, "no seed"),
        ({"seeds": (1, 1)}, "seed 1 is named twice"),
        ({"seeds": (-1,)}, "out of range"),
        ({"clock": "sun"}, "clock"),
    ],
)
def test_impossible_comparisons_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        config(**changes)


def test_looks_on_the_way_grow_between_0_and_1() -> None:
    for curve in ((0.5, 0.2), (0.0,), (1.0,), (0.5, 0.5)):
        with pytest.raises(PrismError, match="fractions"):
            EvaluationPlan(curve=curve)


def test_every_method_once_before_any_twice() -> None:
    order = [(id.contestant, id.seed) for id in trial_ids(config())]
    assert order == [("prism", 0), ("mse", 0), ("prism", 1), ("mse", 1)]


def test_cells_are_described_once_and_other_definitions_are_refused(tmp_path: Path) -> None:
    ids = prepare(tmp_path, config(), QUIET)
    one = Experiment.load(folder_of(tmp_path, ids[1]))
    assert (one.method, one.train.steps, one.train.seed, one.train.threads, one.train.keep_last) == ("mse", 4, 0, 1, 1)
    assert TrialSpec.load(folder_of(tmp_path, ids[3])).id == TrialId("pusht", "mse", 1)
    assert state_of(folder_of(tmp_path, ids[3])) == ("open", "not started yet")
    assert one.demonstrations == Experiment.load(folder_of(tmp_path, ids[0])).demonstrations
    before = (folder_of(tmp_path, ids[0]) / TRIAL).stat().st_mtime_ns
    assert len(prepare(tmp_path, config(seeds=(0, 1, 2)), QUIET)) == 6, "more methods or seeds add to it"
    assert (folder_of(tmp_path, ids[0]) / TRIAL).stat().st_mtime_ns == before
    with pytest.raises(PrismError, match=r"seed-0 .*steps = 4 there, 5 now"):
        prepare(tmp_path, config(steps=5), QUIET)
    with pytest.raises(PrismError, match="unknown method 'magic'"):
        prepare(tmp_path, config(Contestant("magic", "magic")), QUIET)
    with pytest.raises(PrismError, match="exec_horizon < 16"):  # known before it is trained
        prepare(tmp_path, config(Contestant("open", "prism", ("controller.exec_horizon=16",))), QUIET)


def test_a_student_learns_from_the_cell_of_its_teacher(tmp_path: Path) -> None:
    student, teacher = Contestant("rectified_flow", "rectified_flow"), Contestant("flow_matching", "flow_matching")
    with pytest.raises(PrismError, match="name flow_matching among the --methods"):
        prepare(tmp_path, config(PRISM, student), QUIET)
    wide = replace(teacher, settings=("policy.offset_scale=0.3",))
    first, other, later, _ = prepare(tmp_path, config(student, wide), QUIET)
    learned = Experiment.load(folder_of(tmp_path, first))
    assert learned.teacher == str(folder_of(tmp_path, other).resolve())
    policy = learned.policy
    assert isinstance(policy, RectifiedFlowConfig)
    assert (policy.offset_scale, policy.evaluations) == (0.3, 1), "its network, its own way of asking"

    after = waits_for([first, other, later], config(student, wide))
    assert next_ready([first.name, other.name], [], after) == other.name, "teachers first"
    assert next_ready([first.name, later.name], [other.name], after) == later.name, "a student waits for its own alone"
    assert next_ready([first.name], [other.name], after) is None
    assert next_ready([first.name], [], after) == first.name
    with pytest.raises(PrismError, match="its teacher, pusht flow_matching seed 0, is not finished"):
        run_trial(folder_of(tmp_path, first), QUIET)


def test_a_comparison_may_be_moved_with_its_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = Contestant("rectified_flow", "rectified_flow"), Contestant("flow_matching", "flow_matching")
    asked, here = config(teacher, student, seeds=(0,)), tmp_path / "here"
    learned_from, learns = prepare(tmp_path / "there", asked, QUIET)
    (tmp_path / "there").rename(here)
    monkeypatch.setattr("prism.experiments.comparison.open_demonstrations", found_at(tmp_path / "data"))
    check_trials(here, asked)
    prepare(here, asked, QUIET)
    found = Experiment.load(folder_of(here, learns))
    assert found.teacher == str(folder_of(here, learned_from))
    assert found.demonstrations.path == str(tmp_path / "data")
    with pytest.raises(PrismError, match="teacher = pusht/flow_matching/seed-0 there, pusht/other/seed-0 now"):
        prepare(here, config(replace(teacher, name="other"), student, seeds=(0,)), QUIET)


# ------------------------------------------------------------------------------------------ processes that go wrong

_FAKE = """
import json, os, pathlib, signal, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
tries = len(list(folder.glob("try-*"))); (folder / f"try-{tries}").touch()
def done(): (folder / "result.json").write_text("{}"); print(json.dumps({"state": "done", "reason": ""}))
if name == "good": done()
if name == "nan": print(json.dumps({"state": "failed", "reason": "loss is not finite"})); sys.exit(2)
if name == "killed": done() if tries == 2 else os.kill(os.getpid(), signal.SIGKILL)
if name == "doomed": os.kill(os.getpid(), signal.SIGSEGV)
"""


def fake_launch(folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-S", "-c", _FAKE, str(folder), folder.parent.name]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_the_comparison_goes_on_when_cells_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_places, "launch", fake_launch)
    monkeypatch.setattr(trial_places, "_POLL_SECONDS", 0.02)
    listed = Trials(tmp_path, QUIET)
    names = [f"{name}/seed-0" for name in ("nan", "killed", "doomed", "good")]
    for name in names:
        listed.folder(name).mkdir(parents=True)
    done: list[str] = []
    failed = listed.run(names, 2, done.append)
    assert sorted(done) == ["good/seed-0", "killed/seed-0"]
    assert failed[names[0]] == "loss is not finite"
    assert failed[names[2]] == "its process died 3 times: its process ended with SIGSEGV"
    assert [len(list(listed.folder(name).glob("try-*"))) for name in names] == [1, 3, 3, 1]
    assert state_of(listed.folder(names[2])) == ("failed", failed[names[2]]), "also for who looks later"


def test_a_cell_stops_with_its_comparison_and_goes_on_with_the_next(tmp_path: Path) -> None:
    """Real processes: the first stops as its pipe closes (as when the comparison is killed), then all is run."""
    burst = Contestant("burst", "prism", ("train.learning_rate=1e30", "train.grad_clip=0"))
    whole = config(PRISM, burst, seeds=(0,), evaluation=EvaluationPlan(episodes=1, curve=(0.5,), curve_episodes=1))
    good, bad = prepare(tmp_path, whole, QUIET)
    process = trial_places.launch(folder_of(tmp_path, good))
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=300)
    assert state_of(folder_of(tmp_path, good)) == ("open", "not finished yet")
    trial_places.outcome(folder_of(tmp_path, good), process)

    comparison = compare(tmp_path, whole, 2, QUIET)
    assert [row.contestant for row in comparison.rows] == ["prism"]
    row = comparison.rows[0]
    assert (row.steps, row.seeds, [point["fraction"] for point in row.curve]) == (4, (0,), [0.5, 1.0])
    assert [(one.trial, "not finite" in one.reason) for one in comparison.missing] == [(bad, True)]
    assert state_of(folder_of(tmp_path, bad))[0] == "failed"
    assert len(list((folder_of(tmp_path, good) / "checkpoints").glob("step-*"))) == 1
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["scores"] == {"prism": [row.score], "burst": [None]}
    assert "burst" in (tmp_path / "comparison.html").read_text()


def test_a_simulator_may_print_as_much_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'x' * 200_000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = trial_places.launch(tmp_path)
    process.wait(timeout=120)  # for ever, where it waits for a reader
    assert trial_places.outcome(tmp_path, process)[0] == "failed"  # there is no trial in the folder
    assert "x" * 200_000 in (tmp_path / "output.txt").read_text()


def test_a_cell_that_was_stopped_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after its look on the way and all its training: what is left to do is the evaluation."""
    (id,) = prepare(tmp_path, config(PRISM, seeds=(0,)), QUIET)
    folder, real = folder_of(tmp_path, id), trial_process.evaluate
    played: list[int] = []

    def evaluate(policy: Path, task: str, episodes: int, *rest: Any) -> Any:
        played.append(episodes)
        if len(played) == 2:
            raise KeyboardInterrupt
        return real(policy, task, episodes, *rest)

    monkeypatch.setattr(trial_process, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_trial(folder, QUIET)
    assert state_of(folder)[0] == "open"
    (look,), log = json.loads((folder / CURVE).read_text())["points"], (folder / "log.jsonl").read_text()
    assert (look["fraction"], look["step"], look["episodes"]) == (0.5, 2, 2)
    run_trial(folder, QUIET)
    result = json.loads((folder / RESULT).read_text())
    assert (played, result["steps"], result["curve"][0]) == ([2, 3, 3], 4, look)
    assert (folder / "log.jsonl").read_text() == log, "not trained again"


def test_looks_on_the_way_are_at_episodes_of_the_evaluation() -> None:
    assert EvaluationPlan(episodes=10, curve_episodes=20).looked_at == 10


def test_a_status_is_of_what_was_run(tmp_path: Path) -> None:
    prepare(tmp_path, config(), QUIET)
    check_trials(tmp_path, config())
    check_trials(tmp_path, config(PRISM, seeds=(0, 5)))
    with pytest.raises(PrismError, match=r"train\.batch_size = 64 there, 8 now"):
        check_trials(tmp_path, config(settings=("demonstrations.mirror=false", "train.batch_size=8")))
    with pytest.raises(PrismError, match=r"demonstrations\.mirror"):
        check_trials(tmp_path, config(settings=()))
    finish(tmp_path, TrialId("pusht", "prism", 0), [0.5] * 3)
    assert len(summarise(tmp_path, config()).trials) == 1
    with pytest.raises(PrismError, match="steps = 4 there, 8 now"):  # a study's --status would say 8
        summarise(tmp_path, config(steps=8))


def test_a_damaged_result_is_a_missing_trial(tmp_path: Path) -> None:
    for seed in (0, 1):
        finish(tmp_path, TrialId("pusht", "prism", seed), [0.5, 0.5, 0.5])
    (folder_of(tmp_path, TrialId("pusht", "prism", 1)) / RESULT).write_text('{"met')
    comparison = summarise(tmp_path, config(PRISM))
    assert comparison.rows[0].seeds == (0,)
    assert "result.json is not JSON" in comparison.missing[0].reason
    assert "run the same command again" in comparison.missing[0].reason


def test_a_full_disk_is_a_reason_even_if_it_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "log.jsonl")

    monkeypatch.setattr(trial_process, "_end_with_parent", lambda: None)
    monkeypatch.setattr(trial_process, "run_trial", full)
    assert trial_process.main(tmp_path) == EXIT_FAILED
    assert state_of(tmp_path) == ("failed", "No space left on device: log.jsonl")
    (tmp_path / FAILED).unlink()
    monkeypatch.setattr(trial_process.files, "replace_file", full)
    assert trial_process.main(tmp_path) == EXIT_FAILED
    assert [json.loads(line)["reason"] for line in capsys.readouterr().out.splitlines()] == [
        "No space left on device: log.jsonl"
    ] * 2


def test_a_folder_has_one_budget_and_one_evaluation(tmp_path: Path) -> None:
    prepare(tmp_path, config(PRISM), QUIET)
    check_equal(tmp_path, config(MSE, seeds=(5,)))
    for other, message in (
        (config(MSE, steps=8), "steps = 4 there, 8 now"),
        (config(MSE, evaluation=EvaluationPlan(episodes=4)), "evaluation"),
        (config(MSE, steps=None, minutes=1.0), "minutes = 0.0 there, 1.0 now"),
    ):
        with pytest.raises(PrismError, match=message):
            prepare(tmp_path, other, QUIET)
    assert not (tmp_path / "trials" / "pusht" / "mse").exists()


def test_a_refused_comparison_leaves_nothing_behind(tmp_path: Path) -> None:
    there, bare = tmp_path / "there", tmp_path / "bare"
    prepare(there, config(PRISM, seeds=(0,)), QUIET)
    bare.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for out in (tmp_path / "new" / "out", there):
        with pytest.raises(PrismError, match="is not finished"):
            compare(out, config(PRISM, MSE), 1, QUIET, trained=bare)
        assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before
    assert not list(tmp_path.glob("new/**"))
    with pytest.raises(PrismError, match="--trained nowhere does not exist"):
        Compare(("pusht",), tmp_path / "new", steps=4, trained=Path("nowhere"))


def test_all_cells_have_the_same_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prism train` may have recorded more of them into the same folder meanwhile."""
    prepare(tmp_path, config(PRISM), QUIET)
    prepare(tmp_path, config(PRISM, seeds=(0, 1, 2)), QUIET)
    monkeypatch.setattr("prism.experiments.comparison.open_demonstrations", found_at(tmp_path, 50))
    refused = (
        r"trials/pusht was made with other settings \(episodes = \d+ there, \d+ now.*: give the same, or another folder"
    )
    with pytest.raises(PrismError, match=refused):
        prepare(tmp_path, config(MSE), QUIET)
    assert not (tmp_path / "trials" / "pusht" / "mse").exists()


def test_what_was_trained_is_played_again_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, first, again = config(PRISM, seeds=(0,)), tmp_path / "first", tmp_path / "again"
    compare(first, plain, 1, QUIET)
    plan = EvaluationPlan(episodes=2, first_seed=300_000, curve=())
    other = Contestant("other", "prism", ("controller.selection.rule=first",))
    executed = replace(plain, contestants=(other,), evaluation=plan)
    with pytest.raises(PrismError, match=r"train\.batch_size = "):
        prepare(again, replace(executed, settings=(*executed.settings, "train.batch_size=7")), QUIET, first)
    finish(tmp_path / "bare", TrialId("pusht", "prism", 0), [0.5])
    prepare(tmp_path / "bare", plain, QUIET)
    with pytest.raises(PrismError, match="not its checkpoint and log any more"):
        prepare(tmp_path / "other", executed, QUIET, tmp_path / "bare")
    with pytest.raises(PrismError, match="seed-1 is not finished"):
        prepare(again, replace(executed, seeds=(1,)), QUIET, first)
    with monkeypatch.context() as patch:
        patch.setattr("prism.experiments.comparison.open_demonstrations", found_at(tmp_path / "data", 50))
        with pytest.raises(PrismError, match=r"first/trials/pusht was made with other settings \(episodes = "):
            prepare(tmp_path / "grown", executed, QUIET, first)
        patch.setattr("prism.experiments.comparison.open_demonstrations", found_at(tmp_path / "data"))
        prepare(tmp_path / "moved", executed, QUIET, first)
    (id,) = prepare(again, executed, QUIET, first)
    run_trial(folder_of(again, id), QUIET)
    source = folder_of(first, replace(id, contestant="prism"))
    old, new = (json.loads((folder / RESULT).read_text()) for folder in (source, folder_of(again, id)))
    assert (new["steps"], new["train_seconds"]) == (4, old["train_seconds"])
    assert [row["seed"] for row in new["per_episode"]] == [300_000, 300_001]
    assert new["controller"]["selection"]["rule"] == "first"
    assert new["trained_by"] == old["trained_by"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("demonstrations.count=3", "all methods have the same data"),
        ("train.steps=9", "use --steps"),
        ("train.seed=9", "use --seeds"),
        ("train.threads=2", "it is fixed"),
    ],
)
def test_what_is_everybodys_is_no_variation(setting: str, message: str) -> None:
    with pytest.raises(PrismError, match=message):
        config(PRISM, Contestant("few", "prism", (setting,)))


def test_a_variation_has_its_own_preset(tmp_path: Path) -> None:
    literal = Contestant("literal", "prism", ("train.batch_size=16",), "paper-literal")
    made = experiments_of(tmp_path, config(PRISM, literal), None)
    plain, other = (made[TrialId("pusht", name, 0)] for name in ("prism", "literal"))
    alone = with_preset(recipe("pusht"), "paper-literal")
    assert (other.policy, other.controller) == (alone.policy, alone.controller)
    assert other.train.batch_size == 16
    assert other.train.learning_rate == alone.train.learning_rate
    assert other.demonstrations.next_actions
    assert not plain.demonstrations.next_actions
    assert plain.policy == recipe("pusht").policy
    with pytest.raises(PrismError, match="unknown preset 'huge'"):
        experiments_of(tmp_path, config(Contestant("a", "prism", (), "huge")), None)
