"""Without which sensors a policy was trained: counted over all windows of the training, all ranks, all sittings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from prism.data.loader import BatchOrder
from prism.io import files
from prism.training import checkpoint
from prism.training.config import TrainConfig
from prism.training.trainer import TrainResult, train
from tests.ranks import run_ranks
from tests.test_training import files_of, stopping_policy
from tests.training_fakes import FakePolicy, make_policy, make_windows, quiet

CONFIG = TrainConfig(batch_size=16, steps=10, warmup_steps=3, val_every=0, checkpoint_minutes=0, threads=1)


def run(run_dir: Path, gaps: set[int], policy: FakePolicy | None = None, resume: bool = False) -> TrainResult:
    return train(policy or make_policy(), make_windows(gaps=gaps)[0], None, CONFIG, run_dir, resume, quiet())


def drawn(steps: range, rank: int = 0, world: int = 1) -> list[int]:
    """The windows of these steps."""
    order = BatchOrder(len(make_windows()[0]), CONFIG.batch_size, CONFIG.seed, rank, world)
    return [int(index) for step in steps for index in order.indices(step)]


def test_one_batch_of_many_lifts_no_stop(tmp_path: Path) -> None:
    unlucky = drawn(range(3, 4))[:3]  # a fifth of one batch
    result = run(tmp_path, set(unlucky))
    assert result.policy.spec.absent == checkpoint.read_spec(result.checkpoint).absent == ()


@pytest.mark.parametrize(("count", "absent"), [(15, ()), (16, ("proprio",))])
def test_a_tenth_of_all_windows_is_counted_over_a_resume(tmp_path: Path, count: int, absent: tuple[str, ...]) -> None:
    """All of them before the stop: after 5 of 10 steps a fifth of the windows, at the end a tenth, or one fewer."""
    first, later = drawn(range(5)), drawn(range(5, 10))
    gaps = [index for index in first if index not in later][:count]
    assert len(gaps) == count
    whole = run(tmp_path / "whole", set(gaps))
    half = run(tmp_path / "parts", set(gaps), stopping_policy(5))
    assert (half.step, half.policy.spec.absent) == (5, ("proprio",))
    both = run(tmp_path / "parts", set(gaps), resume=True)
    for result in (whole, both):
        assert result.policy.spec.absent == checkpoint.read_spec(result.checkpoint).absent == absent
    assert files_of(whole.checkpoint) == files_of(both.checkpoint)
    assert checkpoint.load_training_state(both.checkpoint).windows == {"": 160, "proprio": count}


def test_a_checkpoint_from_before_windows_were_counted_goes_on(tmp_path: Path) -> None:
    half = run(tmp_path, set(), stopping_policy(5))
    written = {file.name: file.read_bytes() for file in half.checkpoint.iterdir() if file.name != files.CHECKSUMS}
    training = json.loads(written["training.json"])
    del training["windows"]
    files.write_folder(half.checkpoint, {**written, "training.json": files.encode_json(training)})
    again = run(tmp_path, set(), resume=True)
    assert checkpoint.load_training_state(again.checkpoint).windows == {"": 80, "proprio": 0}


def rank_run(rank: int, folder: Path, gaps: set[int]) -> tuple[str, ...]:
    config = dataclasses.replace(CONFIG, steps=4)
    return train(make_policy(), make_windows(gaps=gaps)[0], None, config, folder, console=quiet()).policy.spec.absent


def test_windows_of_all_ranks_count(tmp_path: Path) -> None:
    """The second of two ranks alone meets windows without the sensor."""
    gaps = set(drawn(range(4), rank=1, world=2)) - set(drawn(range(4), rank=0, world=2))
    assert len(gaps) > 16
    assert run_ranks(2, rank_run, tmp_path, gaps) == [("proprio",), ("proprio",)]
    assert checkpoint.load_training_state(checkpoint.folder_of(tmp_path, 4)).windows == {"": 64, "proprio": len(gaps)}
