"""Operators over two clouds and the trees of their points."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.tree import Tree
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.clouds import Clouds

INPUTS = {
    "query_points": Tensor,
    "query_offsets": Tensor | None,
    "reference_points": Tensor,
    "reference_offsets": Tensor | None,
    "clouds": int,
    "query_tree": list[Tensor],
    "reference_tree": list[Tensor],
}


def tree_op(
    name: str,
    by_kernels: Callable[..., tuple[Tensor, ...]],
    by_torch: Callable[..., tuple[Tensor, ...]],
    outputs: Callable[..., tuple[Spec, ...]],
    **derivatives: Any,
) -> Callable[..., Any]:
    """Register an operator of ``INPUTS`` and others.

    Parameters
    ----------
    name : str
        ``"namespace::operator"``.
    by_kernels : callable
        ``by_kernels(clouds, queries, references, *others)``, annotated as :func:`torch_op` asks for it.
    by_torch : callable
        ``by_torch(clouds, *others)``: the same where there are no kernels, and no trees.
    outputs : callable
        ``outputs(clouds, *others)``: shape and dtype of every output.
    **derivatives
        As for :func:`torch_op`.

    Returns
    -------
    callable
        The operator: it takes the inputs, then the others.
    """

    def forward(*args: Any) -> tuple[Tensor, ...]:
        clouds, (query_tree, reference_tree, *others) = Clouds(*args[:5]), args[5:]
        if not runs_kernels(clouds.query_points):
            return by_torch(clouds, *others)
        return by_kernels(clouds, Tree(*query_tree), Tree(*reference_tree), *others)

    forward.__signature__ = inspect.Signature(
        [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
            for n, annotation in (INPUTS | _others(by_kernels)).items()
        ],
        return_annotation=inspect.signature(by_kernels).return_annotation,
    )
    specs = lambda *args: outputs(Clouds(*args[:5]), *args[7:])  # noqa: E731
    return kernel_op(name, forward, specs, **derivatives)


def input_names(by_kernels: Callable[..., Any]) -> list[str]:
    """Of an operator that :func:`tree_op` made."""
    return [*INPUTS, *_others(by_kernels)]


def _others(by_kernels: Callable[..., Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(by_kernels).parameters.values())[3:]
    return {p.name: p.annotation for p in parameters}
