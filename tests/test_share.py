"""A run for others: LeRobot's folder and back, the hub's cache, and a small hub on this computer."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prism_client import ActionKind

from prism import cli
from prism.data.formats.store_writer import DatasetWriter
from prism.experiments.run_folder import Run
from prism.sensors import ActionSpec, SensorSpec


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two sensors, trained for two steps."""
    home = tmp_path_factory.mktemp("share")
    rng = np.random.default_rng(0)
    sensors = (SensorSpec("proprio", "vector", (3,)), SensorSpec("rgb_static", "rgb", (24, 32, 3)))
    poses = ActionSpec(kind=ActionKind.ABSOLUTE)
    with DatasetWriter(home / "demos", sensors, action_dim=2, fps=10.0, task="wander", action=poses) as writer:
        for _ in range(3):
            streams = {
                "proprio": rng.normal(size=(20, 3)).astype(np.float32),
                "rgb_static": rng.integers(0, 256, (20, 24, 32, 3), dtype=np.uint8),
            }
            writer.add(streams, rng.normal(size=(20, 2)).astype(np.float32))
    folder = home / "run"
    settings = ["--set", "controller.exec_horizon=4", "controller.selection.restless=2"]
    assert cli.main(["train", str(home / "demos"), "--steps", "2", "--out", str(folder), *settings]) == 0
    return folder


def actions(run: Path | str, steps: int = 10) -> np.ndarray:
    controller = Run(run).controller()
    controller.reset(7)
    rng = np.random.default_rng(1)
    frames = [
        {"proprio": rng.normal(size=3), "rgb_static": rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)}
        for _ in range(steps)
    ]
    return np.stack([controller.act(frame) for frame in frames])


def test_there_and_back(run: Path, tmp_path: Path) -> None:
    """The exported folder is a run; an export of the export too; not an action differs."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert cli.main(["export", str(run), "--lerobot", str(once)]) == 0
    assert cli.main(["export", str(once), "--lerobot", str(twice)]) == 0
    for folder in (once, twice):
        assert np.abs(actions(folder) - actions(run)).max() <= 1e-5
        assert Run(folder).settings == Run(run).settings
    config = json.loads((once / "config.json").read_text())
    assert config["type"] == "prism"
    assert config["input_features"]["observation.images.rgb_static"] == {"type": "VISUAL", "shape": [3, 24, 32]}
    assert config["keys"] == {"proprio": "observation.state", "rgb_static": "observation.images.rgb_static"}
    card = (once / "README.md").read_text()
    for words in ("license: mit", "rgb_static | rgb | 24 x 32 x 3", "2 values", "demos", "seed 0", "Not evaluated"):
        assert words in card
    assert str(run.parent) not in (once / "experiment.json").read_text()  # nobody's business where the data lay


def test_a_checkpoint_of_lerobot_alone(run: Path, tmp_path: Path) -> None:
    """What lerobot-train leaves behind has no experiment.json: the controller's settings are in config.json."""
    folder = tmp_path / "outputs/checkpoints/last/pretrained_model"
    assert cli.main(["export", str(run), "--lerobot", str(folder)]) == 0
    (folder / "experiment.json").unlink()
    assert Run(tmp_path / "outputs").settings.exec_horizon == 4
    assert np.abs(actions(tmp_path / "outputs") - actions(run)).max() <= 1e-5


