"""LeRobot's features as prism's sensors, and LeRobot's batches as prism's observations.

| LeRobot                                                  | prism                                                 |
| -------------------------------------------------------- | ----------------------------------------------------- |
| picture (C, H, W), values in [0, 1]                      | rgb (H, W, 3) uint8, resized to image_size            |
| picture whose feature has info.is_depth_map, millimetres | depth (H, W), metres                                  |
| any other observation                                    | vector                                                |
| task, where a dataset has several                        | text                                                  |
| meta/prism.json, where prism wrote the dataset           | the sensors as they were recorded                     |
| a key that a batch lacks; NaN; columns `present.KEY`     | absent at these steps                                 |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_STATE
from prism.data.formats.lerobot import PRESENT, TASK, stored_specs
from prism.errors import PrismError
from prism.normalize import Normalizer, Statistics, VectorStatistics
from prism.policy import PolicySpec
from prism.sensors import ActionSpec, SensorSpec, encode_text
from prism.types import Observation
from torch import Tensor

from lerobot_policy_prism.configuration_prism import AUTO, PrismConfig

_LARGEST_VECTOR = 1024
_TEXT_BYTES = 64


def make_spec(config: PrismConfig, meta: Any) -> tuple[PolicySpec, dict[str, str]]:
    """What prism builds a policy from, and LeRobot's key of each sensor; `meta` is the dataset's, or None."""
    assert config.input_features is not None
    assert config.action_feature is not None
    features: Mapping[str, Any] = {} if meta is None else meta.features
    stored, action = stored_specs(Path(meta.root)) if meta is not None else ({}, ActionSpec())
    sensors, keys = [], {}
    for key, feature in config.input_features.items():
        spec = stored.get(key) or _sensor(key, feature, features.get(key, {}), config)
        if spec is None:
            logging.warning("prism leaves out '%s' %s: no kind of sensor that it knows", key, feature.shape)
            continue
        sensors.append(spec)
        keys[spec.name] = key
    texts = [] if meta is None else [str(text) for text in meta.tasks.index]
    if len(texts) > 1:
        longest = max(len(text.encode()) for text in texts)
        sensors.append(stored.get(TASK) or SensorSpec(TASK, "text", (max(_TEXT_BYTES, -(-longest // 16) * 16),)))
        keys[sensors[-1].name] = TASK
    robot = str(getattr(meta, "robot_type", "") or action.robot)
    action = replace(action, names=action.names or _names(features.get(ACTION, {})), robot=robot)
    anchor = _anchor(config, features, keys)
    network = replace(config.network(), anchor=anchor)
    fps = 10.0 if meta is None else float(meta.fps)
    return network.spec(tuple(sensors), config.action_feature.shape[0], fps, action), keys


def _sensor(key: str, feature: PolicyFeature, entry: Mapping[str, Any], config: PrismConfig) -> SensorSpec | None:
    name = key.removeprefix("observation.").removeprefix("images.")
    if feature.type is FeatureType.VISUAL:
        channels, height, width = feature.shape
        resize = _smaller(height, width, config.image_size)
        pixels = min(height, width) / min(resize or (height, width))  # stored ones in one that the network sees
        picture: dict[str, Any] = {"resize": resize, "random_shift": round(config.random_shift * pixels)}
        if _is_depth(entry) or channels == 1:
            return SensorSpec(name, "depth", (height, width), **picture)
        return SensorSpec(name, "rgb", (height, width, 3), **picture) if channels == 3 else None
    size = int(np.prod(feature.shape, dtype=np.int64))
    if entry.get("dtype") in ("string", "language") or not 1 <= size <= _LARGEST_VECTOR:
        return None
    names = _names(entry)
    return SensorSpec(name, "vector", (size,), names=names if len(names) == size else ())


def _smaller(height: int, width: int, size: int) -> tuple[int, int] | None:
    shorter = min(height, width)
    return None if not 0 < size < shorter else (round(height * size / shorter), round(width * size / shorter))


def _is_depth(entry: Mapping[str, Any]) -> bool:
    info = {**(entry.get("video_info") or {}), **(entry.get("info") or {})}
    return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))


def _names(entry: Mapping[str, Any]) -> tuple[str, ...]:
    names = entry.get("names")
    if isinstance(names, dict) and len(names) == 1:
        names = next(iter(names.values()))
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def _anchor(config: PrismConfig, features: Mapping[str, Any], keys: Mapping[str, str]) -> str | None:
    """The sensor that plans are offsets from."""
    by_key = {key: name for name, key in keys.items()}
    if config.anchor == AUTO:
        state, action = (_names(features.get(key, {})) for key in (OBS_STATE, ACTION))
        return by_key.get(OBS_STATE) if state and state == action else None
    if config.anchor is None or config.anchor in keys:
        return config.anchor
    if config.anchor not in by_key:
        raise PrismError(
            f"--policy.anchor={config.anchor}: there is no such observation; there are {', '.join(by_key)}"
        )
    return by_key[config.anchor]


def check_features(spec: PolicySpec, keys: Mapping[str, str], meta: Any, where: str) -> None:
    """PrismError where a dataset cannot continue the training of a checkpoint. A sensor that it lacks is absent."""
    width = int(meta.features[ACTION]["shape"][0])
    if width != spec.action_dim:
        raise PrismError(f"{where}: its actions have {spec.action_dim} dimensions, those of {meta.repo_id} {width}")
    for sensor in spec.sensors:
        entry = meta.features.get(keys[sensor.name])
        size = None if entry is None else int(np.prod(entry["shape"], dtype=np.int64))
        if sensor.kind == "vector" and size is not None and size != sensor.shape[0]:
            raise PrismError(
                f"{where}: '{keys[sensor.name]}' has {sensor.shape[0]} values, that of {meta.repo_id} {size}: use a "
                "dataset of the same robot, or train from the beginning (without --policy.path)"
            )


def make_normalizer(
    spec: PolicySpec, keys: Mapping[str, str], stats: Mapping[str, Mapping[str, Any]] | None
) -> Normalizer:
    """prism's normaliser from the statistics that LeRobot stores with a dataset (meta/stats.json)."""
    vectors = {s.name: _statistics(stats, keys[s.name]) for s in spec.sensors if s.kind == "vector"}
    actions = _statistics(stats, ACTION)
    references = np.stack([actions.mean[q : q + 4] for q in spec.action.quaternions] or [np.empty(0)])
    norm = np.linalg.norm(references, axis=-1, keepdims=True)
    references = np.where(norm > 0.1, references / np.maximum(norm, 1e-9), 0.5).reshape(-1, 4)
    return Normalizer.from_statistics(Statistics(actions, vectors, spec.action.quaternions, references), spec.sensors)


