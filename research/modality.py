"""What a missing sensor costs, and what dropping sensors in training saves (Sec. 5, Fig. 3).

`modality-dropout` measures it; here its figures stand beside the paper's. With --given an
earlier file of it is judged, and nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from prism.errors import PrismError
from prism.training import files
from research import modality_dropout
from research.modality_dropout import ModalityDropoutConfig
from research.report import Claim, Study, Verdict, confirmed

PAPER_COST = 0.05  # of success, at most, without one modality


@dataclass(frozen=True)
class ModalityConfig:
    given: Path | None = None  # a file of `python -m research modality-dropout --json`
    bench: ModalityDropoutConfig = field(default_factory=ModalityDropoutConfig)


def run(config: ModalityConfig, console: Console | None = None) -> Study:
    if config.given is None:
        measured = modality_dropout.run(config.bench, console or Console(stderr=True))
    else:
        if not config.given.is_file():
            raise PrismError(f"--given {config.given} does not exist: research modality-dropout --json makes it")
        measured = files.read_json(config.given)
        if missing := {"saved", "saved_ci", "cost_with_dropout_ci", "success", "settings"} - measured.keys():
            raise PrismError(
                f"--given {config.given}: no '{min(missing)}'; it is no file of bench modality-dropout, or an old one: "
                "run that again"
            )
    kept = ("cost_without_dropout", "cost_with_dropout", "saved", "saved_ci", "success", "success_by_seed")
    figures = {key: measured[key] for key in kept}
    figures["measured"] = {key: measured.get(key) for key in ("command", "commit", "date")}
    seeds = tuple(range(int(measured["settings"].get("seeds", 1))))
    return Study("modality", figures, tuple(claims(measured)), dict(measured["settings"]), seeds)


def claims(measured: dict[str, Any]) -> list[Claim]:
    low, high = measured["saved_ci"]
    trained = measured["success"]["with"]
    cost, (least, most) = measured["cost_with_dropout"], measured["cost_with_dropout_ci"]
    small: Verdict = "cannot be tested here" if least <= PAPER_COST < most else confirmed(most <= PAPER_COST)
    saves: Verdict = "cannot be tested here" if low <= 0 <= high else confirmed(low > 0)
    task = measured["settings"]["task"]
    ours = ", ".join(f"without {name} {value:.0%}" for name, value in trained.items() if name != "nothing")
    return [
        Claim(
            "Sec. 5",
            "without one modality success drops by 3 to 5 points only",
            f"{cost * 100:.0f} points [{least * 100:.0f}, {most * 100:.0f}] on average "
            f"({trained['nothing']:.0%} with every sensor; {ours})",
            small,
            f"{task}, an object seen twice, trained with dropout; CALVIN is not available here",
        ),
        Claim(
            "Sec. 1, Sec. 5",
            "the encoder degrades gracefully under missing sensors",
            f"dropout in training saves {measured['saved'] * 100:.0f} points [{low * 100:.0f}, {high * 100:.0f}]",
            saves,
            "the paper does not say how absence is learnt; without dropout in training it costs "
            f"{measured['cost_without_dropout'] * 100:.0f} points",
        ),
        Claim(
            "Sec. 5, Fig. 3",
            "without wrist RGB 41.5 %, without proprioception 15.8 %, without depth 66.2 %, with all 65.2 % (CALVIN)",
            "-",
            "cannot be tested here",
            "CALVIN's data and simulator are not available here; python -m research modality does it for any run",
        ),
    ]


def show(study: Study, console: Console) -> None:
    modality_dropout.show({**study.figures, "settings": study.settings}, console)
