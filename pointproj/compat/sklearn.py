"""``sklearn.neighbors.NearestNeighbors`` on tensors, by its names and signatures."""

from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.pairs import coordinates, pairs_within, split
from pointproj.ops.functional import build_index, knn

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
    algorithm, leaf_size, metric_params, n_jobs
        Not read.
    metric : {"minkowski", "euclidean", "l2"}
        Others are not supported.
    p : float
        2; others are not supported.

    Raises
    ------
    ValueError
        For another metric.
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
        if metric not in ("minkowski", "euclidean", "l2") or p != 2:
            raise ValueError(f"the metric must be Euclidean; got {metric!r} with p = {p}")
        self.n_neighbors = n_neighbors
        self.radius = radius

    def fit(self, X: Points, y: object = None) -> Self:  # noqa: N803 - its name there
        """Take the points that are searched.

        Parameters
        ----------
        X : (n, m) tensor
            m = 1 to 3. Distances are differentiable in them.
        y
            Not read.

        Returns
        -------
        NearestNeighbors
            Itself.
        """
        self._points = coordinates("X", X)
        self._index = build_index(self._points.detach())
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
        points = self._fitted()
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        if not 1 <= k <= self.n_samples_fit_ - (X is None):
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, "
                f"n_samples_fit = {self.n_samples_fit_}" + (", itself left out" if X is None else "")
            )
        if X is not None:
            distances, rows = knn(self._queries(X), points, k, index=self._index)
            return (distances, rows) if return_distance else rows
        distances, rows = knn(points, points, k + 1, index=self._index)
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
        radius : float, optional
            The distance.
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
            Before :meth:`fit`, or for a radius that is not positive.
        """
        if sort_results and not return_distance:
            raise ValueError("return_distance must be True if sort_results is True.")
        points = self._fitted().detach()
        query_points = points if X is None else self._queries(X).detach()
        reach = self.radius if radius is None else radius
        queries, rows, squared = pairs_within(query_points, points, reach, inclusive=True)
        if X is None:
            others = queries != rows
            queries, rows, squared = queries[others], rows[others], squared[others]
        if sort_results:
            nearest = squared.argsort(stable=True)
            nearest = nearest[queries[nearest].argsort(stable=True)]
            rows, squared = rows[nearest], squared[nearest]
        counts = torch.bincount(queries, minlength=len(query_points))
        rows = split(rows, counts)
        return (split(squared.sqrt(), counts), rows) if return_distance else rows

    def _fitted(self) -> Tensor:
        if not hasattr(self, "_points"):
            raise ValueError("This NearestNeighbors instance is not fitted yet: call fit first")
        return self._points

    def _queries(self, points: Tensor) -> Tensor:
        return coordinates("X", points).to(self._points.dtype)
