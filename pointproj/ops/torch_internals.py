"""All private names of torch that the operators use, each looked up when it is needed.

They save time, or tell what no public function of torch tells. If a version of torch lacks one, operators
take the public way: every call then goes through torch's dispatcher.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transforming(unknown: bool = False) -> bool:
    """Whether an operator is called under a transform of torch.func, or in forward-mode differentiation."""
    try:
        if torch._C._are_functorch_transforms_active():
            return True
        return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    except AttributeError:
        return unknown


@functools.cache
def _key(name: str) -> Any:
    """One of the dispatcher's keys; reading the name takes 2 us."""
    return torch._C._dispatch_key_parse(name)


def is_unseen(_: Sequence[Any] = ()) -> bool:
    """Whether no mode, tracer or transform must see the operators that are called, with any arguments."""
    try:
        return not (
            torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._is_tracing()
            or is_transforming(unknown=True)
        )
    except AttributeError:
        return False


def is_observed() -> bool:
    """Whether one of these or a profiler must see them."""
    try:
        return bool(
            not is_unseen()
            or torch.autograd._profiler_enabled()
            # torch.autograd.grad(is_grads_batched=True), which is no transform of torch.func
            or torch._C._dispatch_tls_is_dispatch_key_included(_key("VmapMode"))
        )
    except AttributeError:
        return True


def registries_of_active_counters() -> list[dict[Any, Any]]:
    """The formulas by operator that each active counter of floating-point operations has."""
    modes = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)()
    counters = (getattr(mode, "counter", None) for mode in modes)
    return [counter.flop_registry for counter in counters if hasattr(counter, "flop_registry")]


def is_known(number: Any) -> bool:
    """Whether a tracer, if there is one, knows the value of a number."""
    try:
        from torch.fx.experimental.symbolic_shapes import has_static_value
    except ImportError:
        return True
    return has_static_value(number)


def filled(shape: Sequence[int], value: float, dtype: torch.dtype, device: Any) -> Tensor:
    """``torch.full``, which a tracer that does not know the value need not compile for each one.

    torch.compile turns products with such numbers into products of tensors, and takes those that are given to
    functions for constants.
    """
    like = {"dtype": dtype, "device": device}
    if torch.compiler.is_compiling() and not is_known(value):
        return torch.ones(shape, **like) * value
    return torch.full(shape, value, **like)


def in_tensor_if_open(number: float) -> tuple[float, Tensor | None]:
    """Arguments of an operator: a number and None, or 0 and a tensor with one that a tracer does not know.

    The tensor is on the CPU, where reading it waits for no device.
    """
    if not torch.compiler.is_compiling() or isinstance(number, Tensor) or is_known(number):
        return number, None
    return 0.0, filled((), number, torch.float64, "cpu")


def keep_open(number: float) -> None:
    """Let no tracer take a number for a constant because nothing in the graph uses what was made with it."""
    _, tensor = in_tensor_if_open(number)
    if tensor is not None:
        torch._assert_async(tensor > 0, "expected a positive number")  # stays in the graph


def wrapper_test() -> Callable[[Tensor], bool]:
    """A function that tells whether a tensor belongs to a transform, also to one that has ended."""
    try:
        return torch._C._functorch.is_functorch_wrapped_tensor
    except AttributeError:
        return lambda _: True


def any_requires_grad(args: Sequence[Any]) -> bool:
    """Whether a tensor among arguments does."""
    try:
        return torch._C._any_requires_grad(*args)
    except AttributeError:
        return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its part for transforms, which takes time."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def below_autograd() -> contextlib.AbstractContextManager:
    """A context in which operators run and autograd records nothing."""
    try:
        return torch._C._AutoDispatchBelowAutograd()
    except AttributeError:
        return torch.no_grad()


def builtin_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The built-in function behind an operator, without the Python function that calls it."""
    return getattr(operator, "_op", operator)


def go_straight_to(function: type[torch.autograd.Function], backward: Callable[..., Any]) -> None:
    """Let autograd's engine call ``backward`` directly, without torch's function that looks it up."""
    if hasattr(function, "_backward_cls"):
        function._backward_cls.apply = backward


def has_modes() -> bool:
    """Whether a mode is active, in which new tensors may be of another class."""
    try:
        return torch._C._len_torch_dispatch_stack() > 0
    except AttributeError:
        return True


def map_rows(function: Callable[..., Tensor], rows: tuple[Tensor, ...], *others: Any) -> Tensor:
    """``function(rows, *others)`` for each row of some tensors; a tracer sees a loop over any number."""
    try:
        from torch._higher_order_ops.map import map as mapped
    except ImportError:
        return torch.stack([function(row, *others) for row in zip(*rows, strict=True)])
    return mapped(function, rows, *others)


def raw_stream(index: int) -> int:
    """The address of torch's current stream on a GPU; the public way makes an object in each call."""
    try:
        return torch._C._cuda_getCurrentRawStream(index)
    except AttributeError:
        return torch.cuda.current_stream(index).cuda_stream


def after_operators(follow: Callable[[Any, list[Any], list[Any]], None]) -> contextlib.AbstractContextManager:
    """A context that calls ``follow(operator, arguments, results)`` after each operator of torch."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves
    except ImportError:
        return contextlib.nullcontext()

    class Follow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            follow(func, tree_leaves((args, kwargs)), tree_leaves(made))
            return made

    return Follow()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records, also inside of an operator that the dispatcher has called."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.enable_grad())
        with contextlib.suppress(AttributeError):
            contexts.enter_context(torch._C._PreserveDispatchKeyGuard())
            torch._C._dispatch_tls_set_dispatch_key_excluded(_key("AutogradFunctionality"), False)
        yield
