"""A target is a row of one table, and a file of conf/target."""

from pathlib import Path

from pointproj.config import TARGETS
from pointproj.geometry.fields import FIELDS

CONF = Path(__file__).parents[2] / "conf" / "target"


def test_every_target_can_be_chosen_and_computed():
    assert {path.stem for path in CONF.glob("*.yaml")} == TARGETS.keys()
    assert FIELDS.keys() == {name for name, target in TARGETS.items() if target.of_mesh}
