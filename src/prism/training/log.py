"""What a run tells: log.jsonl (one JSON object a line), TensorBoard, Weights & Biases where train.wandb names a
project, and a progress bar or plain lines.

Every metric of a line is the mean over the steps since the line before:

    step, seconds     steps done; time in the loop, over all sittings
    loss              training loss, raw weights
    val_loss          loss of the averaged weights on held-out windows; null when not measured at this step
    learning_rate     of the last step
    gradient_norm     before clipping
    steps_per_second  since the line before
    skipped_steps     in total: loss or gradient was not finite
    ...               the policy's own logs (prism.objective: rejection_rate, fallback_rate, threshold, ...)

An evaluation on the way (prism train --eval-every) is a line of its own: step, seconds, success, score.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from prism.errors import PrismError, need, reason
from prism.io import files
from prism.io.progress import short_bar
from prism.training.config import TrainConfig

INTACT = "The checkpoints are intact (--resume)"  # where something beside them cannot be written
_BAR_SECONDS = 0.5  # between updates of the bar
_LINE_SECONDS = 15.0  # between lines where there is no terminal
_LONG = 30.0  # of |q~|^2 + |k~|^2 in linear attention (docs/explanation/attention.md)
_SHOWN = (("rejection_rate", "rejected", "{:.0%}"), ("fallback_rate", "fallback", "{:.0%}"))


@dataclass(frozen=True)
class StepOutput:
    loss: float
    gradient_norm: float  # before clipping
    logs: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Silent:
    """What ranks other than 0 have in place of a Monitor: rank 0 speaks for all."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None: ...
    def say(self, message: str) -> None: ...
    def record(self, output: StepOutput) -> None: ...
    def write(self, *values: object) -> None: ...
    def show(self, *values: object, last: bool = False) -> None: ...


class Curves:
    """The log of a run. `step`: the step it continues from; None appends."""

    def __init__(self, run_dir: Path, config: TrainConfig, step: int | None = None) -> None:
        self._path = run_dir / "log.jsonl"
        resumed = step is not None and self._path.exists()
        if step is not None and resumed:
            _truncate_log(self._path, step)
        self._wandb = _open_wandb(run_dir, config) if config.wandb else None
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = step + 1 if step is not None and resumed else None
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def write(self, record: dict[str, float | int | None]) -> None:
        """One line: `step`, `seconds` and numbers; None for a missing number."""
        step = int(record["step"] or 0)
        numbers = {k: v for k, v in record.items() if v is not None and k not in ("step", "seconds")}
        with files.explain_write_errors(self._path, INTACT):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self, failed: bool = False) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        # Both write what they still hold: on a full disk that fails again, and must not hide the error on its way.
        for close in (self._file.close, self._board.close):
            with suppress(OSError) if failed else files.explain_write_errors(self._path, INTACT):
                close()


def _open_wandb(run_dir: Path, config: TrainConfig) -> Any:
    """The run at Weights & Biases, the same one after a resume. Offline, in RUN/wandb, unless WANDB_MODE is set."""
    wandb = need("wandb", "wandb", f"train.wandb={config.wandb}")
    known = run_dir / "wandb-id"
    if not known.is_file():
        files.replace_file(known, uuid.uuid4().hex[:8].encode())
    mode = os.environ.get("WANDB_MODE") or "offline"
    try:
        return wandb.init(
            project=config.wandb,
            name=run_dir.resolve().name,
            id=known.read_text(encoding="utf-8").strip(),
            dir=str(run_dir),
            config=config.to_json(),
            mode=mode,
            resume="allow",
        )
    except Exception as error:  # its own kinds: no key, no network, a project that may not be written to
        raise PrismError(f"train.wandb={config.wandb}: {reason(error)}; WANDB_MODE=offline needs no account") from None


