"""The pool: order kept, the dead replaced, errors passed on, nobody left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prism.errors import PrismError
from prism.evaluation.workers import LostJobsError, WorkerPool
from tests.worker_fakes import hopeless, setup


def test_results_come_in_order_from_workers_that_stay(tmp_path: Path) -> None:
    with WorkerPool[int, tuple[int, int]](functools.partial(setup, tmp_path, 0, ""), 2) as pool:
        seen: list[int] = []
        first = pool.run([5, 4, 3, 2, 1], lambda result: seen.append(result[0]))
        second = pool.run([7])
    assert [value for value, _ in first] == [25, 16, 9, 4, 1]
    assert sorted(seen) == [1, 4, 9, 16, 25]
    assert second[0][0] == 49
    assert second[0][1] in {process for _, process in first}
    assert pool.crashes == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [("exit", "exit status 17"), ("kill", "SIGKILL"), ("raise", "ZeroDivisionError: division by a job")],
)
def test_a_dead_worker_is_replaced_and_reported(tmp_path: Path, how: str, reason: str) -> None:
    with WorkerPool[int, tuple[int, int]](functools.partial(setup, tmp_path, 2, how), 2) as pool:
        results = pool.run([0, 1, 2, 3])
    assert [value for value, _ in results] == [0, 1, 4, 9]
    assert len(pool.crashes) == 2
    assert all(line.startswith("2: ") and line.endswith(reason) for line in pool.crashes)


def test_a_job_that_always_kills_is_an_error(tmp_path: Path) -> None:
    with (
        WorkerPool[int, tuple[int, int]](functools.partial(setup, tmp_path, 99, "exit"), 1) as pool,
        pytest.raises(LostJobsError, match="3 times at 2") as error,
    ):
        pool.run([1, 2, 3])
    assert {index: value for index, (value, _) in error.value.results.items()} == {0: 1, 2: 9}
    assert list(error.value.lost) == [1]


def test_where_nothing_runs_not_everything_is_tried(tmp_path: Path) -> None:
    with (
        WorkerPool[int, None](functools.partial(hopeless, tmp_path), 1) as pool,
        pytest.raises(PrismError, match=r"3 times at 0: the process ended with exit status 3 \(and 1 more\)"),
    ):
        pool.run(list(range(50)))
    assert len(list(tmp_path.iterdir())) == 6


def test_a_refusal_is_passed_on_at_once(tmp_path: Path) -> None:
    with (
        WorkerPool[int, tuple[int, int]](functools.partial(setup, tmp_path, 99, "refuse"), 1) as pool,
        pytest.raises(PrismError, match=r"^job 2 is not for us$"),
    ):
        pool.run([1, 2])
    assert len(list(tmp_path.iterdir())) == 1


INTERRUPTED = """
import functools, sys
from pathlib import Path
from prism.evaluation.workers import LostJobsError, WorkerPool
from tests.worker_fakes import forever
if __name__ == "__main__":
    try:
        with WorkerPool(functools.partial(forever, Path(sys.argv[1])), 2) as pool:
            pool.run([1, 2, 3])
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_leaves_no_process_and_no_traceback(tmp_path: Path, repository: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    folder = tmp_path / "processes"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        children = [int(path.name) for path in folder.iterdir()]
        assert len(children) == 2
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, errors = parent.communicate(timeout=30)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
    assert parent.returncode == 130
    assert errors == b""
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
