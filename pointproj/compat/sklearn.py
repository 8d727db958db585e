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
    number_or_tensor,
    pairs_within,
    split,
)

__all__ = ["NearestNeighbors"]

Points = Float[Tensor, "n m"]


class NearestNeighbors:
    """Searches among the points that it was fitted to, with the Euclidean distance.

    Parameters
    ----------
    n_neighbors : int
        What :meth:`kneighbors` finds unless told otherwise.
    radius : float
        How far :meth:`radius_neighbors` searches unless told otherwise.
    algorithm, leaf_size, n_jobs
        Not read.
    metric : {"minkowski", "euclidean", "l2"}
        Others are not supported.
    p : float
        Of the metric "minkowski": 2; others are not supported.
    metric_params : dict, optional
        Weights and whatever else changes the metric are not supported.

    Raises
    ------
    ValueError
        For another metric, no neighbours, or a negative radius.
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
        """Take the points that are searched.

        Parameters
        ----------
        X : (n, m) tensor, array or list
            Distances are differentiable in them. With m above 3 all pairs are compared, in chunks, and every
            search waits for the device.
        y
            Not read.

        Returns
        -------
        NearestNeighbors
            Itself.

        Raises
        ------
        TypeError, ValueError
            For what is no table of real numbers with one row or more.
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
        """The nearest points.

        Parameters
        ----------
        X : (q, m) tensor, optional
            Where to search from. None: from each point that it was fitted to, itself left out.
        n_neighbors : int, optional
            How many.
        return_distance : bool
            Whether to return distances.

        Returns
        -------
        neigh_dist : (q, k) float tensor
            Nearest first, ties by the lower index, in the points' dtype. Differentiable twice in ``X`` and
            in the points fitted to. Nothing waits for the device.
        neigh_ind : (q, k) int64 tensor
            Rows of the points fitted to. -1 where a point that is not finite is missing.

        Raises
        ------
        ValueError
            For more neighbours than there are points, or before :meth:`fit`.
        """
        searched = self._fitted()
        k = self.n_neighbors if n_neighbors is None else _checked_count(n_neighbors)
        if k > self.n_samples_fit_ - (X is None):
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, "
                f"n_samples_fit = {self.n_samples_fit_}" + (", itself left out" if X is None else "")
            )
        if X is not None:
            distances, rows = searched.nearest(k, X=self._queries(X))
            return (distances, rows) if return_distance else rows
        distances, rows = searched.nearest(k + 1, X=searched.given["fitted"])
        own = rows == torch.arange(len(rows), device=rows.device)[:, None]
        own[:, -1] |= ~own.any(1)  # among as many that coincide, the last is left out instead
        others = own.int().argsort(dim=1, stable=True)[:, :k]
        distances, rows = distances.gather(1, others), rows.gather(1, others)
        return (distances, rows) if return_distance else rows

    def radius_neighbors(
        self,
        X: Points | None = None,  # noqa: N803
        radius: float | None = None,
        return_distance: bool = True,
        sort_results: bool = False,
    ) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        """All points within a distance, which belongs to it.

        Parameters
        ----------
        X : (q, m) tensor, optional
            As for :meth:`kneighbors`.
        radius : float or (q,) tensor, array or list, optional
            The distance, or one for each row of ``X``.
        return_distance : bool
            Whether to return distances.
        sort_results : bool
            Whether the nearest come first; else the lowest index.

        Returns
        -------
        neigh_dist : (q,) array of float tensors
            Without gradients. The host waits for the device to know how many pairs there are.
        neigh_ind : (q,) array of int64 tensors

        Raises
        ------
        ValueError
            Before :meth:`fit`, or for a negative radius.
        """
        if sort_results and not return_distance:
            raise ValueError("return_distance must be True if sort_results is True.")
        searched = self._fitted()
        query_points, points = searched.beside(X=searched.given["fitted"] if X is None else self._queries(X))
        reach = number_or_tensor(
            "radius", self.radius if radius is None else radius, query_points.shape[:1], points
        )
        queries, rows, squared = pairs_within(query_points.detach(), points.detach(), reach, inclusive=True)
        if X is None:
            others = queries != rows
            queries, rows, squared = queries[others], rows[others], squared[others]
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
