"""The page: well-formed, self-contained, complete; charts that survive odd numbers."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prism_sims.scenes import MetaWorldScene, PushTScene

from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.evaluation.results import EpisodeResult, EvaluationResult, Fan, run_info
from prism.evaluation.sensor_use import Rise, SensorReport, SensorUse
from prism.report import charts
from prism.report.player import films, mode_class, telling_fans
from prism.report.run_page import render, write_report
from tests.browser import CHROMIUM, Browser

VOID = {"meta", "input", "img", "br", "link"}
LOG = [
    {"step": 100 * i, "seconds": 10.0 * i, "loss": 1 / i, "val_loss": 1.1 / i if i % 2 else None,
     "rejection_rate": 0.2, "fallback_rate": 0.0, "threshold": 0.1 / i}
    for i in range(1, 30)
]  # fmt: skip


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects what a test may ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def make_episode(seed: int, task: str, frames: int = 3, success: bool = True) -> EpisodeResult:
    rng = np.random.default_rng(seed)
    size, da = (39, 4) if task.startswith("metaworld") else (5, 2)
    steps = 24
    candidates = rng.uniform(-1, 1, (3, 6, 16, da)).astype(np.float32)
    fans = [Fan(8 * i, 2, c, np.array([0, 0, 1, 1, 1, 2])) for i, c in enumerate(candidates)]
    return EpisodeResult(
        seed, success, float(success), steps, steps if success else None, 0.05, 3.0, 3, 1, 0, 2.5, 0.3,
        [3.1, 2.9, 7.0], 1.0, rng.uniform(-1, 1, (steps, da)).astype(np.float32),
        rng.uniform(-1, 1, (steps + 1, size)).astype(np.float32), fans,
        [b"\xff\xd8" + bytes([i]) * 50 for i in range(frames)], list(range(frames)),
    )  # fmt: skip


def make_result(task: str, frames: int = 3) -> EvaluationResult:
    episodes = tuple(make_episode(100_000 + i, task, frames, i != 1) for i in range(3))
    return EvaluationResult(task, "run", 100_000, 10.0, ControllerConfig(candidates=6), episodes, 9.0, info=run_info(1))


@pytest.mark.parametrize("frames", [0, 3])
@pytest.mark.parametrize("tasks", [["pusht"], ["metaworld-pick-place", "pusht", "point"]])
def test_page_is_well_formed_and_needs_nothing_else(tasks: list[str], frames: int) -> None:
    text = render([make_result(task, frames) for task in tasks], {tasks[0]: LOG}, "A title")
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    for address in page.addresses:
        assert address.startswith(("data:image/jpeg;base64,", "#"))
        if address.startswith("#"):
            assert address[1:] in page.ids
    outside = set(re.findall(r"https?://[^\s\"'<)]*|url\(|@import", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert page.tags.count("table") == len(tasks)
    assert text.count('role="tab"') == 3 * len(tasks)
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text):
        assert json.loads(data)["steps"] == 24
    for word in ("Candidate fans", "Training", "Speed", "Episodes", "prefers-color-scheme"):
        assert word in text


def test_names_cannot_break_out_of_the_markup() -> None:
    result = dataclasses.replace(
        make_result("pusht"),
        rendering_hint="<script>alert(1)</script>",
        crashes=("<img src=x>",),
        info={"command": "<b>"},
    )
    text = render([dataclasses.replace(result, task='x"><script>')], {}, "<i>")
    Page(text)
    assert "<script>alert" not in text
    assert "<img src=x>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_seeds_and_provenance_cannot_break_out_of_the_markup() -> None:
    bad = "<img src=x onerror=alert(1)>"
    episode = dataclasses.replace(make_episode(100_000, "pusht"), seed=bad)  # type: ignore[arg-type]
    info = {"command": bad, "date": bad, "machine": {"processor": bad}, "versions": {bad: bad}}
    result = dataclasses.replace(make_result("pusht"), episodes=(episode,), info=info)
    text = render([result], {}, "A title")
    Page(text)
    assert bad not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 6


def test_the_sensors_stand_on_the_page_of_a_task_too() -> None:
    rise = Rise(0.5, 0.4, 0.6)
    eye = SensorUse("<b>eye", "rgb", "used", 0.9, 0.9, 0.8, rise, 0.9, 1.1, rise, False, False)
    text = render([make_result("pusht")], {}, "T", sensors=SensorReport((eye,), 40, 2, 6, 0.1, 0.25, 0.03, None, 0.2))
    Page(text)
    assert "&lt;b&gt;eye is used: it changes the plan by 90 %" in text
    assert "Which sensors it uses" not in render([make_result("pusht")], {}, "T")


def test_write_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "deep" / "report.html", [make_result("pusht")])
    assert path.read_text().startswith("<!doctype html>")
    write_report(path, [make_result("pusht")])
    with pytest.raises(PrismError, match="exists already"):
        write_report(path, [make_result("pusht")], overwrite=False)
    with pytest.raises(PrismError, match="no evaluation"):
        write_report(path, [])
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_page_says_what_its_episodes_are() -> None:
    """Seeds below the tests' are those of demonstrations; what was lost is in no mean."""
    result = make_result("pusht")
    assert "positions the policy has never seen (seeds from 100000)" in render([result], {}, "a")
    other = dataclasses.replace(result, first_seed=0, lost=("a worker died 3 times at seed 7",))
    page = render([result, other], {}, "a")
    assert "on starting positions (seeds from 0, 100000)" in page
    assert "Workers that died; 1 episodes were lost and are not counted:</p>" in page
    assert "<li>a worker died 3 times at seed 7</li>" in page


