"""PRISM: single-pass multisensory imitation learning (see README.md for the map from paper to files).

    import prism

    run = prism.train("pusht", minutes=5)                # or, of a folder: prism.load_run("runs/pusht")
    result = prism.evaluate(run, episodes=20)            # result.summary()["success"]
    controller = run.controller()                        # with the settings that are stored in the run
    controller.reset(seed=0)                             # at the beginning of every episode
    action = controller.act({"proprio": hand, "object_state": objects})      # one reading of each sensor
    episodes = prism.open_dataset("my.zarr.zip")         # any dataset that prism reads

Each name is imported when it is first used, so that `import prism` and `prism --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.errors import PrismError
from prism.io.processes import keep_freed_memory, sleep_at_barriers

if TYPE_CHECKING:
    from prism.controller import Controller
    from prism.data import open_dataset
    from prism.experiments.run_folder import Run
    from prism.experiments.workflow import evaluate, load_run, train

__version__ = "0.1.0"
__all__ = ["Controller", "PrismError", "Run", "__version__", "evaluate", "load_run", "open_dataset", "train"]

_HOME = {
    "Controller": "prism.controller",
    "Run": "prism.experiments.run_folder",
    "evaluate": "prism.experiments.workflow",
    "load_run": "prism.experiments.workflow",
    "open_dataset": "prism.data",
    "train": "prism.experiments.workflow",
}

keep_freed_memory()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'prism' has no attribute '{name}'")
    if name == "train":
        sleep_at_barriers()  # before torch is loaded
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
