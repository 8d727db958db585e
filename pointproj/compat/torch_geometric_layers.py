"""Convolutions of PyTorch Geometric with a network for all pairs, on our operators.

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

from pointproj.compat.edges import boundaries, knn_rows
from pointproj.compat.replacement import CannotReplace, Replacement, replace_layers
from pointproj.ops.arguments import is_readable
from pointproj.ops.edge_mlp import edge_mlp
from pointproj.ops.layers import (
    SLOPE,
    Activation,
    Network,
    activation_of,
    checked_layers,
    layer_of,
    with_bias,
)
from pointproj.ops.neighbor_lists import NeighborList, Neighbors
from pointproj.ops.vector_attention import vector_attend

REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}
NONE = -1  # the row of a slot without a neighbour

Edges = Int[Tensor, "2 edges"]
Both = Tensor | tuple[Tensor, Tensor]


def replace(model: nn.Module) -> Replacement:
    """Replace ``EdgeConv``, ``DynamicEdgeConv``, ``PointNetConv`` and ``PointTransformerConv`` in place.

    Layers of subclasses, with other networks (such as with batch normalisation, whose statistics are of all
    pairs) or other aggregations are left. ValueError for a model without any of these layers.
    """
    from torch_geometric import nn as theirs

    makers = (EdgeConv, DynamicEdgeConv, PointNetConv, PointTransformerConv)
    return replace_layers(model, {getattr(theirs, maker.__name__): maker for maker in makers})


class _Convolution(nn.Module):
    """The settings of a layer of the library that all have, checked."""

    def __init__(self, layer: nn.Module, *networks: nn.Module | None) -> None:
        super().__init__()
        self.reduce = REDUCTIONS.get(layer.aggr) if isinstance(layer.aggr, str) else None
        if self.reduce is None:
            raise CannotReplace(f"expected aggr max, mean, sum or add; it is {layer.aggr}")
        if layer.decomposed_layers > 1 or layer.explain:
            raise CannotReplace("it is decomposed, or records messages to explain them")
        if any(getattr(layer, f"_{kind}_hooks", None) for kind in HOOKS):
            raise CannotReplace("it has hooks of messages")
        self.sources_first = layer.flow == "source_to_target"
        for network in networks:
            first = next(network.parameters(), None) if isinstance(network, nn.Module) else None
            if first is None:
                raise CannotReplace(f"expected a network with parameters; it is {network}")
            try:
                layers_of(network, first)
            except (TypeError, ValueError) as reason:
                raise CannotReplace(f"its network cannot run on pairs: {reason}") from None

    def reset_parameters(self) -> None:
        """Draw the parameters of all networks anew, as the library does."""
        from torch_geometric.nn.inits import reset

        for child in self.children():
            reset(child)

    def listed(self, edges: Tensor, queries: int, sources: int, loops: int = 0) -> NeighborList | Neighbors:
        """The edges as the neighbours of each query, :func:`padded` unless compiled or captured: that waits.

        With ``loops``, edges of a point to itself are none, but one for each of the first points.
        """
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise TypeError(f"expected edge_index as a dense (2, E) tensor; got {type(edges).__name__}")
        rows, targets = edges if self.sources_first else edges.flip(0)
        for name, given, count in (("sources", rows, sources), ("targets", targets, queries)):
            if given.numel() and is_readable(given) and (given.min() < 0 or given.max() >= count):
                raise IndexError(
                    f"edge_index must have {name} from 0 to {count - 1}; got {int(given.min())} to "
                    f"{int(given.max())}"
                )
        own = torch.arange(queries, device=edges.device, dtype=edges.dtype)
        if not torch.compiler.is_compiling() and not (
            rows.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            found = padded(sorted_list(rows, targets, queries, bool((targets.diff() < 0).any())))
            if not loops:
                return found
            if isinstance(found, Neighbors):
                others = torch.where(found.indices == own[:, None], NONE, found.indices)
                return neighbors_of(torch.cat([others, torch.where(own < loops, own, NONE)[:, None]], dim=1))
        if loops:
            rows = torch.cat([torch.where(rows == targets, NONE, rows), own[:loops]])
            targets = torch.cat([targets, own[:loops]])
        return sorted_list(rows, targets, queries, True)


HOOKS = ("propagate_forward_pre", "propagate_forward", "message_forward_pre", "message_forward")


class EdgeConv(_Convolution):
    """``EdgeConv`` with the network and the settings of one of the library's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, layer.nn)
        self.nn = layer.nn

    def forward(self, x: Both, edge_index: Edges) -> Float[Tensor, "n channels"]:
        """(..., M, out) from (..., N, F) and (..., M, F) features, or one of both, and the (2, E) edges."""
        x = pair_of(x)
        if x[0].ndim == 3:  # several sets of features on one graph
            return torch.stack([self(own, edge_index) for own in zip(*x, strict=True)])
        return self._aggregated(x, self.listed(edge_index, len(x[1]), len(x[0])))

    def _aggregated(self, x: tuple[Tensor, Tensor], lists: NeighborList | Neighbors) -> Tensor:
        # W [x_i, x_j - x_i] = W_d x_j + (W_x - W_d) x_i, without positions.
        ((first, bias), *others), activation = layers_of(self.nn, x[0])
        of_query, of_difference = first.chunk(2, dim=1)
        weight = torch.cat([of_difference, of_query - of_difference], dim=1)
        nowhere = [points.new_zeros(len(points), 0, dtype=torch.float32) for points in (x[1], x[0])]
        network = Network([(weight, bias), *others], activation)
        return edge_mlp(x[0], *nowhere, lists, network, query_features=x[1], reduce=self.reduce)


