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
    settings, target = config.projector, TARGETS[config.target.name]
    predicts = target.output if target.is_distance and settings.predicts_distances else "value"
    arguments = settings.arguments() | ({"in_channels": 6} if settings.normals else {})
    if statistics is not None:
        parameters = len(statistics.parameters)
        arguments["in_channels"] = 3 + 3 * bool(settings.normals) + parameters
        arguments["query_channels"] = 3 + 3 * statistics.on_surface * bool(settings.normals) + parameters
        arguments["out_channels"] = sum(statistics.channels)
    # The config has the network's name instead of its class, since a config is read without importing torch.
    network = pkgutil.resolve_name(settings.NETWORK)
    return network(**arguments, predicts=predicts, backend=backend)


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


def with_features(batch: dict[str, Any], settings: ProjectorConfig) -> dict[str, Any]:
    """Add ``features`` (B, N, C) to a batch, if the network takes more than points."""
    features = features_of(settings, batch["reference_points"], batch["normals"], batch.get("sensors"))
    if "parameters" in batch:
        batch, features = _with_parameters(batch, settings, features)
    return batch if features is None else {**batch, "features": features}


def _with_parameters(
    batch: dict[str, Any], settings: ProjectorConfig, features: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    """Add ``query_features`` to a batch with fields; return the features of the cloud with its parameters."""
    reference_points, query_points = batch["reference_points"], batch["query_points"]
    of_cloud = [reference_points if features is None else features]
    of_queries = [query_points]
    if settings.normals and "query_normals" in batch:
        of_queries.append(batch["query_normals"])
    parameters = batch["parameters"][..., None, :]
    rows = (
        torch.cat([*known, parameters.expand(*points.shape[:-1], -1)], dim=-1)
        for known, points in ((of_cloud, reference_points), (of_queries, query_points))
    )
    features, query_features = rows
    return {**batch, "query_features": query_features}, features


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
