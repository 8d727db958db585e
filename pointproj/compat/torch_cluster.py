"""Searches of torch-cluster by their names and signatures, which PyTorch Geometric took over unchanged."""

from pointproj.compat.torch_geometric import knn, knn_graph, nearest, radius, radius_graph

__all__ = ["knn", "knn_graph", "nearest", "radius", "radius_graph"]
