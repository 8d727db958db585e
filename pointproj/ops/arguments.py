"""Checks of the operators' arguments, made before any work."""

import math
from numbers import Integral, Real

import torch
from torch import Tensor

POSITIONS = (torch.float32, torch.float64)
FEATURES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_cloud(name: str, points: Tensor) -> None:
    """Shape and dtype of one cloud, or of a batch of them."""
    if not isinstance(points, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(points).__name__}")
    if points.ndim not in (2, 3) or points.shape[-1] != 3:
        raise ValueError(f"{name} must have shape (n, 3) or (batch, n, 3); got {tuple(points.shape)}")
    if points.dtype not in POSITIONS:
        raise TypeError(f"{name} must be float32 or float64; got {points.dtype}: call .float() on it")


def check_points(query_points: Tensor, reference_points: Tensor) -> None:
    """Shapes, dtypes and devices of the two clouds."""
    check_cloud("query_points", query_points)
    check_cloud("reference_points", reference_points)
    if query_points.ndim != reference_points.ndim:
        raise ValueError(
            f"query_points {tuple(query_points.shape)} and reference_points {tuple(reference_points.shape)} "
            "must both be (n, 3) or both (batch, n, 3): expand the one that is shared, or use offsets"
        )
    if query_points.ndim == 3 and query_points.shape[0] != reference_points.shape[0]:
        raise ValueError(
            f"query_points and reference_points must hold equally many clouds; "
            f"got {query_points.shape[0]} and {reference_points.shape[0]}"
        )
    if query_points.dtype != reference_points.dtype:
        raise TypeError(
            f"query_points and reference_points must have one dtype; "
            f"got {query_points.dtype} and {reference_points.dtype}"
        )
    _check_device("reference_points", reference_points, query_points)


def check_features(features: Tensor, reference_points: Tensor) -> None:
    """One row of features for each reference point."""
    if not isinstance(features, Tensor):
        raise TypeError(f"features must be a torch.Tensor; got {type(features).__name__}")
    if features.ndim != reference_points.ndim or features.shape[:-1] != reference_points.shape[:-1]:
        raise ValueError(
            f"features must have shape {(*reference_points.shape[:-1], 'channels')}, one row for each "
            f"reference point; got {tuple(features.shape)}"
        )
    if features.shape[-1] < 1:
        raise ValueError(f"features must have at least one channel; got shape {tuple(features.shape)}")
    if features.dtype not in FEATURES:
        raise TypeError(f"features must be float16, bfloat16, float32 or float64; got {features.dtype}")
    _check_device("features", features, reference_points)


def check_k(k: int, reference_points: Tensor) -> None:
    """1 <= k <= number of reference points."""
    if not isinstance(k, Integral) or isinstance(k, bool):
        raise TypeError(f"k must be an int; got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"k must be at least 1; got {k}")
    if k > reference_points.shape[-2]:
        raise ValueError(
            f"k = {k} neighbours were asked for, but there are {reference_points.shape[-2]} points"
        )


def check_neighbor_indices(
    neighbor_indices: Tensor, query_points: Tensor, reference_points: Tensor, k: int
) -> None:
    """A row of k integers for each query point. Values on a GPU are not read."""
    if not isinstance(neighbor_indices, Tensor) or neighbor_indices.dtype not in (torch.int32, torch.int64):
        got = getattr(neighbor_indices, "dtype", type(neighbor_indices).__name__)
        raise TypeError(
            f"neighbor_indices must be an int32 or int64 tensor, as pointproj.knn gives; got {got}"
        )
    expected = (*query_points.shape[:-1], k)
    if tuple(neighbor_indices.shape) != expected:
        raise ValueError(
            f"neighbor_indices must have shape {expected}, k = {k} for each query point; "
            f"got {tuple(neighbor_indices.shape)}"
        )
    _check_device("neighbor_indices", neighbor_indices, query_points)
    on_host = neighbor_indices.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and neighbor_indices.numel():
        least, most = (int(value) for value in neighbor_indices.aminmax())
        size = reference_points.shape[-2]
        if least < -1 or most >= size:
            raise ValueError(
                f"neighbor_indices must be from 0 to {size - 1}, or -1 for none; "
                f"got {least if least < -1 else most}: search these points again"
            )


def check_radius(radius: float) -> None:
    """A positive, finite number."""
    if not isinstance(radius, Real) or isinstance(radius, bool):
        raise TypeError(f"radius must be a number; got {type(radius).__name__}: it has no gradient")
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite; got {radius}")


def check_sigma(sigma: float | Tensor, query_points: Tensor) -> None:
    """A positive, finite number, or a tensor of one floating-point element."""
    if isinstance(sigma, Tensor):
        if sigma.numel() != 1 or not sigma.is_floating_point():
            raise ValueError(
                f"sigma must be a number or a floating-point tensor of one element; "
                f"got {sigma.dtype} of shape {tuple(sigma.shape)}"
            )
        _check_device("sigma", sigma, query_points)
    elif not isinstance(sigma, Real) or isinstance(sigma, bool):
        raise TypeError(f"sigma must be a number or a tensor of one element; got {type(sigma).__name__}")
    elif not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be positive and finite; got {sigma}")


def check_offsets(
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
    query_points: Tensor,
    reference_points: Tensor,
) -> None:
    """Both or none; packed points; int tensors of one length. Values on a GPU are not read."""
    if query_offsets is None and reference_offsets is None:
        return
    if query_offsets is None or reference_offsets is None:
        missing = "query_offsets" if query_offsets is None else "reference_offsets"
        raise ValueError(f"ragged batches need query_offsets and reference_offsets; {missing} is missing")
    check_cloud_offsets("query_offsets", query_offsets, query_points)
    check_cloud_offsets("reference_offsets", reference_offsets, reference_points)
    if query_offsets.shape != reference_offsets.shape:
        raise ValueError(
            f"query_offsets and reference_offsets must describe equally many clouds; "
            f"got {query_offsets.shape[0] - 1} and {reference_offsets.shape[0] - 1}"
        )


def check_cloud_offsets(name: str, offsets: Tensor, points: Tensor) -> None:
    """Where each of several packed clouds begins: an int tensor from 0 to the number of points."""
    if points.ndim != 2:
        raise ValueError(f"offsets go with packed points (n, 3); got {tuple(points.shape)}")
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        got = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor; got {got}")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ValueError(f"{name} must have shape (clouds + 1,); got {tuple(offsets.shape)}")
    _check_device(name, offsets, points)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_offset_values(name, offsets, points.shape[0])


def _check_offset_values(name: str, offsets: Tensor, size: int) -> None:
    if offsets[0] != 0 or offsets[-1] != size or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{name} must rise from 0 to the number of points, {size}; got {offsets.tolist()}")


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"all tensors must be on one device; {name} is on {tensor.device}, others on {like.device}"
        )
