"""Checkpoints: never half-written, never without a good one, and one clear line for each thing that can be wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.errors import PrismError
from prism.io import files
from prism.training import checkpoint
from prism.training.checkpoint import TrainingState
from tests.policy_fakes import save_run, small_policy
from tests.training_fakes import build_fake, fake_spec, make_policy

POLICY = make_policy()


def state(step: int, val_loss: float | None = None) -> TrainingState:
    weights = {name: value + step for name, value in POLICY.named_parameters()}
    moments = {f"exp_avg.{name}": value * step for name, value in POLICY.named_parameters()}
    return TrainingState(step, 1.5, {"steps": 10}, "data", val_loss, val_loss, 0, 0, {}, weights, moments)


def save(run: Path, step: int, val_loss: float | None = None, keep_last: int = 2) -> Path:
    return checkpoint.save_checkpoint(run, POLICY.spec, POLICY.state_dict(), state(step, val_loss), keep_last)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def kept(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.list_checkpoints(run)]


def test_round_trip(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, 0.25)
    assert folder == tmp_path / "checkpoints" / "step-00000007"
    loaded = checkpoint.load_training_state(folder)
    expected = state(7, 0.25)
    assert loaded.weights.keys() == expected.weights.keys()
    assert all(torch.equal(loaded.weights[name], value) for name, value in expected.weights.items())
    assert all(torch.equal(loaded.optimizer[name], value) for name, value in expected.optimizer.items())
    assert (loaded.step, loaded.seconds, loaded.val_loss, loaded.data) == (7, 1.5, 0.25, "data")
    for path in (tmp_path, folder):  # a run folder or a checkpoint folder
        policy = checkpoint.load_policy(path, build=build_fake)
        assert policy.spec == POLICY.spec
        assert all(torch.equal(value, policy.state_dict()[name]) for name, value in POLICY.state_dict().items())


def test_three_files_are_enough_to_deploy(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1)
    robot = tmp_path / "robot"
    robot.mkdir()
    for name in ("config.json", "model.safetensors", "checksums.json"):
        shutil.copy(folder / name, robot)
    checkpoint.load_policy(robot, build=build_fake)
    with pytest.raises(PrismError, match=r"training\.json is missing"):
        checkpoint.load_training_state(robot)


def test_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None), (5, 0.2), (6, 0.4)):
        save(tmp_path, step, loss)
    assert kept(tmp_path) == [2, 5, 6]
    assert checkpoint.latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000006"
    assert checkpoint.best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]  # nothing else is left behind


def test_saving_a_step_twice_keeps_the_intact_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert save(tmp_path, 3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    (folder / "model.safetensors").write_bytes(b"")
    save(tmp_path, 3)
    checkpoint.verify_checkpoint(folder)


def _kill_in_write(at: int) -> Callable[[Path, bytes], None]:
    """A write_file that dies, half-way through its `at`-th file, without any clean-up."""
    count = 0

    def write(path: Path, data: bytes) -> None:
        nonlocal count
        count += 1
        if count == at:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        path.write_bytes(data)

    return write


def _killed_save(run: Path, step: int, patch: Callable[[], None]) -> None:
    """Save in a child process that is killed on the way."""
    child = os.fork()
    if child == 0:
        patch()
        save(run, step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_kill_9_in_a_write_leaves_the_last_good_checkpoint(tmp_path: Path, at: int) -> None:
    save(tmp_path, 1)
    _killed_save(tmp_path, 2, lambda: setattr(files, "write_file", _kill_in_write(at)))
    damaged: list[str] = []
    assert checkpoint.latest_checkpoint(tmp_path, damaged.append) == tmp_path / "checkpoints" / "step-00000001"
    assert damaged == []  # the half-written one never had a name
    checkpoint.load_policy(tmp_path, build=build_fake)
    save(tmp_path, 2)  # and it is cleared away by the next save
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", ["replace", "rmtree"])
def test_kill_9_at_the_rename_or_while_pruning(tmp_path: Path, call: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    module = os if call == "replace" else shutil
    _killed_save(tmp_path, 3, lambda: setattr(module, call, die))
    newest = checkpoint.latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == ("step-00000002" if call == "replace" else "step-00000003")
    save(tmp_path, 4)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EIO, "could not be")]
)
def test_a_write_that_fails_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    good = save(tmp_path, 1)

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_file", fail)
    with pytest.raises(PrismError, match=words) as error:
        save(tmp_path, 2)
    assert f"The last good checkpoint is {good}" in str(error.value)
    assert "--resume" in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-00000001"]
    checkpoint.verify_checkpoint(good)


def _edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change a JSON file *and* its checksum: wrong content, not damage."""

    def apply(folder: Path) -> None:
        import hashlib

        data = json.loads((folder / name).read_text())
        change(data)
        encoded = files.encode_json(data)
        (folder / name).write_bytes(encoded)
        sums = json.loads((folder / "checksums.json").read_text())
        sums[name] = {"sha256": hashlib.sha256(encoded).hexdigest(), "bytes": len(encoded)}
        (folder / "checksums.json").write_bytes(files.encode_json(sums))

    return apply


