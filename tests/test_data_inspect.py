"""`inspect` on every format: the numbers are right, what looks wrong is said, the page stands alone."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from prism.data import open_dataset
from prism.data.episodes import Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.data.guess_kind import guess_kind
from prism.data.inspect import as_picture, duration, print_summary, size, summarise
from prism.errors import PrismError
from prism.report.dataset_page import render, write_page
from prism.sensors import SensorSpec
from tests.data_fakes import MemorySource, counting_source, inspect
from tests.test_data_zarr import arrays, write


def make(path: Path) -> Path:
    memory = counting_source([9, 14, 11], images=True)
    with DatasetWriter(path, memory.sensors, 2, 20.0, "toy <task>") as writer:
        for episode in memory.episodes:
            writer.add(episode.streams, episode.actions)
    return path


def test_numbers_of_the_own_format(tmp_path: Path) -> None:
    summary = inspect(make(tmp_path / "set"))
    assert (summary.format, summary.task, summary.fps, summary.steps) == ("prism", "toy <task>", 20.0, 34)
    assert summary.seconds == pytest.approx(1.7)
    assert summary.bytes_on_disk > 1000
    assert summary.lengths.tolist() == [9, 14, 11]
    statistics = summary.actions.statistics
    assert statistics is not None
    assert statistics.min.tolist() == [0, 0]
    assert statistics.max.tolist() == [2, 13]
    assert statistics.mean[0] == pytest.approx((14 + 2 * 11) / 34)
    assert [(s.name, s.kind, s.dtype) for s in summary.sensors] == [
        ("where", "vector", "float32"),
        ("cam", "rgb", "uint8"),
    ]


def test_zarr(tmp_path: Path) -> None:
    summary = inspect(write(tmp_path / "set.zarr", arrays()), fps=5)
    assert summary.format == "Diffusion Policy zarr"
    assert summary.fps == 5
    assert [s.name for s in summary.sensors] == ["img", "keypoint", "n_contacts", "state"]
    assert any("training maps them" in note for note in summary.notes)


def test_what_looks_wrong_is_said() -> None:
    rng = np.random.default_rng(0)
    steps = 5000
    state = rng.normal(size=(steps, 3)).astype(np.float32)
    state[:, 1] = 7
    state[100, 2] = 1e4
    actions = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
    actions[:, 0] = 0
    present = {"s": np.arange(steps) % 4 > 0}
    never = {"gone": np.zeros((steps, 1), np.float32)}
    episode = Episode({"s": state, **never}, actions, {**present, "gone": np.zeros(steps, np.bool_)})
    short = Episode({"s": state[:3], "gone": never["gone"][:3]}, actions[:3], {"gone": np.zeros(3, np.bool_)})
    source = MemorySource([episode, short], [SensorSpec("s", "vector", (3,)), SensorSpec("gone", "vector", (1,))])
    source.episodes[0].streams["s"][100, 2] = 1e4
    said = " | ".join(summarise(source, "memory").warnings)
    assert "'actions': dimension 0 is constant" in said
    assert "'s': dimension 1 is constant" in said
    assert "'s' is absent from 25.0% of the steps" in said
    assert "'gone' is absent from every step" in said
    assert "1 episodes have fewer than 8 steps" in said
    assert "'s': dimensions 2 have values more than 30" not in said  # step 100 is one at which it was absent
    source.episodes[0].present["s"][100] = True
    assert "'s': dimensions 2 have values more than 30" in " | ".join(summarise(source, "memory").warnings)
    render(source, summarise(source, "memory"))
    (said,) = summarise(source, "memory").notes
    assert said.startswith("unknown kind of action: ")


def test_page_stands_alone_and_is_whole_or_absent(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    write_page(open_dataset(path), tmp_path / "out" / "page.html")
    page = (tmp_path / "out" / "page.html").read_text()
    assert "toy &lt;task&gt;" in page
    assert "toy <task>" not in page
    assert not re.search(r"https?://|src=\"(?!data:)|<link|<script|@import|url\(", page)
    assert page.count("data:image/png;base64,") == 18
    assert page.count("<polyline") == 3 * (2 + 2)
    with pytest.raises(PrismError, match="exists already"):
        write_page(open_dataset(path), tmp_path / "out" / "page.html")
    with pytest.raises(PrismError, match="is a folder"):
        write_page(open_dataset(path), tmp_path / "out", overwrite=True)
    write_page(open_dataset(path), tmp_path / "out" / "page.html", overwrite=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["page.html"]


def test_depth_shows_what_is_near_whatever_was_not_measured() -> None:
    """Infinite, NaN and 0 are black; one stray pixel far away does not make all the others white."""
    metres = np.tile(np.linspace(0.5, 1.5, 40, dtype=np.float32), (10, 1))
    metres[0, :3], metres[1, 0] = (np.inf, np.nan, 0.0), 60.0
    picture = as_picture(SensorSpec("depth_wrist", "depth", (10, 40)), metres)
    assert picture.shape == (10, 40, 3)
    assert not picture[0, :3].any()
    assert picture[5, 0, 0] > 200
    assert 0 < picture[5, -1, 0] < 60


def test_histograms_count_every_step(tmp_path: Path) -> None:
    source = counting_source([9, 14, 11])
    page = render(source, summarise(source, "memory"))
    section = page[page.index("<h2>actions</h2>") :].split('<figure class="panel">')[1]
    assert sum(int(n) for n in re.findall(r": (\d+) steps</title>", section)) == 34


def test_printed_summary_fits_a_narrow_terminal(tmp_path: Path) -> None:
    summary = inspect(write(tmp_path / "set.zarr", arrays()))
    for width in (60, 100):
        text = io.StringIO()
        print_summary(summary, Console(file=text, width=width))
        assert "keypoint" in text.getvalue()
        assert "23 steps at 10 a second" in " ".join(text.getvalue().split())
        assert max(map(len, text.getvalue().splitlines())) <= width


def test_words() -> None:
    assert [duration(s) for s in (4.2, 95, 3725)] == ["4.2 s", "1 min 35 s", "1 h 2 min"]
    assert [size(n) for n in (12, 31_102_359, 2_000_000_000)] == ["12 bytes", "31.1 MB", "2 GB"]


def test_bad_dataset_writes_no_page(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    (path / "cam.npy").unlink()
    with pytest.raises(PrismError, match=r"cam\.npy"):
        write_page(open_dataset(path), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("absent", ["force", "joints"])
def test_what_an_absent_sensor_holds_says_nothing_of_the_actions(absent: str) -> None:
    rng, episodes = np.random.default_rng(0), []
    for number in range(4):
        pose = rng.normal(size=(60, 3)).cumsum(0).astype(np.float32)
        streams = {name: pose.copy() for name in ("pose", "joints")}
        streams["force"] = rng.normal(size=(60, 3)).astype(np.float32)
        if number % 2:
            streams[absent][:] = np.nan
        actions = np.concatenate([pose[1:], pose[-1:]])
        episodes.append(Episode(streams, actions, {absent: np.full(60, number % 2 == 0)}))
    sensors = [SensorSpec(name, "vector", (3,)) for name in ("pose", "joints", "force")]
    assert guess_kind(MemorySource(episodes, sensors)).kind == "absolute"
