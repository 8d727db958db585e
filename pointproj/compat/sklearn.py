"""``sklearn.neighbors.NearestNeighbors`` on tensors, by its names and signatures.

Arrays and lists are taken as tensors on the CPU; results are tensors.
"""

from numbers import Integral
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.pairs import (
    SearchedPoints,
    array,
    by_distance,
    narrowed,
    number_or_tensor,
    others,
    pairs_within,
    split,
)

__all__ = ["NearestNeighbors"]

Points = Float[Tensor, "n m"]


class NearestNeighbors:
    """Searches among the points that it was fitted to, with the Euclidean distance.

    ValueError for other metrics and for ``metric_params``. ``algorithm``, ``leaf_size`` and ``n_jobs`` are
    not read.
    """

    def __init__(
        self,
        *,
        n_neighbors: int = 5,
        radius: float = 1.0,
        algorithm: str = "auto",
        leaf_size: int = 30,
        metric: str = "minkowski",
        p: float = 2,
        metric_params: dict | None = None,
        n_jobs: int | None = None,
    ) -> None:
        if metric not in ("minkowski", "euclidean", "l2") or (metric == "minkowski" and p != 2):
            raise ValueError(f"the metric must be Euclidean; got {metric!r} with p = {p}")
        if metric_params:
            raise ValueError(f"the metric must be Euclidean without metric_params; got {metric_params}")
        self.n_neighbors = _checked_count(n_neighbors)
        self.radius = radius

    def fit(self, X: Points, y: object = None) -> Self:  # noqa: N803 - its name there
        """Take the points (n, m) that are searched; distances are differentiable in them.

        With m above 3 all pairs are compared, in chunks, and every search waits for the device. TypeError or
        ValueError unless it is a table of real numbers with at least one row.
        """
        X = _table(X)  # noqa: N806
        if not len(X):
            raise ValueError(f"Found array with 0 sample(s), shape {tuple(X.shape)}: 1 or more are required")
        self._searched = SearchedPoints(fitted=X)
        self.n_samples_fit_, self.n_features_in_ = X.shape
        return self

    def kneighbors(
        self,
        X: Points | None = None,  # noqa: N803
        n_neighbors: int | None = None,
        return_distance: bool = True,
    ) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"]] | Int[Tensor, "q k"]:
        """The fitted points nearest to each point of ``X``; None: to each fitted point, without itself.

        ValueError for more neighbours than there are points.

        Returns
        -------
        neigh_dist : (q, k) float tensor
            Nearest first, ties by the lower index, in the points' dtype. Differentiable twice in ``X`` and
            in the fitted points. Nothing waits for the device.
        neigh_ind : (q, k) int64 tensor
            Rows of the fitted points; -1 where fewer than k of them are finite.
        """
        searched = self._fitted()
        k = self.n_neighbors if n_neighbors is None else _checked_count(n_neighbors)
        if k > self.n_samples_fit_ - (X is None):
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, "
                f"n_samples_fit = {self.n_samples_fit_}" + (", itself left out" if X is None else "")
            )
        queries = self._queries(X)
        distances, rows = searched.nearest(k + (X is None), X=queries)
        distances = narrowed(distances, queries, *searched.given.values())
        if X is None:
            columns = others(rows)
            distances, rows = distances.gather(1, columns), rows.gather(1, columns)
        return (distances, rows) if return_distance else rows

    def radius_neighbors(
        self,
        X: Points | None = None,  # noqa: N803
        radius: float | None = None,
        return_distance: bool = True,
        sort_results: bool = False,
    ) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        """All fitted points within ``radius``; one at exactly the radius is within.

        ``X`` is that of :meth:`kneighbors`; ``radius`` is one number, or one for each row of ``X``. Without
        ``sort_results`` the lowest index comes first. ValueError for a negative radius.

        Returns
        -------
        neigh_dist : (q,) array of float tensors
            Without gradients. The host waits for the device to know how many pairs there are.
        neigh_ind : (q,) array of int64 tensors
        """
        if sort_results and not return_distance:
            raise ValueError("return_distance must be True if sort_results is True.")
        searched = self._fitted()
        query_points, points = searched.beside(X=self._queries(X))
        radius = self.radius if radius is None else radius
        search_radius = number_or_tensor("radius", radius, query_points.shape[:1], points)
        queries, rows, squared = pairs_within(
            query_points.detach(), points.detach(), search_radius, inclusive=True
        )
        if X is None:
            apart = queries != rows
            queries, rows, squared = queries[apart], rows[apart], squared[apart]
        if sort_results:
            order = by_distance(queries, squared)
            rows, squared = rows[order], squared[order]
        counts = torch.bincount(queries, minlength=len(query_points))
        rows = split(rows, counts)
        return (split(squared.sqrt(), counts), rows) if return_distance else rows

    def _fitted(self) -> SearchedPoints:
        if not hasattr(self, "_searched"):
            raise ValueError("This NearestNeighbors instance is not fitted yet: call fit first")
        return self._searched

    def _queries(self, points: object) -> Tensor:
        if points is None:
            return self._searched.given["fitted"]
        points = _table(points)
        if points.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {points.shape[1]} features, but NearestNeighbors is expecting {self.n_features_in_} "
                "features as input"
            )
        return points


def _table(points: object) -> Tensor:
    points = array("X", points)
    if points.ndim != 2:
        raise ValueError(
            f"Expected X of shape (samples, features), got {tuple(points.shape)}: of single features take "
            "X.reshape(-1, 1), of a single sample X.reshape(1, -1)"
        )
    return points


def _checked_count(n_neighbors: int) -> int:
    if not isinstance(n_neighbors, Integral) or isinstance(n_neighbors, bool):
        raise TypeError(f"n_neighbors must be an integer; got {type(n_neighbors).__name__}")
    if n_neighbors < 1:
        raise ValueError(f"Expected n_neighbors > 0. Got {n_neighbors}")
    return int(n_neighbors)
