"""Numbers that torch.compile leaves open, in arguments of operators.

torch.compile takes a number that changed between two calls for a variable, but one that enters an operator
for a constant: it would compile once for each radius. Such a call goes to a second operator, made when first
needed, which has these numbers in one tensor on the CPU, where reading them waits for no device.
"""

import dis
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.torch_internals import filled, is_known


def unread_floats(function: Callable, parameters: dict[str, Any]) -> list[str]:
    """Names of the numbers among the parameters that the code of a function of all of them does not use."""
    if not inspect.isfunction(function):
        return []
    code = function.__code__
    used = set()
    for instruction in dis.get_instructions(code):
        names = instruction.argval
        used.update(names if isinstance(names, tuple) else (names,))
    own = list(code.co_varnames[: code.co_argcount])
    if code.co_flags & inspect.CO_VARARGS:
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        own += [rest] * (len(parameters) - len(own))
    return [
        name
        for name, mine in zip(parameters, own, strict=False)
        if is_float(parameters[name]) and mine not in used
    ]


def is_float(kind: Any) -> bool:
    return kind in (float, float | None)


def open_places(operator: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Where among an operator's arguments there are numbers that a tracer does not know."""
    return tuple([i for i in operator.open_numbers if args[i] is not None and not is_known(args[i])])


def call_with_numbers(operator: Any, places: tuple[int, ...], args: Sequence[Any]) -> Any:
    """Call the operator that takes the numbers at these places in a tensor."""
    numbers = [filled((), args[i], torch.float64, "cpu") for i in places]
    others = [a for i, a in enumerate(args) if i not in places]
    return getattr(operator, _made(operator, places))(*others, torch.stack(numbers))


def _made(operator: Any, places: tuple[int, ...]) -> str:
    """The attribute of an operator that is the other one."""
    name = f"with_numbers_{'_'.join(map(str, places))}"
    if not hasattr(operator, name):
        setattr(operator, name, operator.made_with_numbers(places))
    return name


_made._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result marks it


class WithNumbers:
    """The functions of an operator from the others of its arguments, and the numbers at some places."""

    def __init__(self, parameters: dict[str, Any], places: tuple[int, ...]) -> None:
        self.size, self.places = len(parameters), places
        kinds = enumerate(parameters.items())
        self.parameters = dict(item for i, item in kinds if i not in places) | {"numbers": Tensor}

    def whole(self, args: Sequence[Any], known: bool = True) -> list[Any]:
        """All arguments of the operator, in their order; without known numbers, NaN for each."""
        *others, numbers = args
        numbers = iter(numbers.tolist() if known else [math.nan] * len(self.places))
        rest = iter(others)
        return [next(numbers if i in self.places else rest) for i in range(self.size)]
