"""A module of the edge network :func:`pointproj.edge_mlp`."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from pointproj.ops.edge_mlp import check_reduce, edge_mlp
from pointproj.ops.neighbor_lists import NeighborList, Neighbors


class EdgeMLP(nn.Module):
    """An MLP on every pair of a neighbour list, reduced over each query's neighbours.

    Parameters
    ----------
    layers : torch.nn.Sequential
        Linear layers and activations, as :func:`pointproj.edge_mlp` takes them. Their input is the
        neighbour's feature, its relative position, the distance if asked, and the query's feature if given.
    with_distance, multiply_features, reduce, backend
        As for :func:`pointproj.edge_mlp`.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        with_distance: bool = False,
        multiply_features: bool | str = False,
        reduce: str = "mean",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(layers, nn.Sequential):
            raise TypeError(
                "layers must be a torch.nn.Sequential, whose parameters are trained; got "
                f"{type(layers).__name__}"
            )
        check_reduce(reduce)
        self.layers = layers
        self.settings: dict[str, Any] = {
            "with_distance": with_distance,
            "multiply_features": multiply_features,
            "reduce": reduce,
            "backend": backend,
        }

    def forward(
        self,
        features: Float[Tensor, "*batch n c"],
        query_points: Float[Tensor, "*batch q dims"],
        reference_points: Float[Tensor, "*batch n dims"],
        neighbors: Neighbors | NeighborList,
        *,
        query_features: Float[Tensor, "*batch q channels"] | None = None,
        weights: Float[Tensor, "*pairs"] | None = None,
        reference_weights: Float[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Apply the network: see :func:`pointproj.edge_mlp`."""
        given = {"query_features": query_features, "weights": weights, "reference_weights": reference_weights}
        points = query_points, reference_points
        return edge_mlp(features, *points, neighbors, self.layers, **given, **self.settings)

    def extra_repr(self) -> str:
        """The module's arguments, for ``print(model)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
