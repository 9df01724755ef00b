"""The loop on several ranks: the same run as in one process, one checkpoint, agreement, and errors that end all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from prism import ranks
from prism.cli.train import Train
from prism.data.formats.store_writer import DatasetWriter
from prism.encoders.vision import ResNet18
from prism.errors import PrismError
from prism.policy import Draw, LossOutput
from prism.sensors import SensorSpec
from prism.training import checkpoint, start, trainer
from prism.training.config import TrainConfig
from prism.training.log import read_log
from prism.training.trainer import train
from tests.ranks import run_ranks
from tests.test_training import files_of
from tests.training_fakes import FakePolicy, make_policy, make_windows, quiet

CONFIG = TrainConfig(
    batch_size=16, steps=8, warmup_steps=2, log_every=1, val_every=4, val_batches=3, checkpoint_minutes=0, threads=1
)


class EvenPolicy(FakePolicy):
    """Whose buffer does not look at the batch: FakePolicy's follows its own rows, which no method may do."""

    stop_at = 0

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        if self.training and self.calls + 1 == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        before = self.threshold.clone()
        output = super().loss(draw)
        self.threshold.copy_(before + 0.1)
        return output


def policy() -> EvenPolicy:
    plain = make_policy()
    return EvenPolicy(plain.spec, plain.normalizer)


def run(rank: int, folder: Path, resume: Any = False, changes: dict[str, Any] | None = None, oddity: str = "") -> Any:
    windows, held_out = make_windows(seed=1 if oddity == f"data {rank}" else 0)
    own = policy()
    if oddity == f"weights {rank}":
        torch.nn.init.ones_(own.net[0].weight)
    if oddity == f"code {rank}":
        start.source_fingerprint = lambda: "0123"  # type: ignore[assignment]
    if oddity == f"settings {rank}":
        changes = {"seed": 5}
    if oddity == f"stop {rank}":
        own.stop_at = 3
    if oddity == f"late stop {rank}":
        real = trainer._Keeper._validate

        def interrupted(*arguments: Any) -> float | None:
            signal.raise_signal(signal.SIGTERM)
            return real(*arguments)

        trainer._Keeper._validate = interrupted  # type: ignore[method-assign]
    result = train(own, windows, held_out, dataclasses.replace(CONFIG, **(changes or {})), folder, resume, quiet())
    weights = torch.cat([p.flatten() for p in result.policy.parameters()])
    return result.step, result.val_loss, result.stopped_by, weights.tolist(), str(result.checkpoint)


def test_two_ranks_write_the_run_of_one_process(tmp_path: Path) -> None:
    alone = run(0, tmp_path / "alone")
    both = run_ranks(2, run, tmp_path / "ranks")
    for found in both:
        assert found[0] == 8, found
        assert found[1] == pytest.approx(alone[1], rel=1e-5)
        assert found[3] == both[0][3]
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "ranks")] == ["step-00000008"]
    checkpoint.verify_checkpoint(checkpoint.folder_of(tmp_path / "ranks", 8))
    assert [record["step"] for record in read_log(tmp_path / "ranks")] == list(range(1, 9))


def test_a_signal_to_one_rank_stops_all_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run_ranks(2, run, folder, False, {"steps": 100_000, "val_every": 0}, "stop 1")
    assert [found[2] for found in first] == ["SIGTERM", "SIGTERM"], first
    assert first[0][0] == first[1][0] == 3
    target = {"steps": 100_000, "val_every": 0}
    second = run_ranks(3, run, folder, True, target, "stop 2")
    assert [found[2] for found in second] == ["SIGTERM"] * 3, second
    assert second[0][0] == 6


