"""PRISM behind LeRobot's policy interface: its network, objective, normaliser and controller are prism's own.

    lerobot-train    forward(batch) -> loss (Alg. 1);  update() -> moving average of the weights
    lerobot-eval     select_action(batch): one prism Controller an environment; plans are drawn for all in one pass
    lerobot-rollout  select_action, or predict_action_chunk with --inference.type=rtc

A checkpoint is config.json, model.safetensors and checksums.json, as prism writes them: `prism serve` reads the folder.
"""

from __future__ import annotations

import copy
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, PRETRAINED_MODEL_DIR
from prism.controller import Controller, act_together
from prism.encoder import load_pretrained
from prism.errors import PrismError
from prism.inference.window import batched
from prism.io import files
from prism.methods.presets import build_policy
from prism.policy import Policy
from prism.rows import EachRandom, Random
from prism.training.config import TrainConfig, ema_decay
from prism.training.trainer import parameter_groups, update_average
from prism.types import Batch
from torch import Tensor

from lerobot_policy_prism import sensor_features
from lerobot_policy_prism.configuration_prism import PrismConfig
from lerobot_policy_prism.memory import Memory

MODEL, RAW = "model.safetensors", "weights.safetensors"


@dataclass(frozen=True)
class _Entered:
    """How real-time chunking goes from one plan to the next: `delay` actions of the rest of the old one come first."""

    rest: np.ndarray | None = None  # (R, Da)
    delay: int = 0

    def commands(self, planned: np.ndarray) -> np.ndarray:
        """What was executed since the plan was asked for, of which the rows `planned` are over."""
        if self.rest is None:
            return planned
        return np.concatenate([self.rest[: min(self.delay, len(planned))], planned[self.delay :]])


