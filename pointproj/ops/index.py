"""A search structure over reference points that several calls share."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.clouds import Clouds, pack
from pointproj.ops.registry import Backend, Tables, choose, modules


class Index(NamedTuple):
    """A search structure over one set of reference points, from :func:`build_index`.

    It holds for the points it was built from: build a new one when they move.
    """

    backend: str
    shape: tuple[int, ...]  # of the reference points
    dtype: torch.dtype
    device: torch.device
    clouds: int
    tables: Tables


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
        The cut-off that ``radius_aggregate`` will use, in units of the points; it sizes the cells. The
        index is right for every other radius and for kNN as well, only slower.
    backend : str
        ``"auto"`` or a name from :func:`pointproj.backends`.
    reference_offsets : (B + 1,) integer tensor, optional
        For packed clouds of different sizes.

    Returns
    -------
    Index
        Pass it as ``index=`` together with the same points.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device.
    BackendUnavailable
        If a backend asked for by name cannot run here.
    """
    arguments.check_cloud("reference_points", reference_points)
    if reference_offsets is not None:
        arguments.check_cloud_offsets("reference_offsets", reference_offsets, reference_points)
    if radius is not None:
        arguments.check_radius(radius)
    operator = "knn" if radius is None else "radius"
    packed = pack(reference_points, reference_points, reference_offsets, reference_offsets)
    name = choose(backend, reference_points.device.type, operator)
    points = packed.reference_points.detach()
    tables = modules[name].build_index(points, packed.reference_offsets, packed.count, radius)
    shape, dtype, device = tuple(reference_points.shape), reference_points.dtype, reference_points.device
    return Index(name, shape, dtype, device, packed.count, tables)


def choose_backend(
    backend: str, operator: str, index: Index | None, reference_points: Tensor, clouds: Clouds
) -> tuple[Backend, Tables | None]:
    """The backend of one call, and the tables of its index if there is one.

    Parameters
    ----------
    backend : str
        ``"auto"`` or a name; with an index, ``"auto"`` means the index's own backend.
    operator : {"knn", "radius"}
        What will be called.
    index : Index or None
        As the caller gave it.
    reference_points : (N, 3) or (B, N, 3) float tensor
        As the caller gave them.
    clouds : Clouds
        The same points, packed.

    Returns
    -------
    Backend
        Its module.
    tuple of Tensor or None
        The tables of the index.
    """
    if index is not None:
        _check_type(index)
    asked_for = index.backend if index is not None and backend == "auto" else backend
    name = choose(asked_for, reference_points.device.type, operator)
    if index is None:
        return modules[name], None
    _check_index(index, name, reference_points, clouds.count)
    return modules[name], index.tables


def _check_type(index: object) -> None:
    if not isinstance(index, Index):
        raise TypeError(f"index must come from pointproj.build_index; got {type(index).__name__}")


def _check_index(index: Index, backend: str, reference_points: Tensor, clouds: int) -> None:
    """An index built by this backend, for points like these."""
    if index.backend != backend:
        raise ValueError(f"the index was built by backend {index.backend!r}; this call runs {backend!r}")
    if index.shape != tuple(reference_points.shape) or index.dtype != reference_points.dtype:
        raise ValueError(
            f"the index was built for points of shape {index.shape}, {index.dtype}; "
            f"got {tuple(reference_points.shape)}, {reference_points.dtype}: build one for these points"
        )
    if index.clouds != clouds:
        raise ValueError(
            f"the index was built for {index.clouds} cloud(s), these points hold {clouds}: "
            "give build_index the reference_offsets of the call"
        )
    if index.device != reference_points.device:
        raise ValueError(
            f"the index was built on {index.device}, the points are on {reference_points.device}: "
            "build one there"
        )
