"""Recording demonstrations: the same bytes for any number of processes, only successes, nothing half-written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld")
pytest.importorskip("gym_pusht")

from numpy.typing import NDArray
from prism_sims.metaworld import MetaWorldEnv, MetaWorldExpert
from prism_sims.pusht_features import PushTDemonstrations
from rich.console import Console

from prism import cli
from prism.data.formats.store import StoreSource
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations, record_if_missing
from prism.experiments.recipes import recipe
from prism.sims import collect as collecting
from prism.sims.collect import Collected, collect, demonstrate
from research import experts
from research.__main__ import main as research
from research.experts import tasks_of

TASK = "metaworld-button-press-topdown"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    alone = collect(TASK, 3, tmp_path / "one", seed=5, workers=1)
    together = collect(TASK, 3, tmp_path / "two", seed=5, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (alone.attempts, alone.steps) == (together.attempts, together.steps)
    source = StoreSource(tmp_path / "one")
    assert len(source.lengths) == 3
    assert source.lengths.sum() == alone.steps
    assert source.task == TASK
    assert source.provenance["attempts"] == alone.attempts
    assert source.provenance["command"] == f"prism data collect {TASK} --episodes 3 --seed 5 --noise 0 --beyond 0"


def test_recorded_actions_replay(tmp_path: Path) -> None:
    collect(TASK, 1, tmp_path / "data", seed=9)
    episode = StoreSource(tmp_path / "data").read(0)
    env = MetaWorldEnv("button-press-topdown")
    observation = env.reset(9)
    for step, action in enumerate(episode.actions):
        for name, value in observation.items():
            assert np.array_equal(episode.streams[name][step], value)
        result = env.step(action)
        observation = result.observation
    assert result.success
    env.close()


def test_noise_disturbs_what_happens_and_not_what_is_recorded() -> None:
    env = MetaWorldEnv("button-press-topdown")
    expert = MetaWorldExpert(env)
    clean, noisy = demonstrate(env, expert, 3), demonstrate(env, expert, 3, noise=0.3)
    again = demonstrate(env, expert, 3, noise=0.3)
    assert np.array_equal(clean.actions[0], noisy.actions[0])
    assert np.abs(clean.streams["proprio"][1] - noisy.streams["proprio"][1]).max() > 1e-4
    assert np.array_equal(noisy.actions, again.actions)
    env.close()


def test_a_recording_goes_on_after_success() -> None:
    """So that a policy sees how to come to rest; an evaluation still ends at success."""
    env = MetaWorldEnv("reach")
    expert = MetaWorldExpert(env)
    short, long = demonstrate(env, expert, 3), demonstrate(env, expert, 3, beyond=20)
    assert len(long.actions) == len(short.actions) + 20
    assert np.array_equal(long.actions[: len(short.actions)], short.actions)
    assert np.abs(long.actions[-1]).max() < 0.3 * np.abs(short.actions[-1]).max(), "it has come to rest"
    assert len(demonstrate(env, expert, 3).actions) == len(short.actions)
    late = demonstrate(env, expert, 3, beyond=1000)
    assert late.success, "it did, if not in its last step"
    assert len(late.actions) == env.max_steps
    env.close()


class _Failing:
    """An expert that solves only every third start."""

    def __init__(self, env: MetaWorldEnv) -> None:
        self._expert = MetaWorldExpert(env)
        self._good = True

    def reset(self, seed: int) -> None:
        self._good = seed % 3 == 0
        self._expert.reset(seed)

    def act(self) -> NDArray[np.float32]:
        return self._expert.act() if self._good else np.zeros(4, dtype=np.float32)


def test_only_successes_are_kept_and_attempts_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "make_expert", lambda _task, env: _Failing(env))
    got = collect(TASK, 2, tmp_path / "data", workers=1)
    assert got == Collected(tmp_path / "data", episodes=2, attempts=4, successes=2, steps=got.steps)
    assert got.success == 0.5
    assert len(StoreSource(tmp_path / "data").lengths) == 2


def test_an_expert_that_never_succeeds_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(_Failing):
        def reset(self, seed: int) -> None:
            self._good = False

    monkeypatch.setattr(collecting, "make_expert", lambda _task, env: Idle(env))
    monkeypatch.setattr(collecting, "_PATIENCE", 1)
    with pytest.raises(PrismError, match=r"0 of 2 attempts"):
        collect(TASK, 1, tmp_path / "data", workers=1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_named_with_the_options_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "collect", TASK, "--out", str(tmp_path)]) == 2
    said = "exists already: name another folder with --out, or replace it with --overwrite"
    assert said in capsys.readouterr().err


def test_bad_requests_write_nothing(tmp_path: Path) -> None:
    for bad, words in (
        ({"task": "metaworld-buton"}, "unknown task"),
        ({"episodes": 0}, "cannot record"),
        ({"seed": -1}, "cannot record"),
        ({"beyond": -1}, "cannot record"),
        ({"seed": 99_999, "episodes": 2}, "for evaluation"),
    ):
        request = {"task": TASK, "episodes": 1, "seed": 0} | bad
        with pytest.raises(PrismError, match=words):
            collect(request.pop("task"), request.pop("episodes"), tmp_path / "data", **request)
    (tmp_path / "data").mkdir()
    with pytest.raises(PrismError, match="exists already"):
        collect(TASK, 1, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_recording_of_another_version_of_the_simulator_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = collect(TASK, 1, tmp_path / "data").path
    wanted = Demonstrations("expert", 1, path=str(path))
    console = Console(quiet=True)
    assert record_if_missing(wanted, TASK, console) == path
    monkeypatch.setattr(collecting, "version", lambda package: "9.9" if package == "metaworld" else "1.0")
    with pytest.raises(PrismError, match=r"metaworld 3\.1\.1, installed is 9\.9; record it again"):
        record_if_missing(wanted, TASK, console)


def test_what_is_there_is_used_extended_or_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--episodes and noise count also where the folder exists; extended is the same as recorded at once."""
    path, console = tmp_path / "data", Console(stderr=True, width=500)
    wanted = Demonstrations("expert", 2, noise=0.1, path=str(path))
    for episodes, line in ((2, "recording 2 demonstrations"), (3, "recording 1 more to the 2"), (3, "using the 3")):
        record_if_missing(replace(wanted, episodes=episodes), TASK, console)
        assert line in capfd.readouterr().err
    record_if_missing(replace(wanted, episodes=2), TASK, console)
    assert "using the 3 demonstrations" in (said := capfd.readouterr().err)
    assert "2 were asked for (fewer: --demonstrations N)" in said
    extended, whole = StoreSource(path), StoreSource(collect(TASK, 3, tmp_path / "whole", noise=0.1).path)
    assert extended.provenance == whole.provenance
    for number in range(3):
        assert np.array_equal(extended.read(number).actions, whole.read(number).actions)
    with pytest.raises(
        PrismError, match=r"with --noise 0\.1 --beyond 0, --noise 0\.3 --beyond 0 was asked for: record it"
    ):
        record_if_missing(replace(wanted, noise=0.3), TASK, console)
    with pytest.raises(PrismError, match=r"--beyond 25 --overwrite\), move it away, .*--set demonstrations\.path="):
        record_if_missing(replace(wanted, beyond=25), TASK, console)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(
        PrismError, match=rf"is not a recording of .*: move it away, or use it: prism train {TASK} --data"
    ):
        record_if_missing(replace(wanted, path=str(foreign)), TASK, console)


