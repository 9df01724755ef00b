"""`prism bench allocator`: what prism.io.allocator brings to a training step on this machine.

The allocator is set once a process, on import, so each setting gets a process of its own; both stay alive and take
turns, one training step (loss, backward, AdamW) at a time. speedup is the median over rounds of
time(system) / time(default). On one thread (the default) that is CPU time, page faults included, which a busy machine
does not disturb and which is the wall clock of an idle one; speedup_wall is beside it. The gain is in the large blocks
(glibc keeps those below 32 MiB by itself), so the same is measured at the `base` preset with a large batch, as "base".
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prism.bench.output import Output
from prism.bench.timing import Times, paired_ratio, ratio_interval
from prism.errors import PrismError
from prism.rollout.results import run_info

SETTINGS = {"system": {"PRISM_ALLOCATOR": "system"}, "default": {}}


@dataclass(frozen=True)
class AllocatorBenchConfig:
    json: Path | None = None  # write the figures to this file
    overwrite: bool = False
    preset: str = "tiny"
    batch: int = 64
    rounds: int = 60
    warmup: int = 5
    base_batch: int = 64  # the second measurement: the base preset at this batch
    base_rounds: int = 7  # 0: leave it out
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch, self.rounds, self.threads, self.base_batch) < 1 or min(self.warmup, self.base_rounds) < 0:
            raise PrismError("batch, rounds, threads, base-batch must be at least 1, warmup and base-rounds at least 0")


class Worker:
    """A process that runs one training step when asked and answers with its wall and CPU seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._ask: IO[str] = process.stdin
        self._answer: IO[str] = process.stdout

    def step(self) -> tuple[float, float]:
        try:
            self._ask.write("step\n")
            self._ask.flush()
            line = self._answer.readline()
        except OSError:
            line = ""
        if not line:
            status = self._process.wait()
            raise PrismError(f"the measuring process ended by itself (status {status}); its own message is above")
        wall, cpu = json.loads(line)
        return float(wall), float(cpu)


@contextmanager
def worker(config: AllocatorBenchConfig, changes: dict[str, str]) -> Iterator[Worker]:
    environment = {name: value for name, value in os.environ.items() if name != "PRISM_ALLOCATOR"} | changes
    settings = json.dumps({name: getattr(config, name) for name in ("preset", "batch", "threads", "seed")})
    process = subprocess.Popen(
        [sys.executable, "-m", "prism.bench.allocator", settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()  # closes the pipes and waits


def measure(config: AllocatorBenchConfig) -> dict[str, Any]:
    """One preset and batch, both settings in turn."""
    rng = np.random.default_rng(config.seed)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    with ExitStack() as stack, Progress(console=Console(stderr=True), transient=True) as progress:
        workers = {name: stack.enter_context(worker(config, changes)) for name, changes in SETTINGS.items()}
        label = f"training steps, {config.preset} preset, batch {config.batch}"
        bar = progress.add_task(label, total=config.warmup + 1 + config.rounds)
        for done in range(config.warmup + 1 + config.rounds):  # the first steps allocate and are not counted
            for i in rng.permutation(len(workers)):
                name = list(workers)[i]
                seconds = workers[name].step()
                if done > config.warmup:
                    samples[name].append(seconds)
            progress.advance(bar)
    times = {name: Times(*np.array(values).T) for name, values in samples.items()}
    clock = "cpu" if config.threads == 1 else "wall"
    ratio = (getattr(times["system"], clock), getattr(times["default"], clock))
    median = "cpu_median" if clock == "cpu" else "median"
    return {
        "clock": clock,
        "speedup": paired_ratio(*ratio),
        "speedup_interval": ratio_interval(*ratio, rng),
        "speedup_wall": paired_ratio(times["system"].wall, times["default"].wall),
        "ms_system": times["system"].summary()[median],
        "ms_default": times["default"].summary()[median],
        "step_ms": {name: value.summary() for name, value in times.items()},
        "settings": {name: getattr(config, name) for name in ("preset", "batch", "rounds", "warmup", "threads")},
    }


def run(config: AllocatorBenchConfig) -> dict[str, Any]:
    result = measure(config)
    if config.base_rounds:
        changes: dict[str, Any] = {"preset": "base", "batch": config.base_batch, "rounds": config.base_rounds}
        result["base"] = measure(dataclasses.replace(config, **changes, warmup=1))
    return {**result, **run_info(config.seed)}


def serve(settings: dict[str, Any]) -> None:
    """The measuring process: a step for every line on standard input."""
    import torch

    from prism.bench.train_step import TrainStepBenchConfig, chosen_loss, make_batch, make_policy
    from prism.methods.table import preset

    torch.set_num_threads(settings["threads"])
    candidates = preset(settings["preset"]).objective.candidates
    config = TrainStepBenchConfig(
        preset=settings["preset"], batch=settings["batch"], candidates=candidates, seed=settings["seed"]
    )
    policy = make_policy(config, soft=False)
    batch = make_batch(config, policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    for count, _ in enumerate(sys.stdin):
        cpu, wall = time.process_time(), time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(chosen_loss(policy, batch, seed=count))
        optimizer.step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


def show(result: dict[str, Any], console: Console) -> None:
    clock = result["clock"]
    table = Table(title=f"Training step, {clock} time, median")
    for column in ("preset", "batch", "C library, ms", "keeping memory, ms", "speed-up", "95 % interval"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for entry in (result, *([result["base"]] if "base" in result else [])):
        low, high = entry["speedup_interval"]
        table.add_row(
            entry["settings"]["preset"],
            str(entry["settings"]["batch"]),
            f"{entry['ms_system']:.1f}",
            f"{entry['ms_default']:.1f}",
            f"{entry['speedup']:.2f}x",
            f"{low:.2f} to {high:.2f}",
        )
    console.print(table)


def main(config: AllocatorBenchConfig) -> None:
    Output(config.json, overwrite=config.overwrite).carry_out(lambda _: run(config), show)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
