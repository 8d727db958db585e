"""A network that was trained with target=field, applied to other geometries."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from pointproj.data.errors import DataError
from pointproj.data.fields.preparation import cloud_of
from pointproj.geometry.files.measured import FieldSample
from pointproj.inference.trained_model import CPU_POINTS, TrainedModel, load_trained
from pointproj.training.networks import with_features

CLOUD_SEED = 0  # of the points of a geometry that the network sees


class FieldModel:
    """Predicts the fields of a network at the points of a sample, in the units of the training files."""

    def __init__(self, trained: TrainedModel) -> None:
        self.trained, self.statistics = trained, trained.statistics

    @classmethod
    def load(cls, path: Path, device: str = "auto", backend: str = "auto") -> "FieldModel":
        """Load a checkpoint or the folder of a run, as :func:`.trained_model.load_trained` does."""
        return cls(load_trained(path, device, backend, targets=("field",)))

    @torch.inference_mode()
    def __call__(
        self,
        sample: FieldSample,
        parameters: Mapping[str, float] | None = None,
        at: Float[np.ndarray, "p 3"] | None = None,
    ) -> dict[str, Float[np.ndarray, "p c"]]:
        """Return each field at the sample's points, or at those of ``at``, float32.

        ``parameters`` are those of the training samples, by default those of the file. Raises DataError if
        one is missing, or if normals or points are.
        """
        statistics, config = self.statistics, self.trained.config
        given = {**sample.parameters, **(parameters or {})}
        statistics.require_parameters(given)
        needs_normals = statistics.on_surface and config.projector.normals
        if needs_normals and sample.normals is None:
            raise DataError(
                "the network was trained with normals, and the file has none: give a mesh, or an NPZ file "
                "with the arrays points and normals"
            )
        origin = sample.points.mean(0)
        cloud = cloud_of(sample, origin, config.data.points, np.random.default_rng(CLOUD_SEED))
        if len(cloud) < config.projector.fewest_points:
            few = config.projector.fewest_points
            raise DataError(f"the file has {len(cloud)} points, and the network needs at least {few}")
        shared = {
            "reference_points": statistics.placed(cloud[:, :3], origin),
            "normals": cloud[:, 3:],
            "parameters": statistics.parameter_row(given).numpy(),
        }
        known = {name: self._tensor(values) for name, values in shared.items()}
        points = sample.points if at is None else at
        places = {"query_points": statistics.placed(points - origin, origin)}
        if statistics.on_surface:
            places["query_normals"] = (
                np.zeros_like(sample.points) if sample.normals is None else sample.normals
            )
        encoding, parts = None, []
        for start in range(0, len(points), CPU_POINTS):
            some = {name: self._tensor(rows[start : start + CPU_POINTS]) for name, rows in places.items()}
            batch = with_features({**known, **some}, config.projector, statistics)
            model = self.trained.model
            if encoding is None:  # of all queries
                encoding = model.encode(batch["reference_points"], batch["features"])
            parts.append(
                model.decode(batch["query_points"], encoding, query_features=batch["query_features"])
            )
        values = self.statistics.in_units(torch.cat(parts, dim=1)[0].double()).float().cpu()
        return {name: each.numpy() for name, each in statistics.split(values).items()}

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        """Return values as a batch of one, float32, on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(self.trained.device)[None]
