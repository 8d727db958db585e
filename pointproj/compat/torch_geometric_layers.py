"""Convolutions of PyTorch Geometric with one network for all pairs, on :func:`pointproj.edge_mlp`.

    from pointproj.compat.torch_geometric_layers import replace

    print(replace(model))  # what was replaced, and what was left, with the reason

No tensor of all edges and channels is made. A layer is replaced if its network is a ``Sequential`` of one
to four ``Linear`` layers with one activation between them, or an ``MLP`` of the library without
normalisation, and its aggregation is max, mean or sum. Parameters and their names in the ``state_dict`` stay
the same. Results differ by rounding: the first layer is applied before points are paired, so ``x_j - x_i`` is
not rounded by itself. Relative to the largest feature the difference is about 1e-6 in float32. Written
against torch-geometric 2.8.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from pointproj.compat.edges import boundaries, knn_edges
from pointproj.compat.replacement import CannotReplace, Replacement, replace_layers
from pointproj.ops.edge_mlp import edge_mlp
from pointproj.ops.layers import Activation, Layer, activation_of, checked_layers, with_bias
from pointproj.ops.neighbor_lists import NeighborList

REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}
NONE = -1  # the row of a slot without a neighbour

Edges = Int[Tensor, "2 edges"]
Both = Tensor | tuple[Tensor, Tensor]


def replace(model: nn.Module) -> Replacement:
    """Replace ``EdgeConv``, ``DynamicEdgeConv`` and ``PointNetConv`` in a model, in place.

    Layers of subclasses, with other networks (such as with batch normalisation, whose statistics are of all
    pairs) or other aggregations are left. ValueError for a model without any of these layers.
    """
    from torch_geometric import nn as theirs

    makers = {theirs.EdgeConv: EdgeConv, theirs.DynamicEdgeConv: DynamicEdgeConv}
    return replace_layers(model, makers | {theirs.PointNetConv: PointNetConv})


class _Convolution(nn.Module):
    """The settings of a layer of the library that all have, checked."""

    def __init__(self, layer: nn.Module, network: nn.Module | None) -> None:
        super().__init__()
        self.reduce = REDUCTIONS.get(layer.aggr) if isinstance(layer.aggr, str) else None
        if self.reduce is None:
            raise CannotReplace(f"expected aggr max, mean, sum or add; it is {layer.aggr}")
        if layer.decomposed_layers > 1 or layer.explain:
            raise CannotReplace("it is decomposed, or records messages to explain them")
        if any(getattr(layer, f"_{kind}_hooks", None) for kind in HOOKS):
            raise CannotReplace("it has hooks of messages")
        self.sources_first = layer.flow == "source_to_target"
        try:
            layers_of(network, next(network.parameters()))
        except (AttributeError, StopIteration, TypeError, ValueError) as reason:
            raise CannotReplace(f"its network cannot run on pairs: {reason}") from None

    def listed(self, edges: Tensor, queries: int) -> NeighborList:
        """The edges as the neighbours of each query."""
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise TypeError(f"expected edge_index as a dense (2, E) tensor; got {type(edges).__name__}")
        rows, targets = edges if self.sources_first else edges.flip(0)
        targets, order = targets.sort(stable=True)
        starts = torch.arange(queries + 1, device=edges.device, dtype=targets.dtype)
        splits = torch.searchsorted(targets.contiguous(), starts)
        return NeighborList(splits, rows[order], rows.new_zeros(len(rows), dtype=torch.float32))

    def with_loops(self, edges: Tensor, count: int) -> Tensor:
        """Edges without those of a point to itself, but one for each of the first points."""
        edges = edges if self.sources_first else edges.flip(0)
        own = torch.arange(count, device=edges.device, dtype=edges.dtype)
        sources = torch.where(edges[0] == edges[1], NONE, edges[0])
        made = torch.cat([torch.stack([sources, edges[1]]), own.expand(2, -1)], dim=1)
        return made if self.sources_first else made.flip(0)


HOOKS = ("propagate_forward_pre", "propagate_forward", "message_forward_pre", "message_forward")


class EdgeConv(_Convolution):
    """``EdgeConv`` with the network and the settings of one of the library's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, layer.nn)
        self.nn = layer.nn

    def forward(self, x: Both, edge_index: Edges) -> Float[Tensor, "n channels"]:
        """(M, out) from (N, F) and (M, F) features, or (N, F) of both, and the (2, E) edges."""
        x = (x, x) if isinstance(x, Tensor) else x
        return self._aggregated(x, self.listed(edge_index, len(x[1])))

    def _aggregated(self, x: tuple[Tensor, Tensor], lists: NeighborList) -> Tensor:
        # W [x_i, x_j - x_i] = W_d x_j + (W_x - W_d) x_i, without positions.
        ((first, bias), *others), activation = layers_of(self.nn, x[0])
        of_query, of_difference = first.chunk(2, dim=1)
        weight = torch.cat([of_difference, of_query - of_difference], dim=1)
        nowhere = [points.new_zeros(len(points), 0, dtype=torch.float32) for points in (x[1], x[0])]
        layers = [(weight, bias), *others]
        kind = {"activation": activation, "reduce": self.reduce}
        return edge_mlp(x[0], *nowhere, lists, layers, query_features=x[1], **kind)


