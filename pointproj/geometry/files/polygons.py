"""Polygons and strips as triangles."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.text import FormatError

MOST_CORNERS = 4096
"""Most corners of a polygon that is not convex."""

FOLD = 1e-9  # of a polygon's area; a fan that turns back by less is not folded


def triangles_of(
    polygons: Iterable[Sequence[int]], vertices: Float[np.ndarray, "V 3"]
) -> Int[np.ndarray, "F 3"]:
    """Split polygons into fans of triangles, or by ears where a fan folds; points and edges give none.

    A polygon that crosses itself stays a fan. Raises FormatError for a vertex that does not exist.
    """
    polygons = [*polygons]
    fans = [(corners[0], b, c) for corners in polygons for b, c in pairwise(corners[1:])]
    try:
        triangles = np.array(fans, dtype=np.int64).reshape(-1, 3)
    except OverflowError:
        triangles = np.full((1, 3), -1)
    if len(triangles) and not 0 <= triangles.min() <= triangles.max() < len(vertices):
        raise FormatError(f"has a face that names a vertex outside 0 to {len(vertices) - 1}")
    owners = np.repeat(np.arange(len(polygons)), [max(len(corners) - 2, 0) for corners in polygons])
    if len(triangles) == len(np.unique(owners)):  # all polygons are triangles
        return triangles
    with np.errstate(over="ignore", invalid="ignore"):
        a, b, c = np.moveaxis(vertices[triangles], 1, 0)
        areas = np.cross(b - a, c - a)
        normals = np.stack([np.bincount(owners, axis, len(polygons)) for axis in areas.T], axis=1)
        along = np.einsum("fi,fi->f", areas, normals[owners])
        folded = along < -FOLD * np.einsum("fi,fi->f", normals, normals)[owners]
    for number in np.unique(owners[folded]):
        corners, start = polygons[number], np.searchsorted(owners, number)
        if len(corners) > MOST_CORNERS:
            raise FormatError(f"has a concave polygon of {len(corners)} corners: write triangles")
        if len(corners) == 4:  # the other diagonal
            triangles[start : start + 2] = np.asarray(corners)[[[1, 2, 3], [1, 3, 0]]]
            continue
        axis = int(np.abs(normals[number]).argmax())
        flat = np.delete(vertices[corners], axis, axis=1) * [1, normals[number, axis] * (-1) ** axis]
        ears = _ears(flat)
        if ears is not None:
            triangles[start : start + len(ears)] = np.asarray(corners)[ears]
    return triangles


def _ears(corners: Float[np.ndarray, "n 2"]) -> Int[np.ndarray, "f 3"] | None:
    """Cut ears off a polygon of positive area until a triangle is left; None if there is none to cut."""
    left, ears = np.arange(len(corners)), []
    while len(left) > 3:
        before, after = np.roll(left, 1), np.roll(left, -1)
        turns = _area(corners[before], corners[left], corners[after])
        for place in [*np.flatnonzero(turns > 0), *np.flatnonzero(turns == 0)]:
            ear = before[place], left[place], after[place]
            a, b, c = corners[[*ear]]
            others = corners[left]
            sides = [_area(p, q, others) for p, q in ((a, b), (b, c), (c, a))]
            is_corner = [(others == corner).all(axis=1) for corner in (a, b, c)]
            if not (np.min(sides, axis=0) >= 0)[~np.any(is_corner, axis=0)].any():
                break
        else:
            return None
        ears.append(ear)
        left = np.delete(left, place)
    return np.array([*ears, left])


def _area(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return twice the area of triangles in the plane, positive if a, b, c turn left."""
    first, second = b - a, c - a
    return first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]


def strip(indices: Int[np.ndarray, " n"]) -> Int[np.ndarray, "F 3"]:
    """Return the triangles of a strip of three corners or more.

    Every second one is turned; those with two equal corners are left out.
    """
    triangles = np.stack([indices[:-2], indices[1:-1], indices[2:]], axis=1)
    triangles[1::2] = triangles[1::2, [1, 0, 2]]
    a, b, c = triangles.T
    return triangles[(a != b) & (b != c) & (c != a)]
