"""Words of MuJoCo's XML that the models share."""

from __future__ import annotations

from collections.abc import Iterable


def numbers(values: Iterable[float]) -> str:
    return " ".join(f"{float(value):.6g}" for value in values)


def box(size: Iterable[float], pos: Iterable[float], rgba: str, more: str = "") -> str:
    return f'<geom type="box" size="{numbers(size)}" pos="{numbers(pos)}" rgba="{rgba}" {more}/>'


def free(name: str, geoms: str) -> str:
    """A thing that nothing holds."""
    return f'<body name="{name}"><freejoint name="{name}"/>{geoms}</body>'
