"""Operators in plain eager mode: called directly, and through an autograd function of their own.

torch's way to an operator written in Python (schema, dispatcher, autograd, trees of arguments) takes longer
than most kernels. It is needed wherever somebody looks on: a tracer, a transform, a mode, a profiler, a
subclass of Tensor. Where nobody does, :func:`direct` does the same without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

# What an operator can be called with directly. Symbolic numbers, proxies and subclasses are not among it.
PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, list, torch.dtype, type(None)})


def is_transforming() -> bool:
    """Whether an operator is called under a transform, or where derivatives are carried forward."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def nobody_looks_on(args: Sequence[Any]) -> bool:
    """Whether work on these arguments, the first of them a tensor, can be done directly."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or is_transforming():
        return False
    if torch._C._len_torch_function_stack() or torch.autograd._profiler_enabled() or torch._C._is_tracing():
        return False
    if not PLAIN.issuperset(map(type, args)) or not isinstance(args[0], Tensor) or args[0].is_meta:
        return False
    for a in args:
        if type(a) is list and not PLAIN.issuperset(map(type, a)):
            return False
        if isinstance(a, Tensor) and is_functorch_wrapped_tensor(a):  # left over from a transform that ended
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
    function = type(name.replace("::", "_"), (torch.autograd.Function,), methods)
    apply = super(torch.autograd.Function, function).apply  # without its part for torch.func

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return apply(*args)
        return body(*args)

    return call
