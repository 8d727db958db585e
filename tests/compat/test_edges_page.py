"""The page on the edges of other libraries says of ours, and of scipy, what is so."""

import pytest

from tests.processes import PROJECT
from tools import edges

PAGE = (PROJECT / "docs" / "operators" / "edges.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("edge", list(edges.edges())[:-1], ids=lambda edge: edge.asked)
def test_the_page_has_what_ours_answers(edge):
    assert f"| {edge.asked} | " in PAGE
    lines = [line for line in PAGE.splitlines() if edge.asked in line and line.count("|") == 5]
    assert all(line.endswith(f"| {edge.ours()} |") for line in lines)


def test_a_point_at_the_largest_distance_and_too_many_neighbours():
    *_, at_bound, too_many = edges.edges()
    assert (at_bound.others["scipy"](), at_bound.ours()) == ("excluded", "included")
    assert too_many.ours() == "an error that names both numbers"