def test_what_collect_records_is_what_train_learns_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "collect", TASK, "--episodes", "2"]) == 0
    assert StoreSource(tmp_path / "data" / TASK).provenance["noise"] == recipe(TASK).demonstrations.noise
    assert cli.main(["train", TASK, "--episodes", "2", "--steps", "1"]) == 0
    assert f"using the 2 demonstrations in data/{TASK}" in capfd.readouterr().err


def test_failures_are_kept_when_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "make_expert", lambda _task, env: _Failing(env))
    got = collect(TASK, 3, tmp_path / "data", workers=1, failures=True)
    assert (got.episodes, got.attempts, got.successes) == (3, 3, 1)
    source = StoreSource(tmp_path / "data")
    assert (source.lengths[1:] == 200).all()
    assert source.provenance["command"].endswith("--failures")


def test_patterns_name_tasks() -> None:
    assert len(tasks_of("metaworld")) == 50
    assert len(tasks_of("metaworld-*-pixels")) == 50
    assert tasks_of("metaworld-*-wall") == tuple(
        f"metaworld-{task}-wall" for task in ("button-press-topdown", "button-press", "pick-place", "push", "reach")
    )
    assert tasks_of("pusht") == ("pusht",)
    for unknown in ("metawolrd", "metaworld-*-nothing", ""):
        with pytest.raises(PrismError, match="no task matches"):
            tasks_of(unknown)


def test_all_experts_of_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "all", tmp_path / "experts.json"
    words = ["experts", "metaworld-reach*", "--seed", "3", "--workers", "1", "--out", str(out), "--episodes"]
    asked = [*words, "2", "--episodes-of", "metaworld-reach-wall=1"]
    assert research([*asked, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["attempts.metaworld-reach"] == 2
    assert found["attempts.metaworld-reach-wall"] == 1
    assert found["success.metaworld-reach"] == found["mean.easy"] == found["mean.all"] == 1.0
    assert "mean.hard" not in found
    # interrupted and started again: what is there is kept, untouched
    before = {task: contents(out / task) for task in ("metaworld-reach", "metaworld-reach-wall")}
    assert research(asked) == 0
    assert {task: contents(out / task) for task in before} == before
    assert "mean, all" in capsys.readouterr().out
    assert research([*words, "3"]) == 2
    assert "another recording" in capsys.readouterr().err
    for word in ("metaworld-push=2", "metaworld-reach=0", "metaworld-reach"):
        assert research([*words, "2", "--episodes-of", word]) == 2
        assert "use TASK=NUMBER" in capsys.readouterr().err


def test_an_expert_that_fails_too_often_has_a_row_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "make_expert", lambda _task, env: _Failing(env))
    monkeypatch.setattr(collecting, "_PATIENCE", 1)
    config = experts.Config(tasks="metaworld-reach", episodes=2, out=tmp_path, seed=1, workers=1)
    found = experts.run(config, Console(quiet=True))
    assert found["attempts.metaworld-reach"] == 3
    assert found["success.metaworld-reach"] == 1 / 3
    with pytest.raises(PrismError, match="1 of 3 attempts"):
        experts.check(found)


def test_a_task_without_an_expert_is_in_no_mean() -> None:
    rows = [experts.Row("metaworld-reach", 3, 4), experts.Row("metaworld-push", 0, 0, "there is no expert")]
    figures = experts.table(rows)
    assert figures["mean.all"] == figures["success.metaworld-reach"] == 0.75
    assert "success.metaworld-push" not in figures
    assert experts.table(rows[1:]) == {}


def test_pusht_keeps_the_raw_state(tmp_path: Path) -> None:
    collect("pusht", 1, tmp_path / "state", seed=4, workers=1)
    source = StoreSource(tmp_path / "state")
    assert [sensor.name for sensor in source.sensors] == ["state"]
    shown = PushTDemonstrations(source, "state").read(0)
    assert shown.streams["object_state"].shape == (int(source.lengths[0]), 41)
