"""Attention over lists of neighbours by other libraries."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pointproj.benchmark.implementations import of_library
from pointproj.benchmark.workloads import ATTEND_CHANNELS, ATTEND_K, HEADS, Inputs

BLOCK = "physicsnemo.nn.module.point_transformer_attention"


def _gathered(inputs: Inputs, *tensors: Tensor) -> list[Tensor]:
    """Queries (N, H, D), and keys and values of the neighbours (N, K, H, D)."""
    query, *others = (tensor.unflatten(-1, (HEADS, -1)) for tensor in tensors)
    return [query, *(other[inputs.neighbors.indices] for other in others)]


def attention_by_torch(inputs: Inputs, *tensors: Tensor) -> Tensor:
    """Torch's own function, with a row of one query for each point and head."""
    query, keys, values = _gathered(inputs, *tensors)
    found = scaled_dot_product_attention(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    return found[:, :, 0].flatten(1)


def attention_by_einsum(inputs: Inputs, *tensors: Tensor) -> Tensor:
    """Products, softmax and sums written out, for a compiler to fuse."""
    query, keys, values = _gathered(inputs, *tensors)
    weights = torch.einsum("nhd,nkhd->nkh", query / math.sqrt(query.shape[-1]), keys).softmax(1)
    return torch.einsum("nkh,nkhd->nhd", weights, values).flatten(1)


@functools.cache
def _physicsnemo_block(device: torch.device) -> Callable:
    sizes = {"dim": ATTEND_CHANNELS, "num_heads": HEADS, "neighbor_k": ATTEND_K, "dilation": 1}
    block = of_library(f"{BLOCK}.LocalPointTransformerBlock")(**sizes, mlp_ratio=1, dropout=0.0, use_te=False)
    return block.to(device).requires_grad_(False)._attend


def physicsnemo_attention(inputs: Inputs, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Only the attention of its block, without search and output layers. The block makes its own values."""
    points, rows = inputs.points[0], inputs.neighbors.indices
    return _physicsnemo_block(query.device)(query, keys, points, points, rows, None)
