"""The pressure on three cars, learned by our networks and by GINO of neuraloperator: a table.

    python -m tools.cars mini_car.pt [--steps 200] [--threads 1]

The file is in the repository of neuraloperator. Two cars train, and the third is the test; there are no
validation samples, and the last weights count. All networks take one car a step. GINO has the values of
neuraloperator's ``config/gino_carcfd_config.py``, with latent points and distances of the file; ours have
those of ``experiment=flow``, and knn a learned sigma. Errors are those of the car's points, which all weigh
the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PROJECT = Path(__file__).resolve().parent.parent
OURS = {"knn": ["projector.sigma=learned"], "attention": [], "pairs": []}


def gino() -> torch.nn.Module:
    """GINO with the values of its example for cars."""
    from neuralop.models import GINO

    torch.manual_seed(0)
    return GINO(
        in_channels=0,
        out_channels=1,
        latent_feature_channels=1,
        gno_coord_dim=3,
        in_gno_radius=0.033,
        out_gno_radius=0.033,
        in_gno_pos_embed_type="nerf",
        out_gno_pos_embed_type="nerf",
        gno_embed_channels=16,
        fno_n_modes=(16, 16, 16),
        fno_hidden_channels=64,
        fno_norm="instance_norm",
        fno_ada_in_features=32,
        fno_factorization="tucker",
        fno_rank=0.4,
        fno_channel_mlp_expansion=1.0,
        gno_use_open3d=False,
        gno_use_torch_scatter=False,
    )


def train_gino(cars: list[dict[str, Tensor]], steps: int) -> tuple[float, float]:
    """Return the relative L2 of the third car, and milliseconds a step."""
    train = torch.cat([car["press"] for car in cars[:2]])
    mean, std = train.mean(), train.std()
    network = gino()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
    halve = torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // 6), 0.5)  # as 50 of 301 epochs

    def predicted(car: dict[str, Tensor]) -> Tensor:
        points = car["vertices"][None]
        return network(
            input_geom=points,
            latent_queries=car["query_points"][None],
            output_queries=points[0],
            latent_features=car["distance"][None],
        ).reshape(-1)

    began = time.perf_counter()
    for step in range(steps):
        car = cars[step % 2]
        wanted = (car["press"][0] - mean) / std
        loss = relative(predicted(car), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        halve.step()
    took = (time.perf_counter() - began) / steps * 1000
    with torch.no_grad():
        return relative(predicted(cars[2]) * std + mean, cars[2]["press"][0]).item(), took


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).norm() / wanted.norm()


def train_ours(
    cars: list[dict[str, Tensor]], steps: int, name: str, values: list[str]
) -> tuple[float, float]:
    """Return the same of a run of this application."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, run = Path(temporary) / "cars", Path(temporary) / "run"
        for number, car in enumerate(cars):
            split = folder / ("test" if number == 2 else "train")
            split.mkdir(exist_ok=True, parents=True)
            arrays = {
                "points": car["vertices"],
                "normals": car["vertex_normals"],
                "pressure": car["press"][0],
            }
            np.savez(split / f"car_{number}.npz", **arrays)
        command = [
            *(sys.executable, PROJECT / "train.py", "experiment=flow"),
            *("data=fields", "data.fields=[pressure]"),
            *(f"data.root={folder}", f"data.cache={temporary}/cache", f"hydra.run.dir={run}"),
            *("data.validation=0", f"data.points={len(cars[0]['vertices'])}", "data.queries=0"),
            *("augmentation.rotate=none", "augmentation.mirror=false", "device=cpu", "training.pictures=0"),
            *("training.batch_size=1", f"training.epochs={steps // 2}", "training.validate_every=10000"),
            *(f"training.threads={torch.get_num_threads()}", f"projector={name}", *values),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    return report["metric_value"], report["ms_per_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cars = torch.load(given.file, weights_only=True)
    mean = torch.cat([car["press"] for car in cars[:2]]).mean()
    print("| network | relative L2 | ms a step |\n| --- | ---: | ---: |")
    print(f"| mean of the training cars | {relative(mean, cars[2]['press'][0]):.3f} | |", flush=True)
    for name, values in OURS.items():
        error, took = train_ours(cars, given.steps, name, values)
        print(f"| ours, projector={name} | {error:.3f} | {took:.0f} |", flush=True)
    error, took = train_gino(cars, given.steps)
    print(f"| GINO | {error:.3f} | {took:.0f} |")


if __name__ == "__main__":
    main()
