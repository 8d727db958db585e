"""Checks of the operators' arguments, made before any work."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from types import EllipsisType

import torch
from torch import Tensor

from pointproj.ops.specification.reference import DEFAULT, KERNELS, SIGMA_RANGE, Weighting
from pointproj.ops.specification.rounding import radius_in_range
from pointproj.ops.torch_internals import wrapper_test

POSITIONS = (torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)
FEATURES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_SLOTS = 2**31 - 2  # of one query: backends count them, and one more, in 32 bits


def check_cloud(name: str, points: Tensor, in_space: bool = True, nowhere: bool = False) -> None:
    """Shape and dtype of one cloud, or of a batch of them, in space, with more coordinates, or with none."""
    if not isinstance(points, Tensor):
        raise _no_tensor(name, points)
    shape = points.shape
    dims = shape[-1] if len(shape) in (2, 3) else 1
    if dims == 1 or (dims == 0 and not nowhere) or (in_space and dims > 3):
        others = "2 coordinates in the plane" if in_space else "any other number of coordinates from 2 on"
        raise ValueError(f"{name} must have shape (n, 3) or (batch, n, 3), or {others}; got {tuple(shape)}")
    if points.dtype not in POSITIONS:
        raise TypeError(f"{name} must be float32 or float64; got {points.dtype}: call .float() on it")


def check_points(
    query_points: Tensor, reference_points: Tensor, in_space: bool = True, nowhere: bool = False
) -> None:
    """Shapes, dtypes and devices of the two clouds."""
    check_cloud("query_points", query_points, in_space, nowhere)
    check_cloud("reference_points", reference_points, in_space, nowhere)
    own, others = query_points.shape, reference_points.shape
    if len(own) != len(others):
        raise ValueError(
            f"query_points {tuple(own)} and reference_points {tuple(others)} "
            "must both be (n, 3) or both (batch, n, 3): expand the one that is shared, or use offsets"
        )
    if len(own) == 3 and own[0] != others[0]:
        raise ValueError(
            f"query_points and reference_points must hold equally many clouds; got {own[0]} and {others[0]}"
        )
    if own[-1] != others[-1]:
        raise ValueError(
            f"reference_points must have shape (n, {own[-1]}) or (batch, n, {own[-1]}), with as many "
            f"coordinates as query_points; got {tuple(others)}"
        )
    if query_points.dtype != reference_points.dtype:
        raise TypeError(
            f"query_points and reference_points must have one dtype; "
            f"got {query_points.dtype} and {reference_points.dtype}"
        )
    check_device("reference_points", reference_points, query_points)


def check_features(
    features: Tensor, reference_points: Tensor, least: int = 1, name: str = "features"
) -> None:
    """One row of features for each reference point, with so many channels or more."""
    if not isinstance(features, Tensor):
        raise _no_tensor(name, features)
    shape, points = features.shape, reference_points.shape
    if len(shape) != len(points) or shape[0] != points[0] or shape[-2] != points[-2]:
        expected = f"shape {(*points[:-1], 'channels')}, one row for each reference point"
        raise ValueError(f"{name} must have {expected}; got {tuple(shape)}")
    if shape[-1] < least:
        raise ValueError(f"{name} must have at least one channel; got shape {tuple(shape)}")
    check_dtype(name, features, FEATURES, "float16, bfloat16, float32 or float64")
    check_device(name, features, reference_points)


def check_k(k: int, reference_points: Tensor) -> None:
    """1 <= k <= number of reference points."""
    if type(k) is int and 1 <= k <= reference_points.shape[-2]:
        return
    check_size("k", k, least=1)
    if k > reference_points.shape[-2]:
        raise ValueError(
            f"k = {k} neighbours were asked for, but there are {reference_points.shape[-2]} points"
        )


def check_index_dtype(index_dtype: torch.dtype) -> None:
    """int32 or int64."""
    if index_dtype not in INDICES:
        raise ValueError(f"index_dtype must be torch.int32 or torch.int64; got {index_dtype!r}")


def check_neighbor_indices(
    neighbor_indices: Tensor, query_points: Tensor, reference_points: Tensor, k: int
) -> None:
    """A row of k integers for each query point. Values on a GPU are not read."""
    check_dtype(
        "neighbor_indices", neighbor_indices, INDICES, "an int32 or int64 tensor, as pointproj.knn gives"
    )
    shape = *query_points.shape[:-1], k
    check_rows("neighbor_indices", neighbor_indices, shape, f"k = {k} for each query point", query_points)
    size = reference_points.shape[-2]
    check_rows_of_points("neighbor_indices", neighbor_indices, size, "search these points again")


def checked_radius(radius: float, dtype: torch.dtype, name: str = "radius") -> float:
    """A positive, finite number, clamped to the normal numbers of the points' dtype."""
    _check_number(name, radius, more=": it has no gradient")
    _check_positive(name, radius)
    return radius_in_range(radius, dtype)


