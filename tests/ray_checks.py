"""What Ray must give, run in a process of its own (Ray leaves resources behind that pytest counts as leaks).

python -m tests.ray_checks FOLDER [CHECK ...]      prints the names of the checks that held; default: all
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from prism.controller import Controller, ControllerConfig
from prism.errors import PrismError
from prism.evaluation.play import TEST_SEED, evaluate, run_episode
from prism.evaluation.ray_workers import RayPool, cpus
from prism.evaluation.workers import LostJobsError
from prism.experiments.comparison import CompareConfig, Contestant, folder_of, prepare
from prism.experiments.trial import RESULT, TrialId
from prism.experiments.trials import Trials
from tests import worker_fakes
from tests.evaluation_fakes import make_point_env, make_point_policy


def pool(folder: Path, deaths: int, how: str, retries: int = 2) -> RayPool[int, tuple[int, int]]:
    folder.mkdir()
    return RayPool(functools.partial(worker_fakes.setup, folder, deaths, how), 1, retries)


def check_episodes_are_the_same_bit_for_bit(folder: Path) -> None:
    assert cpus() == 2
    config = ControllerConfig(exec_horizon=4)
    env, controller = make_point_env(), Controller(make_point_policy(), config)
    local = [run_episode(env, controller, TEST_SEED + i) for i in range(3)]
    far = evaluate(
        make_point_policy, "point", 3, workers=1, ray=True, controller=config, env=make_point_env, progress=False
    )
    assert [e.seed for e in far.episodes] == [e.seed for e in local]
    for one, other in zip(local, far.episodes, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.states, other.states)
        assert (one.score, one.success, one.jerk) == (other.score, other.success, other.jerk)
    assert far.crashes == ()


def check_a_lost_worker_is_replaced_and_its_job_done_again(folder: Path) -> None:
    with pool(folder / "kill", 1, "kill") as workers:
        assert [square for square, _ in workers.run([1, 2, 3])] == [1, 4, 9]
    assert len(workers.crashes) == 1
    assert workers.crashes[0].startswith("2: ")


def check_a_job_that_always_dies_is_given_up_alone(folder: Path) -> None:
    with pool(folder / "exit", 9, "exit", retries=0) as workers:
        error = raised(LostJobsError, lambda: workers.run([1, 2, 3]))
    assert "died 1 times at 2" in str(error)
    assert {index: value[0] for index, value in error.results.items()} == {0: 1, 2: 9}


def check_a_refusal_stops_all(folder: Path) -> None:
    with pool(folder / "refuse", 9, "refuse") as workers:
        assert str(raised(PrismError, lambda: workers.run([2]))) == "job 2 is not for us"


def check_cells_run_as_tasks(folder: Path) -> None:
    """One that is done already (its process says so at once), one whose folder the node cannot see."""
    config = CompareConfig(("pusht",), (Contestant("prism", "prism"),), seeds=(0,), steps=1)
    (here,) = prepare(folder, config, Console(quiet=True))
    (folder_of(folder, here) / RESULT).write_text(json.dumps({}))
    gone = TrialId("pusht", "elsewhere", 0)
    done: list[str] = []
    failed = Trials(folder, Console(quiet=True)).run([here.name, gone.name], 0, done.append, ray=True)
    assert done == [here.name]
    assert "all nodes share" in failed[gone.name]


def raised(kind: type[Any], call: Any) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for name, check in list(globals().items()):
        if name.startswith("check_") and (name in sys.argv[2:] or not sys.argv[2:]):
            place = Path(sys.argv[1]) / name
            place.mkdir()
            check(place)
            print(name, flush=True)
    ray.shutdown()
