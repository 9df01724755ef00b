"""A run for others: a folder that prism and LeRobot read alike, with a model card, and the same on the hub.

    config.json                LeRobot's settings; under `policy` and `controller` prism's own
    model.safetensors          averaged weights and normaliser: the very bytes of the run's checkpoint
    policy_preprocessor.json   LeRobot's processors, which change no number
    policy_postprocessor.json
    experiment.json            how it was trained, where it is known
    README.md                  the model card
    checksums.json

lerobot-rollout --policy.path=FOLDER, `prism serve FOLDER` and `prism export FOLDER --onnx` take it as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import prism
from prism.controller import ControllerConfig
from prism.data.formats.lerobot import TASK
from prism.data.formats.lerobot_writer import feature_keys
from prism.errors import PrismError
from prism.experiments.recipes import FILE
from prism.experiments.run_folder import Run
from prism.io import files
from prism.io.jsonconfig import to_json
from prism.policy import PolicySpec
from prism.training.checkpoint import FORMAT_VERSION

CARD = "README.md"
_IDENTITY = dict.fromkeys(("VISUAL", "STATE", "ENV", "ACTION"), "IDENTITY")


def write_lerobot(run: Run, folder: Path, overwrite: bool = False, license_: str = "mit", name: str = "") -> None:
    """Write the folder whole or not at all; an older one is replaced where `overwrite`."""
    if folder.exists():
        if not overwrite:
            raise PrismError(f"{folder} exists already: choose another folder, or pass --overwrite")
        if not (folder / "config.json").is_file() or not (folder / files.CHECKSUMS).is_file():
            raise PrismError(f"{folder} is not an export of prism, so it is not overwritten: choose another folder")
    weights = run.weights()
    stored = files.read_json(weights / "config.json")
    config = stored if stored.get("type") == "prism" else lerobot_config(run.spec, run.settings)  # LeRobot's already
    content = {
        "config.json": files.encode_json(config),
        "model.safetensors": files.read_verified(weights, "model.safetensors", files.read_sums(weights)),
        **{file: files.encode_json(data) for file, data in _processors(config).items()},
        CARD: model_card(run, config["keys"], license_, name or folder.name).encode(),
    }
    if run.has_experiment:
        content[FILE] = replace(run.experiment, demonstrations=run.experiment.demonstrations.elsewhere()).encoded()
    with files.explain_write_errors(folder, "Nothing was written"):
        files.write_folder(folder, content)


def lerobot_config(spec: PolicySpec, controller: ControllerConfig) -> dict[str, Any]:
    """config.json of lerobot_policy_prism (its PrismConfig); what is not named has the default there."""
    if controller.ensemble is not None or controller.warm_start:
        raise PrismError("controller.ensemble and warm_start have no place in LeRobot: export a run without them")
    if long := [sensor.name for sensor in spec.sensors if sensor.steps > 1]:
        raise PrismError(f"the history of '{long[0]}' has no place in LeRobot: train with --set history=1 to export")
    return {
        "type": "prism",
        "n_obs_steps": spec.obs_horizon,
        "horizon": spec.pred_horizon,
        "n_action_steps": controller.exec_horizon,
        "candidates": controller.candidates,
        "selection": controller.selection.rule,
        **_features(spec),
        "device": "cpu",
        "push_to_hub": False,
        "format_version": FORMAT_VERSION,
        "prism_version": prism.__version__,
        "policy": spec.to_json(),
        "controller": to_json(controller),
        "keys": feature_keys(spec.sensors),
    }


def _features(spec: PolicySpec) -> dict[str, Any]:
    features = {}
    for sensor, key in zip(spec.sensors, feature_keys(spec.sensors).values(), strict=True):
        if key.startswith("observation.images."):
            height, width, channels = sensor.shape
            features[key] = {"type": "VISUAL", "shape": [channels, height, width]}
        elif key != TASK:
            features[key] = {"type": "STATE", "shape": list(sensor.shape)}
    action = {"action": {"type": "ACTION", "shape": [spec.action_dim]}}
    return {"input_features": features, "output_features": action}


def _processors(config: dict[str, Any]) -> dict[str, Any]:
    outputs = config["output_features"]

    def step(name: str, **config: Any) -> dict[str, Any]:
        return {"registry_name": name, "config": config}

    normal = {"eps": 1e-8, "norm_map": _IDENTITY}
    device = step("device_processor", device="cpu", float_dtype=None)
    before = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        device,
        step("normalizer_processor", features={**config["input_features"], **outputs}, **normal),
    ]
    after = [step("unnormalizer_processor", features=outputs, **normal), device]
    steps = {"policy_preprocessor": before, "policy_postprocessor": after}
    return {f"{name}.json": {"name": name, "steps": list_} for name, list_ in steps.items()}


# --------------------------------------------------------------------------- the model card

_CARD = """---
license: {license}
library_name: lerobot
pipeline_tag: robotics
tags: [robotics, lerobot, prism]
---
# {name}

