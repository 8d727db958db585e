"""Sums over neighbour lists of what a network makes of each pair, a chunk of pairs at a time.

A list of M pairs and a network of width W need M x W numbers for each of its layers when all pairs go through
it at once, and autograd keeps them. Here a chunk of whole rows goes through at a time; the backward computes
each chunk again. What is held is the list, the sums, and the layers of one chunk.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pointproj.ops.clouds import queries_of

ELEMENTS = {"cpu": 2**23, "cuda": 2**26}  # numbers of the widest layer in one chunk


class Inputs(NamedTuple):
    """What the network takes: tensors, or None for what it does not read."""

    of_queries: Tensor  # (Q, E)
    of_points: Tensor  # (..., N, H)
    features: Tensor | None  # (..., N, C)
    of_pairs: Tensor | None  # (M, 1)
    parameters: tuple[Tensor, ...]


# Takes the inputs of a chunk of R queries and P pairs, (R, E), (..., P, H), (..., P, C), (P, 1) and the
# parameters, and the query of each pair, (P,) rows of the R. Gives (..., P, C).
Network = Callable[[Inputs, Tensor], Tensor]


def sum_pairs(network: Network, inputs: Inputs, row_splits: Tensor, indices: Tensor, width: int) -> Tensor:
    """For each query, the sum of ``network`` over its pairs.

    Parameters
    ----------
    network : callable
        A :data:`Network` whose result for a pair depends on that pair alone, and is the same each time.
    inputs : Inputs
        Of all queries, points and pairs. Each tensor gets its gradient; differentiable twice, where the
        second derivative holds all pairs at once.
    row_splits : (Q + 1,) int64 tensor
        The pairs of query i are ``row_splits[i]:row_splits[i + 1]``. Copied to the host, which waits for it.
    indices : (M,) int64 tensor
        The point of each pair.
    width : int
        Numbers that the widest layer of the network holds for each pair, all batches together.

    Returns
    -------
    (..., Q, C) float tensor
        In float32 or wider; 0 for a query without pairs.
    """
    pairs_at_once = max(1, ELEMENTS.get(indices.device.type, ELEMENTS["cuda"]) // width)
    rows, pairs = _chunk_sizes(row_splits.tolist(), pairs_at_once)
    if len(rows) <= 1:
        return sum_all_pairs(network, inputs, row_splits, indices)
    # Gradients of the points are added up chunk by chunk, in the dtype that the chunks are cut from.
    narrow = [None if tensor is None else tensor.dtype for tensor in inputs[1:3]]
    wide = [None if tensor is None else _widened(tensor) for tensor in inputs[1:3]]

    def of_chunk(counts: Tensor, indices: Tensor, of_queries: Tensor, of_pairs: Tensor | None) -> Tensor:
        of_points, features = (
            None if tensor is None else tensor.index_select(-2, indices).to(dtype)
            for tensor, dtype in zip(wide, narrow, strict=True)
        )
        some = Inputs(of_queries, of_points, features, of_pairs, inputs.parameters)
        return _row_sums(network, some, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

    of_pairs = [None] * len(rows) if inputs.of_pairs is None else inputs.of_pairs.split(pairs)
    cut = row_splits.diff().split(rows), indices.split(pairs), inputs.of_queries.split(rows), of_pairs
    again = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(of_chunk, *some, **again) for some in zip(*cut, strict=True)], dim=-2)


def _chunk_sizes(splits: list[int], pairs_at_once: int) -> tuple[list[int], list[int]]:
    """Rows and pairs of chunks: neither are more than ``pairs_at_once``, unless a single row has more."""
    cuts = [0]
    for row in range(1, len(splits)):
        first = cuts[-1]
        full = splits[row] - splits[first] > pairs_at_once or row - first > pairs_at_once
        if full and row - 1 > first:
            cuts.append(row - 1)
    ends = itertools.pairwise([*cuts, len(splits) - 1])
    return tuple(zip(*((last - first, splits[last] - splits[first]) for first, last in ends), strict=True))


def sum_all_pairs(network: Network, inputs: Inputs, row_splits: Tensor, indices: Tensor) -> Tensor:
    """The same with all pairs at once, for a network that is not to be called twice."""
    of_points, features = (
        None if tensor is None else tensor.index_select(-2, indices) for tensor in inputs[1:3]
    )
    return _row_sums(network, inputs._replace(of_points=of_points, features=features), row_splits)


def _row_sums(network: Network, of_pairs: Inputs, row_splits: Tensor) -> Tensor:
    queries = queries_of(row_splits, of_pairs.of_points.shape[-2])
    values = _widened(network(of_pairs, queries))
    sums = values.new_zeros(*values.shape[:-2], len(row_splits) - 1, values.shape[-1])
    return sums.index_add(-2, queries, values)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
