"""Ray: the same results as local processes, and the loss of a worker is no loss (tests/ray_checks.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.errors import PrismError
from prism.evaluation import ray_workers
from prism.evaluation.ray_workers import RayPool, SentPolicy
from prism.evaluation.workers import LostJobsError
from prism.methods import presets
from prism.training.checkpoint import TrainingState, save_checkpoint
from tests.evaluation_fakes import SENSORS

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")


def run_checks(module: str, folder: Path, *names: str) -> list[str]:
    """The checks that held, by name; tests/ray_checks.py says why they have a process of their own."""
    words = [sys.executable, "-m", module, str(folder), *names]
    # A busy machine starts Ray slowly, and its workers, whose niceness is 15, hardly at all.
    patience = {**os.environ, "RAY_raylet_start_wait_time_s": "200", "RAY_worker_niceness": "0"}
    home = Path(__file__).parent.parent
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=home, env=patience)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("check_")]


@needs_ray
def test_on_a_local_cluster(tmp_path: Path) -> None:
    names = ["check_episodes_are_the_same_bit_for_bit", "check_a_lost_worker_is_replaced_and_its_job_done_again"]
    assert run_checks("tests.ray_checks", tmp_path, *names) == names


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("tests.ray_checks", 5), ("tests.ray_node_loss", 3)])
def test_a_cluster_in_trouble(tmp_path: Path, module: str, count: int) -> None:
    """Workers that die, refusals, trials as tasks; an evaluation and a comparison that lose a node in the middle."""
    assert len(run_checks(module, tmp_path)) == count


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrismError, match=r"pip install 'prism-policy\[ray\]'"):
        ray_workers.connect()


def test_a_policy_is_sent_whole_and_verified(tmp_path: Path) -> None:
    policy = presets.build_policy(presets.tiny().spec(SENSORS, 2, 10.0), seed=3)
    state = TrainingState(
        step=1,
        seconds=1.0,
        train_config={},
        data="",
        val_loss=None,
        best_val_loss=None,
        skipped=0,
        skipped_total=0,
        scaler={},
        weights={},
        optimizer={},
    )
    save_checkpoint(tmp_path / "run", policy.spec, policy.state_dict(), state)
    sent = SentPolicy.read(tmp_path / "run")
    loaded = sent().state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in policy.state_dict().items())
    sent.files["model.safetensors"] = sent.files["model.safetensors"][:-1] + b"x"
    with pytest.raises(PrismError, match=r"model\.safetensors"):
        sent()


class FakeRay:
    """As much of Ray as RayPool uses: nodes with one processor each; `doomed` goes with its first job."""

    class exceptions:  # noqa: N801 - as Ray spells it
        class RayError(Exception): ...

        class NodeDiedError(RayError): ...

        class ActorUnavailableError(RayError): ...

    def __init__(self, nodes: list[str], doomed: str = "") -> None:
        self.alive, self.free, self.doomed = set(nodes), list(nodes), doomed
        self.known = nodes

    def put(self, value: object) -> object:
        return value

    def remote(self, kind: object) -> FakeRay:
        return self

    def options(self, **options: object) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda setup: FakeActor(self, setup))

    def wait(self, references: list[FakeCall], num_returns: int, timeout: float) -> tuple[list[FakeCall], list[Any]]:
        return [reference for reference in references if reference.actor.placed()][:1], []

    def get(self, reference: FakeCall) -> Any:
        actor = reference.actor
        if reference.job is None and actor.node in self.alive:
            return actor.node
        if actor.node == self.doomed:
            self.alive.discard(self.doomed)
        if actor.node not in self.alive:
            raise self.exceptions.RayError("the actor died")
        return "done", actor.setup()(reference.job)

    def kill(self, actor: FakeActor) -> None:
        if actor.node in self.alive:
            self.free.append(actor.node)
        actor.node = "none"

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": name in self.alive} for name in self.known]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(len(self.alive))}


class FakeActor:
    def __init__(self, ray: FakeRay, setup: Any) -> None:
        self.ray, self.setup, self.node = ray, setup, ""
        self.where = SimpleNamespace(remote=lambda: FakeCall(self, None))
        self.do = SimpleNamespace(remote=lambda job: FakeCall(self, job))

    def placed(self) -> bool:
        if not self.node and (free := [name for name in self.ray.free if name in self.ray.alive]):
            self.node = free[0]
            self.ray.free.remove(self.node)
        return bool(self.node)


class FakeCall:
    def __init__(self, actor: FakeActor, job: int | None) -> None:
        self.actor, self.job = actor, job


def squares() -> Any:
    return lambda job: job * job


def test_jobs_of_a_lost_node_go_to_the_workers_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(["b", "a"], doomed="b")
    monkeypatch.setattr(ray_workers, "connect", lambda: ray)
    with RayPool[int, int](squares, 4, retries=0) as pool:  # more workers than processors; no crash is forgiven
        assert pool.run(range(9)) == [n * n for n in range(9)]
        assert pool.run(range(3)) == [0, 1, 4]
    assert pool.crashes == ["0: its node was lost, or does not answer"]
    assert ray.free == ["a"]


def test_a_cluster_without_processors_is_given_up_with_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(["b"], doomed="b")
    monkeypatch.setattr(ray_workers, "connect", lambda: ray)
    monkeypatch.setattr(ray_workers, "PATIENCE", 0.0)
    with RayPool[int, int](squares, 2) as pool, pytest.raises(LostJobsError, match="no processor for") as caught:
        pool.run(range(3))
    assert (caught.value.results, set(caught.value.lost)) == ({}, {0, 1, 2})
