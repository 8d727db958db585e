"""A training step captured in a CUDA graph: search, forward, backward and Adam are one launch.

No operator waits for the device, so torch.cuda.graph captures the whole step. Without a GPU the step runs
eagerly.
"""

import torch
from torch import nn

from pointproj import knn_aggregate

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
points = torch.rand(2000, 3, device=device)
query_points = torch.rand(500, 3, device=device)  # new queries are copied into this tensor
target = torch.zeros(500, 1, device=device)

encode = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 16)).to(device)
decode = nn.Linear(16, 1).to(device)
parameters = [*encode.parameters(), *decode.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2, capturable=device == "cuda")


def step() -> torch.Tensor:
    """Make one step; return its loss, on the device."""
    optimizer.zero_grad(set_to_none=True)
    loss = (decode(knn_aggregate(query_points, points, encode(points), 7)) - target).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def captured() -> torch.Tensor:
    """Replay the step; each replay writes the loss into the same tensor."""
    graph.replay()
    return graph_loss


run = step
if device == "cuda":
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # before the capture, compile kernels and reserve memory
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_loss = step()
    run = captured

losses = []
for _ in range(100):
    query_points.copy_(torch.rand(500, 3))
    target.copy_(query_points.sum(1, keepdim=True))
    losses.append(run().clone())
print("captured in a CUDA graph" if device == "cuda" else "no GPU here: the same step, eagerly")
print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.4f}")
assert losses[-1] < 0.05 * losses[0]
