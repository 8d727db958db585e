"""What networks of pairs are given: their layers, the lists, and what goes with each of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pointproj.ops import arguments
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


def _parts_of_modules(name: str, modules: list[nn.Module]) -> tuple[list[Any], Activation]:
    modules = [m for m in modules if not isinstance(m, nn.Identity) and not _is_idle(m)]
    linear = modules[::2]
    found = {activation_of(module) for module in modules[1::2]}
    if not all(isinstance(m, nn.Linear) for m in linear) or None in found or len(found) > 1:
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(
            f"{name} must be torch.nn.Linear and one activation of {', '.join(ACTIVATIONS)} by turns; "
            f"got {kinds}: {ELSEWHERE}"
        )
    kind, slope = found.pop() if found else ("relu", SLOPE)
    return [with_bias(m.weight, m.bias) for m in linear], Activation(kind, slope, len(modules) % 2 == 0)


def with_bias(weight: Tensor, bias: Tensor | None) -> Layer:
    """A layer; zeros for a missing bias."""
    return weight, weight.new_zeros(len(weight)) if bias is None else bias


def _is_idle(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)


def activation_of(module: nn.Module) -> tuple[str, float] | None:
    """Name and slope of a module of torch.nn."""
    match module:
        case nn.GELU():
            return ("gelu_tanh" if module.approximate == "tanh" else "gelu"), SLOPE
        case nn.ReLU():
            return "relu", SLOPE
        case nn.LeakyReLU():
            return "leaky_relu", float(module.negative_slope)
        case nn.SiLU():
            return "silu", SLOPE
        case nn.Tanh():
            return "tanh", SLOPE
    return None


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


def check_lists(neighbors: Any, query_points: Tensor, reference_points: Tensor) -> None:
    """Lists of these points. Values on a GPU are not read."""
    indices, queries = neighbors.indices, query_points.shape[:-1]
    count = math.prod(indices.shape[:-1]) if indices.ndim > 1 else neighbors.row_splits.shape[0] - 1
    if (indices.ndim > 1 and indices.shape[:-1] != queries) or count != math.prod(queries):
        raise ValueError(
            f"neighbors must have a list for each of {math.prod(queries)} query points; got {count} lists, "
            f"of indices {tuple(indices.shape)}: search these points"
        )
    if (
        indices.numel()
        and arguments.is_readable(indices)
        and (most := int(indices.max())) >= reference_points.shape[-2]
    ):
        raise ValueError(
            f"neighbors.indices must be from 0 to {reference_points.shape[-2] - 1}, or -1 for none; got "
            f"{most}: search these points"
        )


def check_query_features(query_features: Tensor | None, query_points: Tensor) -> None:
    """A row for each query point."""
    if query_features is None:
        return
    arguments.check_dtype("query_features", query_features, arguments.FEATURES, "a floating-point tensor")
    if query_features.shape[:-1] != query_points.shape[:-1] or query_features.shape[-1] < 1:
        raise ValueError(
            f"query_features must have shape {(*query_points.shape[:-1], 'channels')}, one row for each "
            f"query point; got {tuple(query_features.shape)}"
        )
    arguments.check_device("query_features", query_features, query_points)


def check_one_a_pair(name: str, values: Tensor, indices: Tensor) -> None:
    """A floating-point number for each pair."""
    arguments.check_dtype(name, values, arguments.FEATURES, "a floating-point tensor")
    arguments.check_rows(name, values, indices.shape, "one number for each pair", indices)
