"""The field's tables: splits, missing trials, and a whole one in miniature."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.errors import PrismError
from prism.experiments.comparison import folder_of
from prism.experiments.recipes import recipe
from prism.experiments.stored_trials import contestant, kept
from prism.experiments.trial import RESULT, TrialId
from prism.io.jsonconfig import to_json, with_settings
from prism.methods.prism import PrismPolicy
from research import departures, favor, one_policy, placebo, tables, variants
from research.__main__ import main
from research.report import Study
from tests.comparison_fakes import QUIET, fake_result, finish
from tests.pins.cases import CASES, float64, make_batch


def test_metaworld_has_its_fifty_tasks() -> None:
    groups = tables.groups_of(tables.protocol("metaworld").tasks)
    sizes = {name: len(members) for name, members in groups.items()}
    assert sizes == {"all": 50, "easy": 28, "medium": 11, "hard": 6, "very_hard": 5}


def test_a_mean_says_over_how_many_tasks() -> None:
    means, counted = tables.split_means({"a": 1.0, "c": 0.0}, {"all": ["a", "b", "c"], "hard": ["b"]})
    assert means == {"all": 0.5}
    assert counted == {"all": "2 of 3", "hard": "0 of 1"}
    rates = dict(enumerate([0.8, 0.85, 0.9, 1, 1, 1, 0.8, 1, 0.6, 1, 0.95]))  # added one by one: 9.899999999999999
    named = {str(n): rate for n, rate in rates.items()}
    assert tables.split_means(named, {"all": list(named)})[0]["all"] == 0.9


def test_some_tasks_of_each_split() -> None:
    every = tables.protocol("metaworld").tasks
    some = tables.spread(every, 3)
    assert {name: len(found) for name, found in tables.groups_of(some).items() if name != "all"} == dict.fromkeys(
        tables.SPLITS, 3
    )
    assert some[-3:] == ("metaworld-disassemble", "metaworld-shelf-place", "metaworld-stick-push")
    assert set(tables.spread(every, 99)) == set(every), "not more than there are, none twice"


def test_a_split_is_judged_whole_by_its_interval_and_by_three_trainings() -> None:
    plan = tables.protocol("metaworld")
    figures: dict[str, Any] = {
        "common": {"tasks": []},
        "mean": {"hard": 1.0, "very_hard": 1.0, "easy": 0.97, "medium": 0.5},
        "mean_ci": {"hard": [0.9, 1.0], "very_hard": [0.9, 1.0], "easy": [0.95, 0.98], "medium": [0.4, 0.6]},
        "tasks_done": {"hard": "1 of 1", "very_hard": "5 of 5", "easy": "28 of 28", "medium": "11 of 11"},
    }

    def verdicts(seeds: int, departures: str = "") -> dict[str, str]:
        return {claim.where[9:]: claim.verdict for claim in tables.claims(figures, plan, seeds, departures)}

    untold = "cannot be tested here"
    assert verdicts(3) == {"hard": untold, "very_hard": "confirmed", "easy": untold, "medium": "not confirmed"}
    assert set(verdicts(2).values()) == set(verdicts(3, "100 demonstrations, not 10").values()) == {untold}


def test_what_departs_from_the_protocol_is_said() -> None:
    assert tables.Config(table="metaworld", demonstrations=10).departures == ""
    other = tables.Config(table="metaworld", demonstrations=20, set=("train.batch_size=8",))
    assert other.departures == "20 demonstrations, not 10; train.batch_size=8"
    twice = tables.Config(table="metaworld", tasks=("metaworld-push", "metaworld-push"))
    assert twice.rows == ("metaworld-push",), "none counts twice"


def test_the_figures_of_prism_are_of_prism(tmp_path: Path) -> None:
    config = tables.Config(table="metaworld", tasks=("metaworld-reach",), methods=("prism", "act"), seeds=(0,))
    id = TrialId("metaworld-reach", "act", 0)
    asked = config.comparison(tmp_path, "metaworld-reach")
    finish(tmp_path / "metaworld-reach", id, [1.0] * 20)
    result = next((tmp_path / "metaworld-reach").rglob("result.json"))
    result.write_text(json.dumps(json.loads(result.read_text()) | {"trained_by": {"commit": "abc"}}))
    study = tables.summary(config, {"metaworld-reach": tables.summarise(tmp_path / "metaworld-reach", asked)})
    assert (study.figures["mean"], study.figures["tasks"], study.claims) == ({}, {}, ())
    assert study.figures["mean_by_method"]["act"]["easy"] == 1.0


def test_methods_are_compared_on_the_tasks_that_all_have() -> None:
    row = namedtuple("row", "success")
    rows = {"prism": {"a": row(1.0), "b": row(0.2)}, "diffusion": {"a": row(0.9)}}
    assert tables.common_means(rows) == {"tasks": ["a"], "mean": {"prism": 1.0, "diffusion": 0.9}}
    groups, ours = {"all": ["a", "b"]}, rows["prism"]
    assert tables.whole_means(ours, groups, ours) == {"all": 0.6}
    assert tables.whole_means(rows["diffusion"], groups, ours) == {}, "a mean of the easier task alone"
    assert tables.whole_means(rows["diffusion"], groups, {"b": row(0.2)}) == {}, "as many tasks, and others"
    assert tables.common_means({}) == {"tasks": [], "mean": {}}


def test_baselines_are_executed_as_published() -> None:
    published = tables.AS_PUBLISHED
    assert contestant("prism", published).settings == ()
    assert contestant("diffusion", published).settings == ("policy.pred_horizon=16", "controller.exec_horizon=8")
    often = contestant("often=diffusion:controller.exec_horizon=1", published)
    assert often.settings == ("policy.pred_horizon=16", "controller.exec_horizon=1"), "the rest stays as published"


def test_a_task_of_another_table_is_refused() -> None:
    with pytest.raises(PrismError, match="no task of metaworld"):
        tables.Config(table="metaworld", tasks=("robosuite-lift",))


def test_a_table_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("metaworld")
    file = tmp_path / "table.json"
    words = ["tables", "metaworld", "--tasks", "metaworld-reach", "--minutes", "0.005", "--demonstrations", "2"]
    words += ["--seeds", "0", "--episodes", "1", "--work", str(tmp_path / "work"), "--json", str(file)]
    assert main(words) == 0
    stored = json.loads(file.read_text())
    assert stored["tasks"].keys() == stored["success"]["prism"].keys() == {"reach"}
    assert stored["mean"]["easy"] == stored["tasks"]["reach"]
    assert stored["tasks_done"]["easy"] == "1 of 1"
    assert stored["missing"] == []
    assert stored["expert"]["reach"] == 1.0
    assert "reach" in capsys.readouterr().out
    again, played = tmp_path / "again.json", ["--trained", str(tmp_path / "work"), "--first-seed", "600000"]
    words_again = [str(tmp_path / "work2") if word == str(tmp_path / "work") else word for word in words[:-1]]
    assert main([*words_again, str(again), *played]) == 0
    second = json.loads(again.read_text())
    assert second["tasks"].keys() == {"reach"}
    assert second["settings"]["first_seed"] == 600000
    log = Path("metaworld-reach/trials/metaworld-reach/prism/seed-0/log.jsonl")
    assert (tmp_path / "work" / log).read_text() == (tmp_path / "work2" / log).read_text(), "nothing is trained twice"
    assert not (tmp_path / "work2/data").exists(), "nothing is recorded twice"
    for wrong, said in ((tmp_path / "nosuch", "no work folder of a table"), (tmp_path / "work2", "no work folder")):
        assert main([*words_again, str(again), "--trained", str(wrong), "--overwrite"]) == 2
        assert said in capsys.readouterr().err
        assert not (wrong / "data").exists(), "nothing is recorded there"
    with pytest.raises(PrismError, match="is --work itself"):
        tables.Config(table="metaworld", work=tmp_path / "work", trained=tmp_path / "work")
    words[words.index("metaworld-reach") : words.index("metaworld-reach") + 1] = ["metaworld-reach", "metaworld-push"]
    assert main([*words, "--status", "--overwrite"]) == 0
    status = json.loads(file.read_text())
    assert status["tasks"] == stored["tasks"]
    assert status["tasks_done"]["all"] == "1 of 2"
    assert [one.partition(",")[0] for one in status["missing"]] == ["metaworld-push"]


def test_a_table_goes_on_on_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A results file has its trials; with --add they are there, and only what is missing is trained."""
    pytest.importorskip("metaworld")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = ["tables", "metaworld", "--tasks", "metaworld-reach", "--minutes", "0.005", "--demonstrations", "2"]
    words += ["--episodes", "2"]
    assert main([*words, "--seeds", "0", "--work", str(tmp_path / "a"), "--json", str(first)]) == 0
    there = tmp_path / "b"
    more = [*words, "--seeds", "0", "1", "--add", str(first), "--work", str(there), "--json", str(second)]
    assert main(more) == 0
    trials = there / "metaworld-reach/trials/metaworld-reach/prism"
    assert not (trials / "seed-0/log.jsonl").exists(), "not trained again"
    assert (trials / "seed-1/log.jsonl").exists()
    old, new = (json.loads(file.read_text()) for file in (first, second))
    assert new["trials"][0] == old["trials"][0], "nothing is lost on the way"
    assert [one["trial"]["seed"] for one in new["trials"]] == [0, 1]
    by_seed = [one["trial"]["evaluation"]["success"] for one in new["trials"]]
    assert new["tasks"]["reach"] == sum(by_seed) / 2
    for wrong, said in (
        (["--episodes", "3"], "episodes = 2 there, 3 now"),
        (["--minutes", "1"], "minutes.reach = 0.005 there, 1.0 now"),
        (["--methods", "prism=prism:train.batch_size=8"], "settings = [] there, ['train.batch_size=8'] now"),
    ):
        assert main([*more[:-4], *wrong, "--work", str(tmp_path / "c"), "--status"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    trial = old["trials"][0]["trial"]
    for wrong, said in (
        ({}, "KeyError: 'settings'"),
        (old | {"trials": {"a": 1}}, "no results file with whole trials"),
        (with_trial(old, per_episode={**trial["per_episode"], "success": "1"}), "not 2 finite numbers"),
        (with_trial(old, per_episode={**trial["per_episode"], "jerk": "1 nan"}), "not 2 finite numbers"),
        (with_trial(old, per_episode={**trial["per_episode"], "success": "7 0"}), "out of range"),
        (with_trial(old, evaluation=None), "no results file with whole trials"),
        (with_trial(old, evaluation={"score": 1.0, "success": 1.0}), "KeyError: 'latency_ms'"),
        (old | {"settings": old["settings"] | {"methods": ["act"]}}, "prism is not among its methods"),
    ):
        first.write_text(json.dumps(wrong))
        assert main([*more[:-4], "--work", str(tmp_path / "c"), "--status"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "c").rglob("result.json")), "nothing of them is there"
    first.write_text(json.dumps(with_trial(old, per_episode={**trial["per_episode"], "jerk": "1 2"})))
    assert main([*more[:-4], "--work", str(there), "--status"]) == 2
    assert "is another result of metaworld-reach prism seed 0" in " ".join(capsys.readouterr().err.split())
    first.unlink()
    assert main([*more[:-4], "--work", str(there), "--status"]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_nothing_is_recorded_for_a_task_whose_cells_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(tables, "record", lambda config, work, task, console: recorded.append(task))
    monkeypatch.setattr(tables, "compare", lambda out, asked, *_, **__: tables.summarise(out, asked))
    asked = {"table": "metaworld", "tasks": ("metaworld-reach", "metaworld-push"), "seeds": (0,), "episodes": 3}
    config = tables.Config(**asked, work=tmp_path / "work", add=(tmp_path / "old.json",))
    id = TrialId("metaworld-reach", "prism", 0)
    trial = {**fake_result(id, [1.0, 0.5, 1.0]), "trained_by": {"commit": "abc", "date": "today"}}
    trial["controller"] = to_json(recipe("metaworld-reach").controller)
    stored = {"recipe": id.recipe, "contestant": id.contestant, "trial": kept(trial)}
    settings = {**config.protocol_settings(), "methods": ["prism"]}
    config.add[0].write_text(json.dumps({"settings": settings, "trials": [stored]}))
    study = tables.run(config, QUIET)
    assert recorded == ["metaworld-push"], "what has to be trained"
    assert study.figures["success"]["prism"] == {"reach": pytest.approx(2 / 3)}
    assert not (config.folder / "data").exists()
    other = {"episodes": 50, "add": (), "minutes": 30.0}
    with pytest.raises(PrismError, match="was made with other settings"):
        tables.run(replace(config, **other), QUIET)  # the trial knows what it is
    older = {key: value for key, value in settings.items() if key != "objective"}  # PRISM's defaults were others
    config.add[0].write_text(json.dumps({"settings": older, "trials": [stored]}))
    with pytest.raises(PrismError, match=r"objective\.candidates = None there"):
        tables.run(replace(config, work=tmp_path / "new"), QUIET)
    trial["controller"]["exec_horizon"] = 8
    config.add[0].write_text(json.dumps({"settings": settings, "trials": [stored | {"trial": kept(trial)}]}))
    with pytest.raises(PrismError, match="exec_horizon = 8 there, 1 now"):
        tables.run(replace(config, work=tmp_path / "new"), QUIET)
    assert not (tmp_path / "new").exists()


def with_trial(file: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A results file whose first trial is altered."""
    first, *others = file["trials"]
    return {**file, "trials": [{**first, "trial": {**first["trial"], **changes}}, *others]}


def test_ablations_go_on_on_another_machine(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = ["ablations", "--factors", "scope", "--steps", "1", "--seeds", "0", "--episodes", "1"]
    assert main([*words, "--work", str(tmp_path / "a"), "--json", str(first)]) == 0
    assert main([*words, "--add", str(first), "--work", str(tmp_path / "b"), "--json", str(second)]) == 0
    assert not list((tmp_path / "b").rglob("log.jsonl")), "nothing is trained again"
    old, new = (json.loads(file.read_text()) for file in (first, second))
    assert [row["score"] for row in new["table"]] == [row["score"] for row in old["table"]]
    assert new["trials"] == old["trials"]


def test_a_study_of_variants_goes_on_trial_by_trial(tmp_path: Path) -> None:
    """With what the training logged, also where only the results file is left."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    config = placebo.Config(recipe="pusht", episodes=3, work=tmp_path / "one", status=True, seeds=(0, 1))
    for name, scores in (("batch", [1.0, 0.5, 1.0]), ("random", [0.5, 0.5, 1.0])):
        id = TrialId("pusht", name, 0)
        folder = folder_of(config.work / "pusht", id)
        finish(config.work / "pusht", id, scores)
        trial = fake_result(id, scores) | {"method": "prism", "trained_by": {"commit": "abc", "date": "today"}}
        (folder / RESULT).write_text(json.dumps(trial | {"controller": to_json(recipe("pusht").controller)}))
        lines = [{"step": step, **dict.fromkeys(placebo.WATCHED, step / 2)} for step in range(20, 2000, 20)]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    study = placebo.run(config, QUIET)
    placebo.show(study, QUIET)
    assert study.figures["difference"]["pusht"].keys() == {"batch - random"}
    assert study.figures["difference"]["pusht"]["batch - random"]["success"]["mean"] == pytest.approx(1 / 3)
    assert {claim.verdict for claim in study.claims} == {"cannot be tested here"}, "one training"
    assert len(study.missing) == 6
    log = study.figures["trials"][0]["log"]
    assert len(log["step"]) == variants.LINES
    assert log["step"][-1] == 1980
    first.write_text(json.dumps(study.to_json()))
    again = placebo.run(replace(config, work=tmp_path / "two", add=(first,)), QUIET)
    second.write_text(json.dumps(again.to_json()))
    old, new = (json.loads(file.read_text()) for file in (first, second))
    for key in ("table", "difference", "logged", "trials", "missing"):
        assert new[key] == old[key], key
    for other in ({"minutes": 5.0}, {"first_seed": 7}):
        with pytest.raises(PrismError, match="was made with other settings"):
            placebo.run(replace(config, work=tmp_path / "three", add=(first,), **other), QUIET)
    old["settings"]["objective"]["scope"] = "own"
    first.write_text(json.dumps(old))
    with pytest.raises(PrismError, match=r"objective\.scope = own there, batch now"):
        placebo.run(replace(config, work=tmp_path / "three", add=(first,)), QUIET)
    with pytest.raises(PrismError, match="unknown variant 'half'"):
        placebo.run(replace(config, variants=("half",)), QUIET)


@pytest.mark.parametrize(("case", "same"), [("prism-favor", False), ("prism", True)])
def test_other_random_features_change_what_linear_attention_alone_computes(case: str, same: bool) -> None:
    with float64():
        policy, batch = CASES[case](), make_batch()
        assert isinstance(policy, PrismPolicy)
        before = favor.nearest(policy, batch)
        assert favor.nearest(policy, batch) == before
        policy.generator.redraw(torch.Generator().manual_seed(1))
        assert (favor.nearest(policy, batch) == before) == same


def test_favor_is_as_good_only_within_its_bar() -> None:
    def verdict(low: float, high: float, seeds: int = 3) -> str:
        d = {"mean": (low + high) / 2, "low": low, "high": high, "p": 0.5, "seeds": seeds, "episodes": 200}
        study = Study("favor", {"difference": {"reach": {"favor - exact": {"success": d}}}}, (), {})
        return favor.claims(study)[0].verdict

    assert verdict(-0.09, 0.04) == "confirmed"
    assert verdict(-0.3, -0.12) == "not confirmed"
    assert verdict(-0.12, 0.02) == verdict(-0.05, 0.11) == "cannot be tested here"
    assert verdict(-0.09, 0.04, seeds=2) == "cannot be tested here"


def test_a_split_that_is_not_there_has_no_mean() -> None:
    """Nor is one policy on three tasks compared with others on two of them."""
    won, apart = {"a": [True], "b": [False], "c": [True]}, {"tasks": {"a": 1.0, "b": 1.0}, "settings": {"minutes": 1}}
    figures = one_policy.summary(won, apart, {"all": ["a", "b", "c", "d"], "easy": ["a", "b"], "hard": ["d"]})
    assert figures["by_split"] == {"easy": [0.5, 1.0]}
    assert one_policy.claims(figures)[0].ours == "50.0% with one policy, 100.0% with one for each"


def test_one_policy_beside_those_of_a_table(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    same = ["--tasks", "metaworld-reach", "metaworld-push", "--demonstrations", "2", "--episodes", "1"]
    same += ["--work", str(tmp_path / "work")]
    apart, file = tmp_path / "table.json", tmp_path / "one.json"
    assert main(["tables", "metaworld", *same, "--minutes", "0.005", "--seeds", "0", "--json", str(apart)]) == 0
    words = ["one-policy", *same, "--minutes", "0.01", "--separate", str(apart)]
    assert main([*words, "--json", str(file)]) == 0
    stored = json.loads(file.read_text())
    assert stored["tasks"].keys() == stored["separate"].keys() == {"reach", "push"}
    assert stored["tasks_done"] == "2 of 2"
    assert stored["difference"]["mean"] == pytest.approx(stored["mean"] - stored["separate_mean"])
    assert stored["by_split"].keys() == {"all", "easy", "hard"}
    for more in (["--status"], []):  # what is there is read, or gone on with
        assert main([*words, *more, "--json", str(file), "--overwrite"]) == 0
        assert json.loads(file.read_text())["tasks"] == stored["tasks"]


def test_bad_words_are_refused_before_anything_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["tables", "metaworld", "--methods", "nosuch"], "unknown method 'nosuch'"),
        (["tables", "metaworld", "--minutes", "0"], "--minutes 0 is out of range"),
        (["senses", "--minutes", "nan"], "--minutes nan is out of range"),
        (["language", "--set", "nosuch=1"], "Experiment has no 'nosuch'"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_what_is_missing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    figures = {"success": {"prism": {}}, "jerk": {"prism": {}}, "mode_switches": {"prism": {}}, "expert": {"push": 1.0}}
    figures |= {"tasks_done": {"all": "0 of 1"}, "mean_by_method": {"prism": {}}}
    tables.show(Study("metaworld", figures, (), {}), Console())
    assert "missing" in capsys.readouterr().out


def test_every_departure_is_one_setting_of_the_recipe_and_is_judged_over_all_tasks() -> None:
    plain = recipe("metaworld-pick-place")
    for name, settings in departures.VARIANTS.items():
        assert (with_settings(plain, list(settings)) != plain) == (name != departures.OURS), name

    def trial(task: str, name: str, seed: int, wins: str) -> dict[str, Any]:
        return {"recipe": task, "contestant": name, "trial": {"seed": seed, "per_episode": {"success": wins}}}

    config = departures.Config(tasks=("a", "b"), variants=("ours", "draws", "ema_power"))
    trials = [trial(task, "ours", seed, "1 1 0") for task in "ab" for seed in (0, 1, 2)]
    trials += [trial(task, "draws", seed, "1 0 0") for task in "ab" for seed in (0, 1)]
    trials += [trial("a", "ema_power", seed, "0 0 0") for seed in (0, 1, 2)]
    study = Study("departures", {"trials": trials}, (), {})
    found = departures.pooled(study, config)
    assert found.keys() == {"draws"}, "ema_power lacks a task"
    assert (found["draws"]["mean"], found["draws"]["seeds"], found["draws"]["episodes"]) == (pytest.approx(1 / 3), 2, 6)
