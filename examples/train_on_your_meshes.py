"""Train on your own meshes: any folder of mesh files, with a folder for each class if there are several.

The script writes boxes and balls in place of your meshes. ``train.py`` uses some of them for validation and
tests, and writes its report, pictures and checkpoints to the folder of the run.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import trimesh

PROJECT = Path(__file__).resolve().parent.parent


def write_meshes(folder: Path, count: int) -> None:
    """Write boxes as STL, and as many balls as OBJ."""
    for name in ("box", "ball"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        size = 1 + number / count
        trimesh.creation.box((1, size, 2 * size)).export(folder / f"box/{number}.stl")
        trimesh.creation.icosphere(3, size).apply_scale((1, 1, size)).export(folder / f"ball/{number}.obj")


def train(folder: Path, run: Path) -> dict:
    """Train for a short time on the CPU; return the report."""
    values = {
        "data": "meshes",
        "data.root": folder / "meshes",
        "data.cache": folder / "cache",
        "data.points": 256,
        "data.grid": 12,
        "training.epochs": 5,
        "training.pictures": 0,
        "device": "cpu",
        "hydra.run.dir": run,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    subprocess.run([sys.executable, str(PROJECT / "train.py"), *overrides], check=True)
    return json.loads((run / "metrics.json").read_text(encoding="utf-8"))


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    write_meshes(folder / "meshes", 6)
    report = train(folder, folder / "run")
    print(f"{report['steps']} steps; mean absolute error on test meshes {report['metric_value']:.4f}")
    assert (folder / "run/best.pt").is_file()
    assert report["metric_value"] < 0.1
