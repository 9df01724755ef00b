"""From the folders of the cells to one table: what is done, what is missing, means over stated numbers of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.io.jsonconfig import to_json
from prism.rollout import metrics
from prism.rollout.results import run_info
from prism.rollout.statistics import Difference, FloatArray, interval, paired, success_interval
from prism.runs.comparison.grid import REMEDY, RESULT, CellId, CompareConfig, cell_ids, state_of
from prism.training import files

Cell = Mapping[str, Any]  # a result.json


@dataclass(frozen=True)
class Row:
    """One contestant on one recipe, over the seeds that are done."""

    recipe: str
    contestant: str
    method: str
    seeds: tuple[int, ...]  # done
    of: int  # asked for
    score: float
    score_ci: tuple[float, float]
    success: float
    success_ci: tuple[float, float]
    difference: Difference | None  # score against the reference, on common seeds; None for itself or without any
    jerk: float
    latency_p50_ms: float  # median over seeds of the median replan, in rollouts
    latency_p99_ms: float
    steps: float  # mean
    train_seconds: float
    parameters: int
    candidates: int
    exec_horizon: int
    curve: tuple[dict[str, float], ...]  # means over the seeds: seconds, score, success

    @property
    def complete(self) -> bool:
        return len(self.seeds) == self.of


@dataclass(frozen=True)
class Missing:
    cell: CellId
    reason: str


@dataclass(frozen=True)
class Comparison:
    config: CompareConfig
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...]
    cells: Mapping[CellId, Cell]
    info: Mapping[str, Any]

    @property
    def commits(self) -> list[str]:
        """Of the code that trained the cells, as their last process loaded it."""
        return sorted({str((c.get("trained_by") or c["info"]).get("commit", "unknown")) for c in self.cells.values()})

    def to_json(self) -> dict[str, Any]:
        """comparison.json. scores.<contestant> has one number a seed, null where the cell is missing; with several
        recipes the mean over them, null where one of them is missing."""
        config = self.config
        names = [contestant.name for contestant in config.contestants]
        return {
            "scores": {name: self._by_seed(name, "score") for name in names},
            "success": {name: self._by_seed(name, "success") for name in names},
            "seeds": list(config.seeds),
            "reference": config.reference,
            "test": "paired bootstrap of score differences, training seeds and episodes drawn crossed; common seeds",
            "table": [_row_json(row) for row in self.rows],
            "missing": [{**asdict(one.cell), "reason": one.reason} for one in self.missing],
            "budget": {"minutes": config.minutes, "steps": config.steps, "clock": config.clock},
            "evaluation": to_json(config.evaluation),
            "settings": list(config.settings),
            "contestants": [to_json(contestant) for contestant in config.contestants],
            "commits": self.commits,
            **self.info,
        }

    def _by_seed(self, name: str, key: str) -> list[float | None]:
        values: list[float | None] = []
        for seed in self.config.seeds:
            found = [self.cells.get(CellId(recipe, name, seed)) for recipe in self.config.recipes]
            done = [cell for cell in found if cell is not None]
            whole = len(done) == len(found)
            values.append(metrics.mean([float(cell["evaluation"][key]) for cell in done]) if whole else None)
        return values


def summarise(out: Path, config: CompareConfig, failed: Mapping[CellId, str] | None = None) -> Comparison:
    """Read what is there. `failed`: reasons that could not be written down (a full disk)."""
    cells: dict[CellId, Cell] = {}
    missing = []
    for id in cell_ids(config):
        state, reason = state_of(id.folder(out))
        if state == "done":
            cells[id] = files.read_json(id.folder(out) / RESULT, REMEDY)
        else:
            missing.append(Missing(id, (failed or {}).get(id, reason)))
    rows = []
    for recipe in config.recipes:
        for contestant in config.contestants:
            mine = _of(cells, recipe, contestant.name)
            if mine:
                reference = _of(cells, recipe, config.reference)
                rows.append(_row(config, recipe, contestant.name, mine, reference))
    return Comparison(config, tuple(rows), tuple(missing), cells, run_info(min(config.seeds)))


def _of(cells: Mapping[CellId, Cell], recipe: str, name: str) -> dict[int, Cell]:
    """By seed."""
    return {id.seed: cell for id, cell in cells.items() if (id.recipe, id.contestant) == (recipe, name)}


def difference(comparison: Comparison, one: str, other: str) -> Difference | None:
    """Score of one contestant minus another's on the first recipe and the seeds both have; None without any."""
    recipe = comparison.config.recipes[0]
    mine, theirs = (_of(comparison.cells, recipe, name) for name in (one, other))
    common = sorted(mine.keys() & theirs.keys())
    return paired(table(mine, common, "score"), table(theirs, common, "score")) if common else None


def _row(
    config: CompareConfig, recipe: str, name: str, cells: Mapping[int, Cell], reference: Mapping[int, Cell]
) -> Row:
    seeds = sorted(cells)
    score, success = table(cells, seeds, "score"), table(cells, seeds, "success")
    common = [seed for seed in seeds if seed in reference]
    difference = None
    if name != config.reference and common:
        difference = paired(table(cells, common, "score"), table(reference, common, "score"))
    latency = [cells[seed]["evaluation"]["latency_ms"] for seed in seeds]
    first = cells[seeds[0]]
    return Row(
        recipe=recipe,
        contestant=name,
        method=str(first["method"]),
        seeds=tuple(seeds),
        of=len(config.seeds),
        score=float(score.mean()),
        score_ci=interval(score),
        success=float(success.mean()),
        success_ci=success_interval(success),
        difference=difference,
        jerk=float(table(cells, seeds, "jerk").mean()),
        latency_p50_ms=float(np.median([one["p50"] for one in latency])),
        latency_p99_ms=float(np.median([one["p99"] for one in latency])),
        steps=metrics.mean([float(cells[seed]["steps"]) for seed in seeds]),
        train_seconds=metrics.mean([float(cells[seed]["train_seconds"]) for seed in seeds]),
        parameters=int(first["parameters"]),
        candidates=int(first["controller"]["candidates"]),
        exec_horizon=int(first["controller"]["exec_horizon"]),
        curve=_mean_curve([cells[seed]["curve"] for seed in seeds]),
    )


def table(cells: Mapping[int, Cell], seeds: Sequence[int], key: str) -> FloatArray:
    """(seeds, episodes) values; every cell met the same episodes in the same order (grid.EvaluationPlan)."""
    return np.array([[float(episode[key]) for episode in cells[seed]["per_episode"]] for seed in seeds])


def _mean_curve(curves: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, float], ...]:
    keys = ("fraction", "seconds", "step", "score", "success")
    stages = zip(*curves, strict=True)  # every cell looked at the same fractions
    return tuple({key: metrics.mean([float(point[key]) for point in points]) for key in keys} for points in stages)


def _row_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "n": len(row.seeds)}