class Monitor:
    """Collects the logs of each step without touching the device, and writes them when asked."""

    def __init__(
        self, run_dir: Path, config: TrainConfig, step: int, console: Console | None = None, title: str = "train"
    ) -> None:
        self.console = console or Console(stderr=True)
        self._config = config
        self._pending: list[StepOutput] = []
        self._last_write = (step, time.perf_counter())
        self._last_shown = 0.0
        self._text = ""
        self._val_loss: float | None = None
        self._told_of_lengths = False
        self._curves = Curves(run_dir, config, step)
        self._bar = short_bar(self.console, "{task.percentage:3.0f}% {task.fields[text]}")
        self._task = self._bar.add_task(title, total=1.0, text="")

    def __enter__(self) -> Monitor:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._bar.stop()
        self._curves.close(failed=kind is not None)

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def record(self, output: StepOutput) -> None:
        """Remember one step; nothing is copied from the device before `write`."""
        self._pending.append(output)

    def write(self, step: int, seconds: float, learning_rate: float, val_loss: float | None, skipped: int) -> None:
        """One line of log.jsonl with the means since the last one."""
        now = time.perf_counter()
        record: dict[str, float | int | None] = {"step": step, "seconds": round(seconds, 3)}
        means = _means(self._pending)
        record["loss"] = means.pop("loss", None)
        record["val_loss"] = val_loss
        record["learning_rate"] = learning_rate
        record |= means
        steps, since = step - self._last_write[0], now - self._last_write[1]
        record["steps_per_second"] = round(steps / since, 3) if steps and since > 0 else None
        record["skipped_steps"] = skipped
        self._curves.write(record)
        self._pending.clear()
        self._last_write = (step, now)
        self._val_loss = val_loss if val_loss is not None else self._val_loss
        self._text = _describe(record, self._val_loss)
        if not self._told_of_lengths and (warning := lengths_warning(record)):
            self._told_of_lengths = True
            self.say(warning)

    def show(self, step: int, seconds: float, last: bool = False) -> None:
        """Move the bar; where there is no terminal, print a line now and then."""
        now = time.perf_counter()
        terminal = not self._bar.disable
        if not last and now - self._last_shown < (_BAR_SECONDS if terminal else _LINE_SECONDS):
            return
        self._last_shown = now
        fraction = self._config.fraction(step, seconds)
        left = f"{_clock(seconds * (1 - fraction) / fraction)} left  " if 0 < fraction < 1 else ""
        text = f"{_clock(seconds)}  {left}step {step}  {self._text}"  # a narrow terminal cuts the end
        if terminal:
            self._bar.update(self._task, completed=fraction, text=text)
        else:
            self.say(f"{fraction:4.0%}  {text}")


def lengths_warning(record: Mapping[str, float | int | None]) -> str:
    """A line where queries and keys of linear attention have run away; otherwise nothing."""
    length = sum(record.get(f"attention_{side}_squared") or 0.0 for side in "qk")
    if length <= _LONG:
        return ""
    return (
        f"warning: linear attention estimates noise at step {record['step']}: |q|^2 + |k|^2 = {length:.0f}, more than "
        f"{_LONG:.0f}; use policy.generator.attention.kind=favor with length=1, or kind=softmax"
    )


def _means(pending: list[StepOutput]) -> dict[str, float | None]:
    """Mean of each metric over the pending steps; None where it is not finite (JSON has no NaN)."""
    if not pending:
        return {}
    values: dict[str, float] = {
        "loss": math.fsum(output.loss for output in pending) / len(pending),
        "gradient_norm": math.fsum(output.gradient_norm for output in pending) / len(pending),
    }
    names = sorted({name for output in pending for name in output.logs})
    for name in names:
        stacked = torch.stack([output.logs[name].detach().float() for output in pending if name in output.logs])
        values[name] = float(stacked.mean())
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _describe(record: dict[str, float | int | None], val_loss: float | None) -> str:
    parts = []
    if (loss := record["loss"]) is not None:
        parts.append(f"loss {loss:.4f}")
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}")
    parts += [f"{label} {form.format(value)}" for key, label, form in _SHOWN if (value := record.get(key)) is not None]
    if (threshold := record.get("threshold")) is not None:
        parts.append(f"threshold {threshold:.4f}")
    if (speed := record["steps_per_second"]) is not None:
        parts.append(f"{speed:.1f} steps/s")
    if skipped := record["skipped_steps"]:
        parts.append(f"{skipped} skipped")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl; a line cut short by a kill ends the reading."""
    path = run_dir / "log.jsonl"
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def _truncate_log(path: Path, step: int) -> None:
    """Forget what was logged after the checkpoint: the resumed run logs it again."""
    kept = [record for record in read_log(path.parent) if record.get("step", 0) <= step]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    with files.explain_write_errors(path, INTACT):
        files.replace_file(path, text.encode())
