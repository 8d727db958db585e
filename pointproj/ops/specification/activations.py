"""Activations between the layers of networks that run on every pair."""

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def activated(values: Tensor, name: str, slope: float) -> Tensor:
    """An activation of :data:`ACTIVATIONS`; ``slope`` is that of ``"leaky_relu"`` below 0."""
    if name == "leaky_relu":
        return functional.leaky_relu(values, slope)
    return ACTIVATIONS[name](values)