def test_auto_resume_starts_and_goes_on(tmp_path: Path) -> None:
    whole = run(0, tmp_path / "whole")
    assert run(0, tmp_path / "auto", "auto")[:1] == (8,)
    again = run(0, tmp_path / "auto", "auto")
    assert (again[0], again[3]) == (8, whole[3])
    assert files_of(checkpoint.folder_of(tmp_path / "auto", 8)) == files_of(checkpoint.folder_of(tmp_path / "whole", 8))


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        ("data 1", "same training data: rank 1 has"),
        ("weights 1", "same first weights"),
        ("code 1", "same code: rank 1"),
        ("settings 1", "same setting train.seed: rank 1 has 5, rank 0 has 0"),
    ],
)
def test_ranks_that_differ_are_refused_on_all(tmp_path: Path, oddity: str, message: str) -> None:
    first, second = run_ranks(2, run, tmp_path / "run", False, None, oddity)
    assert first[0] == "PrismError"
    assert message in first[1]
    assert "\n" not in first[1]
    assert second[0] == "ReportedError"
    assert not checkpoint.list_checkpoints(tmp_path / "run")


def test_an_error_of_rank_0_ends_every_rank(tmp_path: Path) -> None:
    assert run(0, tmp_path / "run")[0] == 8
    first, second = run_ranks(2, run, tmp_path / "run")
    assert first == (
        "PrismError",
        f"{tmp_path / 'run'} holds a run already: continue it with --resume, or choose another --out",
    )
    assert second[0] == "ReportedError"
    newest = checkpoint.folder_of(tmp_path / "run", 8) / "training.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    first, second = run_ranks(2, run, tmp_path / "run", True)
    assert "none of its 1 checkpoints is intact" in first[1]
    assert second[0] == "ReportedError"


def test_a_signal_to_one_rank_after_the_last_step_is_told_to_all(tmp_path: Path) -> None:
    found = run_ranks(2, run, tmp_path / "run", False, {"val_every": 0}, "late stop 1")
    assert [(one[0], one[2]) for one in found] == [(8, "SIGTERM")] * 2, found


def write_pictures(path: Path) -> None:
    rng = np.random.default_rng(0)
    with DatasetWriter(path, (SensorSpec("rgb", "rgb", (16, 16, 3)),), 2, 10.0, "none") as writer:
        for _ in range(2):
            frames = rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
            writer.add({"rgb": frames}, rng.random((6, 2), np.float32))


def write_weights(path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = {k: v for k, v in ResNet18(4).state_dict().items() if not k.startswith("project")}
    safetensors.torch.save_file(state, path)


def start_and_resume(rank: int, folder: Path, settings: tuple[str, ...]) -> list[str]:
    """A run whose folder only rank 0 sees; its options are given once."""
    data, run = str(folder / "data"), folder / f"run-of-rank-{rank}"
    Train(recipe=(data,), out=run, steps=1, seed=3, set=settings, action_kind="absolute").run()
    Train(recipe=(data,), out=run, resume=True).run()
    Train(recipe=(data,), out=run, auto_resume=True).run()
    return sorted(path.name for path in folder.iterdir())


def test_a_resume_needs_the_run_folder_on_rank_0_only(tmp_path: Path) -> None:
    """With pretrained weights, which a run that has begun does not read again."""
    write_pictures(tmp_path / "data")
    weights = tmp_path / "resnet18.safetensors"
    write_weights(weights)
    settings = (
        *("train.batch_size=2", "train.val_fraction=0", "train.threads=1"),
        *(f"policy.encoder.rgb_weights={weights}", "policy.encoder.rgb=resnet18"),
        *("policy.encoder.rgb_features=4", "policy.encoder.mix_width=64", "policy.encoder.mix_blocks=1"),
    )
    for found in run_ranks(2, start_and_resume, tmp_path, settings):
        assert found == ["data", "resnet18.safetensors", "run-of-rank-0"]


def ask(rank: int, folder: Path) -> str:
    try:
        Train(recipe=("pusht" if rank == 0 else str(folder / "nowhere"),), out=folder / "run").run()
    except SystemExit as end:
        return f"exit {end.code}"
    return "not reached"


def test_rank_0_says_which_rank_found_no_data(tmp_path: Path) -> None:
    first, second = run_ranks(2, ask, tmp_path)
    assert first[0] == "PrismError"
    assert first[1].startswith("rank 1: ")
    assert "nowhere" in first[1]
    assert second == "exit 2"


def test_a_read_only_run_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder / ".lock"))

    monkeypatch.setattr("prism.training.start.exclusive", refuse)
    with pytest.raises(PrismError, match="run could not be written: the folder is read-only"):
        run(0, tmp_path / "run")


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    found = run_ranks(2, run, tmp_path / "run", False, {"batch_size": 1})
    assert "2 ranks cannot share a batch of 1" in found[0][1]
    assert [name for name, _ in found] == ["PrismError", "ReportedError"]


