"""The scripts of examples/ run as they are; each asserts itself that it worked."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
CARS = Path(__file__).resolve().parents[2] / "shared/mini_car/mini_car.pt"
SLOW = (
    "train_on_your_meshes",
    "reconstruct_your_scan",
    "pressure_on_your_surfaces",
)  # they start further processes, and train


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in SLOW else [])
        for file in EXAMPLES
    ],
)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_seven():
    assert len(EXAMPLES) == 7


@pytest.mark.slow
@pytest.mark.skipif(not CARS.exists(), reason=f"{CARS} is not there")
def test_pressure_on_cars(monkeypatch: pytest.MonkeyPatch, capsys):
    (example,) = (file for file in EXAMPLES if file.stem == "pressure_on_your_surfaces")
    monkeypatch.setattr("sys.argv", [str(example), str(CARS)])
    runpy.run_path(str(example), run_name="__main__")
    assert "relative L2" in capsys.readouterr().out