def _statistics(stats: Mapping[str, Mapping[str, Any]] | None, key: str) -> VectorStatistics:
    if not stats or not {"min", "max", "mean", "std"} <= set(stats.get(key, {})):
        raise PrismError(
            f"the dataset has no statistics of '{key}' in meta/stats.json: record or convert it again, or let "
            "LeRobot compute them (lerobot-edit-dataset --operation.type recompute_stats)"
        )
    values = [np.asarray(stats[key][name], np.float64).reshape(-1) for name in ("min", "max", "mean", "std")]
    return VectorStatistics(1, *values)


@dataclass
class Presence:
    """At which steps of a dataset which key was there: its columns `present.KEY`, which LeRobot does not pass on."""

    masks: dict[str, np.ndarray]  # by key, one value a frame of the whole dataset

    @staticmethod
    def of(meta: Any) -> Presence:
        names = [] if meta is None else [key for key in meta.features if key.startswith(PRESENT)]
        if not names:
            return Presence({})
        import pyarrow.parquet as parquet

        tables = [parquet.read_table(f, columns=["index", *names]) for f in sorted(Path(meta.root).glob("data/*/*"))]
        columns = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in ("index", *names)}
        order = np.argsort(columns["index"])
        masks = {name.removeprefix(PRESENT): columns[name][order].reshape(-1).astype(bool) for name in names}
        return Presence({key: mask for key, mask in masks.items() if not mask.all()})

    def window(self, key: str, batch: Mapping[str, Any], steps: int) -> Tensor | None:
        """(B, To), as LeRobot makes a window: before the first frame of an episode is its first frame."""
        if key not in self.masks or "index" not in batch:
            return None
        last = batch["index"].reshape(-1, 1).cpu().numpy()
        padded = batch[f"{key}_is_pad"].reshape(len(last), -1).cpu().numpy() if f"{key}_is_pad" in batch else False
        at = last + np.arange(1 - steps, 1)
        at = np.where(padded, last - (steps - 1 - np.sum(padded, axis=1, keepdims=True)), at) if steps > 1 else at
        return torch.from_numpy(self.masks[key][at])


