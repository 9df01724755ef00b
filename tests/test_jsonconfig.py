"""Configs to JSON and back, and settings by path."""

from __future__ import annotations

import pytest

from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations
from prism.io.jsonconfig import from_json, to_json, with_settings
from prism.methods.presets import preset
from prism.methods.prism import PrismConfig


def test_settings_change_what_they_name_and_nothing_else() -> None:
    config = preset("tiny")
    changed = with_settings(config, ["objective.scope=own", "generator.width=128", "anchor=proprio"])
    assert (changed.objective.scope, changed.generator.width, changed.anchor) == ("own", 128, "proprio")
    back = with_settings(changed, ["objective.scope=batch", "generator.width=64", "anchor=null"])
    assert back == config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("objective.scop=batch", "scope"),
        ("objective", "KEY=VALUE"),
        ("objective.candidates=many", "expected int"),
        ("objective.candidates=0", "1 or more"),
        ("objective.clamp=[0.1]", r"objective\.clamp: expected 2 values, found 1"),
        ("objective.clamp=[0.1,0.2,0.3]", r"objective\.clamp: expected 2 values, found 3"),
        ('objective.clamp=[0.1,"high"]', r"objective\.clamp\[1\]: expected float"),
        ("nothing.here=1", "PrismConfig has no 'nothing'"),
        ("obs_horizon.deep=1", "no fields"),
    ],
)
def test_bad_settings_are_one_clear_line(setting: str, message: str) -> None:
    with pytest.raises(PrismError, match=message) as error:
        with_settings(preset("tiny"), [setting])
    assert "\n" not in str(error.value)


def test_a_config_of_another_version_is_refused() -> None:
    data = to_json(preset("tiny"))
    data["objective"]["new_field"] = 1
    with pytest.raises(PrismError, match=r"config\.objective: unknown key 'new_field'"):
        from_json(PrismConfig, data)


def test_a_key_that_was_retired_is_read_and_left_out() -> None:
    old = to_json(Demonstrations("expert", noise=0.1)) | {"pushes": 0.0}
    assert from_json(Demonstrations, old) == Demonstrations("expert", noise=0.1)
