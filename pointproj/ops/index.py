"""A search structure over reference points that several calls share."""

import contextlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.registry import choose, modules
from pointproj.ops.specification.clouds import pack
from pointproj.ops.specification.records import Tables
from pointproj.ops.torch_internals import keep_open


@dataclass(frozen=True, eq=False)
class Index:
    """A search structure over one set of reference points, from :func:`build_index`.

    It serves every search of the backend that built it, and is never changed: no call adds anything to it.
    The index is valid for the points it was built from: build a new one when they move.

    Attributes
    ----------
    backend : str
        Name of the backend that built it.
    shape : tuple of int
        Of the reference points.
    dtype : torch.dtype
        Of the reference points.
    device : torch.device
        Of the reference points.
    clouds : int
        How many clouds they hold.
    tables : dict of str to tuple of Tensor
        What the backend built, by the search that reads it: ``"knn"``, and ``"radius"`` if it was built for
        one or the tables are the same.
    """

    backend: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    clouds: int
    tables: dict[str, Tables]


def build_index(
    reference_points: Float[Tensor, "*batch n 3"],
    *,
    radius: float | None = None,
    backend: str = "auto",
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Index:
    """Build once what several calls on one cloud can share.

    Parameters
    ----------
    reference_points : (N, 3) or (B, N, 3) float tensor
        float32 or float64. Gradients do not flow through the index; pass the points themselves to each
        operator as usual.
    radius : float, optional
        The radius that ``radius_aggregate`` will use, in units of the points: the index is built for that
        search as well as for kNN. Results are right for every other radius too, but take longer. None: the
        index is built for kNN; a call with a radius then builds what it needs for itself, unless the backend
        has one kind of tables.
    backend : str
        ``"auto"`` or a name from :func:`pointproj.backends`.
    reference_offsets : (B + 1,) integer tensor, optional
        For packed clouds of different sizes.

    Returns
    -------
    Index
        To pass as ``index=`` together with the same points.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    arguments.check_cloud("reference_points", reference_points)
    if reference_offsets is not None:
        arguments.check_cloud_offsets("reference_offsets", reference_offsets, reference_points)
    if radius is not None:
        bounded = arguments.checked_radius(radius, reference_points.dtype)
        keep_open(radius)  # not its bounded value: torch 2.11 would take the radius for a constant
        radius = bounded
    operator = "knn" if radius is None else "radius"
    points, offsets, count = pack(reference_points.detach(), reference_offsets)
    name = choose(backend, reference_points.device.type, operator)
    # Outside of inference mode: what it makes is of no use to a later call that is differentiated. What is
    # being compiled cannot ask for it.
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else contextlib.nullcontext():
        module = modules[name]
        tables = {"knn": module.build_index(points, offsets, count, radius if module.ONE_INDEX else None)}
        if module.ONE_INDEX:
            tables["radius"] = tables["knn"]
        elif radius is not None:
            tables["radius"] = module.build_index(points, offsets, count, radius)
    shape, dtype, device = tuple(reference_points.shape), reference_points.dtype, reference_points.device
    return Index(name, shape, dtype, device, count, tables)
