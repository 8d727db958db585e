"""Neighbours of shapes that stay as they are: searched once, kept with the batches from then on."""

from typing import Any

import torch
from torch import Tensor

from pointproj.ops.functional import knn


class NeighborCache:
    """The k nearest reference points of every query point, for each shape that has been met.

    Parameters
    ----------
    k : int
        Neighbours of a query point.
    backend : str
        Of the search.
    """

    def __init__(self, k: int, backend: str) -> None:
        self.k = k
        self.backend = backend
        self._of_shape: dict[int, Tensor] = {}  # identity -> (Q, k) int32, on the device of the batches

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add ``neighbor_indices`` to a batch.

        Parameters
        ----------
        batch : dict
            ``reference_points`` (B, N, 3), ``query_points`` (Q, 3) or (B, Q, 3), and ``identity``, the B
            numbers by which shapes are known; the points of a shape must be the same each time.

        Returns
        -------
        dict
            The batch with ``neighbor_indices`` (B, Q, k) int32.
        """
        if any(shape not in self._of_shape for shape in batch["identity"]):
            reference_points = batch["reference_points"]
            query_points = batch["query_points"].expand(len(reference_points), -1, -1)
            points = query_points, reference_points
            _, rows = knn(*points, self.k, index_dtype=torch.int32, backend=self.backend)
            for shape, its_rows in zip(batch["identity"], rows, strict=True):
                self._of_shape[shape] = its_rows.clone()
        return {**batch, "neighbor_indices": torch.stack([self._of_shape[n] for n in batch["identity"]])}
