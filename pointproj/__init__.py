"""Aggregate learned features of a point cloud onto query points.

The public names are imported on first use, so that reading a config or printing help never waits
for torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BackendUnavailable",
    "Projector",
    "backends",
    "build_index",
    "knn",
    "knn_aggregate",
    "radius_aggregate",
]

if TYPE_CHECKING:
    from pointproj.nn.projector import Projector
    from pointproj.ops.functional import build_index, knn, knn_aggregate, radius_aggregate
    from pointproj.ops.registry import BackendUnavailable, backends


def __getattr__(name: str) -> Any:
    if name == "Projector":
        from pointproj.nn.projector import Projector

        return Projector
    if name in ("BackendUnavailable", "backends"):
        from pointproj.ops import registry

        return getattr(registry, name)
    if name in __all__:
        from pointproj.ops import functional

        return getattr(functional, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
