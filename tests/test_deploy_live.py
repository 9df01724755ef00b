"""The live page: what a snapshot says, that a slow viewer costs nothing, and the page itself in headless Chromium."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from websockets.sync.client import connect

from prism.evaluation.metrics import jerk, jerks
from prism.inference.backends import BackendPolicy, EagerBackend
from prism.report.run_page import write_report
from prism.sensors import ActionSpec, SensorSpec
from prism.server.live import encode_picture, latency_histogram
from prism.server.policy_server import PolicyServer
from tests.browser import CHROMIUM, Browser
from tests.policy_fakes import ACTION_DIM, small_policy
from tests.server_fakes import OpenPi, serving
from tests.test_evaluation_report import make_result

KINDS = (
    SensorSpec("proprio", "vector", (3,)),
    SensorSpec("rgb_wrist", "rgb", (48, 64, 3)),
    SensorSpec("depth_wrist", "depth", (48, 64)),
    SensorSpec("tactile", "tactile", (40, 30, 6)),
    SensorSpec("instruction", "text", (32,)),
)


def all_kinds(t: int) -> dict[str, Any]:
    """Moving pictures of every kind of sensor."""
    y, x = np.mgrid[0:48, 0:64]
    blob = np.exp(-((x - 32 - 20 * np.cos(t / 9)) ** 2 + (y - 24 - 14 * np.sin(t / 7)) ** 2) / 90)
    rgb = np.stack([40 + 200 * blob, 60 + 80 * (x / 64), 90 + 100 * (y / 48)], axis=-1).astype(np.uint8)
    touch = (128 + 90 * np.sin(np.arange(40 * 30 * 6).reshape(40, 30, 6) / 37 + t / 5)).astype(np.uint8)
    return {
        "proprio": np.array([np.sin(t / 10), np.cos(t / 13), 0.3], dtype=np.float32),
        "rgb_wrist": rgb,
        "depth_wrist": (1.2 - 0.6 * blob).astype(np.float32),
        "tactile": touch,
        "instruction": "open the drawer",
    }


@contextmanager
def robot(port: int, rate: float = 20.0) -> Iterator[None]:
    """Asks until the block ends."""
    done = threading.Event()

    def run() -> None:
        with OpenPi(port) as client:
            t = 0
            while not done.is_set():
                step = all_kinds(t)
                if t % 40 > 30:
                    del step["depth_wrist"]
                client.infer(step)
                t += 1
                done.wait(1 / rate)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_snapshots_show_the_robot() -> None:
    with (
        serving(small_policy(sensors=KINDS), allow_absent=True) as server,
        connect(f"ws://127.0.0.1:{server.port}/live") as viewer,
    ):
        hello = json.loads(viewer.recv(timeout=10))
        assert hello["hello"]["action_dim"] == 3
        first = json.loads(viewer.recv(timeout=10))
        assert first["clients"] == []
        assert "view" not in first
        with OpenPi(server.port) as client, OpenPi(server.port) as other:
            for t in range(5):
                reply = client.infer(all_kinds(t))
            other.infer({"proprio": np.zeros(3, np.float32)})
            deadline = time.monotonic() + 10
            data = first
            # A request is timed when its reply has gone: a snapshot may come in between.
            while (
                data.get("view", {}).get("requests") != 5
                or data["connected"] != 2
                or sum(data["latency"]["counts"]) < 5
            ):
                data = json.loads(viewer.recv(timeout=10))
                assert time.monotonic() < deadline
            view = data["view"]
            assert view["plan"]["index"] == reply["index"]
            np.testing.assert_allclose(view["plan"]["actions"], reply["actions"], atol=1e-4)
            assert np.shape(view["plan"]["candidates"]) == (4, 4, 3)
            assert len(view["trace"]) == 8  # four plans, two actions of each
            assert len(view["jerk"]) == 5
            sensors = {sensor["name"]: sensor for sensor in view["sensors"]}
            assert sensors["instruction"]["text"] == "open the drawer"
            assert sensors["rgb_wrist"]["picture"].startswith("data:image/jpeg;base64,")
            assert sensors["depth_wrist"]["fault"] is None
            viewer.send(json.dumps({"client": data["clients"][1]["number"]}))
            while data["view"]["number"] != data["clients"][1]["number"]:
                data = json.loads(viewer.recv(timeout=10))
                assert time.monotonic() < deadline
            sensors = {sensor["name"]: sensor for sensor in data["view"]["sensors"]}
            assert sensors["rgb_wrist"]["fault"] == "missing"
            assert {number for number, _ in server._live._pictures} <= {data["view"]["number"]}  # the other's are gone
            for nonsense in ("", "[]", '{"client": "x"}', "{" * 1000):
                viewer.send(nonsense)
            assert "clients" in json.loads(viewer.recv(timeout=10))


CAMERAS = tuple(SensorSpec(name, "rgb", (240, 320, 3)) for name in ("rgb_left", "rgb_right"))


@contextmanager
def stuck_viewer(server: PolicyServer) -> Iterator[OpenPi]:
    """Somebody opened the page and reads nothing, until a snapshot does not leave any more; the robot beside it."""
    rng = np.random.default_rng(0)
    step = {spec.name: rng.integers(0, 256, spec.shape, dtype=np.uint8) for spec in CAMERAS}  # 250 KB a snapshot
    with socket.socket() as raw, OpenPi(server.port) as client:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(
            b"GET /live HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        client.infer(step)
        deadline, stuck, last = time.monotonic() + 60, time.monotonic(), None
        while time.monotonic() - stuck < 0.5:  # the same snapshot is on its way
            assert time.monotonic() < deadline
            time.sleep(0.05)
            sending = next((viewer.sending for viewer in server._live._viewers), None)
            if sending is None or sending.done() or sending is not last:
                last, stuck = sending, time.monotonic()
        assert client.infer(step)["actions"].shape == (4, 3)
        yield client


def test_a_viewer_that_does_not_read_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with serving(small_policy(sensors=CAMERAS), write_timeout=2.0) as server, stuck_viewer(server):
        deadline = time.monotonic() + 20
        while server.metrics.viewers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.metrics.viewers == 0
    assert server.metrics.errors["slow_reader"] == 1
    assert "a viewer that did not read" in caplog.text


def test_a_viewer_that_does_not_read_does_not_keep_the_server_from_ending() -> None:
    with ExitStack() as stack:
        with serving(small_policy(sensors=CAMERAS), write_timeout=2.0) as server:
            stack.enter_context(stuck_viewer(server))
            start = time.monotonic()
        assert time.monotonic() - start < 10  # not when the viewer leaves, or a ping finds out


def test_pictures() -> None:
    def open_picture(spec: SensorSpec, value: np.ndarray) -> Image.Image:
        data = encode_picture(spec, value).removeprefix("data:image/jpeg;base64,")
        return Image.open(io.BytesIO(base64.b64decode(data)))

    step = all_kinds(0)
    specs = {spec.name: spec for spec in KINDS}
    assert open_picture(specs["rgb_wrist"], step["rgb_wrist"]).size == (64, 48)
    assert open_picture(specs["tactile"], step["tactile"]).size == (60, 40)  # two of three channels
    depth = np.asarray(open_picture(specs["depth_wrist"], step["depth_wrist"]).convert("L"), dtype=float)
    near = np.unravel_index(step["depth_wrist"].argmin(), depth.shape)
    assert depth[near] > depth[0, 0]  # near is light
    assert open_picture(specs["depth_wrist"], np.zeros((48, 64), np.float32)).size == (64, 48)
    big = SensorSpec("c", "rgb", (720, 1280, 3))
    assert open_picture(big, np.zeros(big.shape, np.uint8)).size == (320, 180)


def test_jerk_and_latency_are_what_the_docs_say() -> None:
    rng = np.random.default_rng(0)
    actions, scale = rng.normal(size=(20, 3)), np.array([1.0, 2.0, 0.5])
    assert jerks(actions, scale).mean() == pytest.approx(jerk(actions, scale))
    assert len(jerks(actions[:3], scale)) == 0
    histogram = latency_histogram([0.001] * 98 + [0.01, 5.0])
    assert sum(histogram["counts"]) == 100
    assert histogram["p50"] == pytest.approx(1.0)
    assert latency_histogram([])["counts"] == []


def test_latency_is_that_of_plans() -> None:
    """An observation without a plan takes next to no time: counted, it would hide what a plan takes."""
    with serving(small_policy(sensors=KINDS)) as server, OpenPi(server.port) as client:
        for t in range(9):
            client.infer({**all_kinds(t), "plan": t % 4 == 0})
        deadline = time.monotonic() + 10
        while server.metrics.latency.count < 9:  # timed when the reply has gone
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(server.latencies) == 3


class Steady(EagerBackend):
    """Candidates that differ by noise alone."""

    def plan(self, steps: Tensor, candidates: int, rng: torch.Generator) -> Tensor:
        return 0.3 + 1e-5 * torch.randn(len(steps), candidates, 4, ACTION_DIM)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_candidate_view_does_not_zoom_in_on_noise() -> None:
    policy = BackendPolicy(Steady(small_policy(sensors=KINDS)))
    with serving(policy) as server, robot(server.port), Browser(f"http://127.0.0.1:{server.port}/") as page:
        half = server.metadata()["action_scale"]
        page.wait_for("(prismLive.drawn.fan || 0) > 1")
        left, right, low, high = page.ask("prismLive.frame")
        assert min(right - left, high - low) >= 0.5 * half[0] * 0.99  # a quarter of the range of the demonstrations


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_locked_page_opens_with_the_key() -> None:
    with (
        serving(small_policy(sensors=KINDS), api_key="sesame") as server,
        Browser(f"http://127.0.0.1:{server.port}/") as page,
    ):
        page.wait_for("!document.getElementById('lock').hidden")
        assert page.ask("document.getElementById('expects').rows.length") <= 1, "nothing of the policy yet"
        page.ask("document.getElementById('key').value = 'sesame'")
        page.ask("document.getElementById('lock').requestSubmit()")
        page.wait_for(f"document.getElementById('expects').rows.length == {1 + len(KINDS)}")
        page.wait_for("document.getElementById('lock').hidden")
        assert page.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_no_link_of_a_reports_header_is_cut(width: int, tmp_path: Path) -> None:
    tasks = [f"metaworld-button-press-topdown-{i}-v3" for i in range(4)]
    write_report(tmp_path / "report.html", [make_result(task) for task in tasks])
    with Browser((tmp_path / "report.html").as_uri(), width, 844) as page:
        boxes = page.ask(
            "[...document.querySelectorAll('nav a')].map((a) => a.getBoundingClientRect())"
            ".map((box) => [box.left, box.right])"
        )
        assert len(boxes) == 4
        assert all(0 <= left < right <= width for left, right in boxes)
        assert page.ask("document.querySelector('nav').scrollWidth <= document.querySelector('nav').clientWidth")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_draws_everything_at_desktop_and_phone_width() -> None:
    policy = small_policy(sensors=KINDS)
    policy.spec = dataclasses.replace(policy.spec, action=ActionSpec(("x", "a gripper with a long name", "<i>yaw")))
    with (
        serving(policy, allow_absent=True) as server,
        Browser(f"http://127.0.0.1:{server.port}/") as page,
    ):
        page.wait_for("!document.getElementById('empty').hidden")
        assert page.ask("document.getElementById('expects').rows.length") == 1 + len(KINDS)
        choices = "[...document.getElementById('dim-y').options].map((option) => option.textContent).join('|')"
        assert page.ask(choices) == "x|a gripper with …|<i>yaw", "dimensions as the dataset calls them"
        with robot(server.port):
            for width, height in ((1280, 900), (400, 844)):
                page.resize(width, height)
                page.ask("Object.keys(prismLive.drawn).forEach((key) => { prismLive.drawn[key] = 0; })")
                for what in ("fan", "trace", "jerk", "latency", "cameras", "sensors"):
                    page.wait_for(f"(prismLive.drawn.{what} || 0) > 1")
                for canvas in ("fan", "trace", "jerk", "latency"):  # something is on them, beside the ground
                    colours = (
                        f"(() => {{ const c = document.getElementById('{canvas}'); const d = c.getContext('2d')"
                        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
                        "for (let i = 0; i < d.length; i += 4) if (d[i + 3]) s.add([d[i], d[i + 1], d[i + 2]].join());"
                        "return s.size; })()"
                    )
                    assert page.wait_for(colours) > 3, canvas
                assert page.ask("document.documentElement.scrollWidth") <= width
                cut = (
                    "[...document.querySelectorAll('.top *, .panel header *')]"
                    ".filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1).length"
                )
                assert page.ask(cut) == 0  # in the headers
                assert page.ask("[...document.querySelectorAll('.cameras img')].every((i) => i.naturalWidth > 0)")
            rate = page.ask(
                "new Promise((done) => { const from = prismLive.snapshots, start = performance.now(); setTimeout(() =>"
                "done(1000 * (prismLive.snapshots - from) / (performance.now() - start)), 1000); })"
            )
            assert 1 <= rate <= 12  # ten a second, fewer on a busy machine
            page.wait_for("document.querySelector('.sensors .bad') !== null")  # the depth camera drops out at times
            assert page.ask("document.getElementById('modes').textContent") != ""
        page.wait_for("!document.getElementById('empty').hidden")
        assert page.complaints == []
