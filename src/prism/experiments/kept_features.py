"""With a frozen backbone, the features of the demonstrations are computed before the training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from prism import ranks
from prism.data.episodes import EpisodeSource
from prism.data.features import Kept, Look, keep_features
from prism.encoders.frozen import FrozenEncoder
from prism.methods.base import ContextPolicy
from prism.policy import Policy
from prism.training import checkpoint
from prism.training.config import TrainConfig

_BACKBONE = "encoder.backbone."


def frozen_cameras(policy: Policy) -> list[FrozenEncoder]:
    if not isinstance(policy, ContextPolicy):
        return []
    return [encoder for encoder in policy.encoder.encoders if isinstance(encoder, FrozenEncoder)]


def features_of(
    policy: Policy, source: EpisodeSource, episodes: Collection[int], config: TrainConfig, say: Callable[[str], None]
) -> dict[str, Kept]:
    """By camera. {} where every step needs the pictures: they are disturbed, or the backbone is trained as well.

    On several ranks the leader computes first, so that those beside it find what it made.
    """
    cameras = frozen_cameras(policy)
    if not cameras:
        return {}
    frozen, found = cameras[0].config, dict[str, Kept]()
    if frozen.tune or config.robust.disturbs:
        why = "the backbone is trained too" if frozen.tune else "the pictures are disturbed (train.robust)"
        say(f"every step computes the features of its pictures, slowly: {why}")
        return {}
    looks = [_look(camera) for camera in cameras]
    for turn in (True, False):
        with ranks.share_errors():
            if ranks.is_leader() is turn:
                found = keep_features(source, episodes, looks, frozen.shifts, frozen.looks, say)
    return found


def _look(camera: FrozenEncoder) -> Look:
    def run(pixels: Tensor, shift: Tensor | None) -> Tensor:
        with torch.inference_mode():
            return camera.look(pixels.to(device), shift).cpu()

    device = camera.absent.device
    rows, columns = camera.seen.picture_size
    key = {"backbone": camera.backbone.fingerprint(), "strides": camera.config.strides, "seen": camera.seen.to_json()}
    return Look(camera.moved, run, camera.kept, key, f"{camera.spec.name} at {rows}x{columns}")


def restore_backbone(policy: Policy, run: Path) -> None:
    """The backbone of a resumed run, loaded before the rest of its weights to compute features."""
    if not frozen_cameras(policy):
        return
    stored = b""
    if ranks.is_leader() and (folder := checkpoint.latest_checkpoint(run)):
        tensors = checkpoint.load_model_tensors(folder)
        stored = safetensors.torch.save({k: v for k, v in tensors.items() if k.startswith(_BACKBONE)})
    stored = ranks.broadcast(stored) if ranks.world_size() > 1 else stored
    policy.load_state_dict(safetensors.torch.load(stored), strict=False)
