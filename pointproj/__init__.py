"""Aggregate learned features of a point cloud onto query points.

The public names are imported on first use, so that programs that only read a config or print help do not
import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BackendUnavailable",
    "NeighborList",
    "Neighbors",
    "Projector",
    "aggregate",
    "attend",
    "backends",
    "build_index",
    "edge_mlp",
    "farthest_points",
    "knn",
    "knn_aggregate",
    "radius_aggregate",
    "radius_neighbors",
    "vector_attend",
]

if TYPE_CHECKING:
    from pointproj.nn.projector import Projector
    from pointproj.ops.attention import attend
    from pointproj.ops.backends import BackendUnavailable
    from pointproj.ops.edge_mlp import edge_mlp
    from pointproj.ops.farthest_points import farthest_points
    from pointproj.ops.functional import build_index, knn, knn_aggregate, radius_aggregate
    from pointproj.ops.list_sums import aggregate
    from pointproj.ops.neighbor_lists import NeighborList, Neighbors, radius_neighbors
    from pointproj.ops.registry import backends
    from pointproj.ops.vector_attention import vector_attend


MODULES = {
    "BackendUnavailable": "ops.backends",
    "NeighborList": "ops.neighbor_lists",
    "Neighbors": "ops.neighbor_lists",
    "Projector": "nn.projector",
    "aggregate": "ops.list_sums",
    "attend": "ops.attention",
    "edge_mlp": "ops.edge_mlp",
    "farthest_points": "ops.farthest_points",
    "backends": "ops.registry",
    "radius_neighbors": "ops.neighbor_lists",
    "vector_attend": "ops.vector_attention",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{MODULES.get(name, 'ops.functional')}")
    value = globals()[name] = getattr(module, name)  # so that this is called once for each name
    return value
