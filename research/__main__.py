"""python -m research NAME: the benches and studies behind the figures, run from a checkout.

Each name is a module of this folder with its own options (research/report.py says what a module has). RESULTS.md says
for each file in results/ which command made it, and what it does not show.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prism.cli import guard, parse, unknown

MODULES = {
    "attention": "attention",
    "train-step": "train_step",
    "global-batch": "global_batch",
    "data": "data",
    "loading": "loading",
    "big-pictures": "big_pictures",
    "scaling": "scaling",
    "realtime": "realtime",
    "server": "server",
    "sims": "sims",
    "robots": "robots",
    "loco": "loco",
    "faults": "faults",
    "kills": "kills",
    "files": "hostile_files",
    "experts": "experts",
    "size": "size",
    "benchmark": "benchmark",
    "senses": "senses",
    "language": "language",
    "modality": "modality",
    "modality-dropout": "modality_dropout",
    "lemmas": "lemmas",
    "threshold": "threshold",
    "multimodality": "multimodality",
    "ablations": "ablations",
    "departures": "departures",
    "placebo": "placebo",
    "favor": "favor",
    "demonstrations": "demonstrations",
    "selection": "selection",
    "execution": "execution",
    "replan": "replan",
    "failures": "failures",
    "trends": "trends",
    "tables": "tables",
    "overview": "overview",
    "final": "final",
    "pages": "pages",
    "one-policy": "one_policy",
    "lerobot-pusht": "lerobot_pusht",
}

HELP = """usage: python -m research NAME [OPTIONS]

What a reviewer runs: measurements and studies behind the figures of the documentation.
RESULTS.md in this folder says which command made which file, and what it does not show.

{names}

Every name explains itself and the keys of its JSON: python -m research attention --help"""


def main(args: Sequence[str] | None = None) -> int:
    return guard("research", lambda: _dispatch(list(sys.argv[1:] if args is None else args)))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--list"):
        width = max(map(len, MODULES))
        print(HELP.format(names="\n".join(f"  {name:<{width}}  {_first_line(name)}" for name in MODULES)))
        return 0
    name, rest = words[0], words[1:]
    if name not in MODULES:
        raise unknown(name, MODULES, "python -m research")
    from research.report import carry_out

    module: Any = importlib.import_module(f"research.{MODULES[name]}")
    carry_out(module, parse(module.Config, f"python -m research {name}", rest, module.__doc__))
    return 0


def _first_line(name: str) -> str:
    """Of a module's docstring, without importing it: the list answers at once."""
    source = Path(__file__).with_name(f"{MODULES[name]}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
