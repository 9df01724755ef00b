"""What a connection without a key may cost: frames, unread answers, time, and places of its address.

The library parses everything that one read of the socket brings before anything else runs, answers each ping at once,
and keeps the answers for a client that does not read them. So what arrives is handed over in pieces, frames are
counted, and a connection that goes too far is cut off at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

NEWCOMERS = 64  # connections of one address that have not shown yet that they may be here
ALL_NEWCOMERS = 512
_FRAMES = 20  # of a newcomer, in all
_PIECE = 4096  # bytes handed over at once: 680 of the smallest frames, a few milliseconds
_LARGE_PIECE = 65536  # once there are no small frames
_UNREAD = 65536  # bytes of pongs

logger = logging.getLogger("prism.server")


class Gate:
    """The newcomers of one server, by address."""

    def __init__(self) -> None:
        self._newcomers: Counter[str] = Counter()
        self.cut_off: Counter[str] = Counter()  # connections, by why

    def admit(self, address: str) -> bool:
        if self._newcomers[address] >= NEWCOMERS or self._newcomers.total() >= ALL_NEWCOMERS:
            return False
        self._newcomers[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._newcomers[address] -= 1
        if self._newcomers[address] < 1:
            del self._newcomers[address]


class GuardedConnection(ServerConnection):
    """A newcomer until `welcome` is called."""

    def __init__(self, *arguments: Any, gate: Gate, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate = gate
        self._newcomer = ""  # its address
        self._rate = 0.0  # frames a second; 0: a newcomer
        self._frames = float(_FRAMES)  # that may still come now
        self._at = self.loop.time()
        self._unread = 0  # bytes of automatic answers since everything was read

    def welcome(self, frames: float) -> None:
        """Admit the connection, with this many frames a second."""
        self._rate = self._frames = frames
        self._forget()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        address = _network(transport.get_extra_info("peername"))
        if self._gate.admit(address):
            self._newcomer = address
        else:
            self._cut_off("newcomers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        now = self.loop.time()
        self._frames = min(self._rate or self._frames, self._frames + self._rate * (now - self._at))
        self._at = now
        start, size = 0, _PIECE
        while start < len(data) and not self.transport.is_closing():
            kept, allowed = self.transport.get_write_buffer_size(), self._frames
            super().data_received(data[start : start + size])
            left = self.transport.get_write_buffer_size()
            self._unread = self._unread + max(0, left - kept) if left else 0
            if self._unread > _UNREAD:
                self._cut_off("pongs")
            elif self._frames < 0:
                self._cut_off("frames")
            start, size = start + size, _PIECE if allowed - self._frames > 4 else _LARGE_PIECE

    def process_event(self, event: Any) -> None:
        if not isinstance(event, Request):
            self._frames -= 1
        super().process_event(event)

    def _forget(self) -> None:
        if self._newcomer:
            self._gate.leave(self._newcomer)
            self._newcomer = ""

    def _cut_off(self, why: str) -> None:
        self._gate.cut_off[why] += 1
        if (
            self._gate.cut_off[why] in (1, 10, 100) or self._gate.cut_off[why] % 1000 == 0
        ):  # a flood must not fill the log
            logger.warning("%s cut off: %s (%d so far)", address_of(self), _WHY[why], self._gate.cut_off[why])
        self.transport.abort()


_WHY = {
    "newcomers": "too many connections without a valid key, from its address or in all",
    "pongs": "it does not read the answers to its pings",
    "frames": "too many frames",
}


def address_of(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unknown"


def _network(peer: object) -> str:
    """The address that counts as one: of IPv6 the first half, all of which one computer can have."""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0]) if isinstance(peer, tuple) else None
    except ValueError:
        address = None
    if isinstance(address, ipaddress.IPv6Address):
        whole = address.ipv4_mapped
        return str(whole) if whole else str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