def checked_radii(radius: float | Tensor, query_points: Tensor) -> float | Tensor:
    """A positive, finite number, or one for each packed query. Values on a GPU are not read."""
    if not isinstance(radius, Tensor):
        return checked_radius(radius, query_points.dtype)
    if radius.dtype != query_points.dtype or radius.shape != query_points.shape[:-1]:
        raise ValueError(
            f"radius must be a number, or a {query_points.dtype} tensor of shape "
            f"{tuple(query_points.shape[:-1])}, one for each query; got {radius.dtype} of shape "
            f"{tuple(radius.shape)}"
        )
    check_device("radius", radius, query_points)
    if is_readable(radius):
        wrong = radius[~((radius > 0) & radius.isfinite())]
        if len(wrong):
            raise ValueError(f"every radius must be positive and finite; got {wrong[0].item()}")
    # On a GPU, those that are no radius find nothing, or all points.
    return radius.detach().reshape(-1).nan_to_num(0.0, torch.finfo(radius.dtype).max, 0.0).clamp(min=0.0)


def check_box(box: Sequence[float], radius: float | Tensor | None, points: Tensor, inside: bool) -> None:
    """One length for each coordinate, each more than twice the radius.

    ``inside`` says that the points must lie in the box already. Values on a GPU are not read.
    """
    if isinstance(box, Tensor) or not isinstance(box, Sequence) or len(box) != points.shape[-1]:
        raise TypeError(f"box must be a tuple of {points.shape[-1]} lengths, one for each axis; got {box!r}")
    limits = torch.finfo(points.dtype)
    if not all(isinstance(x, Real) and (limits.tiny <= x <= limits.max or x == math.inf) for x in box):
        raise ValueError(
            "box must hold positive lengths (inf: not periodic along that axis), normal numbers of "
            f"{points.dtype}; got {box}"
        )
    if isinstance(radius, Tensor):
        radius = radius.max().item() if is_readable(radius) and radius.numel() else None
    if radius is not None and not radius < min(box) / 2:
        raise ValueError(
            f"the radius must be less than half of every length of the box, {tuple(box)}; got {radius}: "
            "a point would be its own neighbour otherwise"
        )
    if not inside or not is_readable(points):
        return
    if not bool(((points >= 0) & (points < points.new_tensor(box))).all()):
        raise ValueError(
            f"with an index, reference_points must lie in the box already, from 0 to {tuple(box)}; "
            "take their remainders before build_index"
        )


def check_list_form(max_neighbors: int | None, capacity: int | EllipsisType | None) -> None:
    """Exactly one of them was given."""
    if (max_neighbors is None) == (capacity is ...):
        raise ValueError(
            "give either max_neighbors=K (the nearest K of each query) or capacity=M (all neighbours in M "
            f"slots; None: as many as there are); got max_neighbors={max_neighbors}, "
            f"capacity={'nothing' if capacity is ... else capacity}"
        )
    if max_neighbors is not None:
        check_size("max_neighbors", max_neighbors, least=1, most=MOST_SLOTS)
    elif capacity is not None:
        check_size("capacity", capacity, least=0)


def checked_scales(
    radii: object, most: object, capacity: int | EllipsisType | None, dtype: torch.dtype
) -> tuple[float, ...]:
    """The radii of several scales, each with its number of neighbours."""
    given = (radii, most)
    wrong = any(not isinstance(value, tuple | list) or len(value) == 0 for value in given)
    if wrong or len(radii) != len(most):
        raise ValueError(
            "several scales need a tuple of radii and a tuple of max_neighbors, one for each radius; "
            f"got radius={radii} and max_neighbors={most}"
        )
    for own in most:
        check_list_form(own, capacity)
    return tuple(checked_radius(radius, dtype) for radius in radii)


def check_size(name: str, size: int, least: int, most: float = math.inf) -> None:
    """A whole number."""
    _check_number(name, size, "an int", Integral)
    if not least <= size <= most:
        limit = f"least {least}" if size < least else f"most {most}"
        raise ValueError(f"{name} must be at {limit}; got {size}")


def checked_weighting(weighting: Weighting, reductions: tuple[str, ...], dtype: torch.dtype) -> Weighting:
    """Names of a kernel and a reduction, and the numbers of the inverse distance; sums are of ``dtype``."""
    kernel, reduce, power, eps, support = weighting
    if type(power) is type(eps) is float and weighting[:4] == DEFAULT[:4]:
        return weighting
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}")
    if reduce not in reductions:
        raise ValueError(f"reduce must be one of {', '.join(reductions)}; got {reduce!r}")
    for name, value in (("power", power), ("eps", eps)):
        _check_number(name, value)
        _check_in_range(name, value, torch.finfo(dtype).tiny, torch.finfo(dtype).max, dtype)
    return Weighting(kernel, reduce, float(power), float(eps), support)


