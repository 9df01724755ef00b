"""The part of a dataset's page that only a recording of a robot has: how its sensors came, each on its own clock."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from prism.report.charts import table


def recorded_section(source: object) -> str:
    """From what `prism record` and `prism run` said of each episode; empty where nobody did."""
    episodes = [said.get("streams") for said in getattr(source, "provenances", ())]
    known: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, streams in enumerate(episodes):
        for name, said in streams.items() if isinstance(streams, dict) else ():
            known.setdefault(str(name), []).append((number, said))
    if not known:
        return ""
    rows = []
    for name, found in known.items():
        rates = [float(said["rate"]) for _, said in found]
        worst, longest = max(((number, float(said["gap"])) for number, said in found), key=lambda one: one[1])
        lost = sum(int(said["absent"]) for _, said in found)
        rows.append(
            [
                escape(name),
                f"{np.median(rates):.3g}",
                f"{min(rates):.3g}",
                f"{1e3 * longest:.0f}",
                str(worst),
                str(lost),
            ]
        )
    names = ("sensor", "readings a second", "fewest", "longest gap, ms", "in episode", "steps without it")
    return f"<h2>How the sensors came</h2>{table(names, rows, 'Rates and gaps of the sensors')}"
