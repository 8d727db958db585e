"""Folders of meshes, and configs that read them."""

import pytest

from pointproj.config import Config, DataConfig, TargetConfig
from pointproj.data.furniture import write_furniture
from tests.data.samples import SHEET


@pytest.fixture(scope="session")
def furniture(tmp_path_factory):
    """Three training and two test pieces of two classes, prepared by most tests with a small grid."""
    root = tmp_path_factory.mktemp("furniture")
    write_furniture(root / "ModelNet10", ["dresser", "sofa"], train=3, test=2)
    return root


@pytest.fixture
def config(furniture, tmp_path):
    def make(target="udf", **data):
        chosen = {"name": "modelnet10", "root": str(furniture), "cache": str(tmp_path / "cache"), "grid": 6}
        section = DataConfig(**(chosen | {"points": 64, "validation": 0.0} | data))
        return Config(data=section, target=TargetConfig(name=target), seed=5)

    return make


@pytest.fixture
def broken(furniture, tmp_path):
    """The furniture's dressers, and beside them files that are no meshes, and a sheet without interior."""
    root = tmp_path / "broken"
    for path in furniture.glob("ModelNet10/dresser/*/*.off"):
        copy = root / path.relative_to(furniture / "ModelNet10")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (root / "dresser" / "train" / "dresser_0100.off").write_text("")
    (root / "dresser" / "train" / "dresser_0101.off").write_text(SHEET.replace("1 1 0", "1 nan 0"))
    (root / "dresser" / "test" / "dresser_0102.off").write_text(SHEET)
    return root
