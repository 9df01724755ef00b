"""Headless Chromium over its DevTools protocol: open a page, ask it, take its picture."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Browser:
    """One tab. `with Browser(url) as page:`"""

    def __init__(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="prism-chromium-")
        assert CHROMIUM is not None
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack = ExitStack()
        self._socket: ClientConnection | None = None
        self._id = 0
        self.complaints: list[str] = []  # of the console, and exceptions
        try:
            self._socket = self._stack.enter_context(connect(self._tab(), compression=None, max_size=None))
            self.call("Page.enable")
            self.call("Runtime.enable")
            self.call("Log.enable")
            self.resize(width, height)
            self.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
            )
            self.call("Page.navigate", url=url)
            self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        except BaseException:
            self.__exit__()
            raise

    def _tab(self) -> str:
        end = time.monotonic() + 30
        file = Path(self._folder) / "DevToolsActivePort"
        while time.monotonic() < end:
            if file.exists() and (lines := file.read_text().splitlines()):
                with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=10) as reply:
                    tabs = [tab for tab in json.load(reply) if tab["type"] == "page"]
                if tabs:
                    return str(tabs[0]["webSocketDebuggerUrl"])
            time.sleep(0.1)
        raise TimeoutError("chromium did not start")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        assert self._socket is not None
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == self._id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"])[:500])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])

    def resize(self, width: int, height: int, ratio: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=width < 600,
        )

    def ask(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, f"{expression} did not come true; {self.complaints}"
            time.sleep(0.1)
        return value

    def picture(self, path: Path, full: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