class PrismPolicy(PreTrainedPolicy):
    config_class = PrismConfig
    name = "prism"
    config: PrismConfig

    def __init__(
        self, config: PrismConfig, dataset_stats: dict[str, Any] | None = None, dataset_meta: Any = None, **_: Any
    ) -> None:
        super().__init__(config)
        config.validate_features()
        normalizer, fresh = None, not config.policy
        if not fresh:
            spec = config.spec()
            if dataset_meta is not None:
                sensor_features.check_features(spec, config.keys, dataset_meta, str(config.pretrained_path))
        else:
            spec, config.keys = sensor_features.make_spec(config, dataset_meta)
            config.policy = spec.to_json()
            normalizer = (
                sensor_features.make_normalizer(spec, config.keys, dataset_stats) if dataset_meta is not None else None
            )
        self.policy: Policy = build_policy(spec, torch.initial_seed() % 2**31, normalizer)
        if fresh:  # a checkpoint has its weights, and needs no other file
            load_pretrained(self.policy)
        self._presence = sensor_features.Presence.of(dataset_meta)
        self._memory = Memory(spec, 0 if dataset_meta is None else int(dataset_meta.total_frames))
        self._average: list[Policy] = []  # in a list: no submodule, so neither optimised nor sent between ranks
        self._step = 0
        self.reset()

    # ------------------------------------------------------------------ training

    def get_optim_params(self) -> list[dict[str, object]]:
        return parameter_groups(self.policy, self.config.optimizer_weight_decay)

    def forward(self, batch: dict[str, Tensor], **_: Any) -> tuple[Tensor, dict[str, float]]:
        actions = batch[ACTION]
        observation = sensor_features.observation(self.policy.spec, self.config, batch, len(actions), self._presence)
        padded = batch.get(f"{ACTION}_is_pad")
        valid = torch.ones_like(actions[..., 0], dtype=torch.bool) if padded is None else ~padded
        # From torch's own generator, whose state LeRobot saves: a resumed training draws the same numbers.
        rng = Random(int(torch.randint(2**62, ())))
        policy = self.policy if self.training else self.acting
        whole = Batch(observation, actions.float(), valid)
        if self.training:
            whole = self._memory.fill(whole, self.config.fill_batch, rng)
        output = policy.batch_loss(whole, rng)
        return output.loss, {name: float(value) for name, value in output.logs.items()}

    @torch.no_grad()
    def update(self) -> None:
        """LeRobot calls it after every step of the optimiser."""
        if not self._average:
            self._average = [_frozen(self.policy)]
        settings = TrainConfig(steps=1, ema_power=self.config.ema_power, ema_max_decay=self.config.ema_max_decay)
        decay = ema_decay(settings, self._step)
        update_average(list(self._average[0].parameters()), list(self.policy.parameters()), decay)
        self._step += 1

    @property
    def acting(self) -> Policy:
        """The weights to act with and to save: the average, if there is one."""
        if not self._average:
            return self.policy
        for mine, theirs in zip(self._average[0].buffers(), self.policy.buffers(), strict=True):
            mine.copy_(theirs)
        return self._average[0]

    # ------------------------------------------------------------------ acting

    def reset(self) -> None:
        """An episode begins."""
        self._controllers: list[Controller] = []
        self._observed = 0.0
        self._entered = _Entered()

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """(B, Da): the next action of each environment's plan; a new plan where its n_action_steps are executed."""
        frames = self._frames(batch)
        self._control(len(frames))
        return torch.from_numpy(np.stack(act_together(self._controllers, frames))).to(self.config.device)

    def supports_rtc(self) -> bool:
        return True

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: dict[str, Tensor],
        inference_delay: int = 0,
        prev_chunk_left_over: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """(B, Tp, Da) from now on: chosen to go on from the rest of the last plan, and smoothed, as select_action does.

        LeRobot executes it; `prev_chunk_left_over` (R, Da) is the rest of the last plan, which may be padded with zeros
        at its end: these are no actions. Real-time chunking shows an observation only when a plan is wanted; the steps
        between are filled in by prism's window, by the clock.
        """
        frames = self._frames(batch)
        self._control(len(frames))
        now = time.monotonic()
        missed = round((now - self._observed) * self.policy.spec.fps) - 1 if self._observed else 0
        self._observed = now
        planners = [controller.planner for controller in self._controllers]
        for planner, frame in zip(planners, frames, strict=True):
            planner.window.observe(frame, missed=max(0, missed))
        observation = batched([planner.window for planner in planners], planners[0].device)
        each = EachRandom([planner.rng for planner in planners])
        candidates = planners[0].policy.sample(observation, self.config.candidates, each).float().cpu().numpy()
        rest = None if prev_chunk_left_over is None else left_over(prev_chunk_left_over)
        left = 0 if rest is None else len(rest)
        plans = []
        for planner, row in zip(planners, candidates, strict=True):
            chooser = planner.chooser
            if chooser.plan is not None:
                done = max(0, len(chooser.plan.actions) - left)
                chooser.advance(done, self._entered.commands(chooser.plan.actions[:done]))
            plans.append(chooser.choose(row, planner.window.newest, 0.0, rest).actions)
        self._entered = _Entered(rest, inference_delay)
        return torch.from_numpy(np.stack(plans)).to(self.config.device)

    def _control(self, rows: int) -> None:
        """As many controllers as environments."""
        if len(self._controllers) != rows:
            policy, config = self.acting, self.config.control()
            self._controllers = [Controller(policy, config, seed, look=False) for seed in range(rows)]

    def _frames(self, batch: dict[str, Any]) -> list[dict[str, np.ndarray]]:
        """The newest time step of every row, by sensor; what a batch lacks is left out."""
        rows = next(len(v) for k, v in batch.items() if isinstance(v, Tensor) and k.startswith("observation"))
        frames: list[dict[str, np.ndarray]] = [{} for _ in range(rows)]
        for sensor in self.policy.spec.sensors:
            stream = sensor_features.read(sensor, self.config.keys[sensor.name], batch, self.config, rows, 1)
            for frame, value in zip(frames, [] if stream is None else stream[:, -1].cpu().numpy(), strict=False):
                frame[sensor.name] = value
        return frames

    # ------------------------------------------------------------------ files

    def _save_pretrained(self, save_directory: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """The averaged weights under prism's names. LeRobot resumes from its checkpoint's folder, and needs the raw
        ones too: they are beside them there, and not in what is pushed."""
        if state_dict is not None:
            raise PrismError("prism cannot be trained with FSDP: it is small enough for every GPU; use DDP")
        self.config._save_pretrained(save_directory)
        buffers = self.policy.state_dict()
        (save_directory / MODEL).write_bytes(_encode({**buffers, **dict(self.acting.named_parameters())}))
        names = ("config.json", MODEL)
        content = {name: (save_directory / name).read_bytes() for name in names}
        sums = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in content.items()
        }
        (save_directory / files.CHECKSUMS).write_bytes(files.encode_json(sums))
        if self._average and save_directory.name == PRETRAINED_MODEL_DIR:
            raw = {**dict(self.policy.named_parameters()), "step": torch.tensor(self._step)}
            (save_directory / RAW).write_bytes(_encode(raw))

    @classmethod
    def _load_as_safetensor(cls, model: PrismPolicy, model_file: str, map_location: str, strict: bool) -> PrismPolicy:
        try:
            model.policy.load_state_dict(safetensors.torch.load_file(model_file), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:200]
            raise PrismError(
                f"{model_file} does not fit its config.json ({detail}): use the two of one checkpoint"
            ) from None
        raw = Path(model_file).with_name(RAW)
        if raw.is_file():
            weights = safetensors.torch.load_file(raw)
            model._step = int(weights.pop("step"))
            model._average = [_frozen(model.policy)]
            model.policy.load_state_dict(weights, strict=False)
        return model

    def to(self, *args: Any, **kwargs: Any) -> PrismPolicy:
        for average in self._average:
            average.to(*args, **kwargs)
        return super().to(*args, **kwargs)


def left_over(actions: Tensor) -> np.ndarray | None:
    """The rest of the last plan (R, Da) without the zeros that real-time chunking appends; None: nothing is left."""
    rows = actions.reshape(-1, actions.shape[-1]).double().cpu().numpy()
    used = np.flatnonzero((rows != 0).any(axis=1))
    return rows[: used[-1] + 1] if len(used) else None


def _frozen(policy: Policy) -> Policy:
    return copy.deepcopy(policy).eval().requires_grad_(False)


def _encode(tensors: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
