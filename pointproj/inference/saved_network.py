"""The config and the network of a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from pointproj.config import Config, from_saved
from pointproj.training import checkpoint
from pointproj.training.networks import build_model


def saved_config(path: Path, content: dict[str, Any]) -> Config:
    """Read the config of a checkpoint from what :func:`pointproj.training.checkpoint.load` returned.

    Raises
    ------
    CheckpointError
        If another version of this program wrote it.
    """
    try:  # what that run began with is of no interest
        training = {**content["config"]["training"], "weights": None}
        given = {**content["config"], "training": training, "resume": None}
        return from_saved(given)
    except (OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(_other_version(path, error)) from error


def saved_network(path: Path, content: dict[str, Any], config: Config, backend: str) -> nn.Module:
    """Make the network of a checkpoint, on the CPU, with its weights, which fit any backend.

    ``config`` is what :func:`saved_config` returned, ``backend`` that of the operators.

    Raises
    ------
    CheckpointError
        If another version of this program wrote it, or its weights are not finite.
    """
    try:
        with torch.device("meta"):  # sizes alone: the config may ask for more than the file has weights for
            build_model(config, backend).load_state_dict(content["model"], assign=True)
        network = build_model(config, backend)
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