A policy of PRISM: real-time imitation learning from several senses, one pass a plan. {size:.2f} M parameters.

| what it reads | kind | shape | LeRobot's key |
| --- | --- | --- | --- |
{sensors}

A sensor that is missing counts as absent. It answers with {horizon} actions of {dims} at {fps:g} Hz{robot}, and draws
{candidates} alternatives at a time (rule of selection: {rule}).

- Training data: {data}.
- {result}
- Trained with: {trained}.

    prism serve {address}
    lerobot-rollout --policy.path={name} --inference.type=rtc ...      (pip install lerobot_policy_prism)
"""


def model_card(run: Run, keys: dict[str, str], license_: str, name: str) -> str:
    """Sensors, action space, training data, success with interval, commands, licence: all of it from the run."""
    spec, settings = run.spec, run.settings
    rows = [f"| {s.name} | {s.kind} | {' x '.join(map(str, s.shape))} | {keys[s.name]} |" for s in spec.sensors]
    names = f"{spec.action_dim} values" + (f" ({', '.join(spec.action.names)})" if spec.action.names else "")
    data, trained = "not recorded with this checkpoint", "not recorded with this checkpoint"
    if run.has_experiment:
        experiment = run.experiment
        demonstrations = experiment.demonstrations
        places = [part.demonstrations.path for part in demonstrations.parts] or [demonstrations.path]
        places = [Path(place or "").name for place in places]
        data = " ".join(filter(None, (demonstrations.kind, *places, "demonstrations")))
        data += f" of {', '.join(experiment.tasks)}" if experiment.tasks else ""
        train = experiment.train
        budget = f"{train.minutes:g} minutes" if train.minutes else f"{train.steps} steps"
        trained = f"`prism train {experiment.name}`, {budget}, batch {train.batch_size}, seed {train.seed}"
    elif (beside := run.weights() / "train_config.json").is_file():  # lerobot-train wrote it
        theirs = files.read_json(beside)
        data = str((theirs.get("dataset") or {}).get("repo_id", data))
        budget = f"{theirs.get('steps')} steps, batch {theirs.get('batch_size')}, seed {theirs.get('seed')}"
        trained = f"`lerobot-train --policy.type=prism`, {budget}"
    return _CARD.format(
        license=license_,
        name=name,
        address=f"hf://{name}" if "/" in name else name,
        size=sum(p.numel() for p in run.policy().parameters()) / 1e6,
        sensors="\n".join(rows),
        horizon=spec.pred_horizon,
        dims=names,
        fps=spec.fps,
        robot=f" for {spec.action.robot}" if spec.action.robot else "",
        candidates=settings.candidates,
        rule=settings.selection.rule,
        data=data,
        result=_result(run),
        trained=trained,
    )


def _result(run: Run) -> str:
    """The result of the run's last evaluation."""
    if not (run.folder / "metrics.json").is_file():
        return "Not evaluated."
    found = []
    for task, summary in run.metrics.get("tasks", {}).items():
        low, high = summary["success_ci"]
        found.append(
            f"{task}: success {summary['success']:.2f} (95 % interval {low:.2f} to {high:.2f}), score "
            f"{summary['score']:.3f}, {summary['episodes']} episodes from seed {summary['first_seed']}"
        )
    return f"Evaluated on {'; '.join(found)} (`prism eval`)." if found else "Not evaluated."
