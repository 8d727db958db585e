"""Errors of predictions, of the trained model and of a baseline without training."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.config import TARGETS
from pointproj.ops.functional import knn
from pointproj.runtime.distributed import SINGLE_PROCESS, Processes
from pointproj.training.step import Batch

Predictor = Callable[[Batch], Tensor]  # batch -> (B, Q)
Measure = Callable[[Tensor, Batch], dict[str, Tensor]]  # prediction, batch -> errors (B,) by name


class MeshErrors(NamedTuple):
    """Errors on one mesh; ``errors`` has the target's metric and its further measures, by name."""

    name: str
    class_name: str
    errors: dict[str, float]


class Evaluation(NamedTuple):
    """Errors on a set of meshes; all meshes have the same weight."""

    metric: str
    meshes: tuple[MeshErrors, ...]

    @property
    def error(self) -> float:
        """Mean of the metric over the meshes."""
        return self.means()[self.metric]

    def means(self) -> dict[str, float]:
        """Return the mean over the meshes of each measure."""
        return {name: fmean(mesh.errors[name] for mesh in self.meshes) for name in self.meshes[0].errors}

    def by_class(self) -> dict[str, "Evaluation"]:
        """Return the evaluation of each class, in alphabetical order."""
        of_class: dict[str, list[MeshErrors]] = {}
        for mesh in sorted(self.meshes, key=lambda mesh: mesh.class_name):
            of_class.setdefault(mesh.class_name, []).append(mesh)
        return {name: Evaluation(self.metric, tuple(meshes)) for name, meshes in of_class.items()}


@torch.no_grad()
def evaluate(
    predict: Predictor,
    batches: Iterable[dict[str, Any]],
    target_name: str,
    processes: Processes = SINGLE_PROCESS,
    measure: Measure | None = None,
) -> Evaluation:
    """Measure predictions on batches of meshes.

    ``predict`` takes a batch, and returns distances, logits of being inside, or numbers (B, Q). Batches have
    ``target`` (B, Q), ``name`` and ``class_name`` (lists of length B). Each process measures its own part of
    the batches; all get the whole evaluation. ``measure`` takes prediction and batch to the errors of each
    mesh, the target's metric first; by default it is :func:`field_errors`. Raises ValueError if there is
    no batch.
    """
    if measure is None:
        measure = lambda prediction, batch: field_errors(target_name, prediction, batch["target"])  # noqa: E731
    measured = [
        (batch["name"], batch["class_name"], measure(predict(batch), batch))
        for batch in batches
        if batch.get("share") != 0  # with share 0 the shape belongs to another process
    ]
    own = []
    for names, class_names, errors in measured:  # the device is read only after all work is queued
        rows = zip(*(values.tolist() for values in errors.values()), strict=True)
        for name, class_name, row in zip(names, class_names, rows, strict=True):
            own.append(MeshErrors(name, class_name, dict(zip(errors, row, strict=True))))
    meshes = tuple(mesh for part in processes.gather(own) for mesh in part)
    if not meshes:
        raise ValueError("expected at least one batch to evaluate, got none")
    return Evaluation(TARGETS[target_name].metric, meshes)


def field_errors(
    target_name: str, prediction: Float[Tensor, "b q"], target: Float[Tensor, "b q"]
) -> dict[str, Float[Tensor, " b"]]:
    """Return the errors of each mesh of a batch, the target's metric first.

    - For distances: ``mean_absolute_error``; for signed distances also ``sign_accuracy``, the share of query
      points with the right sign.
    - For logits: ``error_rate``, the share of wrong labels; and ``iou``, the number of points inside in both
      prediction and target, divided by the number inside in at least one (1 if there are none).
    - For other numbers: ``mean_squared_error``.
    """
    output = TARGETS[target_name].output
    if output == "number":
        return {"mean_squared_error": (prediction - target).square().mean(1)}
    if output == "logit":
        labelled, inside = prediction > 0, target > 0.5
        both, either = (labelled & inside).sum(1), (labelled | inside).sum(1)
        iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)
        return {"error_rate": (labelled != inside).float().mean(1), "iou": iou}
    errors = {"mean_absolute_error": (prediction - target).abs().mean(1)}
    if output == "signed_distance":
        errors["sign_accuracy"] = ((prediction < 0) == (target < 0)).float().mean(1)
    return errors


def baseline_name(target_name: str, *, normals: bool = False) -> str:
    """Return words for the prediction of :func:`untrained_predictor`."""
    side = "inside behind the nearest point's normal" if normals else "all outside"
    return {
        "distance": "distance to the nearest sampled point",
        "signed_distance": f"distance to the nearest sampled point, {side}",
        "logit": side,
        "number": "zero everywhere",
    }[TARGETS[target_name].output]


def untrained_predictor(target_name: str, backend: str = "auto", *, normals: bool = False) -> Predictor:
    """Return the baseline, a predictor without training: see :func:`baseline_name`.

    It gets the same input as the model. Without normals, a cloud does not tell inside from outside, and most
    of the cube is outside; so all points are predicted to be outside. With ``normals`` (B, N, 3) in its
    batches, a point is inside if it lies behind the plane through the nearest sampled point.
    """
    output = TARGETS[target_name].output

    def predict(batch: Batch) -> Tensor:
        if output == "number":
            return torch.zeros_like(batch["target"])
        reference_points = batch["reference_points"]
        query_points = batch["query_points"].expand(reference_points.shape[0], -1, -1)
        distances, indices = knn(query_points, reference_points, 1, backend=backend)
        side = torch.ones_like(distances[..., 0])
        if normals:
            rows = indices.expand(-1, -1, 3)
            displacement = query_points - reference_points.gather(1, rows)
            height = (displacement * batch["normals"].gather(1, rows)).sum(-1)
            side = torch.where(height < 0, -1.0, 1.0)
        if output == "logit":
            return -side
        return distances[..., 0] * side if output == "signed_distance" else distances[..., 0]

    return predict
