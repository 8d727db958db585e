"""The networks and their parts."""

from pointproj.nn.edge_mlp import EdgeMLP

__all__ = ["EdgeMLP"]
