"""Pages from templates: prism/assets/report/*.html, Jinja2, which escapes all that it is given but `Markup`.

A drawing (charts.py, player.py) is Markup that escapes its own words; everything else on a page is in its template.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from importlib import resources

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

THUMB = 192  # pixels, longest side of a picture


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("prism", "assets/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["asset"] = asset
    return made


def asset(name: str) -> Markup:
    """A file of prism/assets, as it is."""
    return Markup((resources.files("prism") / "assets" / name).read_text())  # our own file


def render_page(template: str, **values: object) -> str:
    """A whole HTML page that needs no network and nothing beside it."""
    return _environment().get_template(template).render(values)


def picture(frame: NDArray[np.generic], longest: int = THUMB) -> str:
    """An image (H, W, 3) as the address of a small PNG."""
    from PIL import Image

    small = Image.fromarray(np.ascontiguousarray(frame, dtype=np.uint8))
    small.thumbnail((longest, longest))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
