"""Several datasets, one policy: the union of sensors, sentences, weights; and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.cli import main
from prism.data import open_dataset
from prism.data.episodes import Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.data.loader import BatchOrder
from prism.data.mixture import Member, Mixture, drawn, epoch_size
from prism.data.windows import Windows
from prism.errors import PrismError
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import EvalOptions, Run
from prism.normalize import compute_statistics
from prism.sensors import ActionSpec, SensorSpec, decode_text, encode_text
from tests.data_fakes import MemorySource

HAND = SensorSpec("proprio", "vector", (2,))
TOUCH = SensorSpec("tactile", "vector", (3,))
WORDS = SensorSpec("text", "text", (32,))


def source(*sensors: SensorSpec, episodes: int = 2, value: float = 1.0, fps: float = 10.0) -> MemorySource:
    made = []
    for number in range(episodes):
        streams = {s.name: np.full((6 + number, *s.shape), value, s.dtype) for s in sensors}
        for spec in sensors:
            if spec.kind == "text":
                streams[spec.name] = np.tile(encode_text(f"say {value:g}", spec.shape[0]), (6 + number, 1))
        made.append(Episode(streams, np.full((6 + number, 2), value, np.float32)))
    return MemorySource(made, sensors, fps)


def stored(path: Path, *sensors: SensorSpec, task: str = "", dims: int = 2, fps: float = 10.0, kind: str = "") -> Path:
    rng = np.random.default_rng(len(path.name))
    with DatasetWriter(path, sensors, dims, fps, task, action=ActionSpec(kind=kind)) as writer:
        for _ in range(3):
            streams = {
                s.name: rng.integers(0, 99, (12, *s.shape)).astype(s.dtype)
                if s.kind != "text"
                else np.tile(encode_text("do it", s.shape[0]), (12, 1))
                for s in sensors
            }
            writer.add(streams, rng.normal(size=(12, dims)).astype(np.float32))
    return path


def test_the_union_of_sensors_with_presence_and_a_sentence_for_each_episode() -> None:
    mixture = Mixture([Member(source(HAND, TOUCH, value=1), text="push"), Member(source(HAND, value=5), text="pull")])
    assert [s.name for s in mixture.sensors] == ["proprio", "tactile", "text"]
    assert mixture.lengths.tolist() == [6, 7, 6, 7]
    first, last = mixture.read(0, 1, 4), mixture.read(3)
    assert decode_text(first.streams["text"][0]) == "push"
    assert decode_text(last.streams["text"][-1]) == "pull"
    assert "tactile" not in first.present
    assert not last.present["tactile"].any()
    assert first.length == 3
    assert (last.streams["proprio"] == 5).all()
    assert mixture.sometimes_absent >= {"tactile"}
    stats = compute_statistics(mixture)
    assert stats.vectors["tactile"].count == 13  # steps at which it was there
    assert stats.vectors["proprio"].mean.tolist() == [3, 3]  # over all


def test_text_is_one_sensor_under_any_name_and_the_longest_size_holds_all() -> None:
    other = SensorSpec("task", "text", (48,))
    mixture = Mixture([Member(source(HAND, WORDS, value=1)), Member(source(HAND, other, value=2))])
    assert [(s.name, s.shape) for s in mixture.sensors] == [("proprio", (2,)), ("text", (48,))]
    assert [decode_text(mixture.read(n, streams=["text"]).streams["text"][0]) for n in (0, 3)] == ["say 1", "say 2"]


def test_the_same_words_need_no_text_sensor() -> None:
    mixture = Mixture([Member(source(HAND), text="push"), Member(source(HAND), text="push")])
    assert [s.name for s in mixture.sensors] == ["proprio"]
    assert mixture.task == "push"


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    hand = Member(source(HAND))
    wide = source(HAND)
    wide.action_dim = 7
    said = {
        "2 dimensions in memory, 7 in memory: one policy cannot learn both": Member(wide),
        "10 steps a second, memory 20: bring them to one rate": Member(source(HAND, fps=20.0)),
        r"'proprio' is vector \(2,\) in memory, vector \(4,\).*--without proprio": Member(
            source(replace(HAND, shape=(4,)))
        ),
        "'proprio' is vector .*, audio .* at 8000 Hz": Member(
            source(SensorSpec("proprio", "audio", (2,), sample_rate=8000))
        ),
        "weight is 0; use more than 0": Member(source(HAND), 0.0),
        "weight is -1; use more than 0": Member(source(HAND), -1.0),
        "weight is nan; use more than 0": Member(source(HAND), float("nan")),
    }
    for words, member in said.items():
        with pytest.raises(PrismError, match=words):
            Mixture([hand, member])
    with pytest.raises(PrismError, match=r"sentence has 40 bytes, the sensor 'text' 32: shorten it with --text"):
        Mixture([Member(source(HAND, WORDS)), Member(source(HAND), text="x" * 40)])


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.01, 0.5, 1.0, 3.0])), min_size=1, max_size=4))
def test_an_epoch_has_the_share_of_each_weight_and_no_window_twice(groups: list[tuple[int, float]]) -> None:
    weights = np.concatenate([np.full(count, weight, np.float32) for count, weight in groups])
    windows = drawn(weights, np.random.default_rng(0))
    assert len(windows) == epoch_size(weights) == len(set(windows.tolist()))
    for weight in set(weights.tolist()):
        have, of = (weights[windows] == weight).sum(), (weights == weight).sum()
        assert abs(have - max(of * weight / weights.max(), 1)) <= 0.5 + 1e-3 * of


def test_weights_decide_what_is_drawn_and_the_order_is_a_function_of_seed_and_step() -> None:
    mixture = Mixture([Member(source(HAND, episodes=9, value=1)), Member(source(HAND, episodes=9, value=2), 0.25)])
    weights = mixture.weights
    assert weights is not None
    windows = Windows(mixture, 1, 2, weights=weights)
    order = BatchOrder(len(windows), 9, 3, weights=windows.weights)
    steps = range(4 * order.steps_per_epoch)
    values = np.concatenate([windows.batch(order.indices(step)).actions[:, 0, 0].numpy() for step in steps])
    assert 0.15 < (values == 2).mean() < 0.25  # 1/5 of the windows
    late = BatchOrder(len(windows), 9, 3, weights=windows.weights)
    assert late.indices(steps[-1]).tolist() == order.indices(steps[-1]).tolist()


def test_merge_writes_what_the_mixture_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = stored(tmp_path / "a", HAND, TOUCH, task="push", kind="delta")
    b = stored(tmp_path / "bb", HAND, task="pull", kind="delta")
    out = tmp_path / "both"
    assert main(["data", "merge", str(a), str(b), "--out", str(out)]) == 0
    assert "6 episodes, 72 steps of 2 datasets" in capsys.readouterr().out
    merged = open_dataset(out)
    assert [s.name for s in merged.sensors] == ["proprio", "tactile", "text"]
    assert decode_text(merged.read(4).streams["text"][0]) == "pull"
    assert not merged.read(4).present["tactile"].any()
    assert merged.action_spec.kind == "delta"  # type: ignore[attr-defined]
    assert np.array_equal(merged.read(1).streams["proprio"], open_dataset(a).read(1).streams["proprio"])
    assert main(["data", "merge", str(a), str(b), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    given = ["--text", "one", "two", "--without", "tactile", "--overwrite"]
    assert main(["data", "merge", str(a), str(b), "--out", str(out), *given]) == 0
    merged = open_dataset(out)
    assert [s.name for s in merged.sensors] == ["proprio", "text"]
    assert [decode_text(merged.read(n).streams["text"][0]) for n in (0, 5)] == ["one", "two"]


def test_merge_writes_lerobot_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    a = stored(tmp_path / "a", HAND, TOUCH, task="push")
    b = stored(tmp_path / "bb", HAND, task="pull")  # no touch in any of its steps
    assert main(["data", "merge", str(a), str(b), "--out", str(tmp_path / "both"), "--to", "lerobot"]) == 0
    merged = open_dataset(tmp_path / "both")
    assert not merged.read(4).present["tactile"].any()
    assert decode_text(merged.read(4).streams["text"][0]) == "pull"


def test_bad_mixtures_end_in_one_line_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(stored(tmp_path / "a", HAND, WORDS, kind="absolute"))
    b = str(stored(tmp_path / "bb", HAND, task="pull", kind="absolute"))
    cases = {
        "actions have 2 dimensions": [a, str(stored(tmp_path / "dims", HAND, dims=3))],
        "10 steps a second": [a, str(stored(tmp_path / "rate", HAND, fps=30.0))],
        "action.kind is absolute": [a, str(stored(tmp_path / "kind", HAND, kind="delta"))],
        "'proprio' is vector": [a, str(stored(tmp_path / "shape", replace(HAND, shape=(5,))))],
        "sentence has 40 bytes": [a, str(stored(tmp_path / "long", HAND, task="x" * 40))],
        "--weights has 1 values, and there are 2 datasets": [a, b, "--weights", "1"],
        "--weights has 0 values, and there are 2 datasets": [a, b, "--weights"],
        "weight is 0; use more than 0": [a, b, "--weights", "1", "0"],
        "weight is -2; use more than 0": [a, b, "--weights=1", "-2"],
        "--weights is for several datasets": [a, "--weights", "1"],
        "given twice": [a, a],
        "--sensors nose: the datasets have the sensors": [a, b, "--sensors", "nose", "proprio"],
        "--without nose: the datasets have the sensors": [a, b, "--without", "nose"],
        "--data x is for one recipe": [a, b, "--data", "x"],
        "delta, grippers at [3]": ["metaworld-reach", "robosuite-lift"],
    }
    for words, arguments in cases.items():
        run = tmp_path / "run"
        assert main(["train", *arguments, "--steps", "1", "--out", str(run)]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert words in said
        assert said.startswith("prism: error: ")
        assert not run.exists()
    assert main(["train"]) == 2
    assert "give a recipe" in capsys.readouterr().err


def test_train_on_several_records_the_mixture_and_resumes_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = stored(tmp_path / "a", HAND, TOUCH, task="push", kind="delta")
    b = stored(tmp_path / "bb", HAND, task="pull", kind="delta")
    run = tmp_path / "run"
    arguments = ["train", str(a), str(b), "--weights", "1", "0.5", "--out", str(run)]
    assert main([*arguments, "--steps", "2"]) == 0
    parts = json.loads((run / "experiment.json").read_text())["demonstrations"]["parts"]
    assert [(part["weight"], part["demonstrations"]["path"]) for part in parts] == [(1.0, str(a)), (0.5, str(b))]
    assert [s.name for s in Run(run).spec.sensors] == ["proprio", "tactile", "text"]
    capsys.readouterr()
    changed = ["train", str(a), str(b), "--weights", "1", "1", "--out", str(run), "--resume"]
    assert main(changed) == 2
    assert "other data" in capsys.readouterr().err
    alone = ["train", str(a), "--sensors", "tactile", "--steps", "1", "--out", str(tmp_path / "touch")]
    assert main(alone) == 0
    assert [s.name for s in Run(tmp_path / "touch").spec.sensors] == ["tactile"]
    assert main(["train", str(a), "--sensors", "nose", "--steps", "1", "--out", str(tmp_path / "none")]) == 2
    assert "--sensors nose" in capsys.readouterr().err


def test_two_tasks_are_one_policy_that_is_told_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = ["metaworld-reach", "metaworld-drawer-open"]
    assert main(["train", *tasks, "--episodes", "2", "--steps", "2", "--out", "run"]) == 0
    run = Run("run")
    assert Experiment.load(Path("run")).tasks == tuple(tasks)
    assert [s.name for s in run.spec.sensors] == ["proprio", "object_state", "text"]
    results = run.evaluate_all(EvalOptions(episodes=1, workers=0), progress=False)
    assert [result.task for result in results] == tasks
    assert set(run.metrics["tasks"]) == set(tasks)
    with pytest.raises(PrismError, match="trained for 2 tasks: choose one"):
        run.evaluate()
    told = EvalOptions(task=tasks[0], episodes=1, workers=0, text="drawer open")
    other = run.evaluate(told, progress=False)
    assert not np.array_equal(other.episodes[0].actions, results[0].episodes[0].actions)
    same = run.evaluate(replace(told, text="reach"), progress=False)
    assert np.array_equal(same.episodes[0].actions, results[0].episodes[0].actions)
    blind = run.evaluate(replace(told, text=None, without=("text",)), progress=False)
    assert not np.array_equal(blind.episodes[0].actions, results[0].episodes[0].actions)
    assert run.metrics["tasks"][tasks[0]]["success"] == results[0].summary()["success"]  # the control is not stored
    with pytest.raises(PrismError, match="text of 99 bytes does not fit"):
        run.evaluate(replace(told, text="x" * 99), progress=False)


@pytest.mark.parametrize("cache_bytes", [2**20, 0])
def test_windows_do_not_train_on_actions_beyond_their_sentence(cache_bytes: int) -> None:
    said = ["", "push", "push", "pull", "pull", "push", "", ""]  # of a long recording, as CALVIN's
    text = np.stack([encode_text(words, 32) for words in said])
    there = np.array([bool(words) for words in said])
    streams = {"proprio": np.zeros((8, 2), np.float32), "text": text}
    long = MemorySource([Episode(streams, np.zeros((8, 2), np.float32), {"text": there})], (HAND, WORDS))
    windows = Windows(long, 1, 4, cache_bytes=cache_bytes)
    valid = windows.batch(np.arange(8)).action_valid.int().tolist()
    assert valid == [
        [1, 1, 1, 1],  # no instruction: all that follows
        [1, 1, 0, 0],  # "push" ends
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 0, 0],  # the episode ends
        [1, 0, 0, 0],
    ]
