"""Settings of `--policy.type=prism`, and how they become prism's own.

A checkpoint's config.json holds LeRobot's settings and, under `policy` and `controller`, prism's: the same file
describes the policy to lerobot-rollout and to `prism serve`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.optim.schedulers import CosineAnnealingWithWarmupSchedulerConfig
from prism import __version__
from prism.controller import ControllerConfig
from prism.errors import PrismError
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.io.old_keys import kind_of_action
from prism.methods import presets
from prism.methods.prism import PrismConfig as NetworkConfig
from prism.policy import PolicySpec
from prism.selection import SelectionConfig
from prism.training.checkpoint import FORMAT_VERSION
from prism_client import ActionKind

AUTO = "auto"


@PreTrainedConfig.register_subclass("prism")
@dataclass
class PrismConfig(PreTrainedConfig):
    """The defaults are the recipe that prism uses for human demonstrations: docs/tutorials/from-lerobot.md.

    To = n_obs_steps observations -> `candidates` plans of horizon = Tp actions -> the first n_action_steps are
    executed -> the next plan is the candidate that goes on from the last one (selection)
    """

    n_obs_steps: int = 2
    horizon: int = 16
    n_action_steps: int = 8
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(("VISUAL", "STATE", "ENV", "ACTION"), NormalizationMode.IDENTITY)
    )

    preset: str = "tiny"  # size of the network: tiny, base, paper
    # Plans are offsets from this observation, which has the action's units: observation.state for joint or position
    # targets. auto: observation.state where its dimensions have the names of the action's. None: no anchor.
    anchor: str | None = AUTO
    observation_noise: float = 0.02  # training: on vectors, in standard deviations
    dropout: float = 0.0  # training: the chance that a sensor is absent from a window
    image_size: int = 96  # the shorter side of a larger picture becomes this; 0: as stored
    random_shift: int = 4  # training: pictures move by up to this many pixels of image_size
    depth_scale: float = 0.001  # metres in a unit of a depth camera; LeRobot's unit is mm
    settings: list[str] = field(default_factory=list)  # any other setting of the network: objective.candidates=16

    candidates: int = 16  # K: plans drawn at a time
    selection: str = "commit"  # which of them is executed
    # Plans that stand still in a row before the candidate that goes farthest is taken; 0: never. Only where actions are
    # known to be poses: with an anchor, or by meta/prism.json.
    restless: int = 2

    # Rows of a training step: LeRobot's batch (--batch_size), filled up with windows of earlier ones (memory.py) where
    # there are no pictures. 0: LeRobot's batch alone.
    fill_batch: int = 64
    optimizer_lr: float = 7e-4
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_weight_decay: float = 1e-2
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 100
    ema_power: float = 0.75  # moving average of the weights, which is what acts and is saved; 0: none
    ema_max_decay: float = 0.9995

    # Filled in when training starts; what prism reads of a checkpoint.
    format_version: int = FORMAT_VERSION
    prism_version: str = __version__
    policy: dict[str, Any] = field(default_factory=dict)  # prism.policy.PolicySpec
    controller: dict[str, Any] = field(default_factory=dict)  # prism.controller.ControllerConfig
    keys: dict[str, str] = field(default_factory=dict)  # LeRobot's key of each of its sensors

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_action_steps <= self.horizon:
            raise PrismError(f"n_action_steps is {self.n_action_steps}; it must lie in 1..{self.horizon} (horizon)")
        self.network()
        if self.control().selection.needs_overlap and self.n_action_steps == self.horizon:
            raise PrismError(
                f"selection '{self.selection}' compares with the rest of a plan: use n_action_steps < {self.horizon}, "
                "or --policy.selection=medoid"
            )

    def network(self) -> NetworkConfig:
        """prism's settings of the network; the anchor is found when the sensors are known."""
        preset = presets.preset(self.preset)
        config = replace(
            preset,
            obs_horizon=self.n_obs_steps,
            pred_horizon=self.horizon,
            observation_noise=self.observation_noise,
            encoder=replace(preset.encoder, dropout=self.dropout),
        )
        return with_settings(config, self.settings)

    def control(self) -> ControllerConfig:
        """prism's settings of the controller: those of the checkpoint, under the options that LeRobot has for them."""
        stored = from_json(ControllerConfig, self.controller, "config.json: controller") if self.controller else None
        config = stored or ControllerConfig(selection=self._of_the_data())
        selection = replace(config.selection, rule=self.selection)
        return replace(config, exec_horizon=self.n_action_steps, candidates=self.candidates, selection=selection)

    def _of_the_data(self) -> SelectionConfig:
        """As the data say, once they are known. Restless only where actions are poses: a constant change moves."""
        if not self.policy:
            return SelectionConfig(restless=self.restless)
        spec = self.spec()
        poses = spec.action.kind is ActionKind.ABSOLUTE or (spec.action.kind is None and spec.config.get("anchor"))
        return SelectionConfig(restless=self.restless if poses else 0).of_actions(spec.action)

    def spec(self) -> PolicySpec:
        """prism's description of the policy, once training has begun."""
        spec = PolicySpec.from_json(self.policy)
        return spec if spec.action.kind else spec.stated(kind_of_action({"controller": self.controller}))

    def _save_pretrained(self, save_directory: Any) -> None:
        self.controller = to_json(self.control())
        super()._save_pretrained(save_directory)

    def validate_features(self) -> None:
        if not self.input_features or self.action_feature is None:
            raise PrismError("prism needs at least one observation and the key 'action'; the dataset has no such pair")

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(
            lr=self.optimizer_lr,
            betas=self.optimizer_betas,
            weight_decay=self.optimizer_weight_decay,
            grad_clip_norm=self.optimizer_grad_clip_norm,
        )

    def get_scheduler_preset(self) -> CosineAnnealingWithWarmupSchedulerConfig:
        return CosineAnnealingWithWarmupSchedulerConfig(num_warmup_steps=self.scheduler_warmup_steps)

    @property
    def observation_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        return None