def fail_on_one(rank: int) -> str:
    with ranks.share_errors():
        if rank == 1:
            raise PrismError("the disk of this machine is full")
    return "not reached"


def leave_early(rank: int) -> str:
    ranks.max_over_ranks([0.0])  # both are connected: who dies before that is not found, not lost
    if rank == 1:
        os._exit(1)
    ranks.max_over_ranks([1.0])
    return "not reached"


def test_rank_0_raises_the_error_of_another_rank() -> None:
    first, second = run_ranks(2, fail_on_one)
    assert first == ("PrismError", "rank 1: the disk of this machine is full")
    assert second[0] == "ReportedError"


def test_a_rank_that_dies_is_noticed() -> None:
    first, second = run_ranks(2, leave_early)
    assert second == ("died", "")
    assert first[0] == "PrismError"
    assert "rank 0 lost another rank" in first[1]


def own_bug(rank: int) -> str:
    """A RuntimeError outside a collective call is this rank's own, even if it speaks of a connection."""
    with ranks.share_errors():
        if rank == 0:
            raise RuntimeError("gloo connection timed out")
    return "not reached"


def test_only_a_collective_call_can_lose_a_rank() -> None:
    first, second = run_ranks(2, own_bug)
    assert first == ("RuntimeError", "gloo connection timed out")
    assert second[0] == "ReportedError"


def report(rank: int) -> tuple[list[str], bytes, list[float]]:
    text = ranks.gather_text("x" * rank)
    return text, ranks.broadcast(b"abc" if rank == 0 else b""), ranks.max_over_ranks([rank, -rank])


def test_messages() -> None:
    for found in run_ranks(3, report):
        assert found == (["", "x", "xx"], b"abc", [2.0, 0.0])


def hang(rank: int) -> str:
    if rank == 1:
        time.sleep(8.0)
        return "late"
    ranks.max_over_ranks([1.0])
    return "not reached"


def test_a_rank_that_hangs_ends_the_wait_of_the_others() -> None:
    begin = time.monotonic()
    first, _ = run_ranks(2, hang, environment={ranks.TIMEOUT: "5"})  # the ranks have to meet in that time, too
    assert first[0] == "PrismError"
    assert "lost another rank" in first[1]
    assert time.monotonic() - begin < 90


def test_a_checkpoint_of_another_policy_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(0, folder)[0] == 8
    config = checkpoint.folder_of(folder, 8) / "config.json"
    text = config.read_text()
    assert '"method": "fake"' in text
    config.write_text(text.replace('"method": "fake"', '"method": "diffusion"'))
    sums = config.with_name("checksums.json")
    values = json.loads(sums.read_text())
    data = config.read_bytes()
    values["config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    sums.write_text(json.dumps(values))
    first, second = run_ranks(2, run, folder, True)
    assert "describes another policy" in first[1]
    assert second[0] == "ReportedError"
    (tmp_path / "file").write_text("not a folder")
    first, second = run_ranks(2, run, tmp_path / "file" / "run")
    assert "could not be written" in first[1]
    assert [first[0], second[0]] == ["PrismError", "ReportedError"]
