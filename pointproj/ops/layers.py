"""What networks of pairs are given: their layers, the lists, and what goes with each of them."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pointproj.ops.arguments import (
    FEATURES,
    INDICES,
    check_device,
    check_dtype,
    check_rows,
    check_rows_of_points,
    check_size,
    is_readable,
)
from pointproj.ops.specification.activations import ACTIVATIONS

MOST_LAYERS = 4
MOST_CHANNELS = 512
ELSEWHERE = "apply further layers to the features before, or to the result after, with torch.nn"

Layer = tuple[Tensor, Tensor]  # weight (out, in) and bias (out,), as of torch.nn.Linear


class Activation(NamedTuple):
    """A name of :data:`ACTIVATIONS`, the slope of ``"leaky_relu"``, and whether one is at the end."""

    name: str
    slope: float
    at_end: bool


class Network(NamedTuple):
    """Layers, and what is between them."""

    layers: list[Layer]
    activation: Activation


Layers = Sequence[Layer] | nn.Sequential | Network


def checked_layers(name: str, layers: Layers, activation: str, like: Tensor) -> Network:
    """Weights and biases in the dtype of ``like``, one layer after the other, and what is between them."""
    given, activation = _parts(name, layers, activation)
    if not 1 <= len(given) <= MOST_LAYERS:
        raise ValueError(f"{name} must be 1 to {MOST_LAYERS} linear layers; got {len(given)}: {ELSEWHERE}")
    made: list[Layer] = []
    for number, layer in enumerate(given):
        which = f"{name}[{number}]"
        _check_layer(which, layer, like)
        inputs = layer[0].shape[1]
        if made and inputs != len(made[-1][0]):
            raise ValueError(
                f"the weight of {which} must have {len(made[-1][0])} columns, one for each output of the "
                f"layer before; got {inputs}"
            )
        made.append(tuple(tensor.to(like.dtype) for tensor in layer))
    return Network(made, activation)


def _parts(name: str, layers: Layers, activation: str) -> tuple[list[Any], Activation]:
    """Pairs of weight and bias, not checked yet."""
    if isinstance(layers, nn.Sequential):
        return _parts_of_modules(name, list(layers))
    if isinstance(layers, Network):
        return layers
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}: {ELSEWHERE}"
        )
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"{name} must be a sequence of (weight, bias) or a torch.nn.Sequential; got "
            f"{type(layers).__name__}"
        )
    return list(layers), Activation(activation, SLOPE, False)


SLOPE = 0.01  # of torch.nn.LeakyReLU
MODULES = {nn.GELU: "gelu", nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu", nn.Tanh: "tanh"}


def _parts_of_modules(name: str, modules: list[nn.Module]) -> tuple[list[Any], Activation]:
    modules = [m for m in modules if not isinstance(m, nn.Identity) and not _is_idle(m)]
    linear = modules[::2]
    found = {activation_of(module) for module in modules[1::2]}
    if not all(_computes(m, nn.Linear) for m in linear) or None in found or len(found) > 1:
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(
            f"{name} must be torch.nn.Linear and one activation of {', '.join(ACTIVATIONS)} by turns; "
            f"got {kinds}: {ELSEWHERE}"
        )
    kind, slope = found.pop() if found else ("relu", SLOPE)
    return [layer_of(m) for m in linear], Activation(kind, slope, len(modules) % 2 == 0)


def _computes(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what that class does: subclasses may do something else."""
    return getattr(type(module), "forward", None) is kind.forward


def layer_of(module: nn.Module) -> Layer:
    """Weight and bias of a linear layer, which is not called."""
    if module._forward_pre_hooks and "weight" in vars(module):
        raise ValueError(
            f"the weight of {module} is made by a hook when it is called, as by weight_norm or pruning: use "
            "torch.nn.utils.parametrizations, or torch.nn.utils.prune.remove"
        )
    return with_bias(module.weight, module.bias)


