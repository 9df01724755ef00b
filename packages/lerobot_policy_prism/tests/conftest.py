"""The last line of `make lerobot`: how many passed, how many failed."""

from __future__ import annotations

from typing import Any


def pytest_unconfigure(config: Any) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    count = {kind: len(reporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    failed = count["failed"] + count["error"] + count["skipped"]  # what was not looked at has not passed
    print(f"{count['passed']} passed, {failed} failed")
