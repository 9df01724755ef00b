"""Plain HTTP beside the WebSocket: the files of the live page, and small text answers."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from importlib.resources import files

from websockets.datastructures import Headers
from websockets.http11 import Response

_ASSETS = {
    "/": ("live.html", "text/html; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, and nobody else may frame it: the page shows cameras.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'"
)


def response(status: HTTPStatus, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    data = body.encode() if isinstance(body, str) else body
    headers = Headers()
    headers["Content-Type"] = kind
    headers["Content-Length"] = str(len(data))
    headers["Connection"] = "close"
    headers["Cache-Control"] = "no-store"
    headers["X-Content-Type-Options"] = "nosniff"
    if kind.startswith("text/html"):
        headers["Content-Security-Policy"] = _POLICY
    return Response(status.value, status.phrase, headers, data)


def asset(path: str) -> Response | None:
    if path == "/favicon.ico":
        return response(HTTPStatus.NO_CONTENT, b"")
    return response(HTTPStatus.OK, _read(_ASSETS[path][0]), _ASSETS[path][1]) if path in _ASSETS else None


@cache
def _read(name: str) -> bytes:
    return (files("prism") / "assets" / name).read_bytes()