def with_bias(weight: Tensor, bias: Tensor | None) -> Layer:
    """A layer; zeros for a missing bias."""
    return weight, weight.new_zeros(len(weight)) if bias is None else bias


def _is_idle(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)


def activation_of(module: nn.Module) -> tuple[str, float] | None:
    """Name and slope of a module of torch.nn."""
    kind = next((kind for kind in MODULES if _computes(module, kind)), None)
    if kind is nn.GELU and module.approximate == "tanh":
        return "gelu_tanh", SLOPE
    slope = float(module.negative_slope) if kind is nn.LeakyReLU else SLOPE
    return None if kind is None else (MODULES[kind], slope)


def _check_layer(name: str, layer: Any, like: Tensor) -> None:
    """A weight (out, in) and a bias (out,) of at most :data:`MOST_CHANNELS` outputs, where ``like`` is."""
    if not isinstance(layer, Sequence) or len(layer) != 2:
        raise TypeError(f"{name} must be (weight, bias), as of torch.nn.Linear; got {type(layer).__name__}")
    weight, bias = layer
    for what, tensor in (("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            also = ": give zeros for a layer without bias" if what == "bias" else ""
            raise TypeError(f"the {what} of {name} must be a floating-point tensor; got {got}{also}")
        if isinstance(tensor, UninitializedParameter):
            raise ValueError(f"the {what} of {name} has no shape before the layer's first call: call it once")
        if tensor.device != like.device:
            raise ValueError(
                f"all tensors must be on one device; the {what} of {name} is on {tensor.device}, others on "
                f"{like.device}"
            )
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or not 1 <= len(weight) <= MOST_CHANNELS:
        raise ValueError(
            f"{name} must have a weight (out, in) and a bias (out,) of 1 to {MOST_CHANNELS} outputs; got "
            f"{tuple(weight.shape)} and {tuple(bias.shape)}: {ELSEWHERE}"
        )


def check_neighbors(
    neighbors: Any, forms: tuple[type, type], features: Tensor, name: str = "features", least: int = 1
) -> None:
    """Lists of one of these forms, the padded one first, over clouds like the features, which have a name."""
    if not isinstance(neighbors, forms):
        raise TypeError(
            f"neighbors must be {' or '.join(form.__name__ for form in forms)}, as radius_neighbors gives; "
            f"got {type(neighbors).__name__}"
        )
    check_dtype(name, features, FEATURES, "a float16, bfloat16, float32 or float64 tensor")
    indices, shape = neighbors.indices, tuple(features.shape)
    check_dtype("neighbors.indices", indices, INDICES, "an int32 or int64 tensor")
    if len(shape) not in (2, 3) or shape[-1] < least:
        raise ValueError(f"{name} must have shape (n, c) or (batch, n, c); got {shape}")
    if isinstance(neighbors, forms[1]):
        _check_row_splits(neighbors.row_splits, indices, math.prod(shape[:-2]))
    elif indices.ndim != len(shape) or indices.shape[:-2] != shape[:-2]:
        raise ValueError(
            f"neighbors.indices must have shape {(*shape[:-2], 'queries', 'k')}, in as many clouds as {name} "
            f"{shape}; got {tuple(indices.shape)}"
        )
    check_device(name, features, indices)


def _check_row_splits(splits: Any, indices: Tensor, clouds: int) -> None:
    """Where the list of each query begins, in one list of pairs. Values on a GPU are not read."""
    if indices.ndim != 1:
        raise ValueError(
            f"neighbors.indices of a NeighborList must have shape (pairs,); got {tuple(indices.shape)}"
        )
    check_dtype("neighbors.row_splits", splits, INDICES, "an int32 or int64 tensor")
    if splits.ndim != 1 or not splits.shape[0] or (splits.shape[0] - 1) % max(1, clouds):
        raise ValueError(
            f"neighbors.row_splits must have shape (queries + 1,), with equally many queries in each of "
            f"{max(1, clouds)} clouds; got {tuple(splits.shape)}"
        )
    check_device("neighbors.row_splits", splits, indices)
    if not is_readable(splits):
        return
    first, last, slots = splits[0].item(), splits[-1].item(), len(indices)
    if first or last > slots or (splits.shape[0] > 1 and splits.diff().min().item() < 0):
        raise ValueError(
            f"neighbors.row_splits must rise from 0 to at most {slots}, the slots of neighbors.indices; got "
            f"{first} to {last}"
        )


def _number_of(neighbors: Any) -> int:
    """How many lists there are."""
    indices = neighbors.indices
    return math.prod(indices.shape[:-1]) if indices.ndim > 1 else neighbors.row_splits.shape[0] - 1


def check_lists(neighbors: Any, query_points: Tensor, reference_points: Tensor) -> None:
    """A list of these points for each query point. Values on a GPU are not read."""
    indices, queries = neighbors.indices, query_points.shape[:-1]
    count = _number_of(neighbors)
    if (indices.ndim > 1 and indices.shape[:-1] != queries) or count != math.prod(queries):
        raise ValueError(
            f"neighbors must have a list for each of {math.prod(queries)} query points; got {count} lists, "
            f"of indices {tuple(indices.shape)}: search these points"
        )
    check_rows_of_points("neighbors.indices", indices, reference_points.shape[-2], "search these points")


def check_query_features(query_features: Tensor | None, query_points: Tensor) -> None:
    """A row for each query point."""
    if query_features is None:
        return
    check_dtype("query_features", query_features, FEATURES, "a floating-point tensor")
    if query_features.shape[:-1] != query_points.shape[:-1] or query_features.shape[-1] < 1:
        raise ValueError(
            f"query_features must have shape {(*query_points.shape[:-1], 'channels')}, one row for each "
            f"query point; got {tuple(query_features.shape)}"
        )
    check_device("query_features", query_features, query_points)


def check_one_a_pair(name: str, values: Tensor, indices: Tensor) -> None:
    """A floating-point number for each pair."""
    check_dtype(name, values, FEATURES, "a floating-point tensor")
    check_rows(name, values, indices.shape, "one number for each pair", indices)


def check_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    neighbors: Any,
    heads: int,
    bias: Tensor | None,
    scale: float | None,
    parts: str = "heads",
) -> None:
    """Rows for each query and reference point, of one dtype, whose channels the heads (or groups) share."""
    check_size(parts, heads, 1)
    indices, shape = neighbors.indices, tuple(keys.shape)
    for name, tensor in (("queries", queries), ("values", values)):
        check_dtype(name, tensor, FEATURES, "a floating-point tensor")
        if tensor.dtype != keys.dtype:
            raise TypeError(f"{name} must have the dtype of keys, {keys.dtype}; got {tensor.dtype}")
        check_device(name, tensor, keys)
    if tuple(values.shape) != shape:
        raise ValueError(f"values must have the shape of keys, {shape}; got {tuple(values.shape)}")
    if shape[-1] % heads:
        raise ValueError(f"keys must have a multiple of {heads} channels, equal {parts}; got {shape}")
    count = _number_of(neighbors)
    rows = queries.shape[:-1]
    if queries.ndim != keys.ndim or queries.shape[-1] != shape[-1] or math.prod(rows) != count:
        raise ValueError(
            f"queries must have {count} rows of {shape[-1]} channels, one for each list of neighbors, in as "
            f"many clouds as keys {shape}; got {tuple(queries.shape)}"
        )
    if bias is not None:
        check_dtype("bias", bias, FEATURES, "a floating-point tensor")
        check_rows("bias", bias, (*indices.shape, heads), "one number for each pair and head", keys)
    if scale is not None and (not isinstance(scale, Real) or not abs(scale) < math.inf):
        raise ValueError(f"scale must be a finite number; got {scale!r}")
