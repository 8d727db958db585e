"""Attention over neighbour lists: the softmax of each query runs over its own neighbours.

For a head h of query i, over the neighbours j of its list,

    w_ij = softmax_j(scale * <query_ih, key_jh> + bias_ijh)          out_ih = sum_j w_ij value_jh

(Vaswani et al., Attention is all you need, 2017, restricted to neighbours). No tensor of all pairs and
channels is made.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops.layers import check_attention, check_neighbors
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, packed_rows
from pointproj.ops.registry import choose, modules


def attend(
    queries: Float[Tensor, "*batch q channels"],
    keys: Float[Tensor, "*batch n channels"],
    values: Float[Tensor, "*batch n channels"],
    neighbors: Neighbors | NeighborList,
    *,
    heads: int = 1,
    bias: Float[Tensor, "*pairs heads"] | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch q channels"]:
    """Attend from each query row to the rows of its neighbours.

    Parameters
    ----------
    queries : (Q, H * D) or (B, Q, H * D) float tensor
        One row for each query point, its heads one after another. float16, bfloat16, float32 or float64; sums
        run in float32 or wider.
    keys, values : (N, H * D) or (B, N, H * D) float tensor
        One row for each reference point, in the queries' dtype.
    neighbors : Neighbors or NeighborList
        From :func:`pointproj.radius_neighbors`, or ``Neighbors(indices, distances)`` with what
        :func:`pointproj.knn` gives, the other way round.
    heads : int
        H.
    bias : (..., H) float tensor, optional
        Added to the logits: for each pair, in the shape of ``neighbors.indices``, one number for each head.
        What depends on relative positions goes in here.
    scale : float, optional
        Multiplies the products; 1 / sqrt(D) by default.
    backend : str
        As for :func:`pointproj.knn`, one of ``"native"`` and ``"torch"``.

    Returns
    -------
    (Q, H * D) or (B, Q, H * D) float tensor
        In the queries' dtype; 0 for a query without neighbours. Differentiable twice in queries, keys, values
        and bias.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    check_neighbors(neighbors, (Neighbors, NeighborList), keys, "keys")
    check_attention(queries, keys, values, neighbors, heads, bias, scale)
    module = modules[choose(backend, queries.device.type, "attend")]
    rows, splits = packed_rows(neighbors, keys, missing=-1)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    packed = (x.reshape(-1, x.shape[-1]).to(dtype).contiguous() for x in (queries, keys, values))
    if bias is None:
        bias = queries.new_empty(0, heads, dtype=dtype)
    bias = bias.flatten(0, -2).to(dtype).contiguous()
    scale = 1 / math.sqrt(keys.shape[-1] // heads) if scale is None else float(scale)
    result = module.attend(*packed, bias, rows.contiguous(), splits, heads, scale)
    return result.view(queries.shape).to(queries.dtype)
