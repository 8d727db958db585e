"""``NeighborSearch`` and ``IntegralTransform`` of neuraloperator 2.0, and a model with both replaced.

    model = replace_search(GINO(...))

The search is exact in the points' dtype and holds the pairs that it finds. The library's own, where Open3D is
missing, holds all ``m x n`` distances; it computes them by a matrix product, so a pair at the very radius may
be in the one list and not in the other, and it counts pairs in float32, wrong beyond 2^24.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it
from torch.utils.checkpoint import checkpoint

from pointproj.compat.pairs import coordinates, number_or_tensor, squared_lengths, within
from pointproj.ops.clouds import queries_of

SMALLEST_DISTANCE = 1e-7  # what the library takes a distance of 0 for
ELEMENTS = {"cpu": 2**23, "cuda": 2**26}  # numbers of the widest layer in one chunk of pairs
TRANSFORMS = ("linear_kernelonly", "linear", "nonlinear_kernelonly", "nonlinear")


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


class NeighborSearch(nn.Module):
    """All points of ``data`` within a radius of each query, as CSR.

    Parameters
    ----------
    use_open3d : bool
        Accepted and not used.
    return_norm : bool
        Return the squared distances too, as ``weights``. The library does so in its own search alone, and
        leaves them out with Open3D.
    """

    def __init__(self, use_open3d: bool = True, return_norm: bool = False) -> None:
        super().__init__()
        self.use_open3d = False
        self.return_norm = return_norm

    def forward(self, data: Tensor, queries: Tensor, radius: float) -> dict[str, Tensor]:
        """Find the neighbours, for which the host waits: their number is the size of the result.

        Parameters
        ----------
        data : (n, d) float tensor
            The points to find. With d above 3 all pairs are compared, in chunks.
        queries : (m, d) float tensor
            Where to search from.
        radius : float
            In the units of the points, 0 or more.

        Returns
        -------
        dict
            ``neighbors_index`` (M,) int64, rows of ``data``, ascending for each query;
            ``neighbors_row_splits`` (m + 1,) int64; with ``return_norm`` also ``weights`` (M,), the squared
            distances with gradients to both sets of points, 1e-14 (no gradient) where the points coincide.

        Raises
        ------
        TypeError, ValueError
            For points that do not go together, and for a negative radius.
        """
        queries, data = coordinates(queries=queries, data=data)
        reach = number_or_tensor("radius", radius, (), data)
        found = within(queries.detach(), data.detach(), reach)
        result = {"neighbors_index": found.rows, "neighbors_row_splits": found.row_splits}
        if self.return_norm:
            squared = squared_lengths(queries[found.queries] - data[found.rows])
            result["weights"] = torch.where(squared == 0, SMALLEST_DISTANCE**2, squared)
        return result


class IntegralTransform(nn.Module):
    """Sum or mean over each query's neighbours of a kernel network, times the function there.

    Parameters, ``state_dict`` and results are the library's. With its ``LinearChannelMLP`` without dropout as
    kernel, no layer is held for all pairs, whatever the ``transform_type``: the first layer is linear in x, y
    and f(y), so it is computed for points instead of pairs, and the others for a chunk of pairs at a time,
    computed again in the backward. Any other ``channel_mlp`` is called once, on all pairs.

    As in the library: ``linear_kernelonly`` multiplies by ``f_y`` if it is given, ``weights`` are one for
    each pair, and weighted sums are never divided by their number. Other than there: weights work without a
    batch dimension too, and float64 stays float64.

    Parameters
    ----------
    channel_mlp : nn.Module, optional
        The kernel, from dim y + dim x (nonlinear transforms: + dim f) channels.
    channel_mlp_layers : list of int, optional
        Widths of a ``LinearChannelMLP`` that is made if no ``channel_mlp`` is given.
    channel_mlp_non_linearity : callable
        Of that one.
    transform_type : str
        "linear_kernelonly", "linear", "nonlinear_kernelonly" or "nonlinear".
    weighting_fn : callable, optional
        Turns the weights of the pairs, (1, M, 1), into factors.
    reduction : str
        "sum" or "mean".
    use_torch_scatter : bool
        Accepted and not used.
    """

    def __init__(
        self,
        channel_mlp: nn.Module | None = None,
        channel_mlp_layers: list[int] | None = None,
        channel_mlp_non_linearity: Callable[[Tensor], Tensor] = F.gelu,
        transform_type: str = "linear",
        weighting_fn: Callable[[Tensor], Tensor] | None = None,
        reduction: str = "sum",
        use_torch_scatter: bool = True,
    ) -> None:
        super().__init__()
        from neuralop.layers.channel_mlp import LinearChannelMLP

        assert channel_mlp is not None or channel_mlp_layers is not None, (
            "expected channel_mlp or channel_mlp_layers, got neither"
        )
        if transform_type not in TRANSFORMS:
            raise ValueError(f"transform_type: expected one of {', '.join(TRANSFORMS)}; got {transform_type}")
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction: expected sum or mean, got {reduction}")
        if channel_mlp is None:
            channel_mlp = LinearChannelMLP(channel_mlp_layers, channel_mlp_non_linearity)
        self.channel_mlp = channel_mlp
        self.transform_type = transform_type
        self.weighting_fn = weighting_fn
        self.reduction = reduction
        self.use_torch_scatter = use_torch_scatter
        self._in_layers = type(channel_mlp) is LinearChannelMLP and channel_mlp.dropout is None

    def forward(
        self,
        y: Tensor,
        neighbors: dict[str, Tensor],
        x: Tensor | None = None,
        f_y: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Integrate over the neighbours.

        Parameters
        ----------
        y : (n, d1) float tensor
            Points, or their embeddings.
        neighbors : dict
            From :class:`NeighborSearch`; its ``weights`` go before the argument.
        x : (m, d2) float tensor, optional
            Queries; None takes ``y``.
        f_y : (n, d3) or (batch, n, d3) float tensor, optional
            The function on ``y``; None integrates the kernel alone.
        weights : (M,) float tensor, optional
            One for each pair.

        Returns
        -------
        (m, d4) or (batch, m, d4) float tensor
            float32 or wider; 0 for a query without neighbours. Differentiable twice.

        Raises
        ------
        KeyError
            If there is a ``weighting_fn`` and there are no weights.
        """
        x = y if x is None else x
        indices, row_splits = neighbors["neighbors_index"], neighbors["neighbors_row_splits"]
        factors = self._factors(neighbors.get("weights", weights))
        if self._in_layers:
            network, inputs, width = self._layered(y, x, f_y, factors)
            sums = sum_pairs(network, inputs, row_splits, indices, width)
        else:
            inputs = Inputs(x, y, f_y, factors, ())
            sums = sum_all_pairs(self._whole, inputs, row_splits, indices)
        if self.reduction == "mean" and factors is None:
            sums = sums / row_splits.diff().clamp(min=1).unsqueeze(-1)
        return sums

    def _factors(self, weights: Tensor | None) -> Tensor | None:
        """(M, 1) factors of the pairs, if there are any."""
        if weights is None:
            if self.weighting_fn is not None:
                raise KeyError(
                    "expected weights in neighbors for the weighting_fn: NeighborSearch(return_norm=True)"
                )
            return None
        weights = weights.unsqueeze(-1).unsqueeze(0)
        return (weights if self.weighting_fn is None else self.weighting_fn(weights)).squeeze(0)

    def _layered(
        self, y: Tensor, x: Tensor, f_y: Tensor | None, factors: Tensor | None
    ) -> tuple[Network, Inputs, int]:
        """The kernel without what its first layer makes of the points, its inputs, and its width."""
        first, *others = self.channel_mlp.fcs
        sizes = [y.shape[-1], x.shape[-1]]
        weight_y, weight_x, weight_f = first.weight.split([*sizes, first.in_features - sum(sizes)], dim=1)
        of_points = F.linear(y, weight_y)
        if self._reads(f_y):
            of_points = of_points + F.linear(f_y, weight_f)
        parameters = (weight_x, first.bias, *(p for layer in others for p in (layer.weight, layer.bias)))

        def network(some: Inputs, queries: Tensor) -> Tensor:
            weight, bias, *rest = some.parameters
            hidden = some.of_points + F.linear(some.of_queries, weight, bias).index_select(0, queries)
            for weight, bias in zip(rest[::2], rest[1::2], strict=True):
                hidden = F.linear(self.channel_mlp.non_linearity(hidden), weight, bias)
            return _weighted(hidden, some)

        features = f_y if self._multiplies(f_y) else None
        batch = 1 if f_y is None else f_y.shape[:-2].numel()
        width = batch * max(layer.out_features for layer in self.channel_mlp.fcs)
        return network, Inputs(x, of_points, features, factors, parameters), width

    def _whole(self, some: Inputs, queries: Tensor) -> Tensor:
        """Any kernel, called as the library calls it."""
        parts = [some.of_points, some.of_queries.index_select(0, queries)]
        if self._reads(some.features):
            parts = [part.expand(*some.features.shape[:-1], -1) for part in parts] + [some.features]
        values = self.channel_mlp(torch.cat(parts, dim=-1))
        return _weighted(values, some if self._multiplies(some.features) else some._replace(features=None))

    def _reads(self, f_y: Tensor | None) -> bool:
        return f_y is not None and self.transform_type.startswith("nonlinear")

    def _multiplies(self, f_y: Tensor | None) -> bool:
        return f_y is not None and self.transform_type != "nonlinear_kernelonly"


