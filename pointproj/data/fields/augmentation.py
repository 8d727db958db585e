"""Turned and mirrored samples: points, normals, and all vectors among parameters and fields together."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.config import AugmentationConfig
from pointproj.data.augmentation import cube_rotations
from pointproj.data.fields.statistics import FieldStatistics

PLACES = ("reference_points", "normals", "query_points", "query_normals")


def augment_fields(
    batch: dict[str, Any], settings: AugmentationConfig, statistics: FieldStatistics, *, seed: tuple[int, int]
) -> dict[str, Any]:
    """Turn each sample about axes through the origin, and mirror it, as the settings say.

    Parameters named ``NAME_x``, ``NAME_y``, ``NAME_z`` are a vector, and so are fields of three channels.
    Equal seeds change equal batches in the same way.
    """
    if not settings.moves:
        return batch
    points = batch["reference_points"]
    generator = torch.Generator(points.device).manual_seed((seed[0] * 1_000_003 + seed[1]) % 2**64)
    turned = _turns(len(points), settings, generator, points)
    changed = {name: batch[name] @ turned for name in PLACES if name in batch}
    changed["parameters"] = _with_turned(batch["parameters"], statistics.vector_parameters, turned)
    target = batch["target"]
    if vectors := statistics.vector_channels:
        target = _with_turned(target, vectors, turned)
    return {**batch, **changed, "target": target}


def _turns(
    count: int, settings: AugmentationConfig, generator: torch.Generator, like: Tensor
) -> Float[Tensor, "b 3 3"]:
    """Draw a matrix for each sample, which is multiplied from the right."""
    drawn = {"generator": generator, "device": like.device}
    if settings.rotate == "cube":
        turns = cube_rotations(like, generator)
        return turns * _sides(count, 3, drawn) if settings.mirror else turns
    quarters = torch.zeros(count, device=like.device)
    if settings.rotate != "none":
        quarters = torch.randint(4, (count,), **drawn).to(like.dtype)
    if settings.rotate == "any":
        some = torch.rand(count, **drawn)
        quarters = torch.where(torch.rand(count, **drawn) < 0.5, quarters, 4 * some)
    angle = quarters * (torch.pi / 2)
    turns = torch.zeros(count, 3, 3, device=like.device, dtype=like.dtype)
    turns[:, 0, 0] = turns[:, 1, 1] = angle.cos()
    turns[:, 0, 1], turns[:, 1, 0] = angle.sin(), -angle.sin()
    turns[:, 2, 2] = 1
    if settings.mirror:
        turns[:, :2] *= _sides(count, 2, drawn)
    return turns


def _sides(count: int, axes: int, drawn: dict[str, Any]) -> Tensor:
    return torch.randint(2, (count, axes, 1), **drawn) * 2 - 1


def _with_turned(values: Tensor, vectors: list[int], turned: Float[Tensor, "b 3 3"]) -> Tensor:
    """Return values (B, ..., C) with channels v to v + 2 turned, for each v of ``vectors``."""
    values = values.clone()
    for first in vectors:
        part = values[..., first : first + 3]
        rows = part if values.dim() == 3 else part[:, None]
        values[..., first : first + 3] = (rows @ turned).view(part.shape)
    return values
