"""The reference of the config holds every value of the schema, with default and meaning."""

from dataclasses import fields, is_dataclass
from pathlib import Path

from docs.config_reference import reference
from pointproj.config import NETWORKS, Config

CONF = Path(__file__).resolve().parents[2] / "conf"


def test_every_value_has_a_row_with_type_default_and_meaning():
    page = reference(CONF)
    sections = [("", Config()), *((f"{e.name}.", getattr(Config(), e.name)) for e in fields(Config()))]
    sections = [(prefix, section) for prefix, section in sections if is_dataclass(section)]
    sections = [pair for pair in sections if pair[0] != "projector."]
    sections += [("projector.", network()) for network in NETWORKS.values()]
    for prefix, section in sections:
        for entry in fields(section):
            key = prefix + entry.name
            if is_dataclass(getattr(section, entry.name)) or key == "projector.name":
                continue
            (row, *_) = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
            assert all(cell.strip() for cell in row.replace("\\|", "").split("|")[1:-1]), row


def test_rows_say_what_the_schema_and_the_files_of_the_groups_say():
    page = reference(CONF)
    for text in (
        "| `projector.k` | a whole number of at least 1 | `7` | neighbours of each query point |",
        "| `optimizer.schedule` | one of constant, cosine | `constant` |",
        "| `data.limit` | a whole number of at least 1, or null | `null` |",
        "| `target.name` | one of udf, sdf, occupancy, random, field | chosen by group |",
        "## `projector=radius`\n\nAll reference points within a radius",
        *("- `data=mixed`: Real meshes", "`repeats=8`"),
    ):
        assert text in page
