"""Edge networks: an MLP on every pair of a neighbour list, reduced over each query's neighbours.

With r_ij = reference point j minus query point i, over the neighbours j of query i,

    out_i = reduce_j  w_ij MLP([f_j, r_ij, |r_ij|, g_i])  (times f_j, if asked)

This is the edge convolution of Wang et al., Dynamic graph CNN, 2019, PointNet++'s set abstraction (Qi et
al., 2017), and the integral transform of Li et al., Neural operator: graph kernel network, 2020. The first
layer is linear, so features are multiplied by it before they are paired. So are positions, unless the
distance is asked or the backend forms relative positions in its kernels: W r_ij = W (p_j - o) - W (p_i - o),
with a median o of the reference points. The last is linear too, so sums and means are multiplied by it. No
tensor of all pairs and channels is made.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.layers import (
    MOST_LAYERS,
    Layer,
    Layers,
    check_lists,
    check_neighbors,
    check_one_a_pair,
    check_query_features,
    checked_layers,
)
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, packed_rows
from pointproj.ops.registry import Backend, choose, modules
from pointproj.ops.specification.clouds import linear_of_rows

REDUCTIONS = ("mean", "sum", "max")
OF_MEDIAN = 128  # points, spread over the rows


def edge_mlp(
    features: Float[Tensor, "*batch n c"],
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    neighbors: Neighbors | NeighborList,
    layers: Layers,
    *,
    query_features: Float[Tensor, "*batch q channels"] | None = None,
    with_distance: bool = False,
    multiply_features: bool | Literal["only"] | Float[Tensor, "*batch n out"] = False,
    activation: str = "gelu",
    reduce: str = "mean",
    weights: Float[Tensor, "*pairs"] | None = None,
    reference_weights: Float[Tensor, "*batch n"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch q out"]:
    """Apply an MLP to every pair of a neighbour list, and reduce over each query's neighbours.

    The input of the MLP is, in this order: the feature of the neighbour, its position relative to the query
    (reference minus query), the distance if asked, and the feature of the query if given.

    Parameters
    ----------
    features : (N, C) or (B, N, C) float tensor
        Of the reference points, packed ones for ragged batches; C may be 0. float16, bfloat16, float32 or
        float64; sums run in float32 or wider.
    query_points, reference_points : (Q, D) and (N, D), or (B, Q, D) and (B, N, D), float32 or float64 tensor
        The points that were searched; with no coordinates, D = 0, the MLP gets no position.
    neighbors : Neighbors or NeighborList
        From :func:`pointproj.radius_neighbors`; or ``Neighbors(indices, distances)`` with what
        :func:`pointproj.knn` gives, the other way round.
    layers : sequence of (weight, bias), or torch.nn.Sequential
        One to four linear layers, as of ``torch.nn.Linear``, of at most 512 outputs each: weights (out, in)
        and biases (out,). They are converted to the features' dtype. Of a ``Sequential``, the activations are
        those between its layers, and one at its end is applied too.
    query_features : (Q, G) or (B, Q, G) float tensor, optional
        Of the query points.
    with_distance : bool
        Whether the MLP gets the distance to the neighbour. Relative positions are then formed for each pair.
        Without it, they may be differences of products whose rounding is that of the cloud's extent: about
        the machine epsilon times the distance of the pair from the median of the reference points (of each
        cloud in a dense batch, of all in a ragged one), instead of times the distance to the neighbour.
    multiply_features : bool, "only" or (..., N, out) float tensor
        Whether the MLP's result, of C channels, is multiplied by the neighbour's feature; ``"only"``:
        which is then no input of the MLP. A tensor has what to multiply by, one row for each reference
        point; features are then an input of the MLP alone.
    activation : {"gelu", "gelu_tanh", "relu", "leaky_relu", "silu", "tanh"}
        Between layers that are given as a sequence.
    reduce : {"mean", "sum", "max"}
        ``"mean"`` divides by the sum of the weights (0 where that is 0). ``"max"`` takes the largest of each
        channel, and gives its gradient to the first of those that are equal.
    weights : float tensor, optional
        Of each pair, in the shape of ``neighbors.indices``; in slots without a neighbour they are not used.
    reference_weights : (..., N) float tensor, optional
        Of each reference point, such as areas of mesh cells, for a quadrature. They multiply the weights.
    backend : str
        As for :func:`pointproj.knn`, one of ``"triton"`` and ``"torch"``.

    Returns
    -------
    (Q, out) or (B, Q, out) float tensor
        In the features' dtype; 0 for a query without neighbours. Differentiable twice in features, both
        sets of points, layers, weights and factors, with subgradient 0 of the distance 0. A point that is
        not finite makes NaN of its own pairs.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, and for other layers.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    check_neighbors(neighbors, (Neighbors, NeighborList), features, least=0)
    arguments.check_points(query_points, reference_points, nowhere=not with_distance)
    arguments.check_features(features, reference_points, least=0)
    check_lists(neighbors, query_points, reference_points)
    if not isinstance(with_distance, bool):
        raise TypeError(f"with_distance must be a bool; got {with_distance!r}")
    check_reduce(reduce)
    check_query_features(query_features, query_points)
    if weights is not None:
        check_one_a_pair("weights", weights, neighbors.indices)
    arguments.check_reference_weights(reference_weights, features)
    given, kind = checked_layers("layers", layers, activation, features)
    only = isinstance(multiply_features, str) and multiply_features == "only"
    columns = _columns(given[0], features, query_points, query_features, with_distance, only)
    factors = _factors(multiply_features, features, given)
    count = math.prod(features.shape[:-1])
    weighted = weights is not None or reference_weights is not None
    real = torch.promote_types(features.dtype, torch.float32)
    last, has_mean = None, reduce == "mean"
    if len(given) > 1 and reduce != "max" and not (factors is not None or kind.at_end):
        last, kind = given.pop(), kind._replace(at_end=True)
    module = modules[choose(backend, features.device.type, "edge_mlp")]
    sums = module.edge_sums if len(given) == 1 and factors is None and reduce != "max" else None
    # Kernels and chunks know which rows are none; only sums of weights need to be told.
    told = weighted or (reduce != "max" and sums is None)
    rows, splits = packed_rows(neighbors, features, missing=count if told else -1)
    pairs = ListedPairs(rows, splits, count) if told else None
    pair_weights = _pair_weights(pairs, weights, reference_weights, real) if weighted else None
    empty, none = features.new_empty(0, 0, dtype=real), features.new_empty(0, dtype=real)
    places = [points.flatten(0, -2) for points in (reference_points, query_points)]
    first = columns.place.to(real), columns.bias.to(real)
    product = functools.partial(_product, module)
    if with_distance or (sums is not None and query_points.shape[-1] > 0):
        hidden, of_queries = _first_layer(product, columns, features, query_features, empty)
    else:
        centred = _centred(reference_points, query_points)
        hidden, of_queries = _first_layer(product, columns, features, query_features, empty, *centred, *first)
        places, first = [points.detach()[:, :0] for points in places], (first[0].detach()[:, :0], none)
    of_layers = [*first, *(tensor.to(real) for layer in given[1:] for tensor in layer)]
    of_layers += [empty, none] * (MOST_LAYERS - len(given))
    tensors = [
        places[0], hidden, empty if factors is None else factors, places[1], of_queries,
        none if pair_weights is None else pair_weights, *of_layers, rows,
    ]  # fmt: skip
    inputs = *(tensor.contiguous() for tensor in tensors), splits, *kind, with_distance
    if sums is None:
        reduced = module.edge_mlp(*inputs, reduce == "max")
    else:
        reduced, total = sums(*inputs, has_mean and not weighted, real if weighted else features.dtype)
        total = total[:, None]
    if told:
        total = pairs.summed(pairs.exists.to(real) if pair_weights is None else pair_weights[..., None])
        if has_mean and weighted:
            reduced = torch.where(total != 0, reduced / torch.where(total != 0, total, 1.0), 0.0)
        elif has_mean:
            reduced = reduced / total.clamp(min=1.0)
    if last is not None:
        counts = (total != 0).to(real) if has_mean else total
        multiplied = linear_of_rows if weighted else product  # weights may have gradients
        reduced = multiplied(reduced.to(features.dtype), *last, counts=counts[:, 0])
    return reduced.view(*query_points.shape[:-1], reduced.shape[-1]).to(features.dtype)


