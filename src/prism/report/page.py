"""The frame of every page we write: one file that opens from disk, with no network and nothing beside it."""

from __future__ import annotations

from html import escape
from importlib import resources


def page(title: str, lead: str, content: str, footer: str, style: str = "", header: str = "", script: str = "") -> str:
    """A whole HTML page. `title` is text, the rest is HTML; `style` comes after that of every report."""
    shared = (resources.files("prism") / "assets" / "report.css").read_text()
    top = f"{header}\n" if header else ""
    bottom = f"<script>{script}</script>\n" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{shared}{style}</style>
</head>
<body>
{top}<main class="wrap">
<h1>{escape(title)}</h1>
<p class="lead">{lead}</p>
{content}
</main>
<footer class="wrap">{footer}</footer>
{bottom}</body>
</html>
"""
