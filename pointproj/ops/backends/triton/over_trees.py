"""Operators over two clouds and the trees of their points."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.tree import (
    Tree,
    build_tree,
    build_trees,
    key_of_both,
    sorted_together,
)
from pointproj.ops.bridge.eager import nobody_looks_on
from pointproj.ops.bridge.replay import Replayable
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.clouds import Clouds
from pointproj.ops.registry import Tables

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
        ``call(clouds, tables, *others)``: ``tables`` are the tree of an index; without one, both clouds are
        sorted first. In plain eager mode, where nothing is differentiated, all launches are then replayed
        together.
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
    operator = kernel_op(name, forward, specs, **derivatives)

    def sort_and_run(*args: Any) -> tuple[Tensor, ...]:
        clouds, (key, *others) = Clouds(*args[:5]), args[5:]
        return by_kernels(clouds, *sorted_together(clouds, key), *others)

    together = Replayable(sort_and_run)

    def call(clouds: Clouds, tables: Tables | None, *others: Any) -> tuple[Tensor, ...]:
        by_itself = tables is None and runs_kernels(clouds.query_points)
        if by_itself and nobody_looks_on((clouds.query_points, clouds.reference_points, *others)):
            args = *clouds, key_of_both(clouds), *others
            if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
                return together(*args)
        query_tree, reference_tree = _trees(clouds.detached(), tables)
        return operator(*clouds, list(query_tree), list(reference_tree), *others)

    return call


def _trees(clouds: Clouds, tables: Tables | None) -> tuple[Tables, Tables]:
    """Queries and reference points sorted: queries side by side then meet the same points."""
    if not runs_kernels(clouds.query_points):
        return (), ()
    if tables is None:
        return build_trees(clouds)
    return build_tree(clouds.query_points, clouds.query_offsets, clouds.count), tables


def input_names(by_kernels: Callable[..., Any]) -> list[str]:
    """Of an operator that :func:`tree_op` made."""
    return [*INPUTS, *_others(by_kernels)]


def _others(by_kernels: Callable[..., Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(by_kernels).parameters.values())[3:]
    return {p.name: p.annotation for p in parameters}
