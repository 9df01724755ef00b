"""The command line: help that teaches, one line when something is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from prism import cli
from prism.errors import PrismError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prism(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `prism ARGS` in this process; its status, stdout and stderr."""
    monkeypatch.delenv("PRISM_DEBUG", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        try:
            status = cli.main(args)
        except SystemExit as stop:  # tyro: help, and arguments that do not parse
            status = int(stop.code or 0)
        out, err = capfd.readouterr()
        return status, out, err

    return run


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command(prism: Run, args: tuple[str, ...]) -> None:
    status, out, _ = prism(*args)
    assert status == 0
    for name in cli.COMMANDS:
        assert f"  {name} " in out


def test_help_of_a_group_lists_that_group(prism: Run) -> None:
    status, out, _ = prism("data", "--help")
    assert status == 0
    assert "data collect" in out
    assert "bench attention" not in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_every_option(prism: Run, name: str) -> None:
    status, out, _ = prism(*name.split(), "--help")
    assert status == 0
    for field in dataclasses.fields(cli.COMMANDS[name]):  # type: ignore[arg-type]
        source = cli.COMMANDS[name].__doc__
        assert source
        assert len(source.splitlines()[0]) <= 110, "the first line is the overview"
        assert field.name.replace("_", "-") in out or field.name.upper() in out or "RUN" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("trane", "pusht"), ("'trane'", "train")),
        (("data", "colect", "x"), ("'data colect'", "data collect")),
        (("train", "pusht", "--minutes", "0"), ("--minutes 0", "positive")),
        (("train", "pusht", "--steps", "-5"), ("--steps -5", "1 or more")),
        (("train", "pusht", "--minutes", "1", "--steps", "5"), ("--minutes or --steps",)),
        (("eval", "runs/nothing", "--episodes", "0"), ("--episodes 0", "1 or more")),
        (("data", "collect", "pusht", "--episodes", "0"), ("--episodes 0", "1 or more")),
        (("data", "inspect", "no/such/place"), ("no/such/place",)),
        (("eval", "no/such/run"), ("no/such/run",)),
        (("report", "no/such/run"), ("no/such/run",)),
        (("data", "collect", "metaworld-draw-open"), ("metaworld-draw-open", "metaworld-drawer-open")),
        (("train", "pusht-humn"), ("pusht-humn", "pusht-human")),
    ],
)
def test_bad_input_is_one_clear_line(prism: Run, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    status, out, err = prism(*args)
    assert status == cli.EXIT_USER
    assert out == ""
    assert err.startswith("prism: error: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


def test_interrupt_and_bugs_are_one_line_too(prism: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []

    @dataclasses.dataclass(frozen=True)
    class Fails:
        """Fails."""

        def run(self) -> None:
            raise errors[-1]

    monkeypatch.setitem(cli.COMMANDS, "fails", Fails)
    for error, status, text in (
        (KeyboardInterrupt(), 130, "prism: interrupted\n"),
        (PrismError("two\nlines"), 2, "prism: error: two lines\n"),
        (
            OSError(28, "No space left on device", "runs/x"),
            2,
            "prism: error: runs/x: the disk is full; free some space\n",
        ),
        (ConnectionRefusedError(111, "Connection refused"), 2, "prism: error: Connection refused\n"),
        (ValueError("oops"), 1, "prism: error: ValueError: oops (a bug in prism; PRISM_DEBUG=1 shows where)\n"),
    ):
        errors.append(error)
        assert prism("fails") == (status, "", text)
    monkeypatch.setenv("PRISM_DEBUG", "1")
    with pytest.raises(ValueError, match="oops"):
        cli.main(["fails"])


def test_an_option_given_twice_keeps_both_values() -> None:
    words = ["pusht", "--set", "a=1", "--minutes", "2", "--set", "b=-2", "c=3", "--set=d=4"]
    assert cli._gather(cli.Train, words) == ["pusht", "--minutes", "2", "--set", "a=1", "b=-2", "c=3", "d=4"]
    assert cli._gather(cli.Train, ["pusht", "--minutes", "2"]) == ["pusht", "--minutes", "2"]


def test_short_forms_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for name in ("export", "data inspect"):
        monkeypatch.setattr(cli.COMMANDS[name], "run", lambda self: seen.append(self))
    assert cli.main(["push", "runs/mine", "me/mine", "--private"]) == 0
    assert (str(seen[0].run_folder), seen[0].hub, seen[0].private) == ("runs/mine", "me/mine", True)
    assert cli.main(["data", "view", "my-data", "my.rrd"]) == 0
    assert (str(seen[1].path), str(seen[1].rerun)) == ("my-data", "my.rrd")
    assert cli.main(["push", "runs/mine"]) == cli.EXIT_USER
