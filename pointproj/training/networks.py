"""The network that a config describes, and what it is shown of a cloud."""

from typing import Any

import torch
from torch import nn

from pointproj.config import TARGETS, Config, ModelConfig
from pointproj.nn.multiscale import Multiscale
from pointproj.nn.projector import Projector


def build_model(config: Config, backend: str) -> nn.Module:
    """Make the network the config describes, on the CPU, with the weights that the seed gives.

    Parameters
    ----------
    config : Config
        Checked, from :func:`pointproj.config.to_config`.
    backend : str
        Of the operators.

    Returns
    -------
    Projector or Multiscale
        Both have ``encode(reference_points, features)``, ``decode(query_points, encoding)`` and, in one
        call, ``forward``. The last axis of the result, of size 1, holds the ``output`` of the target's row
        in :data:`pointproj.config.TARGETS`.
    """
    torch.manual_seed(config.seed)
    model, projector = config.model, config.projector
    target = TARGETS[config.target.name]
    predicts = target.output if target.is_distance else "value"
    if model.name == "multiscale":
        return Multiscale(
            side=model.side,
            levels=model.levels,
            channels=model.hidden_channels,
            grid_channels=model.grid_channels,
            k=model.neighbors,
            feature_channels=6 if model.normals else 0,
            predicts=predicts,
            backend=backend,
        )
    return Projector(
        kind=projector.kind,
        k=projector.k,
        radius=projector.radius,
        sigma=projector.sigma,
        in_channels=6 if model.normals else 3,
        hidden_channels=model.hidden_channels,
        context=bool(projector.context),
        predicts=predicts if projector.context else "value",
        backend=backend,
    )


def operators_of(config: Config) -> str:
    """Name the operator whose backend the config's network runs on: ``"knn"`` or ``"radius"``."""
    return "radius" if config.model.name == "multiscale" else config.projector.kind


def cloud_features(batch: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Add ``features`` (B, N, 6), points and normals, where the network is shown normals.

    Parameters
    ----------
    batch : dict
        ``reference_points`` and ``normals``, (B, N, 3).
    model : ModelConfig
    """
    if not model.normals:
        return batch
    return {**batch, "features": torch.cat([batch["reference_points"], batch["normals"]], dim=-1)}
