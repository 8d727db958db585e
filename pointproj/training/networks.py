"""The network of a config, and its inputs."""

import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.config import TARGETS, Config, ProjectorConfig
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.training.checkpoint import CheckpointError


def build_model(config: Config, backend: str, statistics: FieldStatistics | None = None) -> nn.Module:
    """Make the network of a config on the CPU, with random weights from the config's seed.

    ``statistics`` are those of the training samples for ``target=field``, whose network has an output for
    each channel.

    It has ``encode(reference_points, features)``, ``decode(query_points, encoding)``, and ``forward`` for
    both in one call. The last axis of its other results has size 1 and holds the ``output`` of the target in
    :data:`pointproj.config.TARGETS`.
    """
    torch.manual_seed(config.seed)
    # The config has the network's name instead of its class, since a config is read without importing torch.
    network = pkgutil.resolve_name(config.projector.NETWORK)
    return network(**network_arguments(config, statistics), backend=backend)


def network_arguments(config: Config, statistics: FieldStatistics | None = None) -> dict[str, Any]:
    """Return all arguments of a config's network but ``backend``."""
    settings, target = config.projector, TARGETS[config.target.name]
    predicts = target.output if target.is_distance and settings.predicts_distances else "value"
    arguments = settings.arguments() | ({"in_channels": 6} if settings.normals else {})
    if statistics is not None:
        for name, normals in (("in_channels", True), ("query_channels", statistics.on_surface)):
            directions = 1 + bool(normals and settings.normals)  # positions, and normals
            arguments[name] = 3 * directions + len(statistics.parameters)
        arguments["out_channels"] = sum(statistics.channels)
    return arguments | {"predicts": predicts}


def take_weights(model: nn.Module, path: Path, content: Mapping[str, Any]) -> str:
    """Copy the parts of a checkpoint's weights whose names and shapes agree; return words that say which.

    Raises CheckpointError if no part fits, or a part is not finite.
    """
    saved, own = content.get("model", {}), model.state_dict()
    fitting = {
        name: saved[name]
        for name, values in own.items()
        if isinstance(saved.get(name), Tensor) and saved[name].shape == values.shape
    }
    if not fitting:
        raise CheckpointError(
            f"training.weights={path}: none of its {len(saved)} parts fits a {type(model).__name__} with the "
            "values of projector; write the values that it was trained with"
        )
    odd = [name for name, values in fitting.items() if not values.isfinite().all()]
    if odd:
        raise CheckpointError(f"training.weights={path}: {', '.join(odd)} holds NaN or infinity")
    model.load_state_dict(fitting, strict=False)
    others = [f"{name} {tuple(values.shape)}" for name, values in own.items() if name not in fitting]
    random = f"; random: {', '.join(others)}" if others else ""
    return f"of {path}: {len(fitting)} of {len(own)} parts fit{random}"


def with_features(
    batch: dict[str, Any], settings: ProjectorConfig, statistics: FieldStatistics | None = None
) -> dict[str, Any]:
    """Add ``features`` (B, N, C) to a batch, if the network takes more than points.

    With fields, whose ``statistics`` are given, parameters belong to them, and ``query_features`` (B, Q, C)
    are added too.
    """
    points, normals = batch["reference_points"], batch["normals"]
    if statistics is not None:
        of_queries, parameters = (batch["query_points"], batch.get("query_normals")), batch["parameters"]
        features = _with_parameters(points, normals, parameters, settings)
        query_features = _with_parameters(*of_queries, parameters, settings)
        return {**batch, "features": features, "query_features": query_features}
    features = features_of(settings, points, normals, batch.get("sensors"))
    return batch if features is None else {**batch, "features": features}


def _with_parameters(
    points: Float[Tensor, "b n 3"],
    normals: Float[Tensor, "b n 3"] | None,
    parameters: Float[Tensor, "b p"],
    settings: ProjectorConfig,
) -> Float[Tensor, "b n c"]:
    """Return positions, normals if the network takes them, and the parameters of the whole sample."""
    shown = [points, normals] if settings.normals and normals is not None else [points]
    return torch.cat([*shown, parameters[:, None].expand(*points.shape[:-1], -1)], dim=-1)


def features_of(
    settings: ProjectorConfig,
    reference_points: Float[Tensor, "*batch n 3"],
    normals: Float[Tensor, "*batch n 3"] | None = None,
    sensors: Float[Tensor, "*batch n 3"] | None = None,
) -> Float[Tensor, "*batch n c"] | None:
    """Return the features of a cloud that a network takes beside points, or None; unknown sensors are 0."""
    shown = [reference_points, normals] if settings.normals else []
    if settings.sensors:
        shown.append(torch.zeros_like(reference_points) if sensors is None else sensors)
    return torch.cat(shown, dim=-1) if shown else None
