"""Searches in a periodic box: each query is searched for from all places where its neighbours may see it.

Points are moved into the box. A query in the lower half of an axis is also a query one length above, one in
the upper half one length below: within less than half a length, every reference point is then next to exactly
one of these images, so that every backend searches a periodic box as it searches any cloud.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.ops.specification.clouds import Clouds, queries_of, rows_of
from pointproj.ops.specification.reference import squared_lengths
from pointproj.ops.torch_internals import filled, is_known


class PeriodicBox(NamedTuple):
    """Lengths of a box along x, y, z; inf along an axis that is not periodic."""

    lengths: tuple[float, float, float]

    @property
    def images(self) -> int:
        """How many places each query is searched from."""
        return 2 ** len([length for length in self.lengths if length < math.inf])

    def moved_inside(self, points: Tensor) -> Tensor:
        """The points moved into the box; those inside keep every bit."""
        columns = []
        for x, length in zip(points.unbind(-1), self.lengths, strict=True):
            if length < math.inf:
                end = _number(length, x)
                moved = x - end * _divided(x, length).floor()
                # Just below 0 that rounds up to the length itself, which is the same place as 0. NaN remains.
                x = torch.where((x >= 0) & (x < end), x, torch.where(moved >= end, 0.0, moved))
            columns.append(x)
        return torch.stack(columns, -1)

    def clouds(self, clouds: Clouds) -> Clouds:
        """All images of the queries, those of one query side by side, and the reference points in the box."""
        points = self.moved_inside(clouds.query_points)[:, None]
        for axis, length in enumerate(self.lengths):
            if length < math.inf:
                length = _number(length, points)
                shift = torch.zeros_like(points)
                shift[..., axis] = torch.where(points[..., axis] < length / 2, length, -length)
                points = torch.cat([points, points + shift], 1)
        offsets = None if clouds.query_offsets is None else clouds.query_offsets * self.images
        return clouds._replace(
            query_points=points.reshape(-1, 3),
            query_offsets=offsets,
            reference_points=self.moved_inside(clouds.reference_points).contiguous(),
        )

    def minimum_image(self, displacements: Tensor) -> Tensor:
        """Displacements (..., 3) to the nearest copy of a point."""
        columns = []
        for x, length in zip(displacements.unbind(-1), self.lengths, strict=True):
            if length < math.inf:
                x = x - _number(length, x) * _divided(x.detach(), length).round()
            columns.append(x)
        return torch.stack(columns, -1)

    def merged(self, rows: Tensor, clouds: Clouds, k: int) -> Tensor:
        """The k nearest of what all images of each query found: (Q * images, K) to (Q, k), -1 for none.

        A reference point that several images found counts once. ``clouds`` are those without images.
        """
        rows = rows.view(-1, self.images * rows.shape[1]).sort(1).values
        delta = clouds.query_points[:, None] - rows_of(clouds.reference_points, rows.clamp(min=0))
        squared = squared_lengths(self.minimum_image(delta))
        missing = rows < 0
        missing[:, 1:] |= rows[:, 1:] == rows[:, :-1]
        squared, order = squared.masked_fill(missing, torch.inf).sort(dim=1, stable=True)
        return torch.where(squared.isfinite(), rows.gather(1, order), -1)[:, :k]

    def merged_list(self, row_splits: Tensor, rows: Tensor, references: int) -> tuple[Tensor, Tensor]:
        """One row of a list for each query instead of one for each image, in ascending order."""
        merged = row_splits[:: self.images].contiguous()
        query = queries_of(merged, len(rows))
        last = torch.iinfo(torch.int64).max
        keys = torch.where(rows >= 0, query * references + rows, last).sort().values
        return merged, torch.where(keys < last, keys % max(1, references), -1)


def _divided(x: Tensor, length: float) -> Tensor:
    """The rounded quotient: CUDA multiplies by the inverse of a number, which moves half a box off a half."""
    return x / filled((), length, x.dtype, x.device)


def _number(length: float, like: Tensor) -> float | Tensor:
    """A tensor for a length that torch.compile does not know, which would else compile for each one."""
    return length if is_known(length) else filled((), length, like.dtype, like.device)
