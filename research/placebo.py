"""A placebo for rejection: 20 % of the candidates at random, beside own, batch and no rejection (Sec. 4.4).

Try:
    python -m research placebo --json placebo.json                   3.5 core hours
    python -m research placebo --seeds 0 --json F
    python -m research placebo --add F --seeds 0 1 --json F --overwrite      goes on where F ends

Human Push-T (`prism data collect pusht-human`), batches of 128, equal CPU minutes, everything else as in the recipe.

    batch    the default: any target of the batch rejects        own     only the own target does
    random   each candidate with chance q, whatever its distance none    plain IMLE, with the soft term

logged: rejection_rate, fallback_rate, and the distance of the nearest of the K candidates to the demonstration
(nearest_distance): smaller means that more of what people did is covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from prism.cli.style import option
from prism.experiments.comparison import CompareConfig
from prism.experiments.trial import EvaluationPlan
from research import variants
from research.report import Claim, Study, decided
from research.variants import said

_OBJECTIVE = "policy.objective"
_SAME = ("train.batch_size=128",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "batch": (*_SAME, f"{_OBJECTIVE}.scope=batch"),
    "own": (*_SAME, f"{_OBJECTIVE}.scope=own"),
    "random": (*_SAME, f"{_OBJECTIVE}.rule=random"),
    "none": (*_SAME, f"{_OBJECTIVE}.rule=none"),
}
PAIRS = (
    ("batch", "random"),
    ("own", "random"),
    ("batch", "own"),
    ("batch", "none"),
    ("own", "none"),
    ("random", "none"),
)
WATCHED = ("rejection_rate", "fallback_rate", "threshold", "hard", "own_distance", "nearest_distance")


@dataclass(frozen=True, kw_only=True)
class Config(variants.Options):
    recipe: str = "pusht-human"
    """The recipe to train on."""
    variants: Annotated[tuple[str, ...], option("NAME ...")] = tuple(VARIANTS)
    """batch, own, random, none; default: all of them."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2, 3, 4)
    """Seeds of the training."""
    episodes: int = 100
    """Episodes of each trial."""
    minutes: float = 10.0
    """CPU minutes of each training."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-placebo")
    """Where the runs and finished parts are kept; default: runs/study-placebo."""

    def comparison(self) -> CompareConfig:
        return CompareConfig(
            recipes=(self.recipe,),
            contestants=variants.chosen(self.variants, VARIANTS, "placebo"),
            seeds=self.seeds,
            minutes=self.minutes,
            clock="cpu",
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve=()),
        )


def run(config: Config, console: Console) -> Study:
    study = variants.play("placebo", config, {config.recipe: config.comparison()}, PAIRS, WATCHED, console)
    return variants.with_claims(study, claims(study))


def claims(study: Study) -> list[Claim]:
    """Success and score: where they disagree the verdict depends on the metric."""
    found = []
    for pairs in study.figures["difference"].values():
        for pair, paper in (
            ("batch - random", "what batch-global rejection rejects matters (against the same share at random)"),
            ("batch - none", "batch-global rejection helps (against none)"),
            ("batch - own", "batch-global rejection is better than by the own target alone"),
        ):
            if not (both := pairs.get(pair)):
                continue
            (verdict, note), (other, _) = decided(both["success"]), decided(both["score"])
            if "cannot be tested here" not in (verdict, other) and verdict != other:
                verdict, note = "cannot be tested here", "; depends on the metric"
            ours = f"success {said(both['success'])}; score {said(both['score'])}"
            found.append(Claim("Sec. 4.4", paper, ours, verdict, note.removeprefix("; ")))
    return found


show = variants.show
