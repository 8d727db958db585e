"""Cabinets of thin boards, hollow: a shut compartment counts as solid, an open one does not."""

from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import chance, pick
from pointproj.data.furniture.solids import Range, box
from pointproj.data.furniture.supports import support

OVERLAP = 0.002  # metres by which a door overlaps with the boards around it


def boarded_cabinet(rng: np.random.Generator, half_x: float, half_y: float, height: float) -> list[Manifold]:
    """Return the parts of a cabinet of boards.

    Its compartments are open, shut by doors, or hold drawers that are in or pulled out.

    Parameters
    ----------
    rng : numpy.random.Generator
        Chooses the compartments and their measures.
    half_x, half_y, height : float
        Metres; the front looks towards -y.
    """
    clear = rng.uniform(0.03, 0.3) * height if chance(rng, 0.6) else 0.0
    board = rng.uniform(0.006, 0.03)
    depth = (-half_y, half_y)
    edges_x = np.linspace(-half_x + board / 2, half_x - board / 2, int(rng.integers(2, 5)))
    edges_z = np.linspace(clear + board / 2, height - board / 2, int(rng.integers(2, 7)))
    parts = [box((x - board / 2, x + board / 2), depth, (clear, height)) for x in edges_x]
    parts += [box((-half_x, half_x), depth, (z - board / 2, z + board / 2)) for z in edges_z]
    if chance(rng, 0.85):
        parts.append(box((-half_x, half_x), (half_y - board, half_y), (clear, height)))
    usual, other = (pick(rng, "open", "door", "drawer", "pulled") for _ in range(2))
    for x in pairwise(edges_x):
        for z in pairwise(edges_z):
            kind = usual if chance(rng, 0.7) else other
            if kind == "door":
                parts.append(box(x, (-half_y - board, -half_y + OVERLAP), z))
            elif kind != "open":
                out = rng.uniform(0.1, 0.9) * 2 * half_y if kind == "pulled" else 0.0
                parts += [part.translate([0.0, -out, 0.0]) for part in _drawer(x, z, half_y, board)]
    if clear:
        parts += support(rng, half_x, half_y, clear, "legs", "plinth", "panels", "frames", "crossed")
    return parts


def _drawer(x: Range, z: Range, half_y: float, board: float) -> list[Manifold]:
    """Front that shuts a compartment, and behind it a box that is open above."""
    left, right = x[0] + 1.5 * board, x[1] - 1.5 * board
    low, high = z[0] + board, z[0] + 0.8 * (z[1] - z[0])
    inner, rear = (-half_y, half_y - 3 * board), half_y - 3 * board
    return [
        box(x, (-half_y - board, -half_y + OVERLAP), z),
        box((left, right), inner, (low, low + board)),
        box((left, left + board), inner, (low, high)),
        box((right - board, right), inner, (low, high)),
        box((left, right), (rear - board, rear), (low, high)),
    ]