class DynamicEdgeConv(EdgeConv):
    """``DynamicEdgeConv`` likewise, with the exact search of :mod:`pointproj.compat.torch_geometric`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.k = layer.k

    def forward(self, x: Both, batch: Any = None) -> Float[Tensor, "n channels"]:
        """(M, out) from (N, F) and (M, F) features, or (N, F) of both, and their batch vectors."""
        x = pair_of(x)
        if x[0].ndim != 2:
            raise ValueError("Static graphs not supported in DynamicEdgeConv")
        batches = batch if isinstance(batch, tuple) else (batch, batch)
        offsets = boundaries(*x, *batches, None)
        return self._aggregated(x, neighbors_of(knn_rows(*x, self.k, *offsets)))


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
        x = pair_of(pos)[0][:, :0] if x is None else x
        sources, targets = map(searchable, pair_of(pos))
        loops = min(len(sources), len(targets)) if self.add_self_loops else 0
        lists = self.listed(edge_index, len(targets), len(sources), loops)
        network, of_targets = layers_of(self.local_nn, x), None
        if sources.shape[1] not in (2, 3):  # by products with the positions of each side
            ((weight, bias), *others), activation = network
            network = Network([(torch.cat([weight, -weight[:, x.shape[1] :]], 1), bias), *others], activation)
            x, of_targets = torch.cat([x, sources.to(x.dtype)], 1), targets
            sources, targets = sources[:, :0], targets[:, :0]
        out = edge_mlp(x, targets, sources, lists, network, query_features=of_targets, reduce=self.reduce)
        return out if self.global_nn is None else self.global_nn(out)


class PointTransformerConv(_Convolution):
    """``PointTransformerConv`` likewise, on :func:`pointproj.vector_attend`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, layer.pos_nn, *([] if layer.attn_nn is None else [layer.attn_nn]))
        if self.reduce != "sum":
            raise CannotReplace(f"expected aggr add or sum; it is {layer.aggr}")
        dims = layers_of(layer.pos_nn, next(layer.pos_nn.parameters())).layers[0][0].shape[1]
        if dims not in (2, 3):
            raise CannotReplace(f"expected positions of 2 or 3 coordinates; its pos_nn takes {dims}")
        self.pos_nn, self.attn_nn = layer.pos_nn, layer.attn_nn
        self.lin, self.lin_src, self.lin_dst = layer.lin, layer.lin_src, layer.lin_dst
        self.add_self_loops = layer.add_self_loops

    def forward(self, x: Both, pos: Both, edge_index: Edges) -> Float[Tensor, "m channels"]:
        """(M, out) from (N, F) and (M, F) features, or (N, F) of both, positions likewise, and the edges."""
        (of_sources, of_targets), (sources, targets) = pair_of(x), map(searchable, pair_of(pos))
        loops = min(len(sources), len(targets)) if self.add_self_loops else 0
        keys, values = self.lin_src(of_sources), self.lin(of_sources)
        if self.attn_nn is None:
            one = torch.eye(keys.shape[1], dtype=keys.dtype, device=keys.device)
            score = Network([with_bias(one, None)], PLAIN)
        else:
            score = layers_of(self.attn_nn, keys)
        return vector_attend(
            self.lin_dst(of_targets),
            keys,
            values,
            -targets,  # its relative position is target minus source
            -sources,
            self.listed(edge_index, len(targets), len(sources), loops),
            groups=len(score.layers[-1][0]),
            position_layers=layers_of(self.pos_nn, keys),
            score_layers=score,
        )


