"""Operators that C++ registers get their fake kernels and derivatives here, from Python.

One library serves many versions of torch through torch's stable ABI, which has no autograd, no batching and
no fake kernels. :mod:`pointproj.ops.bridge.torch_op` adds them.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.open_numbers import is_float
from pointproj.ops.bridge.torch_op import Spec, signed, torch_op
from pointproj.ops.torch_internals import below_autograd, builtin_of, is_unseen

ANNOTATIONS = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[bool]": list[bool],
    "int": int,
    "float": float,
    "Optional[float]": float | None,
    "bool": bool,
    "str": str,
}


class CppOp:
    """An operator of a library, with what :func:`pointproj.ops.bridge.torch_op.torch_op` expects of one."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.in_cpp = builtin_of(operator)

    def __call__(self, *args: Any) -> Any:
        return self.operator(*args)

    def unrecorded(self, *args: Any) -> Any:
        """Call C++ without autograd."""
        try:
            with below_autograd():
                return self.in_cpp(*args)
        except MemoryError as error:  # the stable ABI cannot throw torch's own
            raise torch.OutOfMemoryError(str(error)) from None


def cpp_op(
    library: Any,
    name: str,
    outputs: Callable[[SimpleNamespace], tuple[Spec, ...]],
    differentiable: Sequence[str] = (),
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Make an operator of a loaded library compilable and differentiable.

    ``library`` is a namespace of torch.ops. It has the operator ``name``, and if that has differentiable
    arguments also ``<name>_backward`` and ``<name>_second_backward``. The arguments of the first are the
    gradients, ``bool[] needs``, and the forward's arguments and outputs. The second has the directions and
    ``bool[] needs`` before the gradients. They return an empty tensor where none is needed. ``outputs(call)``
    gives shape and dtype of every output; ``call`` holds the arguments by the names of the schema.

    A library with ``define_recorded`` has autograd in C++, for calls that nothing observes.
    """
    schema = getattr(library, name).default._schema
    arguments = {a.name: ANNOTATIONS[str(a.type)] for a in schema.arguments}

    def in_cpp(*_: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{name} is implemented only in C++")

    def register(qualified: str, _: Callable, fake: Callable) -> CppOp:
        operator = CppOp(getattr(library, qualified.partition("::")[2]).default)
        torch.library.register_fake(operator.operator, fake)
        return operator

    made = torch_op(
        schema.name,
        signed(in_cpp, arguments, tuple[(Tensor,) * len(schema.returns)]),
        lambda *args: outputs(SimpleNamespace(**dict(zip(arguments, args, strict=True)))),
        differentiable=differentiable,
        backward=in_cpp,
        second_backward=in_cpp,
        register=register,
        numbers=[n for n, kind in arguments.items() if is_float(kind)],
    )
    if differentiable and hasattr(library, "define_recorded"):
        library.define_recorded(schema.name, [[*arguments].index(n) for n in differentiable])
        made.direct = builtin_of(getattr(library, f"{name}_recorded").default)
        made.is_direct = is_unseen  # C++ looks at the arguments
    return made
