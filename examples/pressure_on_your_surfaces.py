"""Learn the pressure on surfaces: from a folder of samples to a file for ParaView.

Without an argument, the script writes balls in a stream as VTP files. With one, it reads ``mini_car.pt`` of
neuraloperator, a list of three cars, and writes NPZ files: two cars train and the third is the test.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parent.parent


def write_balls(folder: Path) -> None:
    """Write balls as VTP files, with the pressure 1 - 9/4 sin^2 and the direction of the stream."""
    import pyvista as pv

    rows = ["sample,stream_x,stream_y,stream_z"]
    for number, split in enumerate(["train"] * 8 + ["test"]):
        stream = np.random.default_rng(number).normal(size=3)
        stream /= np.linalg.norm(stream)
        ball = pv.Icosphere(radius=0.5 + 0.05 * number, nsub=3)
        along = ball.points @ stream / np.linalg.norm(ball.points, axis=1)
        ball["pressure"] = 1 - 9 / 4 * (1 - along**2)
        (folder / split).mkdir(exist_ok=True, parents=True)
        ball.save(folder / split / f"ball_{number}.vtp")
        rows.append(",".join([f"ball_{number}", *map(str, stream)]))
    (folder / "parameters.csv").write_text("\n".join(rows))


def write_cars(folder: Path, source: str) -> None:
    """Write the cars of ``mini_car.pt`` as NPZ files."""
    import torch

    for number, car in enumerate(torch.load(source, weights_only=True)):
        split = folder / ("test" if number == 2 else "train")
        split.mkdir(exist_ok=True, parents=True)
        arrays = {"points": car["vertices"], "normals": car["vertex_normals"], "pressure": car["press"][0]}
        np.savez(split / f"car_{number}.npz", **arrays)


with tempfile.TemporaryDirectory() as temporary:
    folder, run = Path(temporary) / "samples", Path(temporary) / "run"
    write_cars(folder, sys.argv[1]) if sys.argv[1:] else write_balls(folder)
    values = ["data=fields", "target=field", "data.fields=[pressure]", f"data.root={folder}", "device=cpu"]
    values += ["data.points=256", "data.validation=0", "projector.pool=true", "projector.blocks=2"]
    values += ["training.epochs=60", "training.pictures=0", "augmentation.rotate=right"]
    values += [f"data.cache={temporary}/cache"]
    subprocess.run([sys.executable, PROJECT / "train.py", *values, f"hydra.run.dir={run}"], check=True)
    (test,) = (folder / "test").iterdir()
    predict = [sys.executable, "-m", "pointproj", "predict", run, test, "--out", f"{temporary}/result.vtp"]
    subprocess.run(predict, check=True, cwd=PROJECT)
    report = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    print(f"relative L2 {report['metric_value']:.3f}, baseline {report['baseline']:.3f}")
    assert report["metric_value"] < report["baseline"]
