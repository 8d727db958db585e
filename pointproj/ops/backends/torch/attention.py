"""Attention over neighbour lists, head by head, without the rows of all pairs."""

import torch
from torch import Tensor

from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.backends.torch.weighted_sums import pair_products
from pointproj.ops.specification.clouds import rows_in_packed

DIFFERENTIABLE = ("queries", "keys", "values", "bias")


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    rows: Tensor,
    row_splits: Tensor | None,
    heads: int,
    scale: float,
) -> Tensor:
    """The specification, for packed tensors of one dtype: (Q, H * D), (N, H * D) twice, (pairs or 0, H)."""
    pairs = ListedPairs(rows_in_packed(rows, keys, missing=keys.shape[0]), row_splits, keys.shape[0])
    of_heads = (x.unflatten(-1, (heads, -1)).unbind(1) for x in (queries, keys, values))
    results = []
    for head, (query, key, value) in enumerate(zip(*of_heads, strict=True)):
        logits = (
            scale * pair_products(query.contiguous(), key.contiguous(), pairs.rows, row_splits)[..., None]
        )
        if len(bias):
            logits = logits + bias[:, head].view(logits.shape)
        known = torch.where(pairs.exists, logits.detach(), -torch.inf)
        largest = pairs.extreme("amax", known).nan_to_num(nan=torch.nan, neginf=0.0)
        largest = pairs.of_pairs(largest)
        weights = torch.where(pairs.exists, logits, largest).sub(largest).exp()
        weights = torch.where(pairs.exists, weights, 0.0)
        results.append(pairs.weighted(value.contiguous(), pairs.normalized(weights)))
    return torch.cat(results, dim=-1)
