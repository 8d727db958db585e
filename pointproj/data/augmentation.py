"""Random changes of training shapes on the device; query points move with the reference points.

All random numbers come from a generator seeded by (seed, step), so that a resumed run gets the same batches.
The host never waits for the device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.config import AugmentationConfig
from pointproj.geometry.meshes import LONGEST_SIDE


def augment(
    batch: dict[str, Any],
    settings: AugmentationConfig,
    *,
    seed: tuple[int, int],
    distances: bool,
    finish: Callable[[dict[str, Any], torch.Generator], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return a batch with each shape changed in its own way; the tensors of ``batch`` stay as they are.

    Parameters
    ----------
    batch : dict
        ``reference_points`` and ``normals`` (B, N, 3). Optional ``sensors`` (B, N, 3) are unit vectors from
        the points to the sensors that saw them. ``query_points`` (B, Q, 3) and ``target`` (B, Q) are needed
        if the settings move shapes. All other entries are passed on.
    settings : AugmentationConfig
        What to change. After rotation, mirroring, stretching and warping, shapes are normalised again as by
        :func:`pointproj.geometry.meshes.normalize`; then they shrink.
    seed : tuple of int
        Seed of the run, and step. Equal seeds change equal batches in the same way.
    distances : bool
        Whether the target holds distances, which scale with the shape.
    finish : callable, optional
        Turns the drawn points into clouds: :meth:`pointproj.data.clouds.Sampling.finish`. It is called after
        the shapes have moved, and before points get noise or a gap.
    """
    if settings == AugmentationConfig() and finish is None:
        return batch
    device = batch["reference_points"].device
    generator = torch.Generator(device).manual_seed((seed[0] * 1_000_003 + seed[1]) % 2**64)
    if settings.warp:
        batch = _warped(batch, settings.warp, generator)
    if settings.moves:
        batch = _moved(batch, settings, generator, distances)
    if finish is not None:
        batch = finish(batch, generator)
    points = batch["reference_points"]
    if settings.noise:
        size = settings.noise * _uniform(points, generator)
        points = points + size * torch.randn(points.shape, generator=generator, device=device)
    batch = {**batch, "reference_points": points}
    return _with_gap(batch, settings.drop, generator) if settings.drop else batch


def _warped(batch: dict[str, Any], most: float, generator: torch.Generator) -> dict[str, Any]:
    """Stretch some parts and shrink others: the scale along an axis is 1 plus a sine wave.

    Planes across an axis stay planes, and enclosed points stay enclosed.
    """
    points, queries = batch["reference_points"], batch["query_points"]
    waves_a_unit = math.pi * (0.25 + 0.75 * _uniform(points, generator, axes=3))  # 1/4 to 1 wave in the cube
    phase = 2 * math.pi * _uniform(points, generator, axes=3)
    height = most * _uniform(points, generator, axes=3)

    def moved(places: Float[Tensor, "b n 3"]) -> Float[Tensor, "b n 3"]:
        return places + height / waves_a_unit * (waves_a_unit * places + phase).sin()

    scale = 1 + height * (waves_a_unit * points + phase).cos()
    return {
        **batch,
        "reference_points": moved(points),
        "query_points": moved(queries),
        **_turned(batch, lambda normals: normals / scale, lambda sensors: sensors * scale),
    }


def _moved(
    batch: dict[str, Any], settings: AugmentationConfig, generator: torch.Generator, distances: bool
) -> dict[str, Any]:
    """Rotate, mirror and stretch the shapes, normalise them again, and shrink them."""
    points, queries = batch["reference_points"], batch["query_points"]
    rotations = _rotations(points, settings.rotate, generator)
    if settings.mirror:
        sides = torch.randint(0, 2, (len(points), 1, 3), generator=generator, device=points.device) * 2 - 1
        sides[..., 2] = 1
        rotations = rotations * sides
    lengths = 1 + settings.stretch * (2 * _uniform(points, generator, axes=3) - 1)
    linear = rotations * lengths
    points, queries = points @ linear.mT, queries @ linear.mT
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    centre = (low + high) / 2
    scale = LONGEST_SIDE / (high - low).amax(-1, keepdim=True).clamp(min=1e-6)
    scale = scale * (1 - settings.shrink * _uniform(points, generator))
    by_inverse_transpose = (rotations / lengths).mT
    return {
        **batch,
        "reference_points": (points - centre) * scale,
        "query_points": (queries - centre) * scale,
        **_turned(batch, lambda normals: normals @ by_inverse_transpose, lambda sensors: sensors @ linear.mT),
        "target": batch["target"] * scale.view(-1, 1) if distances else batch["target"],
    }


def _turned(
    batch: dict[str, Any], of_normals: Callable[[Tensor], Tensor], of_lines: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Transform normals and, if there are any, the vectors to the sensors; scale both to unit length."""
    changed = {"normals": of_normals(batch["normals"])}
    if "sensors" in batch:  # a line of sight is transformed like the space around it
        changed["sensors"] = of_lines(batch["sensors"])
    return {name: torch.nn.functional.normalize(values, dim=-1) for name, values in changed.items()}


def _rotations(
    points: Float[Tensor, "b n 3"], rotate: str, generator: torch.Generator
) -> Float[Tensor, "b 3 3"]:
    """Rotations about the vertical axis, or those of a cube."""
    if rotate == "cube":
        return cube_rotations(points, generator)
    share, chosen = _uniform(points, generator), _uniform(points, generator)
    angle = 2 * math.pi * share.flatten()
    right = (4 * share.flatten()).floor() * (math.pi / 2)
    if rotate == "none":
        angle = torch.zeros_like(angle)
    elif rotate == "right":
        angle = right
    else:
        angle = torch.where(chosen.flatten() < 0.5, angle, right)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], dim=-1).view(-1, 3, 3)


def cube_rotations(like: Float[Tensor, "b n 3"], generator: torch.Generator) -> Float[Tensor, "b 3 3"]:
    """Draw a rotation for each shape that brings axes onto axes; there are 24."""
    signs = torch.randint(0, 2, (len(like), 2, 1), generator=generator, device=like.device) * 2 - 1
    order = _uniform(like, generator, axes=3).argsort(-1)[:, 0, :2]
    two = torch.eye(3, dtype=like.dtype, device=like.device)[order] * signs
    return torch.cat([two, torch.linalg.cross(two[:, :1], two[:, 1:])], dim=1)


def _with_gap(batch: dict[str, Any], most: float, generator: torch.Generator) -> dict[str, Any]:
    """Make a gap around one point: replace the points nearest to it by copies of the others."""
    points = batch["reference_points"]
    clouds, count, _ = points.shape
    centre = points[:, :1]  # points are in random order
    kept_count = (count * (1 - most * _uniform(points, generator))).long().view(-1, 1)
    farthest_first = (points - centre).square().sum(-1).argsort(dim=1, descending=True)
    place = torch.arange(count, device=points.device).expand(clouds, -1)
    rows = farthest_first.gather(1, place % kept_count.clamp(min=1))
    rows = rows[..., None].expand(-1, -1, 3)
    of_points = {name: batch[name] for name in ("reference_points", "normals", "sensors") if name in batch}
    return {**batch, **{name: values.gather(1, rows) for name, values in of_points.items()}}


def _uniform(points: Float[Tensor, "b n 3"], generator: torch.Generator, axes: int = 1) -> Tensor:
    """Numbers in [0, 1), (B, 1, axes)."""
    return torch.rand((len(points), 1, axes), generator=generator, device=points.device)
