"""A small part of ``python -m tests.fuzzing``: every reader ends in a value or in its own error."""

import pytest

from tests.fuzzing import fuzz, readers

COUNTS = {
    **dict.fromkeys((".off", ".obj", ".ply", ".stl"), 2000),
    **dict.fromkeys((".xyz, cloud", ".npy, cloud", ".ply, cloud", ".obj, cloud", ".laz, cloud"), 600),
    **dict.fromkeys((".pt", ".pt, inside"), 400),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # about what is in the files
@pytest.mark.parametrize("name", COUNTS)
def test_files_that_nobody_would_write_are_read_or_refused(name, tmp_path):
    tally = fuzz(readers(tmp_path)[name], COUNTS[name], seed=1)
    assert tally.findings == []
    assert tally.read + tally.refused == COUNTS[name]
    assert min(tally.read, tally.refused) > 0
    assert tally.grown < 200