def test_candidates_start_at_the_robot() -> None:
    state = np.arange(39.0)
    paths = MetaWorldScene().future(state, np.ones((2, 5, 4)))
    np.testing.assert_allclose(paths[:, 0], [[0, 1, 2]] * 2)
    np.testing.assert_allclose(paths[:, -1], [[0.05, 1.05, 2.05]] * 2)
    paths = PushTScene().future(np.array([10.0, 20, 0, 0, 0]), np.full((1, 3, 2), 256.0))
    np.testing.assert_allclose(paths[0], [[10, 20], [256, 256], [256, 256], [256, 256]])


def test_views_keep_everything_in_the_frame() -> None:
    rng = np.random.default_rng(0)
    episodes = [rng.uniform(-0.4, 0.8, (20, 39)) for _ in range(3)]
    for states in episodes:
        for view in MetaWorldScene().views(states, episodes):
            for mover in view.movers:
                assert (mover.track[:, :2] >= 0).all()
                assert (mover.track[:, 0] <= 400).all()
                assert (mover.track[:, 1] <= view.height).all()
    (view,) = PushTScene().views(np.array([[512.0, 0, 256, 256, 0]]), [])
    np.testing.assert_allclose(view.movers[1].track[0, :2], [400, 0])


def test_fans_are_spread_over_the_episodes() -> None:
    shown = films("pusht", make_result("pusht").episodes, 2)
    picked = telling_fans(shown, 4)
    assert len(picked) == 4
    assert len({film.episode.seed for film, _, _ in picked}) >= 2
    assert mode_class(shown[0].episode.fans[0]) == ["m1", "m1", "m0", "m0", "m0", "m2"]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30), st.booleans(), st.booleans())
def test_line_charts_survive_any_numbers(values: list[float], log_y: bool, percent: bool) -> None:
    usable = [v for v in values if abs(v) < 1e12]
    series = [charts.Series("a", list(range(len(usable))), usable, "s0")]
    text = charts.line_chart(series, "label", "x", log_y, percent)
    if text:
        Page(text)
        assert "nan" not in text
        assert "inf" not in text


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=50))
def test_histograms_count_everything(values: list[float]) -> None:
    text = charts.histogram(values, "label", "x", [("mean", float(np.mean(values)))])
    Page(text)
    counts = [int(n) for n in re.findall(r"to [\d.]+: (\d+)</title>", text)]
    assert sum(counts) == (len(values) if max(values) - min(values) >= 1e-9 else 0)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_inside(low: float, span: float) -> None:
    ticks = charts.linear_ticks(low, low + span)
    assert 2 <= len(ticks) <= 12
    assert low - 1e-6 * span - 1e-9 * abs(low) <= ticks[0]
    assert ticks[-1] <= low + span + 1e-6 * span + 1e-9 * abs(low)


def many_episodes() -> EvaluationResult:
    result = make_result("pusht", 0)
    return dataclasses.replace(
        result, episodes=tuple(make_episode(100_000 + i, "pusht", 0, i % 3 > 0) for i in range(30))
    )


def test_rows_that_are_hidden_are_counted() -> None:
    text = render([many_episodes()], {}, "Many")
    assert "Show all 30 episodes (10 are hidden otherwise)" in text
    assert all(f'<th scope="row">{100_000 + i}</th>' in text for i in range(30)), "all of them are in the page"
    assert "are hidden" not in render([make_result("pusht")], {}, "Few")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_hidden_rows_are_shown_on_request_without_a_script(tmp_path: Path, width: int) -> None:
    page = write_report(tmp_path / "report.html", [many_episodes()])
    page.write_text(page.read_text().rpartition("<script>")[0])  # its own, the last one
    with Browser(page.as_uri(), width) as browser:
        rows = "[...document.querySelectorAll('tbody tr')].filter((row) => row.offsetHeight).length"
        assert browser.ask(rows) == 20
        browser.ask("document.querySelector('.more input').click()")
        assert browser.ask(rows) == 30
        assert browser.ask("document.documentElement.scrollWidth") <= width, "the page itself does not scroll sideways"
        table = "document.querySelector('.scroll')"
        assert browser.ask(f"{table}.scrollHeight - {table}.clientHeight") <= 1, "no rows below an edge"
        assert browser.complaints == []
