"""``NeighborSearch`` and ``IntegralTransform`` of neuraloperator 2.0, and a model with both replaced.

    model = replace_search(GINO(...))

The search is exact in the points' dtype, and its memory is that of the pairs found. Without Open3D, the
library's own search holds all ``m x n`` distances. It computes them by a matrix product, so the two may
differ in a pair at the radius. It counts pairs in float32, which is wrong beyond 2^24.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it
from torch.utils.checkpoint import checkpoint

from pointproj.compat.pairs import coordinates, number_or_tensor, within
from pointproj.ops.specification.clouds import queries_of
from pointproj.ops.specification.reference import squared_lengths

SMALLEST_DISTANCE = 1e-7  # in place of 0, as in the library
ELEMENTS = {"cpu": 2**23, "cuda": 2**26}  # values of the widest layer for one chunk of pairs
TRANSFORMS = ("linear_kernelonly", "linear", "nonlinear_kernelonly", "nonlinear")

# From R queries (R, E), the query of each pair (P,), and two values of the pair's point, (..., P, H) and
# (..., P, C) or None, to (..., P, C). Each pair is computed by itself.
Network = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class NeighborSearch(nn.Module):
    """All points of ``data`` within a radius of each query, as CSR.

    ``return_norm`` returns the squared distances too, as ``weights``; the library does so only without
    Open3D. ``use_open3d`` is not used here.
    """

    def __init__(self, use_open3d: bool = True, return_norm: bool = False) -> None:
        super().__init__()
        self.use_open3d = False
        self.return_norm = return_norm

    def forward(self, data: Tensor, queries: Tensor, radius: float) -> dict[str, Tensor]:
        """Find the neighbours; the host waits for the device, since their number is the size of the result.

        ``data`` is (n, d) and ``queries`` (m, d); with d above 3 all pairs are compared, in chunks. TypeError
        or ValueError for points that do not go together, and for a negative radius.

        Returns
        -------
        dict
            ``neighbors_index`` (M,) int64, rows of ``data``, ascending for each query;
            ``neighbors_row_splits`` (m + 1,) int64; with ``return_norm`` also ``weights`` (M,), the squared
            distances with gradients to both sets of points, 1e-14 (no gradient) where the points coincide.
        """
        queries, data = coordinates(queries=queries, data=data)
        search_radius = number_or_tensor("radius", radius, (), data)
        found = within(queries.detach(), data.detach(), search_radius)
        result = {"neighbors_index": found.rows, "neighbors_row_splits": found.row_splits}
        if self.return_norm:
            squared = squared_lengths(queries[found.queries] - data[found.rows])
            result["weights"] = torch.where(squared == 0, SMALLEST_DISTANCE**2, squared)
        return result


class IntegralTransform(nn.Module):
    """Sum or mean over each query's neighbours of a kernel network, times the function there.

    Parameters, ``state_dict`` and results are the library's. If the kernel is its ``LinearChannelMLP``
    without dropout, no layer is stored for all pairs, whatever the ``transform_type``. The first layer is
    linear in x, y and f(y), so it is computed for points instead of pairs. The other layers are computed for
    chunks of whole rows, and again in the backward; a second derivative stores all pairs. Any other
    ``channel_mlp`` is called once, with all pairs.

    As in the library, ``linear_kernelonly`` multiplies by ``f_y`` if it is given, ``weights`` has a number
    for each pair, and weighted sums are never divided by the number of neighbours. Unlike there, weights work
    without a batch dimension too, and float64 stays float64.

    ``channel_mlp`` takes dim y + dim x (nonlinear transforms: + dim f) channels; without one, it is made of
    ``channel_mlp_layers`` and ``channel_mlp_non_linearity``. ``weighting_fn`` turns the weights of the pairs,
    (1, M, 1), into factors. ``use_torch_scatter`` is not used.
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
            From :class:`NeighborSearch`; its ``weights`` take precedence over the argument.
        x : (m, d2) float tensor, optional
            Queries; None: ``y``.
        f_y : (n, d3) or (batch, n, d3) float tensor, optional
            The function on ``y``; None integrates only the kernel.
        weights : (M,) float tensor, optional
            One for each pair; KeyError if there is a ``weighting_fn`` but no weights.

        Returns
        -------
        (m, d4) or (batch, m, d4) float tensor
            float32 or wider; 0 for a query without neighbours. Differentiable twice.
        """
        x = y if x is None else x
        indices, row_splits = neighbors["neighbors_index"], neighbors["neighbors_row_splits"]
        factors = self._factors(neighbors.get("weights", weights))
        multiplies = f_y is not None and self.transform_type != "nonlinear_kernelonly"
        if self._in_layers:
            network, y = self._layered(y, x, f_y)
            batch = 1 if f_y is None else f_y.shape[:-2].numel()
            width = batch * max(layer.out_features for layer in self.channel_mlp.fcs)
            at_once = max(1, ELEMENTS.get(indices.device.type, ELEMENTS["cuda"]) // width)
            sizes = _chunks(row_splits.tolist(), at_once)
            f_y = f_y if multiplies else None
        else:
            network, sizes = self._whole, []
        # The chunks are taken from wide tensors, so that their gradients are added up in float32 or wider.
        narrow = [None if values is None else values.dtype for values in (y, f_y)]
        wide = [None if values is None else _widened(values) for values in (y, f_y)]

        def of_rows(counts: Tensor, indices: Tensor, x: Tensor, factors: Tensor | None) -> Tensor:
            """Sums over the pairs of some queries."""
            queries = queries_of(F.pad(counts.cumsum(0), (1, 0)), len(indices))
            of_pairs = [
                None if values is None else values.index_select(-2, indices).to(dtype)
                for values, dtype in zip(wide, narrow, strict=True)
            ]
            values = network(x, queries, *of_pairs)
            for factor in (of_pairs[1] if multiplies else None, factors):
                values = values if factor is None else values * factor
            values = _widened(values)
            sums = values.new_zeros(*values.shape[:-2], len(counts), values.shape[-1])
            return sums.index_add(-2, queries, values)

        counts = row_splits.diff()
        if len(sizes) <= 1:
            sums = of_rows(counts, indices, x, factors)
        else:
            rows, pairs = map(list, zip(*sizes, strict=True))
            factors_of = [None] * len(rows) if factors is None else factors.split(pairs)
            chunks = zip(counts.split(rows), indices.split(pairs), x.split(rows), factors_of, strict=True)
            again = {"use_reentrant": False, "preserve_rng_state": False}
            sums = torch.cat([checkpoint(of_rows, *chunk, **again) for chunk in chunks], dim=-2)
        if self.reduction == "mean" and factors is None:
            sums = sums / counts.clamp(min=1).unsqueeze(-1)
        return sums

    def _factors(self, weights: Tensor | None) -> Tensor | None:
        """(M, 1) factors of the pairs; None without weights."""
        if weights is None:
            if self.weighting_fn is not None:
                raise KeyError(
                    "expected weights in neighbors for the weighting_fn: NeighborSearch(return_norm=True)"
                )
            return None
        weights = weights.unsqueeze(-1).unsqueeze(0)
        return (weights if self.weighting_fn is None else self.weighting_fn(weights)).squeeze(0)

    def _layered(self, y: Tensor, x: Tensor, f_y: Tensor | None) -> tuple[Network, Tensor]:
        """The kernel without its first layer's part of the points, and that part, computed for all points."""
        first, *others = self.channel_mlp.fcs
        sizes = [y.shape[-1], x.shape[-1]]
        weight_y, weight_x, weight_f = first.weight.split([*sizes, first.in_features - sum(sizes)], dim=1)
        of_points = F.linear(y, weight_y)
        if self._reads(f_y):
            of_points = of_points + F.linear(f_y, weight_f)

        def network(x: Tensor, queries: Tensor, of_points: Tensor, _: Tensor | None) -> Tensor:
            hidden = of_points + F.linear(x, weight_x, first.bias).index_select(0, queries)
            for layer in others:
                hidden = layer(self.channel_mlp.non_linearity(hidden))
            return hidden

        return network, of_points

    def _whole(self, x: Tensor, queries: Tensor, y: Tensor, f_y: Tensor | None) -> Tensor:
        """A kernel of any type, called as the library calls it."""
        parts = [y, x.index_select(0, queries)]
        if self._reads(f_y):
            parts = [part.expand(*f_y.shape[:-1], -1) for part in parts] + [f_y]
        return self.channel_mlp(torch.cat(parts, dim=-1))

    def _reads(self, f_y: Tensor | None) -> bool:
        return f_y is not None and self.transform_type.startswith("nonlinear")


def replace_search(model: nn.Module) -> nn.Module:
    """Put these modules in place of the library's own in a model, such as a ``GINO`` or ``FNOGNO``.

    The model is changed in place, and returned. Parameters and the names in the ``state_dict`` stay the same.
    ValueError if the model has neither of the two.
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


def _chunks(splits: list[int], most: int) -> list[tuple[int, int]]:
    """(rows, pairs) of each chunk: at most ``most`` of both, unless a single row has more pairs."""
    starts = [0]
    while starts[-1] < len(splits) - 1:
        first = starts[-1]
        full = bisect_right(splits, splits[first] + most) - 1
        starts.append(min(max(full, first + 1), first + most))
    return [(last - first, splits[last] - splits[first]) for first, last in pairwise(starts)]


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