def replace_search(model: nn.Module) -> nn.Module:
    """Put these modules in place of the library's own in a model, such as a ``GINO`` or ``FNOGNO``.

    Parameters are shared, names of the ``state_dict`` stay.

    Parameters
    ----------
    model : nn.Module
        Changed in place.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    ValueError
        If the model has neither of the two.
    """
    from neuralop.layers import integral_transform, neighbor_search

    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    replaced = 0
    for parent, name, child in found:
        if type(child) is neighbor_search.NeighborSearch:
            ours = NeighborSearch(return_norm=child.return_norm)
        elif type(child) is integral_transform.IntegralTransform:
            names = ("channel_mlp", "transform_type", "weighting_fn", "reduction", "use_torch_scatter")
            ours = IntegralTransform(**{name: getattr(child, name) for name in names})
        else:
            continue
        setattr(parent, name, ours.train(child.training))
        replaced += 1
    if not replaced:
        raise ValueError(
            "expected a model with a NeighborSearch or IntegralTransform of neuraloperator, got a "
            f"{type(model).__name__} without"
        )
    return model


def _weighted(values: Tensor, some: Inputs) -> Tensor:
    for factor in (some.features, some.of_pairs):
        if factor is not None:
            values = values * factor
    return values


def sum_pairs(network: Network, inputs: Inputs, row_splits: Tensor, indices: Tensor, width: int) -> Tensor:
    """For each query, the sum of ``network`` over its pairs, (..., Q, C) in float32 or wider.

    All pairs at once need M x W numbers for each layer of a network of width W, and autograd keeps them. So a
    chunk of whole rows goes through at a time, which the backward computes again.

    What the network gives for a pair depends on that pair alone, and is the same each time. ``width`` is how
    many numbers its widest layer holds for a pair, all batches together. Each tensor of ``inputs`` gets its
    gradient; differentiable twice, where the second derivative holds all pairs at once. The row splits are
    copied to the host, which waits for them.
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
        return _row_sums(network, some, F.pad(counts.cumsum(0), (1, 0)))

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
