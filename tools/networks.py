"""A training step of other libraries' networks, as they are and with one line changed: a table.

    python -m tools.networks [NAME ...] [--device cuda]

A step is forward, mean square of the output, backward. Both networks have the same weights and take turns. On
a GPU: the median wall-clock time of five steps, and the most memory beyond what is held before. On a CPU: the
least CPU time, and the most memory beyond, which is right in a process that returns what it frees:
MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536.
A network whose library is missing has the reason in its row.
"""

import argparse
import copy
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointproj import knn
from pointproj.benchmark.models import make_geotransolver, make_gino
from pointproj.benchmark.recorder import MIB

REPEATED = 5
Step = Callable[[], Any]  # makes the output
Made = tuple[tuple[nn.Module, Step], tuple[nn.Module, Step]]  # theirs, ours


def _clouds(device: torch.device, count: int, points: int = 1024) -> tuple[Tensor, Tensor]:
    clouds = torch.arange(count, device=device).repeat_interleave(points)
    return torch.rand(count * points, 3, device=device), clouds


def _replaced(model: nn.Module, replace: Callable[[nn.Module], Any], *inputs: Tensor) -> Made:
    ours = copy.deepcopy(model)
    print(replace(ours))
    return (model, partial(model, *inputs)), (ours, partial(ours, *inputs))


def dgcnn(device: torch.device, large: bool) -> Made:
    return _pyg(_DGCNN, *_clouds(device, 32 if large else 8))


def pointnet2(device: torch.device, large: bool) -> Made:
    return _pyg(_PointNet2, *_clouds(device, 32 if large else 8))


def point_transformer(device: torch.device, large: bool) -> Made:
    return _pyg(_PointTransformer, *_clouds(device, 32 if large else 4))


def _pyg(make: Callable[[], nn.Module], points: Tensor, batch: Tensor) -> Made:
    from pointproj.compat import torch_geometric
    from pointproj.compat.torch_geometric_layers import replace

    torch_geometric.install()
    return _replaced(make().to(points.device), replace, points, batch)