def _cut(name: str, keep: float = 0.7) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return apply


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("newer", _edit("config.json", lambda d: d.update(format_version=99)), r"format 99 .*: update prism"),
    ("older", _edit("config.json", lambda d: d.update(format_version=0)), r"format 0 .*train again"),
    ("no version", _edit("config.json", lambda d: d.pop("format_version")), r"no 'format_version'"),
    ("no policy", _edit("config.json", lambda d: d.pop("policy")), r"config\.json has no 'policy'"),
    (
        "method",
        _edit("config.json", lambda d: d["policy"].update(method="rism")),
        r"config\.json: unknown method 'rism'",
    ),
    ("spec key", _edit("config.json", lambda d: d["policy"].update(x=1)), r"config\.json: policy spec needs exactly"),
    (
        "sensor",
        _edit("config.json", lambda d: d["policy"]["sensors"][0].update(kind="x")),
        r"unknown kind of sensor 'x'",
    ),
    ("field", _edit("config.json", lambda d: d["policy"].update(config={})), r"config\.json: its config is not one of"),
    ("width", _edit("config.json", lambda d: d["policy"]["config"].update(width=8)), r"does not fit a 'fake' policy"),
    ("cut config", _cut("config.json"), r"config\.json is not JSON: it was cut short"),
    ("cut model", _cut("model.safetensors"), r"model\.safetensors has \d+ bytes instead of \d+: it was cut short"),
    ("empty model", _cut("model.safetensors", 0), r"model\.safetensors has 0 bytes"),
    ("flipped bit", _flip, r"model\.safetensors is altered"),
    ("no model", lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    ("no config", lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
    ("no sums", lambda folder: (folder / "checksums.json").unlink(), r"checksums\.json is missing"),
    ("cut sums", _cut("checksums.json"), r"checksums\.json is not JSON"),
    ("list", lambda folder: (folder / "checksums.json").write_text("[]"), r"does not hold a JSON object"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_every_broken_checkpoint_is_one_line(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = save(tmp_path, 1)
    damage(folder)
    with pytest.raises(PrismError, match=message) as error:
        checkpoint.load_policy(folder, build=build_fake)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_random_damage_is_always_a_prism_error(tmp_path: Path) -> None:
    """A bit flipped or a tail cut anywhere, in any file: refused, or (white space of checksums.json) no difference."""
    folder = save(tmp_path, 1)
    rng = torch.Generator().manual_seed(0)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    for path, data in originals.items():
        for _ in range(40):
            at = int(torch.randint(len(data), (), generator=rng))
            broken = bytearray(data)
            broken[at] ^= 1 << int(torch.randint(8, (), generator=rng))
            for damaged in (bytes(broken), data[:at]):
                path.write_bytes(damaged)
                try:
                    checkpoint.verify_checkpoint(folder)
                    loaded = checkpoint.load_policy(folder, build=build_fake).state_dict()
                    checkpoint.load_training_state(folder)
                except PrismError:
                    continue
                assert path.name == "checksums.json"
                assert all(torch.equal(loaded[name], value) for name, value in POLICY.state_dict().items())
        path.write_bytes(data)
    checkpoint.verify_checkpoint(folder)


def test_a_newest_checkpoint_that_is_damaged_is_reported_and_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    _cut("model.safetensors")(save(tmp_path, 2))
    said: list[str] = []
    checkpoint.load_policy(tmp_path, build=build_fake, report=said.append)
    assert len(said) == 1
    assert "step-00000002" in said[0]
    _cut("model.safetensors")(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(PrismError, match="none of its 2 checkpoints is intact"):
        checkpoint.load_policy(tmp_path, build=build_fake, report=said.append)


def test_a_newest_checkpoint_of_another_format_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    _edit("config.json", lambda data: data.update(format_version=99))(save(tmp_path, 2))
    with pytest.raises(PrismError, match="update prism"):
        checkpoint.load_policy(tmp_path, build=build_fake)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(PrismError, match="does not exist"):
        checkpoint.load_policy(tmp_path / "typo")
    with pytest.raises(PrismError, match="holds no checkpoint"):
        checkpoint.load_policy(tmp_path)
    assert checkpoint.latest_checkpoint(tmp_path) is None


def test_unknown_method_with_the_real_builder(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert fake_spec().method == "fake"
    with pytest.raises(PrismError, match=r"config\.json: unknown method 'fake'"):
        checkpoint.load_policy(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.update(action_dim=10**7),
        lambda policy: policy.update(pred_horizon=10**7),
        lambda policy: policy["config"].update(pred_horizon=10**7),
        lambda policy: policy["config"]["encoder"].update(mix_width=2**13, vector_hidden=2**13),
        lambda policy: policy["config"]["encoder"].update(mix_blocks=2000),
    ],
)
def test_a_config_larger_than_the_weights_is_refused_before_it_is_built(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may state any size: the widths took gigabytes before the weights were compared with it."""
    folder = save_run(tmp_path, small_policy()) / "checkpoints/step-00000001"
    content = json.loads((folder / "config.json").read_text())
    change(content["policy"])
    data = json.dumps(content).encode()
    sums = json.loads((folder / "checksums.json").read_text())
    sums["config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "checksums.json").write_text(json.dumps(sums))
    (folder / "config.json").write_bytes(data)
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: made.append(empty(*size, **more)) or made[-1])
    with pytest.raises(PrismError, match=r"config\.json: ") as refused:
        checkpoint.load_policy(folder)
    assert "\n" not in str(refused.value)
    assert sum(tensor.nbytes for tensor in made) < 2**27
    assert len(made) < 2000


def test_kill_between_the_two_renames_of_an_overwrite_loses_nothing(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old").touch()
    new = files.hidden_beside(tmp_path / "data")
    new.mkdir()
    (new / "new").touch()
    rename = os.replace

    def killed(source: Path, target: Path) -> None:
        if source == new:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(files, "_exchange", lambda *_: False)  # a disk that cannot exchange names
    with pytest.raises(KeyboardInterrupt):
        files.replace_folder(new, tmp_path / "data")
    monkeypatch.undo()
    assert not (tmp_path / "data").exists()
    files.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / "new").exists()