def check_rows_of_points(name: str, rows: Tensor, size: int, remedy: str) -> None:
    """Rows of so many reference points, or -1. Values on a GPU are not read."""
    if not (rows.numel() and is_readable(rows)):
        return
    least, most = (int(value) for value in rows.aminmax())
    if least < -1 or most >= size:
        got = least if least < -1 else most
        raise ValueError(f"{name} must be from 0 to {size - 1}, or -1 for none; got {got}: {remedy}")


def check_pair_weights(weights: Tensor | None, indices: Tensor, features: Tensor) -> None:
    """One number for each pair, or one for each pair and channel."""
    if weights is None:
        return
    check_dtype("weights", weights, FEATURES, "a floating-point tensor")
    shape, channels = tuple(indices.shape), features.shape[-1]
    if tuple(weights.shape) not in (shape, (*shape, 1), (*shape, channels)):
        raise ValueError(
            f"weights must have shape {shape}, one for each pair, or {(*shape, channels)}, one for each "
            f"channel too; got {tuple(weights.shape)}"
        )
    check_device("weights", weights, indices)


def check_reference_weights(weights: Tensor | None, features: Tensor) -> None:
    """One number for each row of features."""
    if weights is None:
        return
    check_dtype("reference_weights", weights, FEATURES, "a floating-point tensor")
    check_rows("reference_weights", weights, features.shape[:-1], "one for each reference point", features)


def check_sigma(sigma: float | Tensor, like: Tensor, dtype: torch.dtype) -> None:
    """A positive number that sums in ``dtype`` can divide by, or a floating-point tensor of one element."""
    if isinstance(sigma, Tensor):
        if sigma.numel() != 1 or not sigma.is_floating_point():
            raise ValueError(
                f"sigma must be a number or a floating-point tensor of one element; "
                f"got {sigma.dtype} of shape {tuple(sigma.shape)}"
            )
        check_device("sigma", sigma, like)
    else:
        if type(sigma) is not float:
            _check_number("sigma", sigma, "a number or a tensor of one element")
        _check_in_range("sigma", sigma, *SIGMA_RANGE[dtype], dtype)


def sum_dtype(features: torch.dtype, others: torch.dtype) -> torch.dtype:
    """The dtype that sums run in: the widest of fp32, features, and positions or distances."""
    if features == others and features in POSITIONS:
        return features
    return torch.promote_types(torch.promote_types(features, others), torch.float32)


def check_offsets(
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
    query_points: Tensor,
    reference_points: Tensor,
) -> None:
    """Both, of packed points; int tensors of one length. Values on a GPU are not read."""
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
    check_dtype(name, offsets, INDICES, "an int32 or int64 tensor")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ValueError(f"{name} must have shape (clouds + 1,); got {tuple(offsets.shape)}")
    check_device(name, offsets, points)
    size, is_known = points.shape[0], is_readable(offsets)
    if is_known and (offsets[0] != 0 or offsets[-1] != size or bool((offsets.diff() < 0).any())):
        raise ValueError(f"{name} must rise from 0 to the number of points, {size}; got {offsets.tolist()}")


def _check_in_range(name: str, value: float, least: float, most: float, dtype: torch.dtype) -> None:
    """Positive, and neither too small nor too large for sums in a dtype."""
    if not least <= value <= most:
        _check_positive(name, value)
        raise ValueError(
            f"{name} must be from {least:.3g} to {most:.3g}, as sums run in {dtype}; got {value}: scale the "
            "points, or give features in float64"
        )


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")


def is_readable(tensor: Tensor) -> bool:
    """Whether there are values here: not on a GPU, in a graph of a compiler, a transform or a fake tensor."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not (torch.compiler.is_compiling() or wrapper_test()(tensor))
    )


def _check_number(
    name: str, value: object, what: str = "a number", kind: type = Real, more: str = ""
) -> None:
    is_float = kind is Real and type(value) is float  # the rest takes longer than all other checks of a call
    if not is_float and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} must be {what}; got {type(value).__name__}{more}")


def _no_tensor(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")


def check_dtype(name: str, tensor: object, dtypes: Sequence[torch.dtype], kind: str) -> None:
    """A tensor of one of these dtypes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be {kind}; got {got}")


def check_rows(name: str, tensor: Tensor, shape: Sequence[int], what: str, like: Tensor) -> None:
    """Of this shape, and where others are."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, {what}; got {tuple(tensor.shape)}")
    check_device(name, tensor, like)


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"all tensors must be on one device; {name} is on {tensor.device}, others on {like.device}"
        )
