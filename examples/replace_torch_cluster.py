"""Replace torch_cluster's search: one import line changes, and torch_cluster need not be installed.

The edges are compared with all distances between the points of the same cloud.
"""

import torch

from pointproj.compat.torch_cluster import knn_graph, radius_graph  # was: from torch_cluster import ...

torch.manual_seed(0)
points = torch.rand(600, 3, dtype=torch.float64)
batch = torch.arange(600) // 200  # three clouds of 200 points

nearest = knn_graph(points, k=6, batch=batch)
within = radius_graph(points, r=0.2, batch=batch, max_num_neighbors=200)


def sorted_edges(edges: torch.Tensor) -> list[tuple[int, int]]:
    return sorted(zip(*edges.tolist(), strict=True))


distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
distances[batch[:, None] != batch] = torch.inf  # other clouds
distances.fill_diagonal_(torch.inf)  # the point itself
six = distances.topk(6, largest=False).indices.flatten()
true_nearest = torch.stack([six, torch.arange(600).repeat_interleave(6)])
true_within = (distances < 0.2).nonzero().T

assert sorted_edges(nearest) == sorted_edges(true_nearest)
assert sorted_edges(within) == sorted_edges(true_within)
print(f"as by brute force: {nearest.shape[1]} edges to nearest points, {within.shape[1]} within the radius")
