"""The documentation: links that lead somewhere, a reference that agrees with the code, commands that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for folder in (".", "docs", "research", "examples", "packages")
    for page in (ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
    if "node_modules" not in page.parts and ".venv" not in page.parts
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pages_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.-])((?:docs|research)/[\w/-]+\.md)", page.read_text()))
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing, f"{page.relative_to(ROOT)} names {missing}"


def test_pages_that_the_code_names_exist() -> None:
    missing = {}
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "research").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]:
        for name in re.findall(r"(?<![\w/.-])((?:docs|research)/[\w/-]+\.md)", path.read_text()):
            if not (ROOT / name).is_file():
                missing[str(path.relative_to(ROOT))] = name
    assert not missing


def test_the_reference_agrees_with_the_code() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "reference", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_on_a_page_exist(page: Path) -> None:
    from prism.cli import COMMANDS

    if page.name in ("CHANGELOG.md", "commands.md"):  # commands that were, and where they went
        return
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), flags=re.S):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["prism"] and len(words) > 1 and not words[1].startswith(("-", "COMMAND")):
                name = " ".join(words[1:3])
                assert name in COMMANDS or words[1] in COMMANDS, f"{page.relative_to(ROOT)}: {line.strip()}"


def test_every_recipe_is_named_where_a_task_is_added() -> None:
    from prism.experiments.recipes import RECIPES

    [line] = re.findall(r"^- `recipe`.*?(?=^- )", (ROOT / "docs/howto/extend.md").read_text(), flags=re.S | re.M)
    assert set(re.findall(r"`([\w-]+)`", line)) - {"recipe"} == set(RECIPES)


def test_the_readme_is_for_ten_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells, one after the other, in an empty folder, offline."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    monkeypatch.chdir(tmp_path)
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert "STEPS = 300" in code
    code = code.replace("STEPS = 300", "STEPS = 10")  # the same lines run, for a tenth of the time
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
