"""prism compare"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from prism.cli.style import JsonOutput, option
from prism.cli.train import Preset
from prism.errors import PrismError, check_numbers

if TYPE_CHECKING:
    from prism.experiments.comparison import Comparison


@dataclass(frozen=True)
class Compare(JsonOutput):
    """Compare methods: same data, same training time, same evaluation episodes.

    Try:
        prism compare pusht-human --minutes 30 --out compare/pusht
        prism compare metaworld-reach --methods prism mse --steps 2000 --seeds 0 1 --out compare/reach
        prism compare pusht --methods prism "k16=prism:policy.objective.candidates=16" --minutes 5 --out compare/k
        prism compare pusht-human --minutes 30 --out compare/pusht --status     what is there so far
        prism compare pusht-human --minutes 30 --trained compare/pusht --first-seed 300000 --out compare/again

    After an interruption the same command continues. Writes comparison.html and comparison.json into
    FOLDER; docs/howto/comparison.md explains the figures.
    """

    recipe: Annotated[tuple[str, ...], Positional, arg(metavar="RECIPE ...", help_behavior_hint="")]
    """Recipes or tasks, as for prism train."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """Output folder for runs and results."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = (
        "prism", "diffusion", "flow_matching", "imle", "act", "mse",
    )  # fmt: skip
    """Methods, or variations of them: NAME=METHOD:KEY=VALUE,KEY=VALUE with keys as in --set, or preset. Default: all
    six."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Training seeds. Each method is trained once per seed. Default: 0 1 2."""
    minutes: Annotated[float | None, option("M")] = None
    """Training time of each, in minutes of one core."""
    steps: Annotated[int | None, option("N")] = None
    """Training steps of each. Either --minutes or --steps is required."""
    clock: Literal["wall", "cpu"] = "wall"
    """Meaning of the minutes: wall-clock time, or CPU time of the process (fair on a busy machine)."""
    preset: Annotated[Preset | None, option("NAME")] = None
    """Size of the networks, as for prism train. Default: the recipe's own."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of the recipe for every method: --set train.batch_size=32."""
    episodes: int = 50
    """Episodes of the final evaluation, on seeds from 100,000."""
    first_seed: int = 100_000
    """Seed of the first of these episodes."""
    curve: Annotated[tuple[float, ...], option("FRACTION ...")] = (0.1, 0.25, 0.5)
    """Fractions of the budget at which to evaluate. The time for it does not count."""
    curve_episodes: int = 20
    """Episodes of each of these evaluations."""
    jobs: Annotated[int | None, option("N")] = None
    """Parallel runs, one thread each. Default: one per core."""
    trained: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Train nothing: play the finished trainings of the comparison in this folder, on other episodes
    (--first-seed) or with other execution settings (variations of controller...)."""
    protocol: Annotated[str, option("NAME")] = ""
    """The written protocol of this comparison (docs/explanation/protocol.md); it is stored and shown."""
    chosen_on: Annotated[tuple[str, ...], option("FIRST-LAST")] = ()
    """Episodes that settings were chosen on; a comparison on any of them is refused."""
    ray: bool = False
    """Run on a Ray cluster (the running one, or one on this machine); FOLDER must be visible to all nodes."""
    status: bool = False
    """Run nothing: show the state of FOLDER."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "jobs steps", "(0, inf)": "minutes"})
        if self.trained is not None and self.trained.resolve() == self.out.resolve():
            raise PrismError(f"--trained {self.trained} is --out itself: name another folder for what is new")
        if self.trained is not None and not self.trained.is_dir():
            raise PrismError(f"--trained {self.trained} does not exist: name the folder of a finished comparison")

    def run(self) -> None:
        from rich.console import Console

        from prism.evaluation.results import refuse_existing, write_json
        from prism.experiments.comparison import PAGE, CompareConfig, Contestant, compare, summarise
        from prism.experiments.trial import EvaluationPlan

        refuse_existing(self.json, overwrite=self.overwrite)
        curve = self.curve if self.trained is None else ()
        config = CompareConfig(
            recipes=self.recipe,
            contestants=tuple(Contestant.parse(text) for text in self.methods),
            seeds=self.seeds,
            minutes=self.minutes,
            steps=self.steps,
            clock=self.clock,
            preset=self.preset,
            settings=self.set,
            evaluation=EvaluationPlan(self.episodes, self.first_seed, curve, self.curve_episodes),
            protocol=self.protocol,
            chosen_on=self.chosen_on,
        )
        console = Console(stderr=True)
        if self.status:
            if not self.out.is_dir():
                raise PrismError(f"{self.out} does not exist: there is no comparison to show")
            comparison = summarise(self.out, config)
        else:
            jobs = self.jobs or (0 if self.ray else os.cpu_count() or 1)
            comparison = compare(self.out, config, jobs, console, self.ray, self.trained)
        if self.json is not None:
            write_json(self.json, comparison.to_json(), self.overwrite)
        print_comparison(comparison)
        if (self.out / PAGE).is_file():
            print(f"page: {self.out / PAGE}")
        if comparison.missing and not self.status:
            total = len(comparison.missing) + len(comparison.trials)
            raise PrismError(
                f"{len(comparison.missing)} of {total} trials are missing (listed above): run the same command again"
            )


def print_comparison(comparison: Comparison) -> None:
    """One row a contestant and recipe; then what is missing."""
    from rich.console import Console
    from rich.table import Table

    config = comparison.config
    console = Console()
    console.width = max(console.width, 150)  # a narrow terminal wraps lines; cut figures would be worse
    for recipe in config.recipes:
        (first, *names), rows = comparison.table(recipe)
        table = Table(box=None, padding=(0, 1, 0, 0), title=f"{recipe}, {config.budget}", title_justify="left")
        table.add_column(first, no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if comparison.rows:
        test = "n: seeds; differences and p: paired bootstrap over common seeds and episodes; K, Ta: candidates drawn "
        test += "and steps executed a plan"
        console.print(test, highlight=False, soft_wrap=True)
    for remark in filter(None, (comparison.mixed, comparison.beside)):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    for one in comparison.missing:
        console.print(f"missing: {one.trial}: {one.reason}", highlight=False, markup=False, soft_wrap=True)
