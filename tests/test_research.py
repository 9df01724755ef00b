"""python -m research: the list, the help of every name, one line for what is wrong."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prism.methods.presets import PRESETS
from research.__main__ import MODULES, main
from research.report import portable

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("word", ["--list", "--help"])
def test_the_list_names_every_module_and_imports_none(word: str) -> None:
    code = "import sys; from research.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, word], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
    for name in MODULES:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_every_name_explains_its_options_and_keys(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    module = importlib.import_module(f"research.{MODULES[name]}")
    assert (module.__doc__ or "").split(":")[0] in said
    assert f"python -m research {name}" in said
    assert "--json" in said
    for field in dataclasses.fields(module.Config):
        assert field.name.replace("_", "-") in said or field.name.upper() in said or "RUN" in said


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["atention"]) == 2
    assert capsys.readouterr().err.startswith("research: error: no command 'atention'; did you mean attention ")
    assert main(["size", "--presets", "huge"]) == 2
    assert capsys.readouterr().err == f"research: error: unknown preset 'huge'; use one of {', '.join(PRESETS)}\n"
    (tmp_path / "there.json").write_text("{}")
    assert main(["size", "--json", str(tmp_path / "there.json")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_every_module_is_in_the_table() -> None:
    shared = {"__init__", "__main__", "report", "variants", "data_files", "benchmark_protocols", "loading_lerobot"}
    assert {path.stem for path in (ROOT / "research").glob("*.py")} - shared == set(MODULES.values())


def test_a_command_names_no_path_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the JSON of every study: what lies below the working folder from there, anything else by its last name."""
    monkeypatch.chdir(tmp_path)
    words = ["loco", "--status", "--work", "/somewhere/else/work", f"--json={tmp_path / 'kept' / 'f.json'}"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/research/__main__.py", *words])
    assert main() == 0
    found = json.loads((tmp_path / "kept" / "f.json").read_text())
    assert found["command"] == "python -m research loco --status --work work --json=kept/f.json"
    told = 'prism run --set path="/home/me/data" --text left/right --server ws://host/x --out ../o /a/b/'
    older = {"command": told, "parts": [{"command": "prism eval /home/me/run"}], "note": "/home/me"}
    assert portable(older) == {
        "command": 'prism run --set path="data" --text left/right --server ws://host/x --out ../o b',
        "parts": [{"command": "prism eval run"}],
        "note": "/home/me",
    }


def test_every_result_says_how_it_was_made() -> None:
    research = ROOT / "research"
    text = (research / "RESULTS.md").read_text()
    others = "".join((research / name).read_text() for name in ("TABLES.md", "LAB_LOG.md"))
    links = set(re.findall(r"\]\((results/[\w./-]+)\)", text + others))
    results = {str(path.relative_to(research)) for path in (research / "results").iterdir() if path.is_file()}
    assert results == links
    for name in re.findall(r"`python -m research ([a-z][\w-]*)", text):
        assert name in MODULES
