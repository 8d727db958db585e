"""Layers of a model are exchanged for faster ones: what was replaced, what was left, and why."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy


class CannotReplace(ValueError):  # noqa: N818 - says why
    """Why a layer is left as it is."""


class Replacement(NamedTuple):
    """What :func:`replace_layers` did, by the names of layers in the model.

    Attributes
    ----------
    replaced : dict of str to str
        The class of each layer that was replaced.
    left : dict of str to str
        Why a layer of a class that can be replaced was left.
    """

    replaced: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"replaced {name}: {kind}" for name, kind in self.replaced.items()]
        return "\n".join(lines + [f"left {name}: {reason}" for name, reason in self.left.items()])


def replace_layers(
    model: nn.Module, makers: Mapping[type[nn.Module], Callable[[nn.Module], nn.Module]]
) -> Replacement:
    """Exchange the layers of a model whose class is exactly one of ``makers``, in place.

    A maker takes a layer and returns one with the same parameters, by the same names, and the same results.
    It raises CannotReplace where it cannot. ValueError for a model without any such layer, and for a model
    that is itself one: there is no parent to put the new layer into.
    """
    replaced, left = {}, {}
    for name, layer in [*model.named_modules(remove_duplicate=False)]:
        make = makers.get(type(layer))
        if make is None:
            continue
        if not name:
            raise ValueError(f"expected a model that contains a {type(layer).__name__}, got the layer itself")
        try:
            _check(layer)
            made = make(layer).train(layer.training)
        except CannotReplace as reason:
            left[name] = str(reason)
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made)
        replaced[name] = type(layer).__name__
    if not replaced and not left:
        kinds = ", ".join(kind.__name__ for kind in makers)
        raise ValueError(f"expected a model with some of {kinds}; got a {type(model).__name__} without")
    return Replacement(replaced, left)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check(layer: nn.Module) -> None:
    """CannotReplace for a layer whose parameters are not there yet, or which calls what another would not."""
    if any(map(is_lazy, layer.parameters())):
        raise CannotReplace("its parameters have no shape before its first call: call it once")
    if any(getattr(module, hooks) for module in layer.modules() for hooks in HOOKS):
        raise CannotReplace("it has hooks, which would not be called: replace it, then register them")
