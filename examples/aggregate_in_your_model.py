"""Aggregate in your own model: the distance to a sphere, learned from points on it.

``knn_aggregate`` is twice differentiable with respect to features and positions, so the loss can contain the
gradient of the field with respect to position. The true gradient points away from the sphere's centre.
"""

import torch
from torch import Tensor, nn

from pointproj import knn_aggregate


class Field(nn.Module):
    """A number at each query point, from its 8 nearest points of a cloud."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.decode = nn.Sequential(nn.Linear(channels + 4, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, query_points: Tensor, cloud: Tensor) -> Tensor:
        features = torch.cat([self.encode(cloud), cloud], dim=1)
        aggregated = knn_aggregate(query_points, cloud, features, 8, sigma=0.1)
        offset = query_points - aggregated[:, -3:]  # from the mean of its neighbours to the query
        distance = (offset.square().sum(1, keepdim=True) + 1e-6).sqrt()
        return self.decode(torch.cat([aggregated[:, :-3], offset, distance], dim=1))


def queries(count: int) -> Tensor:
    return (2 * torch.rand(count, 3) - 1).requires_grad_()


def errors(model: Field, cloud: Tensor, query_points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared errors of the field (true: |p| - 0.5) and of its gradient (true: p / |p|)."""
    norm = query_points.norm(dim=1, keepdim=True)
    field = model(query_points, cloud)
    (gradient,) = torch.autograd.grad(field.sum(), query_points, create_graph=True)
    return (field - norm + 0.5).square().mean(), (gradient - query_points / norm).square().mean()


torch.manual_seed(0)
cloud = 0.5 * nn.functional.normalize(torch.randn(500, 3))
model = Field()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    of_field, of_gradient = errors(model, cloud, queries(256))
    optimizer.zero_grad()
    (of_field + 0.1 * of_gradient).backward()
    optimizer.step()

of_field, of_gradient = (float(error.detach().sqrt()) for error in errors(model, cloud, queries(1000)))
print(f"root mean square error of the distance {of_field:.3f}, of its gradient {of_gradient:.3f}")
assert of_field < 0.1
assert of_gradient < 0.4
