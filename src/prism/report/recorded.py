"""The part of a dataset's page that only a recording of a robot has: how its sensors came, each on its own clock."""

from __future__ import annotations

from typing import Any

import numpy as np


def recorded_rows(source: object) -> list[tuple[str, ...]]:
    """Of every sensor, from what `prism record` and `prism run` said of each episode: readings a second (median and
    fewest), the longest gap in ms and its episode, steps without it. Empty for other datasets."""
    episodes = [said.get("streams") for said in getattr(source, "provenances", ())]
    known: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, streams in enumerate(episodes):
        for name, said in streams.items() if isinstance(streams, dict) else ():
            known.setdefault(str(name), []).append((number, said))
    rows: list[tuple[str, ...]] = []
    for name, found in known.items():
        rates = [float(said["rate"]) for _, said in found]
        worst, longest = max(((number, float(said["gap"])) for number, said in found), key=lambda one: one[1])
        lost = sum(int(said["absent"]) for _, said in found)
        rates_of = (f"{np.median(rates):.3g}", f"{min(rates):.3g}")
        rows.append((name, *rates_of, f"{1e3 * longest:.0f}", str(worst), str(lost)))
    return rows
