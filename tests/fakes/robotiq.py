"""A Robotiq gripper behind its URCap: a line in, a line out. It counts 0 (open) to 255 and needs time to get there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Gripper:
    def __init__(self, host: str, port: int = 63352) -> None:
        self.said: list[str] = []  # every line that came
        self.values = {"ACT": 1, "STA": 3, "GTO": 1, "POS": 0, "PRE": 0, "SPE": 255, "FOR": 150, "FLT": 0, "OBJ": 3}
        self._target, self._at = 0, time.monotonic()
        self._listener = socket.create_server((host, port))
        self._open: list[socket.socket] = []
        self._alive = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._alive = False
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while self._alive:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in connection.makefile("r", encoding="ascii"):
                connection.sendall(self._answer(line.split()).encode() + b"\n")

    def _answer(self, words: list[str]) -> str:
        self._move()
        self.said.append(" ".join(words))
        if words[:1] == ["GET"] and len(words) == 2 and words[1] in self.values:
            return f"{words[1]} {self.values[words[1]]}"
        if words[:1] == ["SET"] and len(words) % 2 == 1 and all(word in self.values for word in words[1::2]):
            for name, value in zip(words[1::2], words[2::2], strict=True):
                if name == "POS":
                    self._target = int(value)
                else:
                    self.values[name] = int(value)
            return "ack"
        return "?"

    def _move(self) -> None:
        now = time.monotonic()
        far, self._at = 500.0 * (now - self._at), now  # counts
        if self.values["GTO"]:
            left = self._target - self.values["POS"]
            self.values["POS"] += round(max(-far, min(far, left)))
