"""The layers of networks that run on every pair: what they may be, and their arguments as operators take them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pointproj.ops.specification.activations import ACTIVATIONS

MOST_LAYERS = 4
MOST_CHANNELS = 512
ELSEWHERE = "apply further layers to the features before, or to the result after, with torch.nn"

Layer = tuple[Tensor, Tensor]  # weight (out, in) and bias (out,), as of torch.nn.Linear
Layers = Sequence[Layer] | nn.Sequential


class Activation(NamedTuple):
    """A name of :data:`ACTIVATIONS`, the slope of ``"leaky_relu"``, and whether the last layer has one too."""

    name: str
    slope: float
    at_end: bool


def checked_layers(
    name: str, layers: Layers, activation: str | Activation, like: Tensor
) -> tuple[list[Layer], Activation]:
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
                f"the weight of {which} must have {len(made[-1][0])} columns, one for each output of the layer "
                f"before; got {inputs}"
            )
        made.append(tuple(tensor.to(like.dtype) for tensor in layer))
    return made, activation


def _parts(name: str, layers: Layers, activation: str | Activation) -> tuple[list[Any], Activation]:
    """Pairs of weight and bias, not checked yet."""
    if isinstance(layers, nn.Sequential):
        return _parts_of_modules(name, list(layers))
    if isinstance(activation, Activation):
        return list(layers), activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}: {ELSEWHERE}"
        )
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"{name} must be a sequence of (weight, bias) or a torch.nn.Sequential; got {type(layers).__name__}"
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
            f"{name} must be torch.nn.Linear and one activation of {', '.join(ACTIVATIONS)} by turns; got {kinds}: "
            f"{ELSEWHERE}"
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