def check_reduce(reduce: str) -> None:
    """The name of a reduction."""
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}; got {reduce!r}")


def _factors(multiply_features: bool | str | Tensor, features: Tensor, layers: list[Layer]) -> Tensor | None:
    """What the results of pairs are multiplied by: (N, out), or None."""
    if isinstance(multiply_features, Tensor):
        expected = "one row of factors for each reference point"
        arguments.check_dtype("multiply_features", multiply_features, arguments.FEATURES, "a float tensor")
        if multiply_features.ndim != features.ndim or multiply_features.shape[:-1] != features.shape[:-1]:
            raise ValueError(
                f"multiply_features must have shape {(*features.shape[:-1], 'out')}, {expected}; "
                f"got {tuple(multiply_features.shape)}"
            )
        arguments.check_device("multiply_features", multiply_features, features)
        factors = multiply_features
    elif multiply_features in (True, "only"):
        factors = features
    elif multiply_features is False:
        return None
    else:
        raise ValueError(
            f"multiply_features must be a bool, 'only' or a tensor of factors; got {multiply_features!r}"
        )
    if len(layers[-1][0]) != factors.shape[-1]:
        name = "multiply_features" if factors is multiply_features else "features"
        raise ValueError(
            f"with multiply_features, the last of layers must have {factors.shape[-1]} outputs, one for "
            f"each channel of {name}; got {len(layers[-1][0])}"
        )
    return factors.flatten(0, -2).to(features.dtype)


