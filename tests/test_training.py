"""The loop: resume bit for bit, signals, NaN, refusals, logs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from prism.data.loader import BatchOrder
from prism.errors import PrismError
from prism.io.files import exclusive
from prism.io.jsonconfig import from_json
from prism.policy import Draw, LossOutput
from prism.rows import derive_seed
from prism.training import checkpoint, trainer
from prism.training.config import TrainConfig, ema_decay, learning_rate
from prism.training.log import Monitor, StepOutput, read_log
from prism.training.trainer import TrainResult, parameter_groups, train
from tests.training_fakes import FakePolicy, make_policy, make_windows, quiet, text_of

CONFIG = TrainConfig(
    batch_size=16, steps=10, warmup_steps=3, log_every=1, val_every=4, val_batches=2, checkpoint_minutes=0, threads=1
)


class StoppingPolicy(FakePolicy):
    """Receives a signal in the middle of a step."""

    stop_at = 0
    number = signal.SIGTERM

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        output = super().loss(draw)
        if self.training and self.calls == self.stop_at:
            signal.raise_signal(self.number)
        return output


def stopping_policy(stop_at: int, number: signal.Signals = signal.SIGTERM) -> StoppingPolicy:
    plain = make_policy()
    policy = StoppingPolicy(plain.spec, plain.normalizer)
    policy.stop_at, policy.number = stop_at, number
    return policy


def run(run_dir: Path, policy: FakePolicy | None = None, resume: bool = False, **changes: Any) -> TrainResult:
    windows, held_out = make_windows()
    config = dataclasses.replace(CONFIG, **changes)
    return train(policy or make_policy(), windows, held_out, config, run_dir, resume, quiet())


def files_of(folder: Path) -> dict[str, Any]:
    """Every tensor and every number of a checkpoint, except the clock."""
    training = json.loads((folder / "training.json").read_text())
    del training["seconds"]
    tensors = {}
    for name in ("model", "training"):
        loaded = safetensors.torch.load_file(folder / f"{name}.safetensors")
        tensors |= {f"{name}/{key}": value.numpy().tobytes() for key, value in loaded.items()}
    return {"training": training, **tensors}


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "val_loss", "learning_rate", "gradient_norm", "threshold")
    return [tuple(record[key] for key in keys) for record in read_log(run_dir)]


@pytest.mark.parametrize("stop_at", [1, 5, 9])
def test_stop_and_resume_equal_an_undisturbed_run_bit_for_bit(tmp_path: Path, stop_at: int) -> None:
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "parts", stopping_policy(stop_at))
    assert (first.step, first.stopped_by) == (stop_at, "SIGTERM")
    second = run(tmp_path / "parts", resume=True)
    assert (second.step, second.stopped_by) == (10, "")
    assert files_of(whole.checkpoint) == files_of(second.checkpoint)
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    assert whole.val_loss == second.val_loss is not None


def test_it_learns_and_the_result_is_what_is_saved(tmp_path: Path) -> None:
    from tests.training_fakes import build_fake

    result = run(tmp_path, steps=300, log_every=50, learning_rate=1e-2)
    losses = [record["loss"] for record in read_log(tmp_path)]
    assert losses[-1] < 0.6 * losses[0]
    loaded = checkpoint.load_policy(tmp_path, build=build_fake)
    assert not loaded.training
    for name, value in result.policy.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert not torch.equal(loaded.get_buffer("normalizer.action_center"), torch.zeros(3))  # statistics are inside


def test_log_has_one_object_a_line_with_every_metric(tmp_path: Path) -> None:
    run(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["step"] for record in records if record["val_loss"] is not None] == [4, 8, 10]
    assert {"seconds", "loss", "learning_rate", "threshold", "rejection_rate", "steps_per_second"} <= set(records[0])
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_validation_does_not_touch_the_training(tmp_path: Path) -> None:
    often, never = run(tmp_path / "a", val_every=1), run(tmp_path / "b", val_every=0)
    a, b = checkpoint.load_training_state(often.checkpoint), checkpoint.load_training_state(never.checkpoint)
    assert all(torch.equal(value, b.weights[name]) for name, value in a.weights.items())


def test_average_follows_its_definition(tmp_path: Path) -> None:
    history: list[torch.Tensor] = []

    class Watched(FakePolicy):
        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            if self.training:
                history.append(self.net[0].weight.detach().double().clone())
            return super().loss(draw)

    plain = make_policy()
    policy = Watched(plain.spec, plain.normalizer)
    result = run(tmp_path, policy)
    history.append(policy.net[0].weight.detach().double().clone())
    average = history[0]
    for step, weights in enumerate(history[1:]):
        decay = min(0.9999, 1 - (1 + step) ** -0.75)
        average = decay * average + (1 - decay) * weights
    torch.testing.assert_close(result.policy.get_parameter("net.0.weight").double(), average, rtol=1e-5, atol=1e-7)


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(PrismError, match=r"holds a run already: continue it with --resume"):
        run(tmp_path / "run")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text("{}")
    with pytest.raises(PrismError, match="data holds a dataset: choose another folder"):
        run(tmp_path / "data")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_failed_start_does_not_block_the_next_try(tmp_path: Path) -> None:
    class Broken(FakePolicy):
        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            raise PrismError("out of memory")

    plain = make_policy()
    with pytest.raises(PrismError, match="out of memory"):
        run(tmp_path / "run", Broken(plain.spec, plain.normalizer))
    assert (tmp_path / "run" / "log.jsonl").exists()
    assert run(tmp_path / "run").step == CONFIG.steps


def test_logs_may_be_plain_numbers(tmp_path: Path) -> None:
    class Plain(FakePolicy):
        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            return LossOutput(super().loss(draw).loss, {"luck": 0.25})  # type: ignore[dict-item]

    plain = make_policy()
    run(tmp_path / "run", Plain(plain.spec, plain.normalizer))
    assert read_log(tmp_path / "run")[-1]["luck"] == 0.25


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="does not exist, so there is nothing to resume"):
        run(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_resume_of_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "log.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    second = run(killed, resume=True)
    assert files_of(whole.checkpoint) == files_of(second.checkpoint)
    assert numbers(tmp_path / "whole") == numbers(killed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"learning_rate": 0.5}, r"learning_rate = 0.001 there, 0.5 now"), ({"steps": 5}, r"steps = 10 there, 5 now")],
)
def test_resume_with_another_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run(tmp_path, stopping_policy(2))
    with pytest.raises(PrismError, match=message):
        run(tmp_path, resume=True, **changes)
    assert run(tmp_path, resume=True, log_every=2, keep_last=3).step == 10  # these may change


def test_resume_with_another_policy_or_other_data_is_refused(tmp_path: Path) -> None:
    run(tmp_path, stopping_policy(2))
    with pytest.raises(PrismError, match="another policy"):
        run(tmp_path, make_policy(width=16), resume=True)
    windows, held_out = make_windows(seed=1)
    with pytest.raises(PrismError, match="other data"):
        train(make_policy(), windows, held_out, CONFIG, tmp_path, True, quiet())


def test_resume_passes_over_a_damaged_checkpoint_and_says_so(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    parts = tmp_path / "parts"
    run(parts, stopping_policy(8), checkpoint_every=3, val_every=0)
    assert [path.name for path in checkpoint.list_checkpoints(parts)][-2:] == ["step-00000006", "step-00000008"]
    newest = checkpoint.list_checkpoints(parts)[-1] / "training.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    windows, held_out = make_windows()
    console = quiet()
    config = dataclasses.replace(CONFIG, checkpoint_every=3, keep_last=1)
    result = train(make_policy(), windows, held_out, config, parts, True, console)
    assert "skipped a damaged checkpoint" in text_of(console)
    assert "resuming" in text_of(console)
    assert "step-00000006" in text_of(console)
    a, b = files_of(whole.checkpoint), files_of(result.checkpoint)
    assert {k: v for k, v in a.items() if k != "training"} == {k: v for k, v in b.items() if k != "training"}


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path, resume=True)
    assert again.step == 10
    assert again.checkpoint == first.checkpoint
    assert files_of(first.checkpoint) == files_of(again.checkpoint)


def test_ctrl_c_saves_too(tmp_path: Path) -> None:
    result = run(tmp_path, stopping_policy(4, signal.SIGINT))
    assert (result.step, result.stopped_by) == (4, "SIGINT")
    checkpoint.verify_checkpoint(result.checkpoint)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as before


@pytest.mark.parametrize("where", ["_Keeper._validate", "checkpoint.save_checkpoint"])
def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    real = trainer._Keeper._validate if where == "_Keeper._validate" else checkpoint.save_checkpoint

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(f"prism.training.trainer.{where}", interrupted)
    console = quiet()
    windows, held_out = make_windows()
    config = dataclasses.replace(CONFIG, val_every=0)
    result = train(make_policy(), windows, held_out, config, tmp_path, console=console)
    assert (result.step, result.stopped_by) == (10, "SIGTERM")
    assert "stopped by SIGTERM at step 10" in text_of(console)
    checkpoint.verify_checkpoint(result.checkpoint)


def test_a_signal_to_a_finished_run_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    real = trainer.Monitor

    def interrupted(*arguments: Any) -> trainer.Monitor:
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(trainer, "Monitor", interrupted)
    again = run(tmp_path, resume=True)
    assert (again.step, again.stopped_by) == (10, "SIGINT")


def test_one_bad_step_is_skipped_and_leaves_no_trace(tmp_path: Path) -> None:
    class OnceBad(FakePolicy):
        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            self.nan_from = 3 if self.calls == 3 else None
            return super().loss(draw)

    plain = make_policy()
    result = run(tmp_path, OnceBad(plain.spec, plain.normalizer))
    assert result.skipped_steps == 1
    assert result.step == 10
    assert all(bool(value.isfinite().all()) for value in result.policy.state_dict().values())
    assert read_log(tmp_path)[-1]["skipped_steps"] == 1


def test_ten_bad_steps_in_a_row_stop_the_run_and_dump_the_batch(tmp_path: Path) -> None:
    policy = make_policy()
    policy.nan_from = 3
    with pytest.raises(PrismError, match=r"10 steps in a row, from step 3 on.*bad-batch-step-00000003") as error:
        run(tmp_path, policy, steps=100, checkpoint_every=2)
    assert "\n" not in str(error.value)
    assert all(bool(value.isfinite().all()) for value in policy.state_dict().values())
    dump = safetensors.torch.load_file(tmp_path / "bad-batch-step-00000003.safetensors")
    order = BatchOrder(len(make_windows()[0]), 16, 0)
    expected = make_windows()[0].batch(order.indices(3))
    assert torch.equal(dump["actions"], expected.actions)
    assert torch.equal(dump["streams.proprio"], expected.observation.streams["proprio"])
    assert checkpoint.latest_checkpoint(tmp_path) is not None  # good ones are still there


def test_a_full_disk_under_the_log_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr("builtins.open", _open_log_on_a_full_disk)
    with pytest.raises(PrismError, match=r"log\.jsonl could not be written: the disk is full"):
        run(tmp_path)


def _open_log_on_a_full_disk(path: Any, *arguments: Any, **options: Any) -> Any:
    return io.open("/dev/full" if str(path).endswith("log.jsonl") else path, *arguments, **options)  # noqa: UP020


def test_two_trainers_cannot_share_a_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(PrismError, match="in use by another prism process"):
        run(tmp_path)
    assert run(tmp_path).step == 10


def test_time_budget_ends_the_run_and_the_cosine_with_it(tmp_path: Path) -> None:
    result = run(tmp_path, steps=0, minutes=0.03, log_every=5, warmup_steps=0, val_every=0)
    assert result.seconds >= 1.8
    rates = [record["learning_rate"] for record in read_log(tmp_path)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.3 * CONFIG.learning_rate  # a step may take long on a busy machine


def test_trains_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path)))
    thread.start()
    thread.join()
    assert results[0].step == 10


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_and_resumes(tmp_path: Path, precision: str) -> None:
    whole = run(tmp_path / "whole", precision=precision)
    run(tmp_path / "parts", stopping_policy(5), precision=precision)
    second = run(tmp_path / "parts", precision=precision, resume=True)
    assert files_of(whole.checkpoint) == files_of(second.checkpoint)
    scaler = checkpoint.load_training_state(whole.checkpoint).scaler
    assert bool(scaler) == (precision == "float16")


def test_a_process_that_gets_sigterm_exits_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tests.training_fakes import make_policy, make_windows
from prism.training.config import TrainConfig
from prism.training.trainer import train
config = TrainConfig(batch_size=16, minutes=2, log_every=1, val_every=0, threads=1)
result = train(make_policy(), *make_windows(), config, Path({str(tmp_path / "run")!r}))
print(result.stopped_by, result.step)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 60
    while process.poll() is None and not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    name, step = out.split()
    assert name == "SIGTERM"
    assert f"stopped by SIGTERM at step {step}" in err
    assert "continue with --resume" in err
    newest = checkpoint.latest_checkpoint(tmp_path / "run")
    assert newest is not None
    assert newest.name == f"step-{int(step):08d}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "train.batch_size = 0 is out of range: use 1 or more"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"steps": 0, "minutes": 0.0}, "no budget"),
        ({"minutes": float("inf")}, "minutes"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"precision": "float8"}, "precision"),
    ],
)
def test_config_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_config_survives_json() -> None:
    assert from_json(TrainConfig, json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


def test_schedule_warms_up_and_ends_at_zero() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(config, step, config.fraction(step, 0.0)) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[50] == pytest.approx(0.5)
    assert rates[100] == 0.0
    assert ema_decay(config, 0) == 0.0  # the average starts at the first weights, not at the initial ones
    assert ema_decay(config, 10**9) == config.ema_max_decay


def test_warm_up_is_at_most_a_tenth_of_the_budget() -> None:
    short = TrainConfig(steps=200, learning_rate=1.0)  # 100 steps of warm-up by default
    rates = [learning_rate(short, step, 0.0 if step == 0 else step / 200) for step in range(200)]
    cosine = [0.5 * (1 + math.cos(math.pi * step / 200)) for step in range(200)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[10] == pytest.approx(0.5 * cosine[10])
    assert rates[20:] == pytest.approx(cosine[20:])
    timed = TrainConfig(minutes=1.0, learning_rate=1.0)  # slow steps: only 30 of them in the minute
    assert learning_rate(timed, 3, timed.fraction(3, 6.0)) == pytest.approx(0.5 * (1 + math.cos(0.1 * math.pi)))
    for steps in (1000, 5000):  # longer budgets: as many steps as the setting says
        config = TrainConfig(steps=steps, learning_rate=1.0)
        for step in range(100):
            warmup = learning_rate(config, step, step / steps) / (0.5 * (1 + math.cos(math.pi * step / steps)))
            assert warmup == pytest.approx((step + 1) / 100)


def test_lengths_that_run_away_are_said_once(tmp_path: Path) -> None:
    """Of queries and keys of linear attention: at heads of 64 they went from 3 to 3,110, which only the loss showed."""
    console = quiet()
    with Monitor(tmp_path, TrainConfig(steps=1), 0, console) as monitor:
        for step, squared in ((1, 2.7), (2, 16.0), (3, 310.0)):
            logs = {"attention_q_squared": torch.tensor(squared), "attention_k_squared": torch.tensor(2.7)}
            for _ in range(2):
                monitor.record(StepOutput(0.1, 1.0, logs))
                monitor.write(step, 1.0, 1e-3, None, 0)
            assert text_of(console).count("estimates noise") == (step == 3), step
    assert "at step 3: |q|^2 + |k|^2 = 313, more than 30" in text_of(console)
    with Monitor(tmp_path, TrainConfig(steps=1), 0, console) as monitor:
        monitor.record(StepOutput(0.1, 1.0, {}))
        monitor.write(1, 1.0, 1e-3, None, 0)
    assert text_of(console).count("estimates noise") == 1


def test_a_budget_of_few_steps_is_said_with_what_would_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, _ = make_windows()
    console = quiet()
    train(make_policy(), windows, None, CONFIG, tmp_path / "steps", console=console)
    assert "this budget gives 10 steps" in text_of(console)
    assert "try --steps 500" in text_of(console)

    class SlowPolicy(FakePolicy):
        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            time.sleep(0.1)
            return super().loss(draw)

    plain = make_policy()
    console = quiet()
    config = dataclasses.replace(CONFIG, steps=0, minutes=0.05)
    train(SlowPolicy(plain.spec, plain.normalizer), windows, None, config, tmp_path / "minutes", console=console)
    assert re.search(r"gives about \d+ steps; fewer than 500 .* try --minutes \d+", text_of(console))

    now = [0.0]

    class SlowingPolicy(FakePolicy):
        """Its first steps promise thousands; the others take longer, as on a machine that gets busy."""

        def loss(self, draw: Draw, choice: None = None) -> LossOutput:
            now[0] += 0.001 if now[0] < 0.03 else 0.1
            return super().loss(draw)

    monkeypatch.setitem(trainer._CLOCKS, "wall", lambda: now[0])
    console = quiet()
    config = dataclasses.replace(CONFIG, steps=0, minutes=0.05)
    train(SlowingPolicy(plain.spec, plain.normalizer), windows, None, config, tmp_path / "slowing", console=console)
    assert re.search(r"this budget gave \d\d steps; fewer than 500", text_of(console))
    assert text_of(console).count("this budget") == 1
    monkeypatch.undo()
    console = quiet()
    train(make_policy(), windows, None, dataclasses.replace(CONFIG, steps=500), tmp_path / "long", console=console)
    assert "this budget" not in text_of(console)


def test_decay_is_for_maps_only() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.zeros(4, 8))
            self.linear = nn.Linear(8, 8)
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.LayerNorm(8)
            self.table = nn.Embedding(5, 8)
            self.tied = self.linear

    net = Net()
    decayed, plain = parameter_groups(net, 0.1)
    assert {id(p) for p in decayed["params"]} == {id(net.linear.weight), id(net.conv.weight)}  # type: ignore[attr-defined]
    count = len(decayed["params"]) + len(plain["params"])  # type: ignore[arg-type]
    assert count == len(list(net.parameters()))
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_seeds_of_different_steps_differ_also_in_the_half_that_pytorch_uses() -> None:
    keys = [(seed, stream, step) for seed in range(3) for stream in (1, 2) for step in range(500)]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > len(keys) - 5  # the CPU generator takes 32 bits
    assert all(0 <= seed < 2**64 for seed in seeds)
