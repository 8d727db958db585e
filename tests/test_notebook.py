"""What things show of themselves in a notebook, without one; the notebook of the examples, cell by cell."""

import ast
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from pointproj import notebook
from pointproj.geometry.files.points import read_cloud
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, radius_neighbors
from pointproj.runtime.run_folder import RunFolder

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/first_look.ipynb"


def facts(shown) -> dict[str, str]:
    rows = ElementTree.fromstring(shown._repr_html_()).iter("tr")
    return {name.text: value.text for name, value in rows}


def test_lists():
    points = torch.tensor([[0.0, 0, 0], [1, 0, 0], [3, 0, 0]])
    padded = facts(radius_neighbors(points, points, 2, max_neighbors=1))
    assert padded == {
        **{"queries": "3", "places": "1", "cut off": "3", "fewest, most neighbours": "1, 1"},
        **{"mean neighbours": "1", "largest distance": "0", "distances": "torch.float32, cpu"},
    }
    packed = facts(radius_neighbors(points, points, 2, capacity=9))
    wanted = {"slots": "9", "pairs": "7", "fewest, most neighbours": "2, 3", "largest distance": "2"}
    assert wanted.items() <= packed.items()
    nothing = torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4)
    assert facts(Neighbors(*nothing))["queries"] == "0"
    assert (
        facts(NeighborList(torch.zeros(1, dtype=torch.int64), *(x[0:0, 0] for x in nothing)))["slots"] == "0"
    )


def test_a_cloud_and_a_run(tmp_path: Path):
    np.savetxt(tmp_path / "a&b.xyz", np.random.default_rng(0).random((50, 3)))
    cloud = read_cloud(tmp_path / "a&b.xyz", 50)
    assert facts(cloud) | {"scale": ""} == {
        "points": "50",
        "normals": "False",
        "sensors": "False",
        "scale": "",
    }
    assert cloud._repr_html_().count("<circle") == 50
    assert "a&amp;b" in cloud._repr_html_()
    for odd in (np.zeros((0, 3)), np.ones((1, 3)), np.full((2, 3), np.nan)):
        ElementTree.fromstring(notebook.drawing(odd))
    run = RunFolder(tmp_path / "run")
    assert facts(run) == {"status": "has no metrics.json yet"}
    run.write_json(
        "metrics.json", {"status": "ok", "loss": None, "steps": 1200, "measured": {"iou": 0.51234}}
    )
    run.picture_path("x").write_bytes(b"png")
    assert facts(run) == {"status": "ok", "steps": "1,200", "iou, on test data": "0.5123"}
    assert "base64,cG5n" in run._repr_html_()


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names, shown = {}, []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            *before, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(before, []), NOTEBOOK.name, "exec"), names)
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names))
    tables = [ElementTree.fromstring(each._repr_html_()) for each in shown if hasattr(each, "_repr_html_")]
    assert [table.find("b").text for table in tables[:3]] == ["Neighbors", "NeighborList", "sample"]
    assert len(tables) == 4
    assert shown[2] > 0.9
