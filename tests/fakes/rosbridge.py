"""rosbridge on loopback: subscribe, advertise, publish; an arm of two joints that follows Float64MultiArray."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class RosBridge:
    def __init__(self) -> None:
        from websockets.sync.server import serve

        self.commands: list[tuple[float, list[float]]] = []
        self.written: list[dict[str, Any]] = []  # all but subscriptions
        self.position: Callable[[np.ndarray], list[Any]] = lambda joints: [9.0, joints[1], joints[0]]
        self.backlog = 0.0  # seconds that messages are on their way
        self.clock = 1.7e9  # of its header stamps, ahead of this computer's
        self.joints = np.zeros(2)
        self.silent = False
        self._target = np.zeros(2)
        self._server = serve(self._serve, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._alive = True
        for work in (self._server.serve_forever, self._live):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._alive = False
        self._server.shutdown()

    def _live(self) -> None:
        while self._alive:
            time.sleep(0.01)
            self.joints = self.joints + np.clip(self._target - self.joints, -0.01, 0.01)

    def _serve(self, connection: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            for text in connection:
                said = json.loads(text)
                if said["op"] != "subscribe":
                    self.written.append(said)
                if said["op"] == "subscribe":
                    threading.Thread(target=self._publish, args=(connection, said), daemon=True).start()
                elif said["op"] == "publish":
                    self._target = np.array(said["msg"]["data"])
                    self.commands.append((time.monotonic(), said["msg"]["data"]))

    def _publish(self, connection: Any, asked: dict[str, Any]) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            if asked["topic"] not in ("/joint_states", "/camera", "/depth", "/wrench"):
                message = {"op": "status", "level": "error", "msg": f"no topic {asked['topic']}"}
                connection.send(json.dumps(message))
                return
            while self._alive:
                time.sleep(0.02)
                if not self.silent:
                    topic = asked["topic"]
                    connection.send(json.dumps({"op": "publish", "topic": topic, "msg": self._message(topic)}))

    def _message(self, topic: str) -> dict[str, Any]:
        stamp = time.monotonic() + self.clock - self.backlog
        header = {"stamp": {"sec": int(stamp), "nanosec": int(1e9 * (stamp % 1.0))}, "frame_id": ""}
        if topic == "/joint_states":  # in an order of its own, with a joint that nobody asked for
            return {"header": header, "name": ["wheel", "b", "a"], "position": self.position(self.joints)}
        if topic == "/wrench":
            part = {"x": 1.0, "y": 2.0, "z": 3.0}
            return {"header": header, "wrench": {"force": part, "torque": part}}
        if topic == "/camera":
            pixels = np.zeros((4, 6, 3), np.uint8)
            pixels[..., 2] = 200  # red, in bgr8
            return {"header": header, **_image(pixels, "bgr8", 18)}
        return {"header": header, **_image(np.full((4, 6), 500, "<u2"), "16UC1", 12)}


def _image(pixels: np.ndarray, encoding: str, step: int) -> dict[str, Any]:
    data = base64.b64encode(pixels.tobytes()).decode()
    return {"height": 4, "width": 6, "step": step, "encoding": encoding, "is_bigendian": 0, "data": data}
