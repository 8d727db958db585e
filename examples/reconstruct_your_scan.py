"""Reconstruct your own scan: a file of points in, a closed mesh out.

``python examples/reconstruct_your_scan.py CHECKPOINT`` uses a trained network. Without a checkpoint, the
script trains a network for seconds on generated furniture, which is enough for a box. For other shapes, train
with ``experiment=solids``, which takes minutes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import trimesh

PROJECT = Path(__file__).resolve().parent.parent


def call(*arguments: object) -> None:
    """Run python with these arguments from the folder of the project."""
    subprocess.run([sys.executable, *map(str, arguments)], cwd=PROJECT, check=True)


def train(folder: Path) -> Path:
    """Train a visibility network on few shapes; return the folder of the run."""
    values = {
        "experiment": "solids",
        "data.root": folder / "furniture",
        "data.classes": "[dresser,sofa]",
        "data.train_meshes": 2,
        "data.test_meshes": 1,
        "data.points": 256,
        "data.grid": 10,
        "data.cache": folder / "cache",
        "training.epochs": 3,
        "training.validate_every": 3,
        "training.pictures": 0,
        "device": "cpu",
        "hydra.run.dir": folder / "run",
    }
    call("train.py", *(f"{key}={value}" for key, value in values.items()))
    return folder / "run"


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    box = trimesh.creation.box((2, 1, 0.8))
    points, _ = trimesh.sample.sample_surface(box, 2000, seed=0)
    np.savetxt(folder / "scan.xyz", points)  # x y z in each line; PLY, CSV, NPY and others are read too

    checkpoint = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else train(folder)
    solid = folder / "solid.ply"
    call("-m", "pointproj", "predict", checkpoint, folder / "scan.xyz", "--side", 32, "--out", solid)

    mesh = trimesh.load_mesh(solid)
    print(f"volume {mesh.volume:.2f} of {box.volume:.2f}, watertight: {mesh.is_watertight}")
    assert mesh.is_watertight
    assert abs(mesh.volume / box.volume - 1) < 0.3
