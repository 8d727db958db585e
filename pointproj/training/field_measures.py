"""Errors of predicted fields, each in the unit of its file, and baselines that need no training."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.data.fields.dataset import FieldDataset
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.ops.functional import knn
from pointproj.training.step import Batch

METRIC = "relative_l2"
COMPARED_POINTS = 256  # of each geometry, to find the training sample that is most alike
MEAN, NEAREST = "mean of the training samples", "values of the training sample that is most alike"


class FieldMeasures:
    """Measures predictions that have mean 0 and standard deviation 1; see :meth:`__call__`."""

    def __init__(self, statistics: FieldStatistics) -> None:
        self.statistics = statistics

    def __call__(
        self, prediction: Float[Tensor, "b q *c"], batch: dict[str, Any]
    ) -> dict[str, Float[Tensor, " b"]]:
        """Return the errors of each sample of a batch; on surfaces, all are weighted by area.

        - ``relative_l2``: the mean over the fields of theirs.
        - ``NAME relative_l2``: root of the integral of |error|^2, divided by that of |truth|^2.
        - ``NAME mean_absolute_error``: in the unit of the field; of a vector the length of the error.
        - ``NAME r2``: 1 less the integral of |error|^2 over that of |truth less its mean|^2.
        - ``NAME force_error``, for scalars on surfaces: length of the error of the integral of value times
          normal, divided by the integral of |value|.
        """
        shape = (*batch["query_points"].shape[:2], -1)
        split, units = self.statistics.split, self.statistics.in_units
        predicted, true = (split(units(v.double().reshape(shape))) for v in (prediction, batch["target"]))
        areas = batch.get("areas", torch.ones_like(batch["query_points"][..., 0])).double()
        weights = (areas / areas.sum(1, keepdim=True))[..., None]
        errors = {}
        for name, truth in true.items():
            error = predicted[name] - truth
            square, size = ((weights * v.square()).sum((1, 2)) for v in (error, truth))
            spread = (weights * (truth - (weights * truth).sum(1, keepdim=True)).square()).sum((1, 2))
            errors[f"{name} {METRIC}"] = (square / size).sqrt()
            errors[f"{name} mean_absolute_error"] = (weights[..., 0] * error.norm(dim=-1)).sum(1)
            errors[f"{name} r2"] = 1 - square / spread
            if truth.shape[-1] == 1 and "query_normals" in batch:
                force = (weights * error * batch["query_normals"]).sum(1).norm(dim=-1)
                errors[f"{name} force_error"] = force / (weights * truth.abs()).sum((1, 2))
        mean = torch.stack([values for name, values in errors.items() if name.endswith(METRIC)]).mean(0)
        return {METRIC: mean, **errors}


def mean_predictor(batch: Batch) -> Tensor:
    """Predict the mean of the training samples everywhere."""
    return torch.zeros_like(batch["target"])


class NearestSample:
    """Predicts the values of the training sample that is most alike, at its nearest points.

    Unlikeness is the mean distance between points of the two clouds plus the root mean square difference of
    the parameters, in the units of the network.
    """

    def __init__(self, train: FieldDataset, device: torch.device, backend: str) -> None:
        self.train, self.device, self.backend = train, device, backend
        drawn = [train.whole(index, COMPARED_POINTS, queries=1) for index in range(len(train))]
        self._clouds = torch.stack([each["reference_points"] for each in drawn]).to(device)
        self._parameters = torch.stack([each["parameters"] for each in drawn]).to(device)

    def __call__(self, batch: Batch) -> Tensor:
        """Predict for the samples of a batch, one after the other."""
        return torch.stack([self._predict(batch, row) for row in range(len(batch["reference_points"]))])

    def _predict(self, batch: Batch, row: int) -> Tensor:
        # Of a cloud in random order.
        cloud, points = batch["reference_points"][row, :COMPARED_POINTS], batch["query_points"][row]
        away, _ = knn(self._clouds, cloud.expand(len(self._clouds), -1, -1), 1, backend=self.backend)
        unlike = away[..., 0].mean(1)
        if self._parameters.shape[1]:
            unlike = unlike + (self._parameters - batch["parameters"][row]).square().mean(1).sqrt()
        sample = self.train.whole(int(unlike.argmin()))
        at, values = (sample[name].to(self.device) for name in ("query_points", "target"))
        _, rows = knn(points, at, 1, backend=self.backend)
        return values[rows[:, 0]]
