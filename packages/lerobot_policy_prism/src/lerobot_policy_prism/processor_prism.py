"""LeRobot's processors around PRISM: rename, add the batch dimension, move to the device.

They change no number (normalization_mapping is IDENTITY): PRISM's normaliser is part of its weights, so one file has
all that a policy needs.
"""

from __future__ import annotations

from typing import Any

import torch
from lerobot.processor import PolicyAction, PolicyProcessorPipeline, make_default_pre_post_processors

from lerobot_policy_prism.configuration_prism import PrismConfig


def make_prism_pre_post_processors(
    config: PrismConfig, dataset_stats: dict[str, dict[str, torch.Tensor]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]],
    PolicyProcessorPipeline[PolicyAction, PolicyAction],
]:
    return make_default_pre_post_processors(config, None)
