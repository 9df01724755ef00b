"""What the figures of `python -m research threshold` say about the paper's sentences (Sec. 5, Lemma E.2, Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prism.runs.grid import Result
from research.report import Claim, Verdict, confirmed

REJECTION_TOLERANCE, FALLBACK_LIMIT = 0.05, 0.05  # what we ask of a calibrated threshold
CONSISTENT = "the threshold keeps a consistent acceptance rate without manual tuning"
PAPER_CV, PAPER_BATCH = 0.05, 64  # Sec. 5, Lemma E.2: "below 5 % at batch size 64"


def claims_on_rates(found: Mapping[str, Mapping[str, Result]], rules: Sequence[str], q: float) -> list[Claim]:
    """Our bar for every rule in training, {task: {rule: rates}}, and the paper's "consistent acceptance rate"."""
    claims = []
    for rule in rules:
        cells = [by_rule[rule] for by_rule in found.values() if rule in by_rule]
        if not cells:
            continue
        after = f" at q = {q:.0%}", f", in {len(cells)} trainings"
        if rule == "paper":
            clamped = np.mean([cell["clamped"] for cell in cells])
            after = after[0], f"{after[1]}; on the clamp in {clamped:.0%} of the steps"
        claims.append(_consistent(f"{rule}, in training", cells, q, *after))
    return claims


def claims_on_policies(applied: Mapping[str, Mapping[str, Result]], rules: Sequence[str], q: float) -> list[Claim]:
    """The same for every rule on the candidates of trained policies, {policy: {rule: entry}}."""
    words = f"on {len(applied)} trained policies"
    by_rule = {rule: [entries[rule] for entries in applied.values()] for rule in rules if applied}
    return [_consistent(f"{rule}, {words}", entries, q) for rule, entries in by_rule.items()]


def _consistent(where: str, cells: Sequence[Result], q: float, after_rejection: str = "", end: str = "") -> Claim:
    """Is the rejection near q, and the fallback rare, in every one of these cells?"""
    rejected = [cell["rejection_rate"] for cell in cells]
    fallen = [cell["fallback_rate"] for cell in cells]
    ours = (
        f"{where}: rejection {min(rejected):.1%} to {max(rejected):.1%}{after_rejection}, "
        f"fallback {min(fallen):.1%} to {max(fallen):.1%}{end}"
    )
    near = [abs(cell["rejection_rate"] - cell.get("quantile", q)) <= REJECTION_TOLERANCE for cell in cells]
    held = all(near) and max(fallen) < FALLBACK_LIMIT
    note = "" if held else f"asked: q +- {REJECTION_TOLERANCE:.0%} and a fallback below {FALLBACK_LIMIT:.0%}"
    return Claim("App. E.2, Fig. 11", CONSISTENT, ours, confirmed(held), note)


def claims_on_batches(table: Mapping[str, Mapping[str, Mapping[str, Result]]], draws: int) -> list[Claim]:
    """Lemma E.2 on {stage: {rule: {batch size: entry}}} from `draws` batches, of the trained policy if it is there."""
    claims = []
    stage = "trained" if "trained" in table else "untrained"
    entries = table.get(stage, {}).get("paper", {})
    if str(PAPER_BATCH) in entries:
        entry = entries[str(PAPER_BATCH)]
        error = entry["cv"] / np.sqrt(2 * (draws - 1))  # of a standard deviation from so many normal values
        near = abs(entry["cv"] - PAPER_CV) < 2 * error
        verdict: Verdict = "cannot be tested here" if near else confirmed(entry["cv"] < PAPER_CV)
        notes = ["5 % lies within the chance of so many batches"] if near else []
        if entry["clamped"] > 0.5:
            notes.append(f"on the clamp in {entry['clamped']:.0%} of the batches, where nothing can vary")
        claims.append(
            Claim(
                "Sec. 5, Lemma E.2",
                f"coefficient of variation of the threshold below 5 % at batch size {PAPER_BATCH}",
                f"{entry['cv']:.1%} +- {2 * error:.1%} of the quantile of all pairs ({draws} batches), "
                f"{entry['cv_ema']:.1%} of the threshold (EMA, clamp)",
                verdict,
                "; ".join(notes),
            )
        )
        n, pairs = entry["effective_samples"], entry["pairs"]
        if n is not None:
            claims.append(
                Claim(
                    "Lemma E.2, (ii)",
                    "aggregating all distances of the minibatch maximises the effective sample size N",
                    f"the {pairs} distances of a batch of {PAPER_BATCH} vary like {n:.0f} independent ones",
                    confirmed(n > 0.5 * pairs),
                    "they share targets and contexts, so N grows with B, not with B K B",
                )
            )
    slopes = []
    for entries in table.get(stage, {}).values():
        if len(entries) >= 3:
            sizes = np.log([int(size) for size in entries])
            slopes.append(float(np.polyfit(sizes, np.log([entry["cv"] for entry in entries.values()]), 1)[0]))
    if slopes:
        claims.append(
            Claim(
                "Lemma E.2, (iii)",
                "the variance of the threshold falls as 1/N with the batch size (the standard deviation as N^-1/2)",
                f"standard deviation ~ B^{min(slopes):.2f} to B^{max(slopes):.2f}, over the rules",
                confirmed(all(abs(slope + 0.5) < 0.15 for slope in slopes)),
                "App. E.2 also writes 'variance O(1/sqrt N)': that is the standard deviation",
            )
        )
    return claims
