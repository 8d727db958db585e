"""How things show themselves in a notebook: small tables and drawings, as HTML without scripts."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float

SIDE = 200  # pixels of a drawing
DOTS = 600  # most points of a drawing


def table(title: str, facts: Mapping[str, Any], more: str = "") -> str:
    """Return a heading, a table of names and values, and more HTML below; None is left out."""
    known = {name: _text(value) for name, value in facts.items() if value is not None}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in known.items())
    return f"<div><b>{escape(title)}</b><table>{rows}</table>{more}</div>"


def drawing(points: Float[np.ndarray, "n 3"]) -> str:
    """Return an SVG picture of a cloud from above its corner, z up; brighter dots are nearer."""
    shown = np.nan_to_num(points[:: -(-len(points) // DOTS) or 1], posinf=0, neginf=0)
    low, high = (shown.min(0), shown.max(0)) if len(shown) else (0, 1)
    x, y, z = ((shown - (low + high) / 2) / max(np.max(high - low), 1e-30)).T
    across, up, near = (x - y) * 0.5**0.5, 0.8 * z + 0.4 * (x + y), (x + y)
    places = np.stack([SIDE * (0.5 + 0.6 * across), SIDE * (0.5 - 0.6 * up), 110 + 80 * near], axis=1)
    dots = _dots(places[near.argsort()[::-1]])
    return f'<svg width="{SIDE}" height="{SIDE}" xmlns="http://www.w3.org/2000/svg">{dots}</svg>'


def _dots(places: Iterable[Iterable[float]]) -> str:
    return "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="2" fill="rgb({shade:.0f},{shade:.0f},220)"/>'
        for x, y, shade in places
    )


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
