"""A trained model from a checkpoint, as a field that can be evaluated for any cloud."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from pointproj.config import TARGETS, Config, from_saved
from pointproj.data.errors import DataError
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.geometry.grids import Field
from pointproj.geometry.meshes import DEFAULT_SIDE, GPU_SIDE
from pointproj.geometry.warp_meshes import usable_device
from pointproj.ops.registry import resolve
from pointproj.runtime.devices import choose_device
from pointproj.training import checkpoint
from pointproj.training.networks import build_model, features_of

SOLID_TARGETS = tuple(name for name, target in TARGETS.items() if target.inside_sign is not None)
CPU_POINTS = 2048  # evaluated at once, so that the network's activations fit into a core's cache


@dataclass(frozen=True)
class TrainedModel:
    """A model that predicts solids, in evaluation mode on its device, with the config of its training.

    ``origin`` says in a line of which checkpoint it is, and how far the training came.
    """

    config: Config
    model: nn.Module
    device: torch.device
    origin: str = ""
    statistics: FieldStatistics | None = None  # of the training samples, for target=field

    @property
    def default_side(self) -> int:
        """Default number of points a side of the grid that surfaces are extracted from."""
        return DEFAULT_SIDE if self.device.type == "cpu" else GPU_SIDE

    @torch.inference_mode()
    def field(
        self,
        points: Float[np.ndarray, "n 3"],
        normals: Float[np.ndarray, "n 3"] | None = None,
        sensors: Float[np.ndarray, "n 3"] | None = None,
    ) -> Field:
        """Encode a cloud once, and return its field, which is below 0 inside.

        Parameters
        ----------
        points : float32 array, shape (n, 3)
            Points in the query cube.
        normals : float32 array, shape (n, 3), optional
            Needed if the model was trained with normals.
        sensors : float32 array, shape (n, 3), optional
            Unit vectors from the points to the sensors that saw them, 0 if unknown; used if the model was
            trained with sensors.

        Returns
        -------
        callable
            Takes float32 points (Q, 3) to values (Q,): signed distances, or logits of being outside.

        Raises
        ------
        DataError
            If there are fewer points than the model needs, or its normals are missing.
        """
        settings = self.config.projector
        if len(points) < settings.fewest_points:
            raise DataError(
                f"the cloud has {len(points)} points, and this model needs at least {settings.fewest_points}"
            )
        if settings.normals and normals is None:
            raise DataError(
                "the cloud has no normals, and this model was trained with them: give a mesh, or points "
                "with normals, or train with projector.normals=false"
            )
        reference_points = self._tensor(points)
        given = (None if values is None else self._tensor(values) for values in (normals, sensors))
        features = features_of(settings, reference_points, *given)
        encoding = self.model.encode(reference_points, features)
        sign = TARGETS[self.config.target.name].inside_sign or 1  # 1 for unsigned distances

        @torch.inference_mode()
        def values(query_points: Float[np.ndarray, "Q 3"]) -> Float[np.ndarray, " Q"]:
            at_once = CPU_POINTS if self.device.type == "cpu" else len(query_points)
            parts = self._tensor(query_points).split(at_once)
            predicted = torch.cat([self.model.decode(part, encoding) for part in parts])
            return sign * predicted.squeeze(-1).float().cpu().numpy()

        return values

    def _tensor(self, values: Float[np.ndarray, "n 3"]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(self.device)


def load_trained(
    path: Path, device: str = "auto", backend: str = "auto", targets: Sequence[str] = SOLID_TARGETS
) -> TrainedModel:
    """Make the model of a checkpoint, or of the best checkpoint in the folder of a run.

    ``backend`` is the backend of the operators. ``targets`` are those that the caller can use; by default
    those that tell inside from outside.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, if it is damaged, or if its model has another target.
    DeviceError, BackendUnavailable
        If the device or the backend cannot be used here.
    """
    path, content = checkpoint.load_best(path)
    config = saved_config(path, content)
    target = config.target.name
    if target not in targets:
        tells = ", which tells nothing about inside and outside" if targets is SOLID_TARGETS else ""
        wanted = " or target=".join(targets)
        raise checkpoint.CheckpointError(
            f"{path} was trained with target={target}{tells}: train with target={wanted}"
        )
    chosen = choose_device(device)
    usable_device(device)  # initialises Warp before an operator does, without its line on a missing driver
    backend, _ = resolve(backend, chosen.type, config.projector.OPERATOR)
    model = saved_network(path, content, config, backend)
    origin = checkpoint.described(path, content)
    return TrainedModel(config, model.to(chosen).eval(), chosen, origin, saved_statistics(path, content))


def target_of(path: Path) -> str:
    """Return the target of a checkpoint, or of the best checkpoint in the folder of a run."""
    return saved_config(*checkpoint.load_best(path)).target.name


def saved_config(path: Path, content: dict[str, Any]) -> Config:
    """Return the config in a checkpoint's content; raise CheckpointError if another version wrote it."""
    try:  # without the weights or checkpoint that the run began with
        training = {**content["config"]["training"], "weights": None}
        given = {**content["config"], "training": training, "resume": None}
        return from_saved(given)
    except (OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error


def saved_statistics(path: Path, content: dict[str, Any]) -> FieldStatistics | None:
    """Return the statistics of the fields in a checkpoint; None if it is of another target."""
    try:
        return FieldStatistics(**content["statistics"]) if "statistics" in content else None
    except TypeError as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error


def saved_network(path: Path, content: dict[str, Any], config: Config, backend: str) -> nn.Module:
    """Make the network of a checkpoint on the CPU, with its weights, which fit any backend of the operators.

    ``config`` is the result of :func:`saved_config`. Raises CheckpointError if another version of this
    program wrote the checkpoint, or if its weights are not finite.
    """
    try:
        statistics = saved_statistics(path, content)
        with torch.device("meta"):  # no memory: a wrong config may describe a huge network
            build_model(config, backend, statistics).load_state_dict(content["model"], assign=True)
        network = build_model(config, backend, statistics)
        network.load_state_dict(content["model"])
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error
    odd = [name for name, values in network.state_dict().items() if not values.isfinite().all()]
    if odd:
        raise checkpoint.CheckpointError(
            f"{path} holds NaN or infinity in {', '.join(odd)}: take a checkpoint from before its training "
            "diverged, or train again with a lower optimizer.lr"
        )
    return network


def _other_version(path: Path, error: Exception) -> str:
    return (
        f"{path} does not fit this version of the program ({type(error).__name__}: {error}): "
        "take a checkpoint that this version wrote"
    )
