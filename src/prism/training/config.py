"""Every setting of the training loop, checked when it is made, and the two schedules that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from prism.errors import PrismError, check_choices, check_numbers
from prism.io import jsonconfig
from prism.training.faults import RobustConfig

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Clock = Literal["wall", "cpu"]

# These do not enter the mathematics of the run, so a resumed run may change them.
FREE_ON_RESUME = frozenset(
    {
        *("workers", "threads", "log_every", "checkpoint_every", "checkpoint_minutes", "keep_last", "val_every"),
        *("accumulate", "wandb"),
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """Budget, optimiser and housekeeping of one run.

    `batch_size` is the global batch, whatever it is spread over: with W ranks each computes batch_size / W rows (one
    more or less where that is no whole number), in `accumulate` parts. Neither changes the mathematics.

    A run ends after `steps` steps or `minutes` minutes, whichever comes first; 0 means no such limit. The cosine
    follows the budget: the fraction done is max(step / steps, seconds / (60 minutes)). With a step budget alone
    a run is reproduced bit for bit, also through a resume; with a time budget the learning rate depends on the
    clock, so no two runs are equal to the last bit.

    `clock` says which time `minutes` means. "cpu" counts the seconds that the process computed, the sum of its
    threads (on several ranks: rank 0's): runs that share a busy machine, or are paused, then still get equal
    amounts of computing. With one thread on an idle core it is the wall clock.
    """

    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 100  # at most a tenth of the budget
    steps: int = 0
    minutes: float = 0.0
    grad_clip: float = 1.0  # largest global norm of the gradient; 0: no clipping
    ema_power: float = 0.75  # decay at step t is min(ema_max_decay, 1 - (1 + t)^-power); 0: plain weights
    ema_max_decay: float = 0.9999
    seed: int = 0
    precision: Precision = "auto"  # auto: half precision on a GPU, float32 on a CPU
    val_fraction: float = 0.05  # of the episodes, split off by the caller with prism.data
    val_every: int = 500  # steps; 0: only when a checkpoint is due
    val_batches: int = 8  # batches of held-out windows, the same ones every time
    checkpoint_every: int = 0  # steps; 0: by the clock alone
    checkpoint_minutes: float = 5.0  # 0: by steps alone. The last step is always saved
    keep_last: int = 2  # newest checkpoints kept; the one with the lowest validation loss is kept as well
    max_skipped_steps: int = 10  # consecutive steps with a loss or gradient that is not finite, before giving up
    log_every: int = 50
    workers: int = 0  # processes that read pixels ahead; 0: a thread does (vectors are in memory anyway)
    threads: int = 0  # of PyTorch's arithmetic; 0: leave as it is
    accumulate: int = 1  # parts that a batch is computed in, one by one
    clock: Clock = "wall"  # what `minutes` counts
    robust: RobustConfig = field(default_factory=RobustConfig)  # faults of sensors, shown in training
    # project at Weights & Biases (extra `wandb`); offline unless WANDB_MODE is set
    wandb: str = ""

    def __post_init__(self) -> None:
        check_choices(self, "train")
        numbers = {
            "[1, inf)": "batch_size val_batches keep_last max_skipped_steps log_every accumulate",
            "[0, inf)": "weight_decay warmup_steps steps minutes grad_clip ema_power seed val_every "
            "checkpoint_every checkpoint_minutes workers threads",
            "(0, inf)": "learning_rate",
            "[0, 1)": "ema_max_decay val_fraction",
        }
        check_numbers(self, "train", numbers)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise PrismError(f"train.betas = {self.betas} is out of range: use two values in [0, 1)")
        if self.steps == 0 and self.minutes == 0:
            raise PrismError("training config: no budget; set steps or minutes (--steps, --minutes)")

    def fraction(self, step: int, seconds: float) -> float:
        """How much of the budget is used, in [0, 1]."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def to_json(self) -> dict[str, Any]:
        return jsonconfig.to_json(self)


def learning_rate(config: TrainConfig, step: int, fraction: float) -> float:
    """eta = eta_0 warm-up (1 + cos(pi fraction)) / 2, where fraction is of the whole budget.

    The warm-up is linear. It takes `warmup_steps` steps, and a tenth of the budget where that is less.
    """
    warmup = min(1.0, max((step + 1) / config.warmup_steps, 10 * fraction)) if config.warmup_steps else 1.0
    return config.learning_rate * warmup * 0.5 * (1.0 + math.cos(math.pi * fraction))


def ema_decay(config: TrainConfig, step: int) -> float:
    """min(max_decay, 1 - (1 + t)^-power): the average covers about the last t^power steps, so it warms up by itself."""
    return min(config.ema_max_decay, 1.0 - math.pow(1.0 + step, -config.ema_power))
