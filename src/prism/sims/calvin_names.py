"""CALVIN's 34 commands by name. What they mean is in the user's checkout: conditions, success functions, sentences."""

from __future__ import annotations

_COLOURS = ("red", "blue", "pink")
_SIDES = ("right", "left")

TASKS: tuple[str, ...] = (
    *(f"{verb}_{colour}_block_{side}" for verb in ("rotate", "push") for colour in _COLOURS for side in _SIDES),
    "move_slider_left", "move_slider_right", "open_drawer", "close_drawer",
    *(f"lift_{colour}_block_{place}" for colour in _COLOURS for place in ("table", "slider", "drawer")),
    "place_in_slider", "place_in_drawer", "push_into_drawer", "stack_block", "unstack_block",
    *(f"turn_{state}_{light}" for light in ("lightbulb", "led") for state in ("on", "off")),
)  # fmt: skip

NAMES: dict[str, str | None] = {"calvin": None, **{f"calvin-{task}": task for task in TASKS}}  # None: chains of five
