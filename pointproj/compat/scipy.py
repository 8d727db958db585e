"""``scipy.spatial.cKDTree`` on tensors, by its names and signatures: its searches around given points.

Arrays and lists are taken as tensors on the CPU; results are tensors.

Distances have gradients. Results are on the device of the points and in their dtype (scipy computes in
float64). There is no tree: the search structure is that of :func:`pointproj.build_index`.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.pairs import SearchedPoints, array, narrowed, number_or_tensor, pairs_within, split

__all__ = ["KDTree", "cKDTree"]


class cKDTree:  # noqa: N801 - its name there
    """Points that are searched: ``data`` (n, m), in which distances are differentiable.

    The data must be finite; the host waits for the device to check that. ``boxsize``, for m up to 3, is the
    lengths of a periodic box (0: not periodic along that axis), in which the data must lie. Else TypeError or
    ValueError. With m above 3 all pairs are compared, in chunks, and every search waits for the device.
    Without ``copy_data`` results are wrong after the data were changed in place, as in scipy. Other arguments
    are not read.
    """

    def __init__(
        self,
        data: Float[Tensor, "n m"],
        leafsize: int = 16,
        compact_nodes: bool = True,
        copy_data: bool = False,
        balanced_tree: bool = True,
        boxsize: float | Sequence[float] | None = None,
    ) -> None:
        data = array("data", data)
        if copy_data:
            data = data.clone()
        if data.ndim != 2:
            raise ValueError(f"data must be 2 dimensions; got shape {tuple(data.shape)}")
        self.data = data
        self.n, self.m = data.shape
        self._searched = SearchedPoints(data=data)
        if not bool(data.isfinite().all()):
            raise ValueError("data must be finite, check for nan or inf values")
        self.boxsize = self._box = None
        if boxsize is not None:
            self.boxsize = tuple(float(length) for length in np.broadcast_to(boxsize, self.m))
            box = [length or math.inf for length in self.boxsize]
            _check_in_box(data, data.new_tensor(box), self.boxsize)
            if self.m > 3:
                raise ValueError(f"boxsize is for up to 3 coordinates; data have {self.m}")
            self._box = (*box, *[math.inf] * (max(self.m, 2) - self.m))

    def query(
        self,
        x: Float[Tensor, "*batch m"],
        k: int | Sequence[int] = 1,
        eps: float = 0.0,
        p: float = 2.0,
        distance_upper_bound: float = math.inf,
        workers: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The k nearest points of ``x`` (..., m); nothing waits for the device.

        Results are exact, whatever ``eps``; ``p`` must be 2, else ValueError; ``workers`` is not read. A
        sequence ``k`` selects single neighbours, 1 is the nearest. For a point that is not finite, scipy
        raises an error; here its distances are NaN and its rows n, so that the host need not wait for the
        device.

        Returns
        -------
        d : (..., k) float tensor
            Distances below ``distance_upper_bound``, nearest first, ties by the lower index; inf where there
            are fewer. Without the last axis if k is 1. Differentiable twice in ``x`` and in the data.
        i : (..., k) int64 tensor
            Rows of the data; n where there are fewer.
        """
        ranks = [k] if isinstance(k, Integral) else list(k) if isinstance(k, Iterable) else []
        if not ranks or not all(isinstance(rank, Integral) and rank >= 1 for rank in ranks):
            raise ValueError(f"k must be an integer, or a sequence of integers, of at least 1; got {k}")
        x = self._queries(x, p)
        distances, rows = self._searched.nearest(max(ranks), self._box, x=x.reshape(-1, self.m))
        absent = (rows < 0) | (distances >= distance_upper_bound)
        distances = torch.where(absent & ~distances.isnan(), torch.inf, distances)
        rows = torch.where(absent, self.n, rows)
        if not isinstance(k, Integral):
            wanted = [rank - 1 for rank in ranks]
            distances, rows = distances[:, wanted], rows[:, wanted]
        shape = x.shape[:-1] if isinstance(k, Integral) and k == 1 else (*x.shape[:-1], rows.shape[1])
        return narrowed(distances.reshape(shape), x, self.data), rows.reshape(shape)

    def query_ball_point(
        self,
        x: Float[Tensor, "*batch m"],
        r: float | Float[Tensor, "*batch"],
        p: float = 2.0,
        eps: float = 0.0,
        workers: int = 1,
        return_sorted: bool | None = None,
        return_length: bool = False,
    ) -> Int[Tensor, "*pairs"] | np.ndarray:
        """All points within the distance ``r`` of ``x`` (..., m); a distance of exactly ``r`` is within.

        ``r`` is one number or one for each centre; in a periodic box it is less than half of the lengths.
        Indices are always ascending: ``return_sorted`` is not read. ValueError for a negative radius, and as
        :meth:`query`.

        Returns
        -------
        (pairs,) int64 tensor, or an array of them
            For one centre the rows of the data. For several centres an array of objects of shape
            ``x.shape[:-1]``, with a tensor where scipy has a list. With ``return_length`` an int64 tensor of
            that shape: the numbers of rows. The host waits for the device.
        """
        x = self._queries(x, p)
        query_points, points = self._searched.beside(x=x.detach().reshape(-1, self.m))
        search_radius = number_or_tensor("r", r, x.shape[:-1], points)
        search_radius = search_radius.reshape(-1) if isinstance(search_radius, Tensor) else search_radius
        queries, rows, _ = pairs_within(
            query_points, points.detach(), search_radius, inclusive=True, box=self._box
        )
        counts = torch.bincount(queries, minlength=len(query_points))
        if return_length:
            return counts.view(x.shape[:-1])
        if x.ndim == 1:
            return rows
        return split(rows, counts).reshape(x.shape[:-1])

    def _queries(self, x: object, p: float) -> Tensor:
        if p != 2:
            raise ValueError(f"p must be 2, the Euclidean distance; got {p}")
        x = array("x", x)
        if x.ndim == 0 or x.shape[-1] != self.m:
            raise ValueError(f"x must consist of vectors of length {self.m} but has shape {tuple(x.shape)}")
        return x


KDTree = cKDTree


def _check_in_box(data: Tensor, limits: Tensor, lengths: tuple[float, ...]) -> None:
    if bool((data >= limits).any()):
        raise ValueError(
            f"Some input data are greater than the size of the periodic box, {lengths}: take their remainders"
        )
    if bool(((data < 0) & limits.isfinite()).any()):
        raise ValueError("Negative input data are outside of the periodic box: take their remainders")
