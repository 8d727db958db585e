"""The network that a config describes, and its inputs."""

import pkgutil
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.config import TARGETS, Config


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
    Module
        Of the class that ``config.projector`` names. It has ``encode(reference_points, features)``,
        ``decode(query_points, encoding)`` and, in one call, ``forward``. The last axis of the result, of
        size 1, holds the ``output`` of the target's row in :data:`pointproj.config.TARGETS`.
    """
    torch.manual_seed(config.seed)
    settings, target = config.projector, TARGETS[config.target.name]
    predicts = target.output if target.is_distance and settings.predicts_distances else "value"
    arguments = settings.arguments() | ({"in_channels": 6} if settings.normals else {})
    # A name, because the config, which knows its network, is read without loading torch.
    network = pkgutil.resolve_name(settings.NETWORK)
    return network(**arguments, predicts=predicts, backend=backend)


def with_features(batch: dict[str, Any], normals: bool | None) -> dict[str, Any]:
    """Add ``features`` (B, N, 6) to a batch with ``normals``, where the network is shown them.

    Parameters
    ----------
    batch : dict
        ``reference_points`` and ``normals``, (B, N, 3).
    normals : bool
        ``projector.normals``.
    """
    if not normals:
        return batch
    return {**batch, "features": features_of(batch["reference_points"], batch["normals"])}


def features_of(
    reference_points: Float[Tensor, "*batch n 3"], normals: Float[Tensor, "*batch n 3"] | None
) -> Float[Tensor, "*batch n 6"] | None:
    """Return what a network is shown of a cloud: points and normals, or None for the points alone."""
    return None if normals is None else torch.cat([reference_points, normals], dim=-1)
