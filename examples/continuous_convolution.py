"""Neighbour lists for a continuous convolution: a small network computes a weight for each pair of points.

The layer learns a filter, the derivative of a Gaussian along x, from features of a cloud before and after it.
"""

import torch
from torch import Tensor, nn

from pointproj import Neighbors, aggregate, radius_neighbors

RADIUS = 0.3


class ContinuousConvolution(nn.Module):
    """out_i = sum over neighbours j of weights((p_i - p_j) / RADIUS) * f_j."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = nn.Linear(3, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()
        self.weights = nn.Sequential(*hidden, nn.Linear(32, channels))

    def forward(self, neighbors: Neighbors, features: Tensor) -> Tensor:
        weights = self.weights(neighbors.displacements / RADIUS)  # (N, 32, C)
        return aggregate(features, neighbors, weights=weights, reduce="sum")


def filtered(neighbors: Neighbors, features: Tensor) -> Tensor:
    """The filter that the layer learns."""
    offsets = neighbors.displacements / RADIUS
    weights = offsets[..., 0] * torch.exp(-2 * offsets.square().sum(-1))  # one for all channels
    return aggregate(features, neighbors, weights=weights, reduce="sum")


torch.manual_seed(0)
points = torch.rand(300, 3)
# One search for all steps: the nearest 32 within the radius. Rows with fewer are padded.
neighbors = radius_neighbors(points, points, RADIUS, max_neighbors=32, displacements=True)

layer = ContinuousConvolution(channels=4)
optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
for _ in range(300):
    features = torch.randn(300, 4)
    loss = (layer(neighbors, features) - filtered(neighbors, features)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

features = torch.randn(300, 4)
truth = filtered(neighbors, features)
with torch.no_grad():
    error = (layer(neighbors, features) - truth).square().mean() / truth.square().mean()
print(f"{int(neighbors.counts.min())} to {int(neighbors.counts.max())} points within the radius")
print(f"mean square error of the learned filter, relative to its result: {float(error):.4f}")
assert error < 0.05
