"""The inputs that every backend is tested and timed with.

A case describes its clouds; :meth:`Case.problem` makes the tensors, the same on every machine and for every
backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MakePoints = Callable[[torch.Generator], tuple[Tensor, Tensor]]  # -> query, reference points in float64


class Problem(NamedTuple):
    """The tensors of one call."""

    query_points: Tensor  # (Q, 3) or (B, Q, 3)
    reference_points: Tensor  # (N, 3) or (B, N, 3)
    features: Tensor  # (N, C) or (B, N, C)
    query_offsets: Tensor | None = None  # (B + 1,) int32
    reference_offsets: Tensor | None = None

    @property
    def offsets(self) -> dict[str, Tensor]:
        """The keyword arguments of a ragged batch."""
        if self.query_offsets is None:
            return {}
        return {"query_offsets": self.query_offsets, "reference_offsets": self.reference_offsets}

    def ranges(self) -> list[tuple[range, range]]:
        """Rows of each cloud in the packed (flattened) query and reference points."""
        if self.query_offsets is not None:
            both = self.query_offsets.tolist(), self.reference_offsets.tolist()
        else:
            clouds = len(self.query_points) if self.query_points.ndim == 3 else 1
            sizes = self.query_points.shape[-2], self.reference_points.shape[-2]
            both = [[b * size for b in range(clouds + 1)] for size in sizes]
        spans = ([range(first, end) for first, end in pairwise(offsets)] for offsets in both)
        return list(zip(*spans, strict=True))


@dataclass(frozen=True)
class Case:
    """One kind of input.

    ``k`` and ``radius`` are the arguments of the two operators, None where the case is not meant for one.
    With ``batch`` the points are split into that many clouds of equal size; with ``sizes`` into a ragged
    batch, of which each cloud has (queries, references).
    """

    id: str
    make_points: MakePoints
    k: int | None = 4
    radius: float | None = 0.4
    sigma: float = 0.1
    channels: int = 3
    positions: torch.dtype = torch.float32
    features: torch.dtype = torch.float32
    batch: int | None = None
    sizes: tuple[tuple[int, int], ...] | None = None

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the case is meant for."""
        return tuple(n for n, v in (("knn", self.k), ("radius", self.radius)) if v is not None)

    def neighborhood(self, operator: str) -> float:
        """k for "knn", the radius for "radius"."""
        return self.k if operator == "knn" else self.radius

    def problem(self, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
        """The tensors, the same for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        query, reference = self.make_points(generator)
        features = torch.randn(len(reference), self.channels, generator=generator, dtype=torch.float64)
        tensors = [query.to(self.positions), reference.to(self.positions), features.to(self.features)]
        if self.batch:
            tensors = [t.view(self.batch, -1, t.shape[-1]) for t in tensors]
        offsets = zip(*self.sizes, strict=True) if self.sizes else ()
        tensors += [torch.tensor([0, *accumulate(s)], dtype=torch.int32) for s in offsets]
        return Problem(*(t.to(device) for t in tensors))


def gaussian(queries: int, references: int) -> MakePoints:
    """References standard normal, queries uniform in [-1, 1]^3."""
    return lambda g: (cube(g, queries), torch.randn(references, 3, generator=g, dtype=torch.float64))


def grid_in_gaussian(side: int, references: int) -> MakePoints:
    """A query grid on [-1, 1]^3 in a standard normal cloud."""
    axis = torch.linspace(-1, 1, side, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis, axis)
    return lambda g: (grid, torch.randn(references, 3, generator=g, dtype=torch.float64))


def clustered(count: int) -> Callable[[torch.Generator], Tensor]:
    """Half of the points in a ball of 1e-3, the others uniform: k-th distances span 400x."""

    def points(g: torch.Generator) -> Tensor:
        ball = torch.randn(count // 2, 3, generator=g, dtype=torch.float64)
        ball *= 1e-3 / ball.norm(dim=1, keepdim=True).clamp(min=1.0)
        cloud = torch.cat([ball + 0.3, cube(g, count - count // 2)])
        return cloud[torch.randperm(count, generator=g)]

    return points


def cube(g: torch.Generator, count: int) -> Tensor:
    """(count, 3) points, uniform in [-1, 1]^3."""
    return torch.rand(count, 3, generator=g, dtype=torch.float64) * 2 - 1


W1 = Case("W1", grid_in_gaussian(30, 100_000), k=7, radius=None, channels=25)
W2 = Case("W2", grid_in_gaussian(30, 25_000), k=None, radius=0.1, channels=25)
W2_WIDE = Case("W2-wide", grid_in_gaussian(30, 25_000), k=None, radius=0.25, channels=25)
