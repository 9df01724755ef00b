"""`prism`: find the command, parse its arguments, run it, and turn what went wrong into one line.

A command is a frozen dataclass in prism.cli with a `run()` method; its docstrings are the help. Commands
import torch, the simulators and the rest inside `run`, so that `prism --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import tyro

from prism.cli.bench import Latency, Realtime, Server
from prism.cli.compare import Compare
from prism.cli.data import Collect, Convert, Inspect
from prism.cli.demo import Demo
from prism.cli.evaluate import Eval
from prism.cli.export import Export
from prism.cli.merge import Merge
from prism.cli.record import Record
from prism.cli.report import Report
from prism.cli.run import Run
from prism.cli.serve import Serve
from prism.cli.train import Train
from prism.errors import PrismError, printable
from prism.io.files import explain
from prism.io.terminal import TerminalLost, end_by_signals

T = TypeVar("T")


class Command(Protocol):
    def run(self) -> None: ...


# What a user asks of a machine, a dataset or a policy of theirs; at most 15, of which two are for record and run.
COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "train": Train,
    "eval": Eval,
    "compare": Compare,
    "report": Report,
    "export": Export,
    "serve": Serve,
    "record": Record,
    "run": Run,
    "data collect": Collect,
    "data inspect": Inspect,
    "data convert": Convert,
    "data merge": Merge,
    "bench latency": Latency,
    "bench realtime": Realtime,
    "bench server": Server,
}
for _command in COMMANDS.values():  # the options that it shares with other commands come last in its help
    _fields = vars(_command)["__dataclass_fields__"]
    for _name in [name for name in _fields if name not in _command.__annotations__]:
        _fields[_name] = _fields.pop(_name)

# Two words for what another command does: prism push RUN NAME is prism export RUN --hub NAME.
SHORT = {"push": ("export", "--hub"), "data view": ("data inspect", "--rerun")}

HELP = """usage: prism COMMAND [OPTIONS]

PRISM: real-time imitation learning from whatever sensors a robot has, in one pass.
Start with `prism demo`: it records demonstrations, trains, evaluates and writes a page, in minutes on a laptop.

{commands}

Every command explains itself, with examples: prism train --help"""

EXIT_BUG = 1
EXIT_USER = 2  # something the user can fix, or arguments that do not parse
EXIT_HANGUP = 129  # as shells report SIGHUP
EXIT_INTERRUPTED = 130  # as shells report Ctrl-C

_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName, tyro.conf.HelptextFromCommentsOff)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command of `prism`; the status to exit with."""
    return guard("prism", lambda: _dispatch(list(sys.argv[1:] if args is None else args)))


def guard(program: str, call: Callable[[], int]) -> int:
    """The result of `call`, or one line and a status. PRISM_DEBUG=1 shows every exception with its traceback."""
    if os.environ.get("PRISM_DEBUG", "") not in ("", "0"):
        return call()
    if threading.current_thread() is threading.main_thread():  # clean up, tell the children
        end_by_signals()
    try:
        return call()
    except TerminalLost as lost:
        return _fail(program, str(lost), EXIT_HANGUP)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error.__context__, TerminalLost):  # so was what read the output
            return EXIT_HANGUP
        return 0  # `prism ... | head`: the reader has seen enough
    except PrismError as error:
        return _fail(program, f"error: {error}", EXIT_USER)
    except OSError as error:  # full disk, no permission; without a file: of a network, whose words say it all
        said = f"{error.filename}: {'; '.join(explain(error))}" if error.filename else error.strerror or error
        return _fail(program, f"error: {said}", EXIT_USER)
    except Exception as error:
        said = f"error: {type(error).__name__}: {error} (a bug in prism; PRISM_DEBUG=1 shows where)"
        return _fail(program, said, EXIT_BUG)


def parse(command: type[T], program: str, words: list[str], description: str | None = None) -> T:
    """A dataclass from its options; `description` instead of its docstring as the help."""
    config: dict[str, Any] = {"prog": program, "args": _gather(command, words), "config": _STYLE}
    parsed: T = tyro.cli(command, description=description, **config)
    return parsed


def unknown(tried: str, names: Iterable[str], program: str, group: Sequence[str] = ()) -> PrismError:
    close = difflib.get_close_matches(tried, names, n=3, cutoff=0.5) or group
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return PrismError(f"no command '{tried}'{hint} ({program} --help lists them)")


def _dispatch(words: list[str]) -> int:
    for short, (command, option) in SHORT.items():
        head, rest = words[: short.count(" ") + 1], words[short.count(" ") + 1 :]
        if " ".join(head) == short:
            if len([word for word in rest[:2] if not word.startswith("-")]) < 2:  # --help too
                raise PrismError(f"prism {short} A B is prism {command} A {option} B: see prism {command} --help")
            words = [*command.split(), rest[0], option, *rest[1:]]
    for size in (2, 1):  # "data collect" before "train"
        name = " ".join(words[:size])
        if name in COMMANDS:
            parse(COMMANDS[name], f"prism {name}", words[size:]).run()
            return 0
    group = [name for name in COMMANDS if words and name.startswith(words[0] + " ")]
    rest = words[1:] if group else words
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(HELP.format(commands=_listing(group or list(COMMANDS))))
        return 0
    if rest[0] == "--version":
        from prism import __version__

        print(f"prism {__version__}")
        return 0
    raise unknown(" ".join(words[:2] if group else words[:1]), COMMANDS, "prism", group)


def _gather(command: type[Any], words: list[str]) -> list[str]:
    """--set A --set B -> --set A B: of an option that takes several values, argparse would keep the last one alone."""
    several = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(command) if "tuple[" in str(f.type)}
    kept: list[str] = []
    values: dict[str, list[str]] = {}
    into = kept
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            into = values.setdefault(flag, []) if flag in several else kept
            if flag in several:
                into.extend([value] if equals else [])
                continue
        into.append(word)
    return kept + [word for flag, given in values.items() for word in (flag, *given)]


def _listing(names: Sequence[str]) -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:<{width}}  {(COMMANDS[name].__doc__ or '').splitlines()[0]}" for name in names)


def _fail(program: str, message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # the reader is gone
        print(f"{program}: " + printable(" ".join(message.split())), file=sys.stderr)
    return status


if __name__ == "__main__":  # torchrun -m prism.cli train ...
    sys.exit(main())
