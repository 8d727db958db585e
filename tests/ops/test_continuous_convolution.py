"""A continuous convolution with its search is captured, also compiled, and trains as in eager mode."""

import pytest
import torch
from torch import Tensor, nn

from pointproj import aggregate, radius_neighbors


class ContinuousConvolution(nn.Module):
    """out_i = sum over neighbours j of kernel((p_i - q_j) / radius) * f_j, times a matrix."""

    def __init__(self, channels: int, radius: float, max_neighbors: int) -> None:
        super().__init__()
        self.radius, self.max_neighbors = radius, max_neighbors
        self.kernel = nn.Sequential(nn.Linear(3, 32), nn.GELU(), nn.Linear(32, channels))
        self.mix = nn.Linear(channels, channels)

    def forward(self, query_points: Tensor, reference_points: Tensor, features: Tensor) -> Tensor:
        neighbors = radius_neighbors(
            query_points, reference_points, self.radius, max_neighbors=self.max_neighbors, displacements=True
        )
        weights = self.kernel(neighbors.displacements / self.radius)
        return self.mix(aggregate(features, neighbors, weights=weights, reduce="sum"))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_trains_as_an_eager_one(compiled: bool):
    torch.manual_seed(0)
    layer = ContinuousConvolution(channels=8, radius=0.3, max_neighbors=32).cuda()
    inputs = tuple(torch.rand(size).cuda() for size in ((60, 3), (200, 3), (200, 8)))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = _train(layer, inputs, 8)
    layer.load_state_dict(state)
    function = torch.compile(layer, fullgraph=True) if compiled else layer
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2, capturable=True)

    def step() -> Tensor:
        loss = _loss(function, inputs)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()  # makes its state, which a graph must not make again
    torch.cuda.synchronize()
    layer.load_state_dict(state)
    for value in (value for of_one in optimizer.state.values() for value in of_one.values()):
        value.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in layer.parameters():
            parameter.grad.zero_()
        loss = step()
        optimizer.step()
    losses = []
    for _ in range(8):
        graph.replay()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-3)


def _loss(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    query = inputs[0]
    return (layer(*inputs) - query.sin().sum(1, keepdim=True)).square().mean()


def _train(layer: nn.Module, inputs: tuple[Tensor, ...], steps: int) -> list[float]:
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(layer, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