def test_bad_input(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("do not delete")
    cases = {
        "exactly one": (["export", str(run)], "--lerobot DIR"),
        "two": (["export", str(run), "--lerobot", "a", "--onnx", "b"], "one of"),
        "exists": (["export", str(run), "--lerobot", str(mine)], "exists already"),
        "not ours": (["export", str(run), "--lerobot", str(mine), "--overwrite"], "not overwritten"),
        "push": (["push", str(run)], "prism export A --hub B"),
        "no id": (["serve", "hf://only-a-user"], "hf://USER/NAME"),
        "no name": (["export", str(run), "--hub", "no-user"], "USER/NAME"),
    }
    for case, (words, said) in cases.items():
        assert cli.main(words) == cli.EXIT_USER, case
        error = capfd.readouterr().err
        assert said in error, case
        assert error.count("\n") == 1, case
    assert (mine / "thesis.txt").exists()


# --------------------------------------------------------------------------- the hub

pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload and a download need; everything is in `files`, by REPO/PATH."""

    files: dict[str, bytes]
    repos: set[str]

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": "c" * 40, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, data: object, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(data).encode(), status, Content_Type="application/json", **headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            self.repos.add(name)
            self._json({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            wanted = json.loads(body)["files"]
            self._json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").split("/commit/")[0]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[f"{name}/{entry['value']['path']}"] = base64.b64decode(entry["value"]["content"])
            url = f"http://{self.headers['Host']}/{name}/commit/{'c' * 40}"
            self._json({"success": True, "commitOid": "c" * 40, "commitUrl": url, "hookOutput": ""})
        else:
            self._json({"error": f"this hub has no {path}"}, 404)

    def do_GET(self) -> None:
        path = self.path.split("?")[0].replace("%2F", "/")
        for name in self.repos:
            for kind in ("models", "datasets"):
                if not path.startswith(f"/api/{kind}/{name}"):
                    continue
                mine = {k.removeprefix(f"{name}/"): v for k, v in self.files.items() if k.startswith(f"{name}/")}
                if "/tree/" in path:
                    self._json([{"type": "file", "path": k, "size": len(v), "oid": _sum(v)} for k, v in mine.items()])
                else:
                    siblings = [{"rfilename": file} for file in mine]
                    self._json({"id": name, "sha": "c" * 40, "siblings": siblings, "private": False, "tags": []})
                return
            for prefix in (f"/{name}/resolve/", f"/datasets/{name}/resolve/"):
                file = f"{name}/{path.removeprefix(prefix).partition('/')[2]}"
                if path.startswith(prefix) and file in self.files:
                    self._send(self.files[file], ETag=f'"{_sum(self.files[file])}"')
                    return
        self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()


def _sum(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("OneHub", (Hub,), {"files": {}, "repos": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def prism(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its environment when it is imported."""
    shared = {**os.environ, "HF_HOME": str(home / "hf"), "HF_TOKEN": "hf_nobody", "HF_HUB_DISABLE_XET": "1"}
    shared.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "prism.cli", *words]
    return subprocess.run(command, env={**shared, **environment}, cwd=home, capture_output=True, text=True, timeout=300)


ACT = """
import sys; sys.path.insert(0, {tests!r})
import numpy, test_share
numpy.save("actions.npy", test_share.actions("hf://me/wander"))
"""


def test_push_fetch_and_act(run: Path, tmp_path: Path, hub: tuple[type[Hub], str]) -> None:
    """Pushed with a card, fetched, acting as the run does; again without the network; then a dataset."""
    handler, address = hub
    pushed = prism(tmp_path, "export", str(run), "--hub", "me/wander", HF_ENDPOINT=address)
    assert pushed.returncode == 0, pushed.stderr
    assert set(handler.files) >= {f"me/wander/{name}" for name in ("config.json", "model.safetensors", "README.md")}
    code = ACT.format(tests=str(Path(__file__).parent))
    home = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    for environment in ({"HF_ENDPOINT": address}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**home, **environment}, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert np.abs(np.load(tmp_path / "actions.npy") - actions(run)).max() <= 1e-5
        (tmp_path / "actions.npy").unlink()
    demos = run.parent / "demos"
    handler.repos.add("me/demos")
    handler.files |= {f"me/demos/{f.relative_to(demos)}": f.read_bytes() for f in demos.rglob("*") if f.is_file()}
    words = ("train", "hf://me/demos", "--steps", "1", "--out", "runs/fetched")
    trained = prism(tmp_path, *words, HF_ENDPOINT=address)
    assert trained.returncode == 0, trained.stderr
    assert Run(tmp_path / "runs/fetched").experiment.demonstrations.path == "hf:/me/demos"


def test_what_the_hub_does_not_give(tmp_path: Path, hub: tuple[type[Hub], str]) -> None:
    """An unknown name, no network, offline: one line each, with the remedy."""
    cases = [
        (("data", "inspect", "hf://me/nothing"), {"HF_ENDPOINT": hub[1]}, "no such dataset"),
        (("export", "hf://me/nothing", "--lerobot", "x"), {"HF_ENDPOINT": hub[1]}, "no such model"),
        (("export", "hf://me/nothing", "--lerobot", "x"), {"HF_HUB_OFFLINE": "1"}, "not in the cache"),
        (("export", "hf://me/nothing", "--lerobot", "x"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "hub"),
    ]
    for words, environment, said in cases:
        done = prism(tmp_path, *words, **environment)
        assert done.returncode == 2, (said, done.stderr)
        assert said in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["serve", "hf://me/wander"]) == cli.EXIT_USER
    assert "prism-policy[hub]" in capfd.readouterr().err