def observation(
    spec: PolicySpec, config: PrismConfig, batch: Mapping[str, Any], rows: int, presence: Presence
) -> Observation:
    """A batch of LeRobot as prism's: (B, To, ...) a sensor, and when it was there."""
    streams, present = {}, {}
    device = next(v.device for v in batch.values() if isinstance(v, Tensor))
    for sensor in spec.sensors:
        key = config.keys[sensor.name]
        there = torch.ones(rows, spec.obs_horizon, dtype=torch.bool, device=device)
        stream = read(sensor, key, batch, config, rows, spec.obs_horizon)
        if stream is None:
            shape, dtype = (rows, spec.obs_horizon, *sensor.shape), torch.from_numpy(np.empty(0, sensor.dtype)).dtype
            stream, there = torch.zeros(shape, dtype=dtype, device=device), torch.zeros_like(there)
        elif stream.dtype.is_floating_point:
            there = stream.isfinite().flatten(2).all(2)
        mask = presence.window(key, batch, spec.obs_horizon)
        streams[sensor.name] = stream
        present[sensor.name] = there if mask is None else there & mask.to(device)
    return Observation(streams, present)


def read(
    sensor: SensorSpec, key: str, batch: Mapping[str, Any], config: PrismConfig, rows: int, steps: int
) -> Tensor | None:
    """One sensor of a batch, (B, To, *shape); None where the batch has no such key."""
    value = batch.get(key)
    if sensor.kind == "text":
        texts = [value] * rows if isinstance(value, str) else value
        if not texts:
            return None
        rows_of = [
            encode_text(text.encode()[: sensor.shape[0]].decode(errors="ignore"), sensor.shape[0]) for text in texts
        ]
        return torch.from_numpy(np.stack(rows_of)).unsqueeze(1).expand(-1, steps, -1)
    if not isinstance(value, Tensor):
        return None
    if sensor.kind in ("vector", "audio"):
        size = value.shape[-1] if value.ndim > 1 else 1
        if size != sensor.shape[0]:
            raise PrismError(
                f"'{key}' has {size} values, the policy's has {sensor.shape[0]}: use the robot or environment that it "
                "was trained for"
            )
        return value.reshape(rows, -1, size).float()
    height, width, *channels = sensor.shape
    picture = key.startswith("observation.image")
    if not picture:  # a column as prism stores it: metres, or bytes
        value = value.reshape(rows, -1, *sensor.shape)
        return value.float() if sensor.kind == "depth" else value.round().clamp(0, 255).to(torch.uint8)
    if tuple(value.shape[-2:]) != (height, width):
        raise PrismError(f"'{key}' has pictures of {tuple(value.shape[-2:])}, the policy's are {(height, width)}")
    value = value.reshape(rows, -1, *(channels or [1]), height, width)
    if sensor.kind == "depth":
        return value[:, :, 0].float() * config.depth_scale
    bytes_ = value if value.dtype == torch.uint8 else (value.float() * 255).round().clamp(0, 255).to(torch.uint8)
    return bytes_.permute(0, 1, 3, 4, 2)
