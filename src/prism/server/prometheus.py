"""What the server counts, as Prometheus reads it: text, one line a number, cumulative histograms.

Everything is counted on the thread of the network loop, so nothing needs a lock. docs/howto/serving.md lists the names.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """Counts by upper bound; `counts[i]` are the values in (bounds[i-1], bounds[i]], the last one those above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Metrics:
    def __init__(self) -> None:
        self.started = time.monotonic()
        self.clients = 0
        self.viewers = 0
        self.connections: Counter[str] = Counter()  # by how the handshake ended: accepted, full, unauthorized, ...
        self.requests: Counter[str] = Counter()  # plan, observe
        self.errors: Counter[str] = Counter()  # frame, observation, message (too large), slow_reader, idle, internal
        self.faults: Counter[tuple[str, str]] = Counter()  # (sensor, fault)
        self.throttled = 0
        self.latency = Histogram(SECONDS)  # frame decoded -> reply handed to the socket
        self.inference = Histogram(SECONDS)  # one batch, from the first observation to the last reply
        self.batch_size = Histogram(SIZES)

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _single("prism_up_seconds", "gauge", "Seconds since the start.", time.monotonic() - self.started)
        yield from _single("prism_clients", "gauge", "Connected robots.", self.clients)
        yield from _single("prism_viewers", "gauge", "Open live pages.", self.viewers)
        yield from _family("prism_connections_total", "Handshakes by how they ended.", "result", self.connections)
        yield from _family("prism_requests_total", "Requests answered, by kind.", "kind", self.requests)
        yield from _family("prism_errors_total", "Requests and connections that failed, by kind.", "kind", self.errors)
        yield "# HELP prism_sensor_faults_total Observations in which a sensor was not believed."
        yield "# TYPE prism_sensor_faults_total counter"
        for (sensor, fault), count in sorted(self.faults.items()):
            yield f'prism_sensor_faults_total{{sensor="{_escape(sensor)}",fault="{fault}"}} {count}'
        yield from _single("prism_throttled_total", "counter", "Requests delayed by the rate limit.", self.throttled)
        yield from _histogram("prism_request_seconds", "From the frame to its reply.", self.latency)
        yield from _histogram("prism_batch_seconds", "One batch of requests in the worker.", self.inference)
        yield from _histogram("prism_batch_size", "Plans made in one pass of the network.", self.batch_size)
        yield from _single("process_cpu_seconds_total", "counter", "Processor time.", time.process_time())
        if memory := resident_bytes():
            yield from _single("process_resident_memory_bytes", "gauge", "Resident memory.", memory)


def resident_bytes() -> int:
    """Memory of this process; 0 if the system does not report it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _single(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {_number(value)}"


def _family(name: str, text: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} counter"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{_escape(key)}"}} {value}'


def _histogram(name: str, text: str, values: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    seen = 0
    for bound, count in zip((*values.bounds, math.inf), values.counts, strict=True):
        seen += count
        yield f'{name}_bucket{{le="{"+Inf" if bound == math.inf else _number(bound)}"}} {seen}'
    yield f"{name}_sum {_number(values.total)}"
    yield f"{name}_count {seen}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.9g}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
