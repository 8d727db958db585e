"""Carry learned features from a point cloud onto query points.

The public names are imported on first use, so that reading a config or printing help never waits
for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "knn": "ops",
    "knn_aggregate": "ops",
    "radius_aggregate": "ops",
    "build_index": "ops",
    "backends": "backends",
    "BackendUnavailable": "backends",
    "Projector": "model",
}

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
    from pointproj.backends import BackendUnavailable, backends
    from pointproj.model import Projector
    from pointproj.ops import build_index, knn, knn_aggregate, radius_aggregate


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