def _product(module: Backend, *args: Tensor | None, **counts: Tensor) -> Tensor:
    """``linear_of_rows`` of a backend that has it and serves these, or of torch."""
    made = None if module.linear_of_rows is None else module.linear_of_rows(*args, **counts)
    return linear_of_rows(*args, **counts) if made is None else made


def _first_layer(
    product: Callable[..., Tensor],
    columns: "_Columns",
    features: Tensor,
    query_features: Tensor | None,
    empty: Tensor,
    *of_places: Tensor,
) -> tuple[Tensor, Tensor]:
    """What the first layer makes of reference points and of queries, one row for each; empty if nothing.

    Given both sets of points around o, and the layer of places, also ``W (p_j - o)``, ``b - W (p_i - o)``.
    """
    hidden = of_queries = empty
    rows = features.flatten(0, -2)
    rows = rows if columns.feature.shape[1] else rows[:, :0]
    own = rows.new_empty(0, 0) if query_features is None else query_features.flatten(0, -2).to(rows.dtype)
    if of_places:
        references, queries, weight, bias = of_places
        references, queries = (points.flatten(0, -2).to(weight.dtype) for points in (references, queries))
        own = rows.new_empty(queries.shape[0], 0) if query_features is None else own
        hidden = product(rows, columns.feature, None, references, weight)
        return hidden, product(own, columns.query, bias, -queries, weight)
    if rows.shape[1]:
        hidden = product(rows, columns.feature)
    if query_features is not None:
        of_queries = product(own, columns.query)
    return hidden, of_queries


def _centred(reference_points: Tensor, query_points: Tensor) -> list[Tensor]:
    """Both sets of points less the median of some reference points, of each dense cloud.

    Single points far away do not move it, and then nothing of other points is lost to rounding.
    """
    if not reference_points.numel():
        return [reference_points, query_points]
    rows = torch.arange(OF_MEDIAN, device=reference_points.device) * reference_points.shape[-2] // OF_MEDIAN
    some = reference_points.detach().index_select(-2, rows).sort(-2).values
    centre = some[..., OF_MEDIAN // 2, None, :].nan_to_num(0.0, 0.0, 0.0)
    return [points - centre for points in (reference_points, query_points)]


class _Columns(NamedTuple):
    """The first layer: its columns for features, places and query features, and its bias."""

    feature: Tensor
    place: Tensor
    query: Tensor
    bias: Tensor


def _columns(
    layer: Layer,
    features: Tensor,
    query_points: Tensor,
    query_features: Tensor | None,
    with_distance: bool,
    only: bool,
) -> _Columns:
    """The first layer in parts."""
    weight, bias = layer
    sizes = {
        "of the feature": 0 if only else features.shape[-1],
        "of the relative position": query_points.shape[-1],
        "of the distance": int(with_distance),
        "of the query's feature": 0 if query_features is None else query_features.shape[-1],
    }
    if weight.shape[1] != sum(sizes.values()):
        listed = ", ".join(f"{size} {name}" for name, size in sizes.items() if size)
        raise ValueError(
            f"the weight of layers[0] must have {sum(sizes.values())} columns ({listed}); "
            f"got {weight.shape[1]}"
        )
    of_features, dims, distance, of_queries = sizes.values()
    return _Columns(*weight.split([of_features, dims + distance, of_queries], dim=1), bias)


def _pair_weights(
    pairs: ListedPairs, weights: Tensor | None, reference_weights: Tensor | None, real: torch.dtype
) -> Tensor | None:
    """One weight a pair, 0 where there is none; None if all are 1."""
    made = None
    if weights is not None:
        made = torch.where(pairs.exists, weights.reshape(pairs.exists.shape).to(real), 0.0)
    if reference_weights is not None:
        own = pairs.gathered(reference_weights.reshape(-1, 1).to(real))
        made = own if made is None else made * own
    return None if made is None else made[..., 0]
