"""Human Push-T through LeRobot's own commands: convert, lerobot-train --policy.type=prism, lerobot-eval.

Try:
    make lerobot                             once: LeRobot's environment, .venv-lerobot
    PRISM_DATA=FOLDER python -m research lerobot-pusht --json research/results/lerobot_pusht.json

`score` is the mean over 50 test episodes (seeds 100000 ..) of the best coverage / 0.95, at most 1; `success` the share
of episodes with coverage above 0.95. `cpu_minutes` is what training took of one core, all of LeRobot's own included;
training has one thread and reads data in the same process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from rich.console import Console

from prism.cli.style import option
from prism.data.convert import convert
from prism.errors import PrismError
from prism.evaluation.metrics import wilson_interval
from prism.evaluation.results import run_info
from prism.experiments.demonstrations import open_demonstrations
from prism.experiments.recipes import recipe
from prism.sims.environment import TEST_SEED
from research.report import Written


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    environment: Annotated[Path, option("FOLDER")] = Path(".venv-lerobot")
    """The virtual environment of `make lerobot`."""
    steps: int = 8000
    """Steps of training."""
    episodes: int = 50
    """Test episodes."""
    seed: int = 0
    """Of the training."""
    work: Annotated[Path | None, option("FOLDER")] = None
    """Where dataset, checkpoints and videos go; default: a folder that is removed afterwards."""


def run(config: Config, console: Console) -> dict[str, Any]:
    if not (config.environment / "bin/lerobot-train").is_file():
        raise PrismError(f"{config.environment}: LeRobot is not installed there; run `make lerobot` first")
    with TemporaryDirectory() as scratch:
        return _run(config, config.work or Path(scratch), console)


def _run(config: Config, work: Path, console: Console) -> dict[str, Any]:
    experiment = recipe("pusht-human")
    _, source, _ = open_demonstrations(experiment.demonstrations, experiment.task, console)
    converted = convert(source, work / "dataset", "lerobot")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    train = [
        "--policy.type=prism", "--policy.device=cpu", "--policy.push_to_hub=false",
        "--policy.anchor=observation.state", "--dataset.repo_id=prism/pusht-human",
        f"--dataset.root={work / 'dataset'}", f"--steps={config.steps}", "--batch_size=8", "--num_workers=0",
        f"--save_freq={config.steps}", f"--seed={config.seed}", f"--output_dir={work / 'trained'}",
    ]  # fmt: skip
    _lerobot(config, console, "lerobot-train", train)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    evaluate = [
        f"--policy.path={work / 'trained/checkpoints/last/pretrained_model'}", "--policy.device=cpu",
        "--env.type=prism", "--env.task=pusht", f"--seed={TEST_SEED}", f"--eval.n_episodes={config.episodes}",
        "--eval.batch_size=10", "--eval.use_async_envs=false", f"--output_dir={work / 'played'}",
    ]  # fmt: skip
    _lerobot(config, console, "lerobot-eval", evaluate)
    played = json.loads((work / "played/eval_info.json").read_text())["per_task"][0]["metrics"]
    wins = sum(played["successes"])
    shown = [[word.replace(str(work), "WORK") for word in words] for words in (train, evaluate)]
    return {
        "score": sum(played["max_rewards"]) / len(played["max_rewards"]),
        "success": wins / len(played["successes"]),
        "success_ci": list(wilson_interval(wins, len(played["successes"]))),
        "episodes": config.episodes,
        "first_seed": TEST_SEED,
        "scores": played["max_rewards"],
        "cpu_minutes": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60,
        "steps": config.steps,
        "demonstrations": converted.episodes,
        "commands": {"train": " ".join(shown[0]), "eval": " ".join(shown[1])},
        **run_info(config.seed),
    }


def _lerobot(config: Config, console: Console, command: str, words: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with console.status(command):
        done = subprocess.run(
            [str(config.environment / "bin" / command), *words], env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise PrismError(f"{command} failed: {' '.join(done.stderr[-400:].split())}")


def show(result: dict[str, Any], console: Console) -> None:
    low, high = result["success_ci"]
    console.print(
        f"score {result['score']:.3f}, success {result['success']:.2f} ({low:.2f} to {high:.2f}) over "
        f"{result['episodes']} episodes; trained {result['cpu_minutes']:.1f} minutes of one core"
    )
