"""The process of one trial: train in stretches, look on the way, evaluate at the end. Killed at any moment, it goes on
when it is run again.

    python -m prism.experiments.trial_process TITLE FOLDER

FOLDER has experiment.json and trial.json (experiments/trial.py). It becomes a run of `prism train` with curve.json
(evaluations on the way) and result.json. Evaluations are not on the training's clock. They run in this process, on one
thread, so that one kill ends everything. When standard input ends, the process saves and ends. Its last line of output
is JSON: what became of the trial.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console

from prism.data.damage import remedies_as_settings
from prism.errors import PrismError
from prism.evaluation.play import RecordConfig, evaluate
from prism.evaluation.results import (
    EpisodeResult,
    EvaluationResult,
    metrics_json,
    recording_path,
    run_info,
    save_result,
    write_json,
)
from prism.experiments.demonstrations import record_if_missing
from prism.experiments.recipes import Experiment
from prism.experiments.trial import (
    EVALUATE,
    EXIT_FAILED,
    EXIT_STOPPED,
    FAILED,
    FORMAT_VERSION,
    LOG,
    REMEDY,
    RESULT,
    EvaluationPlan,
    TrialSpec,
    write_failed,
)
from prism.experiments.workflow import add_point, curve_point, read_curve, train_experiment
from prism.io import files
from prism.io.files import exclusive
from prism.io.jsonconfig import to_json
from prism.training.checkpoint import list_checkpoints
from prism.training.log import read_log
from prism.training.trainer import TrainResult

TRAINED_BY = "trained_by.json"  # commit and date of the training, which may be another comparison's
_LINE_SECONDS = 15.0
_LOCK_SECONDS = 300.0  # a predecessor whose caller was killed may still be saving


def run_trial(folder: Path, console: Console) -> None:
    """Run until result.json exists. PrismError for failures that a retry would repeat."""
    experiment, spec = Experiment.load(folder), TrialSpec.load(folder)
    if (folder / RESULT).is_file():
        return
    teacher = None if experiment.teacher is None else Path(experiment.teacher)
    if teacher is not None and not (teacher / RESULT).is_file():
        raise PrismError(f"its teacher, {TrialSpec.load(teacher).id}, is not finished: run the same command again")
    (folder / FAILED).unlink(missing_ok=True)
    _record_demonstrations(experiment, console)
    _sign(folder, experiment)
    plan = spec.evaluation
    known = [point["fraction"] for point in read_curve(folder)]

    def look(fraction: float, trained: TrainResult) -> None:
        add_point(folder, fraction, trained, _play(folder, experiment, plan, plan.looked_at, console))

    looks = [fraction for fraction in plan.curve if fraction not in known]
    trained = train_experiment(experiment, folder, "auto", console, str(spec.id), 1.0, looks, look)
    if trained.stopped_by:
        raise KeyboardInterrupt(trained.stopped_by)  # all is saved
    result = _play(folder, experiment, plan, plan.episodes, console)
    first = replace(result, episodes=result.episodes[: plan.looked_at])
    curve = [*read_curve(folder), curve_point(1.0, trained, first)]
    save_result(recording_path(folder, result.task), result, overwrite=True)
    write_json(folder / "metrics.json", metrics_json([result]), overwrite=True)
    for old in list_checkpoints(folder):
        if old.resolve() != trained.checkpoint.resolve():
            files.remove_folder(old)
    write_json(folder / RESULT, _record(folder, spec, experiment, trained, result, curve), overwrite=True)


def _sign(folder: Path, experiment: Experiment) -> None:
    """Record the version of prism that trains it; all versions if a resumed training changes it."""
    log, info, path = read_log(folder), run_info(experiment.train.seed), folder / TRAINED_BY
    if not log or experiment.train.fraction(log[-1]["step"], log[-1]["seconds"]) < 1:
        before = files.read_json(path, REMEDY)["commit"].split(" + ") if path.is_file() else ["unknown"] * bool(log)
        commits = dict.fromkeys([*before, str(info.get("commit", "unknown"))])
        files.replace_file(path, files.encode_json({"commit": " + ".join(commits), "date": info["date"]}))


def _record_demonstrations(experiment: Experiment, console: Console) -> None:
    """The demo keeps its own: they are recorded by the process that learns from them."""
    asked = experiment.demonstrations
    if asked.kind == "expert" and asked.path and experiment.task and not Path(asked.path).exists():
        record_if_missing(asked, experiment.task, console, workers=1)


def _play(run: Path, experiment: Experiment, plan: EvaluationPlan, episodes: int, console: Console) -> EvaluationResult:
    assert experiment.task is not None  # who prepares a trial sees to it
    said, wins = time.perf_counter(), 0
    console.print(f"{EVALUATE}{episodes} episodes", highlight=False)

    def tell(episode: EpisodeResult, done: int, total: int) -> None:
        nonlocal said, wins
        wins += episode.success
        if time.perf_counter() - said > _LINE_SECONDS:
            said = time.perf_counter()
            console.print(f"{EVALUATE}{done} of {total} episodes, {wins} succeeded", highlight=False)

    record = RecordConfig(videos=plan.videos) if plan.videos and episodes == plan.episodes else None
    result = evaluate(run, experiment.task, episodes, plan.first_seed, experiment.controller, 0, record, tell)
    again = f"prism eval {run} --episodes {episodes} --first-seed {plan.first_seed}"  # not how this process is called
    return replace(result, info={**result.info, "command": again})


def _record(
    folder: Path,
    spec: TrialSpec,
    experiment: Experiment,
    trained: TrainResult,
    result: EvaluationResult,
    curve: list[dict[str, Any]],
) -> dict[str, Any]:
    """result.json: everything that the summary needs, one row an episode."""
    summary = result.summary()
    kept = ("success", "score", "jerk", "mode_switches", "modes", "spread", "latency_ms", "replans", "seconds")
    info = run_info(experiment.train.seed)
    info.pop("command", None)  # of this process; the comparison's own is in comparison.json
    origin = folder / TRAINED_BY
    trained_by = files.read_json(origin, REMEDY) if origin.is_file() else {k: info.get(k) for k in ("commit", "date")}
    return {
        "format_version": FORMAT_VERSION,
        "recipe": spec.id.recipe,
        "contestant": spec.id.contestant,
        "method": spec.method,
        "protocol": spec.protocol,
        "chosen_on": list(spec.chosen_on),
        "task": result.task,
        "seed": spec.id.seed,
        "steps": trained.step,
        "weights": files.read_sums(trained.checkpoint).get("model.safetensors", {}).get("sha256", ""),
        "train_seconds": trained.seconds,
        "clock": experiment.train.clock,
        "val_loss": trained.val_loss,
        "skipped_steps": trained.skipped_steps,
        "parameters": sum(parameter.numel() for parameter in trained.policy.parameters()),
        "controller": to_json(experiment.controller),
        "evaluation": {name: summary[name] for name in kept},
        "per_episode": [episode.row() for episode in result.episodes],
        "curve": curve,
        "info": info,
        "trained_by": trained_by,
    }


def main(folder: Path) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with open(folder / LOG, "a", encoding="utf-8", buffering=1) as log:
        try:
            with exclusive(folder, ".trial.lock", _LOCK_SECONDS), remedies_as_settings():
                run_trial(folder, Console(file=log, width=200))
        except PrismError as error:
            return _failed(folder, str(error))
        except OSError as error:  # a full disk, mostly
            return _failed(folder, f"{error.strerror or error}: {error.filename or folder}")
        except KeyboardInterrupt:
            return EXIT_STOPPED
        except Exception as error:
            traceback.print_exc(file=log)
            _say("crashed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return 1
    _say("done", "")
    return 0


def _failed(folder: Path, reason: str) -> int:
    reason = " ".join(reason.split())
    _say("failed", reason)
    write_failed(folder, reason)
    return EXIT_FAILED


_answers: TextIO | None = None  # None: standard output


def _say(state: str, reason: str) -> None:
    print(json.dumps({"state": state, "reason": reason}), file=_answers, flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1):  # empty when the other end is closed. Not sys.stdin: its lock may not be held at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the training finishes its step and saves; anything else just ends


if __name__ == "__main__":
    # Nobody reads the pipe before the end, and it holds 64 KB: what a simulator prints goes to output.txt.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(Path(sys.argv[2])))