class _DGCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import MLP, DynamicEdgeConv

        self.first = DynamicEdgeConv(MLP([6, 64, 64, 64], norm=None), 20, "max")
        self.second = DynamicEdgeConv(MLP([128, 128], norm=None), 20, "max")
        self.head, self.scores = nn.Linear(192, 1024), nn.Linear(1024, 10)

    def forward(self, points: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_max_pool

        first = self.first(points, batch)
        both = torch.cat([first, self.second(first, batch)], 1)
        return self.scores(global_max_pool(self.head(both), batch))


class _Abstraction(nn.Module):
    """A level of PointNet++."""

    def __init__(self, ratio: float, radius: float, widths: list[int]) -> None:
        super().__init__()
        from torch_geometric.nn import MLP, PointNetConv

        self.ratio, self.radius = ratio, radius
        self.convolution = PointNetConv(MLP(widths, norm=None), add_self_loops=False)

    def forward(
        self, features: Tensor | None, points: Tensor, batch: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from torch_geometric.nn import fps, radius

        chosen = fps(points, batch, ratio=self.ratio, random_start=False)
        to, of = radius(points, points[chosen], self.radius, batch, batch[chosen], max_num_neighbors=64)
        both = (features, None if features is None else features[chosen])
        made = self.convolution(both, (points, points[chosen]), torch.stack([of, to]))
        return made, points[chosen], batch[chosen]


class _PointNet2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Abstraction(0.5, 0.2, [3, 64, 64, 128])
        self.second = _Abstraction(0.25, 0.4, [131, 128, 128, 256])
        self.scores = nn.Linear(256, 10)

    def forward(self, points: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_max_pool

        features, _, batch = self.second(*self.first(None, points, batch))
        return self.scores(global_max_pool(features, batch))


class _PointTransformer(nn.Module):
    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        from torch_geometric.nn import MLP, PointTransformerConv

        def layer() -> nn.Module:
            networks = (MLP([w, 64, channels], norm=None, plain_last=False) for w in (3, channels))
            return PointTransformerConv(channels, channels, *networks)

        self.lift, self.scores = nn.Linear(3, channels), nn.Linear(channels, 10)
        self.first, self.second = layer(), layer()

    def forward(self, points: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import knn_graph

        edges = knn_graph(points, 16, batch)
        return self.scores(self.second(self.first(self.lift(points), points, edges), points, edges))


def point_transformer_block(device: torch.device, large: bool) -> Made:
    from physicsnemo.nn.module.point_transformer_attention import LocalPointTransformerBlock

    from pointproj.compat.physicsnemo_layers import replace

    count = 100_000 if large else 10_000
    options = {"neighbor_k": 16, "mlp_ratio": 4, "dropout": 0.0, "use_te": False, "dilation": 1}
    block = LocalPointTransformerBlock(dim=64, num_heads=8, **options)
    points, features = torch.rand(count, 3, device=device), torch.randn(count, 64, device=device)
    return _replaced(_Given(block, knn(points, points, 16)[1]).to(device), replace, features, points)


class _Given(nn.Module):
    """A block with the neighbours given."""

    def __init__(self, block: nn.Module, nearest: Tensor) -> None:
        super().__init__()
        self.block, self.nearest = block, nearest

    def forward(self, features: Tensor, points: Tensor) -> Tensor:
        return self.block(features, points, precomputed_idx=self.nearest)


def gino(device: torch.device, large: bool) -> Made:
    return _of_benchmark(make_gino, device, 10_000 if large else 2_000)


def geotransolver(device: torch.device, large: bool) -> Made:
    return _searching(*_of_benchmark(make_geotransolver, device, 100_000 if large else 10_000))


def _of_benchmark(make: Callable[..., Any], device: torch.device, points: int) -> Made:
    made = []
    for ours in (False, True):
        torch.manual_seed(0)
        model, inputs = make(ours, points, device)
        made.append((model, partial(model, **inputs)))
    return made[0], made[1]


def domino(device: torch.device, large: bool) -> Made:
    from physicsnemo.models.domino import config
    from physicsnemo.models.domino.model import DoMINO

    parameters = copy.deepcopy(config.DEFAULT_MODEL_PARAMS)
    if not large:
        parameters.interp_res = [16, 8, 8]
    counts = {"input_features": 3, "output_features_vol": 5, "output_features_surf": 4}
    model = DoMINO(**counts, model_parameters=parameters).to(device)
    inputs = _domino_inputs(parameters, device, *((8192, 100_000) if large else (512, 5_000)))

    def call() -> Tensor:
        return torch.cat([output.flatten() for output in model(inputs)])

    return _searching((model, call), (model, call))


def _domino_inputs(parameters: Any, device: torch.device, sampled: int, geometry: int) -> dict[str, Tensor]:
    """A sphere of radius 1/2 in a box of side 2."""

    def directions(count: int) -> Tensor:
        return nn.functional.normalize(torch.randn(1, count, 3, device=device), dim=-1)

    resolution = tuple(parameters.interp_res)
    axes = (torch.linspace(-1, 1, ticks, device=device) for ticks in resolution)
    grid = torch.cartesian_prod(*axes).view(1, *resolution, 3)
    from_surface = grid.norm(dim=-1) - 0.5
    surface, volume = directions(sampled) * 0.5, directions(sampled) * 0.8
    near = parameters.num_neighbors_surface
    close = surface[:, :, None] + 0.01 * torch.randn(1, sampled, near, 3, device=device)
    corners = torch.tensor([[[-1.0] * 3, [1.0] * 3]], device=device)
    ones = torch.ones(1, 2, 1, device=device)
    return {
        "pos_volume_closest": volume * 0.375,
        "pos_volume_center_of_mass": volume,
        "pos_surface_center_of_mass": surface,
        "geometry_coordinates": directions(geometry) * 0.5,
        "grid": grid,
        "surf_grid": grid,
        "sdf_grid": from_surface,
        "sdf_surf_grid": from_surface,
        "sdf_nodes": volume.norm(dim=-1, keepdim=True) - 0.5,
        "surface_mesh_centers": surface,
        "surface_mesh_neighbors": close,
        "surface_normals": surface * 2,
        "surface_neighbors_normals": close * 2,
        "surface_areas": torch.ones_like(surface[..., 0]),
        "surface_neighbors_areas": torch.ones_like(close[..., 0]),
        "volume_mesh_centers": volume,
        "volume_min_max": corners,
        "surface_min_max": corners,
        "global_params_values": ones,
        "global_params_reference": ones,
    }


def _searching(theirs: tuple[nn.Module, Step], ours: tuple[nn.Module, Step]) -> Made:
    """Each step with its own search of PhysicsNeMo."""
    from pointproj.compat import physicsnemo

    def with_(switch: Callable[[], Any], call: Step) -> Any:
        switch()
        return call()

    return (
        (theirs[0], partial(with_, physicsnemo.uninstall, theirs[1])),
        (ours[0], partial(with_, physicsnemo.install, ours[1])),
    )


NETWORKS = {
    "DGCNN": dgcnn,
    "PointNet++": pointnet2,
    "Point Transformer": point_transformer,
    "LocalPointTransformerBlock": point_transformer_block,
    "GINO": gino,
    "GeoTransolver": geotransolver,
    "DoMINO": domino,
}


def measured(model: nn.Module, call: Step, device: torch.device) -> tuple[float, float]:
    """Time in ms and memory in MiB of one step."""
    model.zero_grad(set_to_none=True)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory counts from here on
        held = _status("VmRSS")
    clock = time.perf_counter if gpu else time.process_time
    start = clock()
    call().float().square().mean().backward()
    if gpu:
        torch.cuda.synchronize()
    taken = (clock() - start) * 1e3
    most = torch.cuda.max_memory_allocated() if gpu else _status("VmHWM")
    return taken, (most - held) / MIB


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def row(name: str, device: torch.device) -> str:
    """The network's row of the table."""
    torch.manual_seed(0)
    both = NETWORKS[name](device, device.type == "cuda")
    for model, call in both * 2:
        measured(model, call, device)
    taken: tuple[list, list] = ([], [])
    for _ in range(REPEATED):
        for rows, (model, call) in zip(taken, both, strict=True):
            rows.append(measured(model, call, device))
    of = statistics.median if device.type == "cuda" else min
    before, after = ([of(column) for column in zip(*rows, strict=True)] for rows in taken)
    return f"| {name} | {before[0]:.1f} | {after[0]:.1f} | {before[1]:.0f} | {after[1]:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32, as these libraries train
    print("| network | ms before | ms after | MiB before | MiB after |\n|---|---:|---:|---:|---:|")
    for name in given.names or NETWORKS:
        try:
            print(row(name, torch.device(given.device)), flush=True)
        except Exception as error:  # of a library: the next network is measured
            traceback.print_exc(limit=-2)
            print(f"| {name} | {type(error).__name__} {str(error)[:80]} | | | |", flush=True)


if __name__ == "__main__":
    main()