class DynamicEdgeConv(EdgeConv):
    """``DynamicEdgeConv`` likewise, with the exact search of :mod:`pointproj.compat.torch_geometric`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.k = layer.k

    def forward(self, x: Both, batch: Any = None) -> Float[Tensor, "n channels"]:
        """(M, out) from (N, F) and (M, F) features, or (N, F) of both, and their batch vectors."""
        x = (x, x) if isinstance(x, Tensor) else x
        if x[0].ndim != 2:
            raise ValueError("Static graphs not supported in DynamicEdgeConv")
        batches = batch if isinstance(batch, tuple) else (batch, batch)
        offsets = boundaries(*x, *batches, None)
        queries, rows = knn_edges(*x, self.k, *offsets)
        edges = torch.stack([rows, queries] if self.sources_first else [queries, rows])
        return self._aggregated(x, self.listed(edges, len(x[1])))


class PointNetConv(_Convolution):
    """``PointNetConv``, the set abstraction of PointNet++, likewise."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, layer.local_nn)
        self.local_nn, self.global_nn = layer.local_nn, layer.global_nn
        self.add_self_loops = layer.add_self_loops

    def forward(
        self, x: Tensor | tuple[Tensor | None, Tensor | None] | None, pos: Both, edge_index: Edges
    ) -> Float[Tensor, "m channels"]:
        """(M, out) from (N, F) features or None, (N, D) and (M, D) positions, and the (2, E) edges."""
        x = x[0] if isinstance(x, tuple) else x
        sources, targets = (pos, pos) if isinstance(pos, Tensor) else pos
        if self.add_self_loops:
            edge_index = self.with_loops(edge_index, min(len(sources), len(targets)))
        lists = self.listed(edge_index, len(targets))
        layers, activation = layers_of(self.local_nn, sources if x is None else x)
        if x is None:  # a feature of zeros, with a column of zeros
            x = sources.new_zeros(len(sources), 1)
            layers[0] = (F.pad(layers[0][0], (1, 0)), layers[0][1])
        settings = {"activation": activation, "reduce": self.reduce}
        out = edge_mlp(x, targets, sources, lists, layers, **settings)
        return out if self.global_nn is None else self.global_nn(out)


def layers_of(network: nn.Module, like: Tensor) -> tuple[list[Layer], Activation]:
    """The layers of a Sequential or of an ``MLP`` of the library, and the activation between them.

    TypeError or ValueError for a network that :func:`pointproj.edge_mlp` does not take.
    """
    if type(network).__name__ != "MLP" or not hasattr(network, "lins"):
        if not isinstance(network, nn.Sequential):
            raise TypeError(
                f"expected a Sequential of Linear and activation; it is a {type(network).__name__}"
            )
        return checked_layers("nn", network, "", like)
    if any(not isinstance(norm, nn.Identity) for norm in network.norms):
        raise ValueError("its normalisation needs all pairs")
    if network.training and any(network.dropout):
        raise ValueError("its dropout needs all pairs")
    if (found := activation_of(network.act)) is None:
        raise ValueError(f"expected another activation; it is {network.act}")
    layers = [with_bias(layer.weight, layer.bias) for layer in network.lins]
    return checked_layers("nn", layers, Activation(*found, not network.plain_last), like)
