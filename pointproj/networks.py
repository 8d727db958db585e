"""The network that a config describes, and what it is shown of a cloud."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from pointproj import checkpoint
from pointproj.config import Config, ModelConfig, to_config
from pointproj.model import Projector
from pointproj.multiscale import Multiscale

PREDICTIONS = {"udf": "distance", "sdf": "signed_distance"}  # all other targets: value


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
        call, ``forward``. The last axis of the result, of size 1, holds the distance (udf, sdf; negative
        inside), the logit of being inside (occupancy), or a number (random).
    """
    torch.manual_seed(config.seed)
    model, projector = config.model, config.projector
    predicts = PREDICTIONS.get(config.target.name, "value")
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


def saved_config(path: Path, content: dict[str, Any]) -> Config:
    """Read the config of a checkpoint.

    Parameters
    ----------
    path : Path
        Of the checkpoint, for messages.
    content : dict
        From :func:`pointproj.checkpoint.load`.

    Raises
    ------
    CheckpointError
        If another version of this program wrote it.
    """
    given = {**content["config"], "resume": None}  # what that run continued from is of no interest
    try:
        return to_config(OmegaConf.merge(OmegaConf.structured(Config), given))
    except (OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error


def saved_network(path: Path, content: dict[str, Any], config: Config, backend: str) -> nn.Module:
    """Make the network of a checkpoint, on the CPU, with its weights, which fit any backend.

    Parameters
    ----------
    path, content
        As for :func:`saved_config`.
    config : Config
        What that returned.
    backend : str
        Of the operators.

    Raises
    ------
    CheckpointError
        If another version of this program wrote it.
    """
    try:
        with torch.device("meta"):  # sizes alone: the config may ask for more than the file has weights for
            build_model(config, backend).load_state_dict(content["model"], assign=True)
        network = build_model(config, backend)
        network.load_state_dict(content["model"])
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error
    return network


def _other_version(path: Path, error: Exception) -> str:
    return (
        f"{path} does not fit this version of the program ({type(error).__name__}: {error}): "
        "take a checkpoint that this version wrote"
    )
