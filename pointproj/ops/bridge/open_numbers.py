"""Numbers that torch.compile leaves open, in arguments of operators.

torch.compile takes a number that changed between two calls for a variable, but one that enters an operator
for a constant: it would compile once for each radius. Such a call goes to a second operator, made when first
needed, which has these numbers in one tensor on the CPU, where reading them waits for no device.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.torch_internals import filled, is_known

operators: dict[str, Any] = {}  # by name: to some versions of torch.compile only strings are constants


def is_float(kind: Any) -> bool:
    return kind in (float, float | None)


def open_arguments(operator: Any, args: Sequence[Any]) -> list[str]:
    """The names of an operator's arguments that are numbers which a tracer does not know."""
    # Names, not places: the tracer may take whole numbers for variables too.
    return [
        name
        for name, value in zip(operator.argument_names, args, strict=False)
        if name in operator.open_numbers and value is not None and not is_known(value)
    ]


def call_with_numbers(operator: Any, names: list[str], args: Sequence[Any]) -> Any:
    """Call the operator that takes the arguments of these names in a tensor."""
    numbers, others = [], []
    for name, value in zip(operator.argument_names, args, strict=False):
        if name in names:
            numbers.append(filled((), value, torch.float64, "cpu"))
        else:
            others.append(value)
    return getattr(operator, _made(operator.full_name, ",".join(names)))(*others, torch.stack(numbers))


def _made(name: str, names: str) -> str:
    """The attribute of the operator of this name that is the other one."""
    operator, attribute = operators[name], f"with_numbers_{names}"
    if not hasattr(operator, attribute):
        setattr(operator, attribute, operator.made_with_numbers(names.split(",")))
    return attribute


_made._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result marks it


class WithNumbers:
    """All arguments of an operator from the others, and those of some names as numbers in a tensor."""

    def __init__(self, parameters: dict[str, Any], names: Sequence[str]) -> None:
        self.is_number = [name in names for name in parameters]
        others = {name: kind for name, kind in parameters.items() if name not in names}
        self.parameters = others | {"numbers": Tensor}

    def whole(self, args: Sequence[Any], known: bool = True) -> list[Any]:
        """All arguments of the operator, in their order; without known numbers, NaN for each."""
        *others, numbers = args
        numbers = iter(numbers.tolist() if known else [math.nan] * sum(self.is_number))
        rest = iter(others)
        return [next(numbers if is_number else rest) for is_number in self.is_number]
