"""Where named datasets are found, and downloads from a stand-in on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prism import cli
from prism.data import locate, open_dataset
from prism.data.locate import data_folder, download, find_dataset
from prism.errors import PrismError
from tests.test_data_zarr import arrays, pack, write


@pytest.fixture(autouse=True)
def no_real_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("PRISM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/short.zip":  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)
        else:
            super().do_GET()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    pack(write(folder / "pusht.zarr", arrays()), "pusht/pusht_cchi_v7_replay.zarr/").rename(folder / "pusht.zip")
    (folder / "page.zip").write_text("<html>not found</html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_download_then_find(server: str, no_real_folders: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = download("pusht-human", url=f"{server}/pusht.zip", progress=lambda done, total: seen.append((done, total)))
    assert path == no_real_folders / "cache" / "prism" / "pusht_cchi_v7_replay.zarr.zip"
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert find_dataset("pusht-human") == path
    assert len(open_dataset(path).lengths) == 3
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with pytest.raises(PrismError, match="exists already"):
        download("pusht-human", url=f"{server}/pusht.zip")
    assert download("pusht-human", url=f"{server}/pusht.zip", overwrite=True) == path


def test_downloads_from_a_file_address(tmp_path: Path) -> None:
    archive = pack(write(tmp_path / "set.zarr", arrays()))
    path = download("pusht-human", folder=tmp_path / "out", url=archive.as_uri())
    assert path.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("short.zip", "broke off after 10 of 1000 bytes"),
        ("page.zip", "the download is not the dataset"),
        ("missing.zip", "download failed (HTTP Error 404"),
    ],
)
def test_failed_downloads_leave_nothing(server: str, tmp_path: Path, file: str, message: str) -> None:
    with pytest.raises(PrismError) as error:
        download("pusht-human", folder=tmp_path / "out", url=f"{server}/{file}")
    assert message in str(error.value)
    assert file in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_too_large_a_download_stops(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = locate.Download(f"{server}/pusht.zip", "x.zarr.zip", max_bytes=1000)
    monkeypatch.setitem(locate.DOWNLOADS, "pusht-human", small)
    with pytest.raises(PrismError, match="more than the 1000 expected"):
        download("pusht-human", folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_of_a_recording_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "collect", "pusht-human", "--beyond", "10", "--out", str(tmp_path / "out")]) == 2
    assert "--beyond is for a task that is recorded; pusht-human is fetched as it is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unreachable_host_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match=r"download failed .*prism train takes it with --data PATH"):
        download("pusht-human", folder=tmp_path, url="http://127.0.0.1:9/pusht.zip")
    with pytest.raises(PrismError, match="known are pusht-human"):
        download("imagenet")


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrismError, match=r"run `prism data collect pusht-human`, or set PRISM_DATA$") as error:
        find_dataset("pusht-human")
    assert "\n" not in str(error.value)
    for place in ("cache/prism/pusht_cchi_v7_replay.zarr", "env/pusht/pusht_cchi_v7_replay.zarr", "given"):
        (tmp_path / place).mkdir(parents=True)
    assert find_dataset("pusht-human") == tmp_path / "cache/prism/pusht_cchi_v7_replay.zarr"
    monkeypatch.setenv("PRISM_DATA", str(tmp_path / "env"))
    assert data_folder() == tmp_path / "env"
    assert find_dataset("pusht-human") == tmp_path / "env/pusht/pusht_cchi_v7_replay.zarr"
    assert find_dataset("pusht-human", tmp_path / "given") == tmp_path / "given"
    assert find_dataset("pusht-human", tmp_path / "env") == tmp_path / "env/pusht/pusht_cchi_v7_replay.zarr"


def test_find_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="did you mean pusht-human"):
        find_dataset("pusht-humen")
    with pytest.raises(PrismError, match="known are"):
        find_dataset("zzz")
    with pytest.raises(PrismError, match="not found"):
        find_dataset("pusht-human", tmp_path / "nowhere")
