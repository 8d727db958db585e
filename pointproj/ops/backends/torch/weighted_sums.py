"""Sums of features over neighbour lists, one given weight a pair, that never hold the features of all pairs.

With s_i = sum_j w_ij f_j, the first backward for an upstream gradient g_i is

    d f_j = sum_i w_ij g_i          d w_ij = g_i . f_j

and that of <both, (u, v)>

    d g_i = sum_j w_ij u_j + v_ij f_j          d f_j = sum_i v_ij g_i          d w_ij = g_i . u_j

which are three kinds of sums in all: of each query, of each reference point, and of each pair. The products
g_i . f_j of pairs have the same three in their derivatives.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from pointproj.ops.bridge.torch_op import Spec, signed, torch_op
from pointproj.ops.specification.clouds import chunks_of, queries_of
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

REST = 4096  # parts that unused slots are divided into: a GPU sums each part up serially


class PairSums(NamedTuple):
    """Sums over the pairs of neighbour lists, ``rows`` (Q, K), or (M,) with ``row_splits``."""

    rows: Tensor
    row_splits: Tensor | None

    @property
    def queries(self) -> int:
        return len(self.rows) if self.row_splits is None else len(self.row_splits) - 1

    def sums(
        self, result: str, *, features: Tensor, upstream: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """The ``result``, "upstream", "features" or "weights": sums of products of the two others."""
        if result == "upstream":
            return self.of_queries(features, weights)
        if result == "features":
            return self.of_references(upstream, weights, len(features))
        return self.of_pairs(upstream, features)

    def of_queries(self, features: Tensor, weights: Tensor) -> Tensor:
        """Sums over the pairs of each query: (Q, C)."""
        if not (self.rows.numel() and self.queries):
            return features.new_zeros(self.queries, features.shape[1])
        padded = pad(features, (0, 0, 0, 1))
        if self.row_splits is None:
            return embedding_bag(self.rows, padded, per_sample_weights=weights, mode="sum")
        return _sums_of_runs(padded, self.rows, weights, self.row_splits)

    def of_references(self, upstream: Tensor, weights: Tensor, count: int) -> Tensor:
        """Sums over the pairs of each reference point: (N, C).

        Pairs are sorted first: on a GPU this takes half the time of atomics, and the order of sums is fixed.
        """
        sums = upstream.new_zeros(count, upstream.shape[1])
        numbers = torch.arange(self.queries, device=upstream.device)[:, None]
        for at, own in self._chunks(numbers, 1):
            rows, order = self.rows[at].flatten().int().sort(stable=True)
            starts = torch.searchsorted(rows, torch.arange(count + 1, dtype=rows.dtype, device=rows.device))
            queries = own[..., 0].expand_as(self.rows[at]).flatten()[order]
            sums += _sums_of_runs(upstream, queries, weights[at].flatten()[order], starts)
        return sums

    def of_pairs(self, upstream: Tensor, features: Tensor) -> Tensor:
        """Products of each pair, summed over the channels; 0 where there is no neighbour."""
        products = upstream.new_zeros(self.rows.shape)
        padded = pad(features, (0, 0, 0, 1))
        for at, own in self._chunks(upstream, upstream.shape[1]):
            dots = (own * padded[self.rows[at]]).sum(-1)
            products[at] = dots.masked_fill_(self.rows[at] == len(features), 0)
        return products

    def _chunks(self, of_queries: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
        """Some pairs, and what their queries (Q, C) have: (m, 1, C) or (m, C)."""
        if not (self.rows.numel() and self.queries):
            return
        queries = None if self.row_splits is None else queries_of(self.row_splits, len(self.rows))
        for at in chunks_of(self.rows, width):
            yield at, of_queries[at, None] if queries is None else of_queries[queries[at]]


def _sums_of_runs(values: Tensor, rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """Weighted sums over rows of values; the i-th is of those from ``starts[i]`` to ``starts[i + 1]``."""
    total = starts[-1:]
    part = torch.arange(1, REST, device=total.device)
    offsets = torch.cat([starts, total + (len(rows) - total) * part // REST])
    sums = embedding_bag(rows, values, offsets=offsets, per_sample_weights=weights, mode="sum")
    return sums[: len(starts) - 1].clone()


def _product_sums(
    name: str, result: str, factors: tuple[str, str], outputs: Callable[..., tuple]
) -> Callable[..., Tensor]:
    """An operator ``(*factors, rows, row_splits)`` that makes ``result``: see :meth:`PairSums.sums`.

    ``rows`` (Q, K) or (M,) int64 are rows of the features, N where there is no neighbour. ``row_splits``
    (Q + 1,) int64 or None: of (M,) pairs those of query i are at ``row_splits[i]:row_splits[i + 1]``, and
    behind the last one's there is no neighbour. It is differentiable twice in both factors.
    """
    kinds = dict.fromkeys((*factors, "rows"), Tensor) | {"row_splits": Tensor | None}

    def forward(*args: Any) -> tuple[Tensor]:
        return (PairSums(*args[2:]).sums(result, **dict(zip(factors, args[:2], strict=True))),)

    def known(grads: Tensors, saved: Saved) -> tuple[dict[str, Tensor], PairSums]:
        *values, rows, row_splits = saved.inputs.values()
        return {**dict(zip(factors, values, strict=True)), result: grads[0]}, PairSums(rows, row_splits)

    def backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
        values, lists = known(grads, saved)
        return tuple(lists.sums(factor, **values) if needs[factor] else None for factor in factors)

    def second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
        values, lists = known(grads, saved)
        first, second = ({**values, factor: u} for factor, u in zip(factors, directions, strict=True))
        return (
            lists.sums(result, **first) + lists.sums(result, **second),
            lists.sums(factors[0], **second),
            lists.sums(factors[1], **first),
        )

    return torch_op(
        f"pointproj::{name}",
        signed(forward, kinds, tuple[Tensor]),
        outputs,
        differentiable=factors,
        backward=backward,
        second_backward=second_backward,
    )


def sums_spec(features: Tensor, weights: Tensor, rows: Tensor, row_splits: Tensor | None) -> tuple[Spec]:
    """Shape and dtype of the sums of each query."""
    queries = (rows if row_splits is None else row_splits[1:]).shape[0]
    return (((queries, features.shape[1]), features.dtype),)


# The sum (Q, C) of weight times feature over each query's pairs. Weights are finite also where there is no
# neighbour.
weighted_sums = _product_sums(
    "weighted_sums",
    "upstream",
    ("features", "weights"),
    sums_spec,
)
# The product of each pair's query row and feature row, 0 where there is no neighbour.
pair_products = _product_sums(
    "pair_products",
    "weights",
    ("upstream", "features"),
    lambda upstream, features, rows, row_splits: ((rows.shape, features.dtype),),
)
