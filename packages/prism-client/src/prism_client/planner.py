"""The source of an executor's plans."""

from __future__ import annotations

from typing import Protocol

from prism_client.messages import PolicyInfo, Reply, Step


class Planner(Protocol):
    """Makes plans: in this thread, beside the control loop, or on a server. Only `poll` with a timeout may wait."""

    @property
    def info(self) -> PolicyInfo:
        """The PolicyInfo of the policy."""
        ...

    def submit(self, step: Step) -> None:
        """Take in one step; start a plan for it if it wants one."""

    def poll(self, timeout: float = 0.0) -> Reply | None:
        """The next reply, in the order of the steps; None: there is none within `timeout` seconds."""

    def trouble(self) -> str:
        """Why nothing comes at the moment, in words; empty: no reason is known."""

    def reset(self, seed: int | None = None) -> None:
        """Start an episode: replies to steps before it never come."""

    def close(self) -> None: ...
