"""A small comparison, and trials of it that are finished without having been run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.experiments.comparison import CompareConfig, Contestant, folder_of
from prism.experiments.trial import RESULT, EvaluationPlan, TrialId

QUIET = Console(quiet=True)
PRISM, MSE = Contestant("prism", "prism"), Contestant("mse", "mse")


def config(*contestants: Contestant, **changes: Any) -> CompareConfig:
    plan = EvaluationPlan(episodes=3, curve=(0.5,), curve_episodes=2)
    options: dict[str, Any] = {
        "settings": ("demonstrations.mirror=false",),
        "seeds": (0, 1),
        "steps": 4,
        "evaluation": plan,
        **changes,
    }
    return CompareConfig(("pusht",), contestants or (PRISM, MSE), **options)


def fake_result(id: TrialId, scores: list[float], latency: float = 5.0) -> dict[str, Any]:
    rows = [
        {"seed": 100_000 + i, "score": s, "success": s > 0.9, "jerk": 0.1, "mode_switches": 1}
        for i, s in enumerate(scores)
    ]
    mean = sum(scores) / len(scores)
    evaluation = {"score": mean, "success": mean > 0.9, "latency_ms": {"p50": latency, "p99": 2 * latency}}
    curve = [
        {"fraction": f, "seconds": 60 * f, "step": 4, "score": mean * f, "success": 0.0, "episodes": 2}
        for f in (0.5, 1.0)
    ]
    return {
        **{"method": id.contestant, "seed": id.seed, "steps": 4, "train_seconds": 60.0, "parameters": 7},
        **{"evaluation": evaluation, "per_episode": rows, "curve": curve},
        **{"controller": {"candidates": 8, "exec_horizon": 4}, "info": {"commit": "abc"}},
    }


def finish(out: Path, id: TrialId, scores: list[float], **options: Any) -> None:
    folder = folder_of(out, id)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(fake_result(id, scores, **options)))
