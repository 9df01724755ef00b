"""A list of trials that can be killed and resumed at any moment: comparisons, the demo, studies, benchmark tables.

OUT/trials/NAME/ is the folder of a trial (experiments/trial.py); NAME may have slashes: pusht/prism/seed-0.

`Trials.run` starts a process for each trial (experiments/trial_process.py), here or on a Ray cluster. A trial that is
done is never computed again. A trial with another spec is refused.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from prism.data import EpisodeSource
from prism.errors import PrismError
from prism.evaluation.workers import LOSSES
from prism.experiments.recipes import Experiment
from prism.experiments.trial import DATA, EVALUATE, LOG, REMEDY, RESULT, TrialResult, spec_file, state_of, write_failed
from prism.experiments.trial_places import Cluster, Places, Processes
from prism.io import files
from prism.io.progress import short_bar
from prism.training.log import read_log

RETRIES = 2  # of a trial whose process died
_BAR_SECONDS = 3.0  # between looks at the logs


def commits_of(trials: Iterable[TrialResult]) -> list[str]:
    """Of the code: "A + B" where a training went on with another version, "A, played by B" where that evaluated it."""
    found = set()
    for trial in trials:
        origins = (trial.get("trained_by") or trial["info"], trial["info"])
        trained, played = (str(one.get("commit", "unknown")) for one in origins)
        found.add(trained if trained.split(" + ")[-1] == played else f"{trained}, played by {played}")
    return sorted(found)


def several_versions(commits: Sequence[str]) -> str:
    """A line where the trials are of several versions of prism."""
    several = len(commits) > 1 or any("+" in commit for commit in commits)
    return f"the trials are of several versions of prism: {'; '.join(commits)}" * several


def refuse_other(folder: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """PrismError that names the settings in which what is in a folder differs from what is asked for now."""
    before, now = _flat(there), _flat(asked)
    if different := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        changes = ", ".join(f"{key} = {before.get(key)} there, {now.get(key)} now" for key in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise PrismError(f"{folder} was made with other settings ({changes}{more}): give the same, or another folder")


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping):
        return {key: value for k, v in data.items() for key, value in _flat(v, f"{path}.{k}" if path else k).items()}
    return {path: list(data) if isinstance(data, tuple) else data}  # as JSON has it


def next_ready(pending: Sequence[str], running: Collection[str], after: Mapping[str, str]) -> str | None:
    """The first trial that can start: one that waits for none of the others."""
    busy = {*pending, *running}
    return next((name for name in pending if after.get(name) not in busy), None)


class Trials:
    """The trials of one study, comparison or demo, in the folder `out`."""

    def __init__(
        self, out: Path, console: Console | None = None, trials: str = "trials", line_seconds: float = 60.0
    ) -> None:
        older = out / "cells"  # the folder of comparisons from before 2026-11-19
        self._trials = older if trials == "trials" and older.is_dir() else out / trials
        self.console = console or Console(stderr=True)
        self._line_seconds = line_seconds  # between lines where there is no terminal

    def folder(self, name: str) -> Path:
        return self._trials / name

    def finished(self) -> dict[str, TrialResult]:
        """The trials of a comparison that are done, by name, also those that are not requested now."""
        found = {"/".join(file.parts[-4:-1]): file for file in sorted(self._trials.glob(f"*/*/seed-*/{RESULT}"))}
        return {name: files.read_json(file) for name, file in found.items() if state_of(file.parent)[0] == "done"}

    def prepared(self) -> list[Path]:
        """The folders of all trials of a comparison that have a spec."""
        return [folder for folder in sorted(self._trials.glob("*/*/seed-*")) if spec_file(folder).is_file()]

    def check_data(self, name: str, source: EpisodeSource, keep: bool = True) -> None:
        """PrismError where the trials below NAME had another dataset, or a smaller one; `keep`: note the first one."""
        now, path = {"episodes": len(source.lengths), "steps": int(source.lengths.sum())}, self.folder(name) / DATA
        if keep and not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace_file(path, files.encode_json(now))
        refuse_other(path.parent, files.read_json(path, REMEDY) if path.is_file() else now, now)

    def run(
        self,
        names: Sequence[str],
        jobs: int,
        on_done: Callable[[str], object] = lambda name: None,
        after: Mapping[str, str] | None = None,
        ray: bool = False,
    ) -> dict[str, str]:
        """Run prepared trials in this order, `jobs` at a time (0: all that find a processor), each in a process of its
        own; the reasons of those that came to nothing. `after`: which trial waits for which other one.

        A trial that fails for a reason (NaN, full disk) is given up; one whose process dies is started again, and goes
        on from its last checkpoint. Ctrl-C: each saves what it has learnt.
        """
        pending, running = deque(names), list[str]()
        deaths, losses = Counter[str](), Counter[str]()
        failed: dict[str, str] = {}
        places: Places = Cluster() if ray else Processes()
        board = _Board(self, len(names))
        with board.bar:
            try:
                while pending or running:
                    while len(running) < (jobs or len(names)):
                        if (name := next_ready(pending, running, after or {})) is None:
                            break
                        pending.remove(name)
                        running.append(name)
                        places.start(name, self.folder(name))
                    for name, state, reason in places.ended():
                        running.remove(name)
                        deaths[name] += state == "crashed"
                        losses[name] += state == "lost"
                        if state in ("crashed", "lost"):
                            if deaths[name] <= RETRIES and losses[name] <= LOSSES:
                                self.say(f"{name}: {reason}; it continues from its last checkpoint")
                                pending.appendleft(name)
                                continue
                            reason = f"its process died {deaths[name] + losses[name]} times: {reason}"
                            write_failed(self.folder(name), reason)
                        if state == "done":
                            on_done(name)
                        else:
                            failed[name] = reason
                            self.say(f"{name} failed: {reason}")
                    board.update(running, len(names) - len(pending) - len(running))
            finally:
                places.stop()
        return failed

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Board:
    """A bar over all trials and one for each that runs; where there is no terminal, lines now and then."""

    def __init__(self, trials: Trials, total: int) -> None:
        self._trials, self._total = trials, total
        self.bar = short_bar(trials.console)
        self._all = self.bar.add_task("all", total=total, text="")
        self._rows: dict[str, TaskID] = {}
        self._looked = time.monotonic()

    def update(self, running: Sequence[str], over: int) -> None:
        for name in [name for name in self._rows if name not in running]:
            self.bar.remove_task(self._rows.pop(name))
        for name in [name for name in running if name not in self._rows]:
            self._rows[name] = self.bar.add_task(name, total=1.0, text="starting")
        self.bar.update(self._all, completed=over, text=f"{over} of {self._total} trials")
        if time.monotonic() - self._looked < (self._trials._line_seconds if self.bar.disable else _BAR_SECONDS):
            return
        self._looked = time.monotonic()
        states = [(name, *progress_of(self._trials.folder(name))) for name in running]
        for name, fraction, text in states:
            self.bar.update(self._rows[name], completed=fraction, text=text)
        if self.bar.disable:
            now = "; ".join(f"{name} {fraction:.0%} {text}" for name, fraction, text in states)
            self._trials.say(f"{over} of {self._total} trials done. {now}")


def progress_of(folder: Path) -> tuple[float, str]:
    """How far the training of a trial is, from what its process leaves on disk: the fraction, and a few words."""
    log = read_log(folder)
    lines = (folder / LOG).read_text(errors="replace").strip().splitlines() if (folder / LOG).exists() else []
    said = lines[-1][:80] if lines else "starting"
    if not log:
        return 0.0, said
    train, last = Experiment.load(folder).train, log[-1]
    fraction = train.fraction(last["step"], last["seconds"])
    if said.startswith(EVALUATE):
        return min(fraction, 1.0), said
    parts = [f"step {last['step']}"]
    if last.get("loss") is not None:
        parts.append(f"loss {last['loss']:.4f}")
    if (val := next((r["val_loss"] for r in reversed(log) if r.get("val_loss") is not None), None)) is not None:
        parts.append(f"val {val:.4f}")
    if train.minutes:
        left = max(0, int(60 * train.minutes - last["seconds"]))
        parts.append(f"{left // 60}:{left % 60:02d} left")
    return fraction, "  ".join(parts)