def pair_of(given: Both) -> tuple[Tensor, Tensor]:
    """Tensors of sources and targets, from both or from one that is of both."""
    return (given, given) if isinstance(given, Tensor) else given


def searchable(points: Float[Tensor, "n dims"]) -> Float[Tensor, "n dims"]:
    """Positions in a dtype that the operators take."""
    return points.to(torch.promote_types(points.dtype, torch.float32))


def sorted_list(rows: Tensor, targets: Tensor, queries: int, sorts: bool) -> NeighborList:
    """The sources and targets of edges as a list, sorted by the targets."""
    if sorts:
        targets, order = targets.sort(stable=True)
        rows = rows[order]
    starts = torch.arange(queries + 1, device=targets.device, dtype=targets.dtype)
    splits = torch.searchsorted(targets.contiguous(), starts)
    return NeighborList(splits, rows, rows.new_zeros((), dtype=torch.float32).expand(len(rows)))


def padded(lists: NeighborList) -> Neighbors | NeighborList:
    """The same as rows of one length, unless most slots would be empty; waits for the device."""
    counts = lists.row_splits.diff()
    slots = torch.arange(int(counts.max()) if len(counts) else 0, device=counts.device)
    if len(slots) * len(counts) > 2 * len(lists.indices):
        return lists
    if len(slots) * len(counts) == len(lists.indices):  # all are as long
        return neighbors_of(lists.indices.view(len(counts), len(slots)))
    at = (lists.row_splits[:-1, None] + slots).clamp(max=len(lists.indices) - 1)
    return neighbors_of(torch.where(slots < counts[:, None], lists.indices[at], NONE))


def neighbors_of(rows: Int[Tensor, "queries k"]) -> Neighbors:
    """Rows of neighbours as lists whose distances nobody reads."""
    return Neighbors(rows, rows.new_zeros((), dtype=torch.float32).expand(rows.shape))


PLAIN = Activation("relu", SLOPE, False)  # of a single layer


def layers_of(network: nn.Module, like: Tensor) -> Network:
    """The layers of a Sequential, or of a ``Linear`` or an ``MLP`` of the library.

    TypeError or ValueError for a network that :func:`pointproj.edge_mlp` does not take.
    """
    if type(network).__name__ == "Linear":
        return checked_layers("nn", Network([layer_of(network)], PLAIN), "", like)
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
    layers = [layer_of(layer) for layer in network.lins]
    return checked_layers("nn", Network(layers, Activation(*found, not network.plain_last)), "", like)
