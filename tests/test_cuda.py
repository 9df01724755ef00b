"""On a GPU: train, resume, half precision, sample, compile, serve, and the latency bench. Skipped where there is none.

python -m pytest -m cuda
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import prism
from prism import cli
from prism.rows import Random
from tests.policy_fakes import ACTION_DIM, random_batch, save_run, small_policy
from tests.server_fakes import OpenPi, see, serving

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
]
TINY = ["train.batch_size=8", "train.val_fraction=0"]


def train(out: Path, steps: int, *settings: str, resume: bool = False) -> prism.Run:
    return prism.train(
        "pusht",
        steps=steps,
        out=out,
        demonstrations=4,
        progress=False,
        device="cuda",
        resume=resume,
        set=[*TINY, *settings],
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "auto"])
def test_trains_and_acts(tmp_path: Path, precision: str) -> None:
    if precision == "bfloat16" and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    run = train(tmp_path / "run", 10, f"train.precision={precision}")
    controller = run.controller("cuda")
    controller.reset(seed=0)
    observation = {sensor.name: np.full(sensor.shape, 100.0, np.float32) for sensor in run.spec.sensors}
    assert np.isfinite(controller.act(observation)).all()


def test_a_resumed_training_ends_where_one_in_one_go_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 10, "train.precision=float32")
    train(tmp_path / "parts", 5, "train.precision=float32")
    parts = train(tmp_path / "parts", 10, resume=True)
    for one, other in zip(whole.policy().parameters(), parts.policy().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_samples_as_on_the_cpu() -> None:
    policy, observation = small_policy().eval(), random_batch(2).observation
    there = small_policy().eval().to("cuda")
    cpu = policy.sample(observation, 4, Random(0))
    gpu = there.sample(observation.to(torch.device("cuda")), 4, Random(0))
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-3, atol=1e-3)


def test_compiled() -> None:
    policy, observation = small_policy().eval().to("cuda"), random_batch(2).observation.to(torch.device("cuda"))
    with torch.inference_mode():
        context = policy.encoder(observation)
        torch.testing.assert_close(torch.compile(policy.encoder)(observation), context, rtol=1e-3, atol=1e-3)


@pytest.fixture
def client() -> Iterator[OpenPi]:
    with serving(small_policy().to("cuda")) as server, OpenPi(server.port) as client:
        yield client


def test_serves(client: OpenPi) -> None:
    assert client.infer(see())["actions"].shape[1] == ACTION_DIM


def test_latency_bench(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", small_policy())
    assert cli.main(["bench", "latency", str(run), "--device", "cuda", "--seconds", "0.1"]) == 0
