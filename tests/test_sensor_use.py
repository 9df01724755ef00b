"""Which sensors a policy uses: the numbers against slow ones, the verdicts on policies of which it is known, and what
follows for a robot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from prism_client import ActionKind
from torch import Tensor

from prism import cli
from prism.data.episodes import Episode
from prism.data.formats.store_writer import DatasetWriter
from prism.data.windows import Windows
from prism.encoders.kinds import VectorEncoder
from prism.errors import PrismError
from prism.evaluation import sensor_use
from prism.evaluation.sensor_use import SensorReport, measure_sensors, read_sensor_report, write_sensor_report
from prism.experiments.run_folder import Run
from prism.inference.about import needed_sensors
from prism.methods.prism import PrismPolicy
from prism.normalize import Normalizer, compute_statistics
from prism.policy import Draw, LossOutput, Policy, PolicySpec
from prism.rows import Random
from prism.sensors import ActionSpec, SensorSpec
from prism.types import Observation
from tests.data_fakes import MemorySource
from tests.policy_fakes import save_run, small_config, small_policy
from tests.reference import sensor_use as slow

SENSORS = (SensorSpec("eye", "vector", (1,)), SensorSpec("ear", "vector", (2,)))
HORIZON = 4
Plan = Callable[[Tensor, Tensor], Tensor]  # readings of eye and ear, (B,) each -> what to do, (B,)


class Known(Policy):
    """Plans what `plan` says of the newest readings, 0 where one is absent; a little noise from the generator."""

    def __init__(self, plan: Plan, source: MemorySource, noise: float = 0.05, absent: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.spec = PolicySpec("known", {}, source.sensors, 3, 10.0, 2, HORIZON, absent=absent)
        self.normalizer = Normalizer.from_statistics(compute_statistics(source))
        self._plan, self._noise = plan, noise

    def loss(self, draw: Draw, choice: None = None) -> LossOutput:
        raise NotImplementedError

    def sample(self, observation: Observation, candidates: int, rng: Random) -> Tensor:
        seen = [
            torch.where(observation.present[s.name][:, -1], observation.streams[s.name][:, -1, 0], torch.tensor(0.0))
            for s in SENSORS
        ]
        wanted = self._plan(*seen)[:, None, None, None].expand(-1, candidates, HORIZON, 3)
        return wanted + self._noise * rng.randn(wanted.shape)


def _source(episodes: int = 6, length: int = 24, seed: int = 0) -> MemorySource:
    """Actions are eye, -2 eye and a constant; ear is noise."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(episodes):
        eye = np.repeat(rng.uniform(-1, 1, (-(-length // 4), 1)), 4, axis=0)[:length].astype(np.float32)
        ear = rng.normal(size=(length, 2)).astype(np.float32)
        actions = np.concatenate([eye, -2 * eye, np.full_like(eye, 0.7)], axis=1)
        made.append(Episode({"eye": eye, "ear": ear}, actions))
    return MemorySource(made, SENSORS)


def _measure(policy: Policy, source: MemorySource, held_out: list[int] | None = None) -> SensorReport:
    chosen = held_out if held_out is not None else list(range(3))
    return measure_sensors(policy, Windows(source, 2, HORIZON, chosen), Windows(source, 2, HORIZON))


def _verdicts(report: SensorReport) -> dict[str, str]:
    return {sensor.name: sensor.verdict for sensor in report.sensors}


def test_every_number_is_that_of_the_slow_version() -> None:
    source = _source()
    policy = Known(lambda eye, ear: eye + 0.2 * ear, source)
    held_out = Windows(source, 2, HORIZON, [1, 4])
    report = measure_sensors(policy, held_out, Windows(source, 2, HORIZON))
    order = np.random.default_rng(0).permutation(np.arange(len(held_out)))
    scale = policy.normalizer.action_scale.double().numpy()
    moves = policy.normalizer.action_moves.numpy() > 0
    assert moves.tolist() == [True, True, False]
    actions, valid, errors, changes, draws = [], [], [], [], []
    for number, rows in enumerate((slice(0, 4), slice(4, 12), slice(12, 28), slice(28, 48))):
        batch = held_out.batch(order[rows])
        seed = sensor_use.derive_seed(0, 0, number)
        usual = policy.sample(batch.observation, 4, Random(seed)).double().numpy()
        present = {**batch.observation.present, "ear": torch.zeros_like(batch.observation.present["ear"])}
        deaf = policy.sample(Observation(batch.observation.streams, present), 4, Random(seed)).double().numpy()
        for row in range(len(usual)):
            truth, good = batch.actions[row].double().numpy(), batch.action_valid[row].numpy()
            actions.append(truth)
            valid.append(good)
            errors.append(
                [slow.error(usual[row], truth, good, scale, moves), slow.error(deaf[row], truth, good, scale, moves)]
            )
            changes.append(slow.change(deaf[row], usual[row], good, scale, moves))
            draws.append(slow.another_draw(usual[row], good, scale, moves))
    unit = slow.mean_action(np.stack(actions), np.stack(valid), scale, moves)
    ear = report.sensors[1]
    assert report.mean_action == pytest.approx(unit)
    assert report.error == pytest.approx(np.mean(errors, axis=0)[0] / unit)
    assert ear.absent == pytest.approx(np.mean(errors, axis=0)[1] / unit)
    assert ear.absent_change == pytest.approx(np.mean(changes) / unit)
    assert report.another_draw == pytest.approx(np.mean(draws) / unit)
    assert ear.absent_rise.mean == pytest.approx(ear.absent - report.error)
    assert (report.windows, report.episodes) == (48, 2)


def test_used_listened_to_in_vain_and_ignored() -> None:
    source = _source()
    assert _verdicts(_measure(Known(lambda eye, ear: eye, source), source)) == {"eye": "used", "ear": "not used"}
    found = _measure(Known(lambda eye, ear: eye + 0.05 * ear, source), source)
    assert _verdicts(found) == {"eye": "used", "ear": "not used"}
    ear = found.sensors[1]
    assert ear.change > 0.02, "the plan follows the noise, and is no better for it"
    assert "does not lower the error" in ear.sentence
    assert "--without ear" in ear.advice
    assert "sensor_dropout" in ear.advice
    deaf = _measure(Known(lambda eye, ear: eye, source), source).sensors[1]
    assert deaf.change == deaf.first_change == deaf.absent_change == 0.0, "with equal latents nothing else moves"
    assert deaf.sentence == "ear is not used: it changes the plan by 0.0 %"


def test_swapped_readings_are_of_another_episode() -> None:
    rng = np.random.default_rng(0)
    own = [np.full((20, 1), number, np.float32) for number in range(3)]
    made = [Episode({"eye": eye, "ear": np.zeros((20, 2), np.float32)}, rng.normal(size=(20, 3))) for eye in own]
    source = MemorySource(made, SENSORS)

    class Sees(Known):
        def sample(self, observation: Observation, candidates: int, rng: Random) -> Tensor:
            seen.append((observation.streams["eye"][:, :, 0], observation.present["eye"]))
            return super().sample(observation, candidates, rng)

    seen: list[tuple[Tensor, Tensor]] = []
    report = _measure(Sees(lambda eye, ear: eye, source), source, [1])
    assert report.episodes == 1
    swapped = [eye for eye, present in seen if present.all() and not (eye == 1).all()]
    assert swapped, "the eye was swapped"
    assert all(bool((eye != 1).all()) for eye in swapped)
    assert _verdicts(report)["ear"] == "constant"


def test_too_little_is_said_to_be_too_little() -> None:
    source = _source(length=4)
    policy = Known(lambda eye, ear: eye, source, absent=("eye", "ear"))
    report = _measure(policy, source, [0])
    assert _verdicts(report) == {"eye": "unclear", "ear": "not used"}
    assert "too few to tell of every sensor, hold out more" in report.lines()[0]
    assert [sensor.name for sensor in report.required] == ["eye", "ear"], "nothing shows that one can be lost"


@pytest.mark.parametrize(
    ("absent", "required"),
    [(("eye", "ear"), ["eye"]), (("eye",), ["eye", "ear"]), (("ear",), ["eye"]), ((), ["eye", "ear"])],
)
def test_a_robot_may_lose_what_training_lacked_and_the_measurement_allows(
    tmp_path: Path, absent: tuple[str, ...], required: list[str]
) -> None:
    source = _source()
    report = _measure(Known(lambda eye, ear: eye, source, absent=absent), source)
    assert [sensor.name for sensor in report.required] == required
    policy = small_policy(sensors=SENSORS)
    policy.spec = dataclasses.replace(policy.spec, absent=absent)
    run = Run(save_run(tmp_path / "run", policy))
    by_training = [spec.name for spec in SENSORS if spec.name not in absent]
    assert needed_sensors(run.policy()) == by_training, "without a measurement as before"
    write_sensor_report(run.weights(), report)
    assert run.sensors_used() == report == read_sensor_report(run.weights())
    assert needed_sensors(run.policy()) == required
    assert set(by_training) <= set(required), "never laxer than the training alone"
    lines = "\n".join(report.lines())
    assert ("tolerates losing ear: error" in lines) is ("ear" in absent)


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    run = Run(save_run(tmp_path / "run", small_policy(sensors=SENSORS)))
    path = run.weights() / "sensor_use.json"
    path.write_text(json.dumps({"sensors": [{"name": "eye"}]}))
    with pytest.raises(PrismError, match=r"sensor_use\.json has no list 'sensors' of names: remove it"):
        run.policy()


def test_cameras_are_left_out_together_where_there_is_something_else() -> None:
    assert _measure(Known(lambda eye, ear: eye, _source()), _source()).without_cameras is None
    rng = np.random.default_rng(0)
    camera = SensorSpec("front", "rgb", (2, 2, 3))
    made = [
        Episode({**one.streams, "front": rng.integers(0, 255, (24, 2, 2, 3), dtype=np.uint8)}, one.actions)
        for one in _source().episodes
    ]
    source = MemorySource(made, (*SENSORS, camera))
    report = _measure(Known(lambda eye, ear: eye, source), source)
    assert report.without_cameras == pytest.approx(report.error)
    assert _verdicts(report)["front"] == "not used"


def test_the_time_is_bounded_and_shown() -> None:
    source, shown = _source(episodes=12), list[tuple[int, int]]()
    policy = Known(lambda eye, ear: eye, source)
    every = Windows(source, 2, HORIZON)
    assert measure_sensors(policy, every, every, progress=lambda *how: shown.append(how)).windows == 256
    assert shown[0] == (4, 256)
    assert shown[-1] == (256, 256)
    assert measure_sensors(policy, every, every, seconds=0.0).windows == 4
    assert measure_sensors(policy, every, every, most=50).windows == 50


def test_a_trained_policy_uses_what_its_target_depends_on() -> None:
    source = _source(episodes=40)
    policy = small_policy(small_config(pred_horizon=HORIZON), SENSORS)
    policy.normalizer.load_state_dict(Normalizer.from_statistics(compute_statistics(source)).state_dict())
    windows = Windows(source, 2, HORIZON, list(range(10, 40)))
    optimizer, rng = torch.optim.Adam(policy.parameters(), 5e-3), np.random.default_rng(0)
    policy.train()
    for step in range(40):
        loss = policy.batch_loss(windows.batch(rng.integers(len(windows), size=32)), Random(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report = _measure(policy, source, list(range(10)))
    assert policy.training, "left as it was found"
    assert report.error < 0.9
    assert _verdicts(report) == {"eye": "used", "ear": "not used"}


def test_a_sensor_is_encoded_once_as_recorded_and_once_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source()
    policy = small_policy(small_config(pred_horizon=HORIZON), SENSORS)
    policy.normalizer.load_state_dict(Normalizer.from_statistics(compute_statistics(source)).state_dict())
    calls, usual = [0], VectorEncoder.encode

    def counted(self: VectorEncoder, stream: Tensor, shift: Tensor | None) -> Tensor:
        calls[0] += 1
        return usual(self, stream, shift)

    monkeypatch.setattr(VectorEncoder, "encode", counted)
    remembered = _measure(policy, source)
    rounds = 5  # 72 windows: 4, 8, 16, 32, 12
    assert calls[0] == 2 * 2 * rounds
    monkeypatch.setattr(sensor_use, "_encoded_once", lambda _: nullcontext())
    each_time = _measure(policy, source)
    assert calls[0] > 2 * 2 * 2 * rounds
    assert dataclasses.replace(remembered, seconds=0) == dataclasses.replace(each_time, seconds=0)


def test_a_mixture_of_datasets_with_other_sensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, sensors in (("both", SENSORS), ("eyes", SENSORS[:1])):
        with DatasetWriter(tmp_path / name, sensors, 3, 10.0, "reach") as writer:
            for episode in _source(episodes=10).episodes:
                writer.add({sensor.name: episode.streams[sensor.name] for sensor in sensors}, episode.actions)
        paths.append(str(tmp_path / name))
    run = tmp_path / "run"
    settings = ["policy.pred_horizon=4", "controller.exec_horizon=2", "train.val_fraction=0.2"]
    command = ["train", *paths, "--action-kind", "delta", "--preset", "tiny", "--steps", "2", "--out", str(run)]
    assert cli.main([*command, "--set", *settings]) == 0
    report = Run(run).sensors_used()
    assert report is not None
    assert report.episodes == 4
    without = {sensor.name: sensor.trained_without for sensor in report.sensors}
    assert (without["eye"], without["ear"]) == (False, True)
    assert "sensors: error" in capsys.readouterr().out


def test_train_says_it_and_stores_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _source(episodes=20, length=32)
    poses = ActionSpec(kind=ActionKind.ABSOLUTE)
    with DatasetWriter(tmp_path / "data", SENSORS, 3, 10.0, "reach", action=poses) as writer:
        for episode in source.episodes:
            writer.add(episode.streams, episode.actions)
    run = tmp_path / "run"
    command = ["train", str(tmp_path / "data"), "--preset", "tiny", "--out", str(run), "--set"]
    settings = ["policy.pred_horizon=4", "controller.exec_horizon=2", "train.val_fraction=0.2"]
    assert cli.main([*command, *settings, "--steps", "3"]) == 0
    said = capsys.readouterr().out
    report = Run(run).sensors_used()
    assert report is not None
    assert report.windows == 128
    assert "\n".join(report.lines()) in said
    assert "requires eye, ear: never absent in training" in said
    assert cli.main([*command, *settings, "--steps", "4", "--resume"]) == 0, "what was measured is no other policy"


def test_plans_that_are_not_finite_fail_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _source(episodes=10)
    with pytest.raises(PrismError, match="plans on held-out windows are not finite"):
        _measure(Known(lambda eye, ear: eye / 0, source), source)
    with DatasetWriter(
        tmp_path / "data", SENSORS, 3, 10.0, "reach", action=ActionSpec(kind=ActionKind.DELTA)
    ) as writer:
        for episode in source.episodes:
            writer.add(episode.streams, episode.actions)

    def sample(self: Policy, observation: Observation, candidates: int, rng: Random) -> Tensor:
        return torch.full((len(observation.present["eye"]), candidates, HORIZON, 3), torch.nan)

    monkeypatch.setattr(PrismPolicy, "sample", sample)
    run = tmp_path / "run"
    settings = ["policy.pred_horizon=4", "controller.exec_horizon=2", "train.val_fraction=0.2"]
    command = ["train", str(tmp_path / "data"), "--preset", "tiny", "--steps", "2", "--out", str(run), "--set"]
    assert cli.main([*command, *settings]) == 0
    said = capsys.readouterr()
    assert "the sensors were not measured: the policy's plans on held-out windows are not finite" in said.err
    assert "requires eye, ear: never absent in training" in said.out
    assert Run(run).sensors_used() is None


@pytest.mark.slow
def test_touch_is_used_on_the_tabletop_and_noise_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute to record, one and a half CPU minutes to train."""
    from prism.data import open_dataset
    from prism.sensors import action_spec_of

    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "collect", "tabletop-insert-left", "--episodes", "200", "--noise", "0.05"]) == 0
    source, rng = open_dataset(tmp_path / "data" / "tabletop-insert-left"), np.random.default_rng(0)
    sensors = (*source.sensors, SensorSpec("hum", "vector", (6,)))
    with DatasetWriter("noisy", sensors, source.action_dim, source.fps, "insert", action=action_spec_of(source)) as new:
        for number in range(len(source.lengths)):
            one = source.read(number)
            hum = rng.normal(size=(one.length, 6)).astype(np.float32)
            new.add({**one.streams, "hum": hum}, one.actions, one.present)
    settings = ["policy.pred_horizon=8", "policy.encoder.mix_width=256", "controller.exec_horizon=2"]
    budget = ["train.clock=cpu", "train.minutes=1.5", "train.threads=1"]
    assert cli.main(["train", "noisy", "--action-kind", "delta", "--out", "run", "--set", *settings, *budget]) == 0
    report = Run(tmp_path / "run").sensors_used()
    assert report is not None
    assert _verdicts(report) == {"object_state": "used", "proprio": "used", "tactile": "used", "hum": "not used"}
