"""Operators in plain eager mode: called directly, and through an autograd function of their own.

torch's way to an operator written in Python (schema, dispatcher, autograd, trees of arguments) takes longer
than most kernels. It is needed wherever somebody looks on: a tracer, a transform, a mode, a profiler, a
subclass of Tensor. Where nobody does, :func:`direct` does the same without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import (
    any_requires_grad,
    apply_of,
    is_observed,
    is_transforming,
    wrapper_test,
)

__all__ = ["direct", "is_transforming", "nobody_looks_on"]

# What an operator can be called with directly. Symbolic numbers, proxies and subclasses are not among it.
PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, list, torch.dtype, type(None)})


def nobody_looks_on(args: Sequence[Any]) -> bool:
    """Whether work on these arguments, the first of them a tensor, can be done directly."""
    if torch.compiler.is_compiling() or is_observed():
        return False
    if not PLAIN.issuperset(map(type, args)) or not isinstance(args[0], Tensor) or args[0].is_meta:
        return False
    is_wrapped = wrapper_test()
    for a in args:
        if type(a) is list and not PLAIN.issuperset(map(type, a)):
            return False
        # Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
        if isinstance(a, Tensor) and (is_wrapped(a) or a.is_neg()):
            return False
    return True


def direct(name: str, body: Callable, save: Callable, chain: Callable) -> Callable[..., Any]:
    """An operator for plain eager mode.

    Parameters
    ----------
    name : str
        Of the operator.
    body : callable
        What it does: it returns a new tensor, or a tuple of them.
    save, chain : callable
        As ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.

    Returns
    -------
    callable
        Takes and returns what ``body`` does.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        made = body(*args)
        save(ctx, args, made)
        return made

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # A list of tensors is one argument here, and has no gradient.
        return tuple(None if type(g) is list else g for g in chain(ctx, *grads))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    apply = apply_of(type(name.replace("::", "_"), (torch.autograd.Function,), methods))

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(args):
            return apply(*args)
        return body(*args)

    return call
