"""A node of a Ray cluster is lost in the middle, in a process of its own (as tests/ray_checks.py).

python -m tests.ray_node_loss FOLDER      several raylets on this machine, one of which is killed at a time
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console

from prism.controller import ControllerConfig
from prism.evaluation.play import evaluate
from prism.evaluation.ray_workers import RayPool
from prism.experiments.comparison import CompareConfig, Contestant, folder_of, prepare
from prism.experiments.trial import RESULT, EvaluationPlan
from prism.experiments.trial_process import run_trial
from prism.experiments.trials import Trials
from prism.sims.environment import StepResult
from prism.training.log import read_log
from tests import worker_fakes
from tests.evaluation_fakes import PointEnv, make_point_policy


class DoomedEnv(PointEnv):
    """On the doomed node: stays in the middle of an episode until the node is gone. Elsewhere: waits for that one."""

    def __init__(self, folder: Path, doomed: str) -> None:
        super().__init__()
        self._folder, self._doomed = folder, doomed

    def step(self, action: NDArray[np.float32]) -> StepResult:
        if self._steps == 3 and ray.is_initialized():
            if ray.get_runtime_context().get_node_id() == self._doomed:
                (self._folder / "here").touch()
                time.sleep(600)
            wait_for((self._folder / "here").exists)
        return super().step(action)


def wait_for(condition: Callable[[], bool], seconds: float = 800.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_when(cluster: Any, node: Any, condition: Callable[[], bool]) -> threading.Thread:
    """Kill the node, processes and all, as soon as the condition holds."""

    def work() -> None:
        wait_for(condition)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def check_an_evaluation_that_loses_a_node(cluster: Any, folder: Path) -> None:
    """Two workers; the node of one goes in the middle of an episode. One CPU is left: it does everything else."""
    node = cluster.add_node(num_cpus=1)
    env = functools.partial(DoomedEnv, folder, node.node_id)
    options: dict[str, Any] = {"controller": ControllerConfig(exec_horizon=4), "env": env, "progress": False}
    local = evaluate(make_point_policy, "point", 6, workers=1, **options)
    killer = kill_when(cluster, node, (folder / "here").exists)
    far = evaluate(make_point_policy, "point", 6, workers=2, ray=True, **options)
    killer.join()
    assert len(far.crashes) == 1, far.crashes
    assert "node was lost" in far.crashes[0]
    assert [e.seed for e in far.episodes] == [e.seed for e in local.episodes]
    for one, other in zip(local.episodes, far.episodes, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.states, other.states)
        assert (one.score, one.success) == (other.score, other.success)


def check_more_workers_than_processors(cluster: Any, folder: Path) -> None:
    """Workers that find no place must not sit on jobs."""
    folder.joinpath("deaths").mkdir()
    setup = functools.partial(worker_fakes.setup, folder / "deaths", 0, "")
    with RayPool[int, tuple[int, int]](setup, 4) as pool:
        assert [square for square, _ in pool.run(range(8))] == [n * n for n in range(8)]
        assert [square for square, _ in pool.run(range(3))] == [0, 1, 4]


def check_a_comparison_that_loses_a_node(cluster: Any, folder: Path) -> None:
    """Two trials on two nodes; one node goes in the middle of a training. That trial goes on, on the node that is left,
    and both end as they do in this process."""
    small = ("policy.encoder.mix_width=64", "policy.encoder.mix_blocks=1", "train.batch_size=8")
    config = CompareConfig(
        ("pusht",),
        (Contestant("prism", "prism"), Contestant("mse", "mse")),
        seeds=(0,),
        steps=300,  # long enough that both trials are still training when the node goes
        settings=(*small, "train.checkpoint_every=5", "train.log_every=1", "train.val_batches=1"),
        evaluation=EvaluationPlan(1, 100_000, (), 1),
    )
    quiet = Console(quiet=True)
    ids = prepare(folder / "local", config, quiet)
    for id in ids:
        run_trial(folder_of(folder / "local", id), quiet)
    node = cluster.add_node(num_cpus=1)
    assert prepare(folder / "far", config, quiet) == ids
    done: list[str] = []
    names = [id.name for id in ids]
    said = open(folder / "said", "w+")  # noqa: SIM115
    logs = [folder_of(folder / "far", id) for id in ids]
    killer = kill_when(cluster, node, lambda: all(len(read_log(log)) > 12 for log in logs))
    failed = Trials(folder / "far", Console(file=said, width=200)).run(names, 0, done.append, ray=True)
    killer.join()
    said.seek(0)
    assert "node was lost" in (text := said.read()), text
    assert (failed, sorted(done)) == ({}, sorted(names))
    for id in ids:
        here, far = (json.loads((folder_of(folder / where, id) / RESULT).read_text()) for where in ("local", "far"))
        for name in ("steps", "val_loss", "skipped_steps"):
            assert here[name] == far[name], name
        for one, other in zip(here["per_episode"], far["per_episode"], strict=True):
            assert {k: one[k] for k in ("seed", "score", "success", "steps", "jerk")} == {
                k: other[k] for k in ("seed", "score", "success", "steps", "jerk")
            }
        steps = [record["step"] for record in read_log(folder_of(folder / "far", id))]
        assert steps == list(range(1, 301))


if __name__ == "__main__":
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            place = Path(sys.argv[1]) / name
            place.mkdir()
            check(cluster, place)
            print(name, flush=True)
    ray.shutdown()
    cluster.shutdown()
