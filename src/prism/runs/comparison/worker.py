"""The process of one cell: python -m prism.runs.comparison.worker "prism compare" FOLDER

One thread. Its standard input is a pipe that the comparison holds open: when that ends, however it ends, the worker
saves and ends too. Its last line of output is JSON: what became of the cell. The first argument makes it findable:
`pgrep -f "prism compare"`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prism.errors import PrismError
from prism.training import files

TITLE = "prism compare"
LOG = "output.txt"
EXIT_FAILED, EXIT_STOPPED = 2, 130
_LOCK_SECONDS = 300.0  # a worker whose comparison was killed may still be saving


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "prism.runs.comparison.worker", TITLE, str(folder)]


def environment() -> dict[str, str]:
    """One thread, also for libraries that read it only when they are loaded."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, "1")}


def main(folder: Path) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()  # before the imports that take seconds
    from rich.console import Console

    with open(folder / LOG, "a", encoding="utf-8", buffering=1) as log:
        console = Console(file=log, width=200)
        try:
            import torch

            from prism.runs.comparison.cell import run_cell

            torch.set_num_threads(1)
            with _alone(folder):
                run_cell(folder, console)
        except PrismError as error:
            return _failed(folder, str(error))
        except OSError as error:  # a full disk, mostly
            return _failed(folder, f"{error.strerror or error}: {error.filename or folder}")
        except KeyboardInterrupt:  # or StoppedError
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


def write_failed(folder: Path, reason: str) -> None:
    """For whoever looks at the folder later; a disk that is full does not take it, and the comparison has heard it."""
    from prism.runs.comparison.grid import FAILED

    with suppress(OSError):
        files.replace_file(folder / FAILED, files.encode_json({"reason": reason}))


def _say(state: str, reason: str) -> None:
    print(json.dumps({"state": state, "reason": reason}), flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1):  # empty when the other end is closed. Not sys.stdin: its lock may not be held at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the training finishes its step and saves; anything else just ends


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for a predecessor that is still saving: its comparison was killed and started again."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(folder / ".cell.lock", "w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PrismError(f"{folder} is in use by another process: wait for it, or stop it") from None
                time.sleep(0.5)
        yield


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2])))
