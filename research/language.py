"""One policy, four commands: does it do what it is told? (Sec. 5: the paper's four commands.)

Try:
    python -m research language --json language.json
    python -m research language --seeds 0 --minutes 2 --episodes 10
    python -m research language --status --json language.json      runs nothing: the figures of what is there

Three cups, a ball and a hook on a table; the sentence says which of four things to do (docs/reference/tabletop.md).
With one seed the four tasks differ in the sentence only. Each training is one policy from 25 demonstrations of each
command, the paper's protocol. Killed, the same command goes on; what is not there is in `missing`.

    success.COMMAND        mean success, told the command; success_ci, by_seed likewise
    mean                   over the four commands
    swapped                in scenes of one command, told another: share of episodes in which that other one was done
    swapped_by_command     the same, by the command that was told; ignored: share in which the scene's own was done
    both                   of the same scenes, played once with each sentence: share in which each did what it says
    paraphrase             share done of what was told in words that were not in training; paraphrase_by_sentence
CLIP's sentences are not measured: its weights are not on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from prism.cli.style import option
from prism.errors import PrismError
from prism.evaluation.metrics import FloatArray, interval, success_interval
from prism.evaluation.play import TEST_SEED
from prism.experiments.combined_recipe import mixed
from prism.experiments.options import customized
from prism.experiments.recipes import Experiment
from prism.experiments.run_folder import EvalOptions, Run
from prism.sims.view import sentence_of
from research.report import Claim, ComputedTrials, Result, Study, Written, confirmed, show_rows, train_run

PARAPHRASES = {
    "stack-blue": ("put the blue cup on top of the green cup", "place the blue cup on the green one"),
    "stack-yellow": ("put the yellow cup on top of the blue cup", "place the yellow cup on the blue one"),
    "ball": ("drop the green ball into the green cup", "the ball goes into the green cup"),
    "hang": ("put the green cup on the hook", "hang up the green cup"),
}
COMMANDS = tuple(PARAPHRASES)
# Told in the scene of each: the next of them.
OTHER = dict(zip(COMMANDS, (*COMMANDS[1:], COMMANDS[0]), strict=True))
SWAPPED_SEED = TEST_SEED + 10_000  # scenes that nothing else was measured on
Played = dict[str, list[bool]]  # name of a measurement -> an entry an episode


@dataclass(frozen=True, kw_only=True)
class Config(Written):
    minutes: float = 2.5
    """CPU minutes of the training."""
    demonstrations: int = 25
    """Of each command."""
    seeds: Annotated[tuple[int, ...], option("N ...")] = (0, 1, 2)
    """Seeds of the training, one policy each."""
    episodes: int = 50
    """Test episodes of each command, and of each that was swapped."""
    paraphrased: int = 20
    """Test episodes of each paraphrase, and of each command's scenes: told its own, and told another."""
    set: Annotated[tuple[str, ...], option("KEY=VALUE")] = ()
    """Change a setting of the recipe."""
    status: bool = False
    """Run nothing: the figures of what is there."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-language")
    """Where the runs and finished parts are kept; default: runs/study-language."""

    def __post_init__(self) -> None:
        if not self.seeds or min(self.demonstrations, self.episodes, self.paraphrased) < 1 or self.minutes <= 0:
            raise PrismError("language: seeds, demonstrations, episodes, paraphrased and minutes must be above 0")
        self.experiment(self.seeds[0])  # a setting that does not exist ends here

    def experiment(self, seed: int) -> Experiment:
        one = mixed([task(command) for command in COMMANDS])
        timed = ("train.clock=cpu", "train.threads=1", "train.val_fraction=0.0", *self.set)
        return customized(one, minutes=self.minutes, seed=seed, episodes=self.demonstrations, set=timed)


def task(command: str) -> str:
    return f"tabletop-{command}"


def words(command: str) -> str:
    return sentence_of(task(command))


def run(config: Config, console: Console) -> Study:
    trials = ComputedTrials(config.work, console)
    settings = config.settings("seeds", "status")
    found: dict[str, dict[int, Played]] = {name: {} for name in ("told", "swapped", "paraphrase")}
    for seed in config.seeds:
        for part, play in (("told", told), ("swapped", swapped), ("paraphrase", paraphrased)):
            name, spec = f"seed-{seed}/{part}", {**settings, "seed": seed, "part": part}
            compute = None if config.status else job(config, seed, play, trials, console)
            if (result := trials.get(name, spec, compute)) is not None:
                found[part][seed] = result
    figures = summary(found)
    claimed = tuple(claims(figures, found))
    return Study("language", figures, claimed, settings, config.seeds, tuple(trials.missing), trials.commits)


def job(
    config: Config, seed: int, play: Callable[[Config, Run], Played], trials: ComputedTrials, console: Console
) -> Callable[[], Result]:
    """Train the policy of this seed, or go on with it, then play."""

    def compute() -> Result:
        folder = trials.training(f"seed-{seed}")
        train_run(config.experiment(seed), folder, console)
        return dict(play(config, Run(folder)))

    return compute


def done(run: Run, command: str, episodes: int, first_seed: int, text: str | None = None) -> list[bool]:
    how = EvalOptions(task(command), episodes, first_seed, workers=0, text=text)
    return [episode.success for episode in run.play(how, progress=False).episodes]


def told(config: Config, run: Run) -> Played:
    return {command: done(run, command, config.episodes, TEST_SEED) for command in COMMANDS}


def swapped(config: Config, run: Run) -> Played:
    """`OTHER > SCENE`: the other command, told in the scene of a command, was done; `SCENE < OTHER`: its own was, in
    the first of the same episodes (scenes are equal for equal seeds, and a controller's draws are too);
    `SCENE = SCENE`: its own was, told its own, in the same scenes.
    """
    played: Played = {}
    for number, (scene, other) in enumerate(OTHER.items()):
        first = SWAPPED_SEED + 1000 * number
        played[f"{other} > {scene}"] = done(run, other, config.episodes, first, words(other))
        played[f"{scene} < {other}"] = done(run, scene, config.paraphrased, first, words(other))
        played[f"{scene} = {scene}"] = done(run, scene, config.paraphrased, first)
    return played


def paraphrased(config: Config, run: Run) -> Played:
    return {
        f"{command}: {text}": done(run, command, config.paraphrased, TEST_SEED, text)
        for command, texts in PARAPHRASES.items()
        for text in texts
    }


def grid_of(by_seed: Mapping[int, Played], names: Sequence[str]) -> FloatArray:
    """(seeds, episodes of all the named measurements)"""
    return np.array([np.concatenate([by_seed[seed][name] for name in names]) for seed in sorted(by_seed)], np.float64)


def summary(found: Mapping[str, Mapping[int, Played]]) -> dict[str, Any]:
    """The figures; null where nothing is there."""
    figures: dict[str, Any] = {"commands": {command: words(command) for command in COMMANDS}}
    rates = {command: grid_of(found["told"], [command]) for command in COMMANDS if found["told"]}
    figures["success"] = {command: float(won.mean()) for command, won in rates.items()}
    figures["success_ci"] = {command: list(success_interval(won)) for command, won in rates.items()}
    figures["by_seed"] = {command: won.mean(axis=1).tolist() for command, won in rates.items()}
    every = grid_of(found["told"], COMMANDS) if rates else None
    figures["mean"] = None if every is None else float(every.mean())
    figures["mean_ci"] = None if every is None else list(interval(every))
    other = {b: f"{b} > {a}" for a, b in OTHER.items()}
    own = {b: f"{a} < {b}" for a, b in OTHER.items()}
    figures |= _rate("swapped", found["swapped"], other) | _rate("ignored", found["swapped"], own)
    figures["both"] = both(found["swapped"])
    sentences = {f"{command}: {text}": f"{command}: {text}" for command, texts in PARAPHRASES.items() for text in texts}
    figures |= _rate("paraphrase", found["paraphrase"], sentences)
    return figures | {"seeds_done": {part: sorted(by_seed) for part, by_seed in found.items()}}


def both(by_seed: Mapping[int, Played]) -> float | None:
    """Share of the scenes in which each of two sentences did what it says."""
    pairs = [
        (played[f"{scene} = {scene}"], played[f"{other} > {scene}"])
        for played in by_seed.values()
        for scene, other in OTHER.items()
    ]
    each = [own and swapped for owns, others in pairs for own, swapped in zip(owns, others, strict=False)]
    return float(np.mean(each)) if each else None


def _rate(name: str, by_seed: Mapping[int, Played], keys: Mapping[str, str]) -> dict[str, Any]:
    by = f"{name}_by_sentence" if name == "paraphrase" else f"{name}_by_command"
    if not by_seed:
        return {name: None, f"{name}_ci": None, by: {}}
    won = grid_of(by_seed, list(keys.values()))
    single = {said: float(grid_of(by_seed, [key]).mean()) for said, key in keys.items()}
    return {name: float(won.mean()), f"{name}_ci": list(success_interval(won)), by: single}


def claims(figures: Mapping[str, Any], found: Mapping[str, Mapping[int, Played]]) -> list[Claim]:
    made = []
    if figures["mean"] is not None:
        low, high = figures["mean_ci"]
        ours = ", ".join(f"{command} {value:.0%}" for command, value in figures["success"].items())
        good = figures["mean"] >= 0.85 and min(figures["success"].values()) >= 0.75
        made.append(
            Claim(
                "Sec. 5, hardware",
                "one policy does four commands from 25 demonstrations each",
                f"{figures['mean']:.0%} [{low:.0%}, {high:.0%}]: {ours}",
                confirmed(good),
                f"our simulated scene, n = {len(found['told'])} seeds",
            )
        )
    if figures["swapped"] is not None:
        ours = f"{figures['swapped']:.0%} do the other thing, {figures['ignored']:.0%} the scene's own"
        made.append(Claim("Sec. 5", "it follows the sentence", ours, confirmed(figures["swapped"] >= 0.8)))
    return made


def show(study: Study, console: Console) -> None:
    figures = study.figures
    percent = "[{:.0%}, {:.0%}]".format
    rows = [
        [command, figures["commands"][command], f"{value:.0%}", percent(*figures["success_ci"][command])]
        for command, value in figures["success"].items()
    ]
    rows += [
        [name, "", f"{figures[name]:.0%}", percent(*figures[f"{name}_ci"])]
        for name in ("mean", "swapped", "ignored", "paraphrase")
        if figures[name] is not None
    ]
    show_rows("Four commands, one policy", ("command", "sentence", "success", "95 %"), rows, console)
