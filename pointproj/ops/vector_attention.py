"""Grouped vector attention over neighbour lists.

With r_ij = reference point j minus query point i and d_ij = position_layers(r_ij), over the neighbours j of
query i, for each group g of channels

    w_ijg = softmax_j(score_layers(query_i - key_j + d_ij)_g)      out_ig = sum_j w_ijg (value_j + d_ij)_g

(Zhao et al., Point transformer, 2021; Wu et al., Point transformer V2, 2022). No tensor of all pairs and
channels is made.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.layers import Layers, check_attention, check_lists, check_neighbors, checked_layers
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, packed_rows
from pointproj.ops.registry import choose, modules


def vector_attend(
    queries: Float[Tensor, "*batch q channels"],
    keys: Float[Tensor, "*batch n channels"],
    values: Float[Tensor, "*batch n channels"],
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    neighbors: Neighbors | NeighborList,
    *,
    groups: int,
    position_layers: Layers,
    score_layers: Layers,
    activation: str = "relu",
    backend: str = "auto",
) -> Float[Tensor, "*batch q channels"]:
    """Attend from each query to its neighbours with one weight for each group of channels.

    Parameters
    ----------
    queries : (Q, C) or (B, Q, C) float tensor
        One row for each query point. float16, bfloat16, float32 or float64; all is computed in float32
        or wider.
    keys, values : (N, C) or (B, N, C) float tensor
        One row for each reference point, in the queries' dtype.
    query_points, reference_points : (Q, D) and (N, D), or (B, Q, D) and (B, N, D), float32 or float64 tensor
        The points that were searched.
    neighbors : Neighbors or NeighborList
        As for :func:`pointproj.attend`. An index of -1 leaves a neighbour out.
    groups : int
        Parts of the channels, a divisor of C.
    position_layers, score_layers : sequence of (weight, bias), or torch.nn.Sequential
        As the layers of :func:`pointproj.edge_mlp`: from D to C channels, and from C to ``groups``.
    activation : str
        As for :func:`pointproj.edge_mlp`, between layers that are given as a sequence.
    backend : str
        As for :func:`pointproj.knn`, one of ``"triton"`` and ``"torch"``.

    Returns
    -------
    (Q, C) or (B, Q, C) float tensor
        In the queries' dtype; 0 for a query without neighbours. Differentiable twice in all rows, points and
        layers.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, and for other layers.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    check_neighbors(neighbors, (Neighbors, NeighborList), keys, "keys")
    arguments.check_points(query_points, reference_points)
    arguments.check_features(keys, reference_points, name="keys")
    check_lists(neighbors, query_points, reference_points)
    check_attention(queries, keys, values, neighbors, groups, None, None, "groups")
    dtype = torch.promote_types(queries.dtype, torch.float32)
    layers, kinds = [], []
    channels = keys.shape[-1]
    for name, given, inputs, outputs in (
        ("position_layers", position_layers, query_points.shape[-1], channels),
        ("score_layers", score_layers, channels, groups),
    ):
        made, kind = checked_layers(name, given, activation, keys)
        if (made[0][0].shape[1], len(made[-1][0])) != (inputs, outputs):
            raise ValueError(
                f"{name} must lead from {inputs} to {outputs} channels; got {made[0][0].shape[1]} to "
                f"{len(made[-1][0])}"
            )
        layers.append([tensor.to(dtype) for layer in made for tensor in layer])
        kinds.extend(kind)
    missing = -1 if isinstance(neighbors, Neighbors) else math.prod(keys.shape[:-1])
    rows, splits = packed_rows(neighbors, keys, missing)
    points = (p.flatten(0, -2).contiguous() for p in (reference_points, query_points))
    packed = (x.flatten(0, -2).to(dtype).contiguous() for x in (keys, values, queries))
    module = modules[choose(backend, queries.device.type, "vector_attend")]
    result = module.vector_attend(
        next(points), next(packed), next(packed), next(points), next(packed), *layers, rows.contiguous(),
        splits, tuple(kinds),
    )  # fmt: skip
    return result.view(queries.shape).to(queries.dtype)
