"""Private names of torch and Warp: in one module each, and an ordinary way where one has gone."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops import torch_internals
from tests.ops.cases import by_id
from tests.oracle import assert_close

OPERATORS = Path(pointproj.__file__).parent / "ops"
HOME = {"torch_internals.py", "triton_internals.py"}
PRIVATE = re.compile(
    r"\b(torch|warp|wp|triton|forward_ad)(\.\w+)*\._[a-zA-Z]\w*|from (torch|warp|triton)[\w.]*\._\w+"
)
NAMES = sorted(
    {
        found.group(1)
        for found in re.finditer(
            r"torch\.([\w.]*\b_[a-zA-Z][\w.]*)", Path(torch_internals.__file__).read_text()
        )
    }
)


class Without:
    """A module, or part of it, that lacks a name."""

    def __init__(self, part: Any, name: str) -> None:
        self.part, self.name = part, name

    def __getattr__(self, asked: str) -> Any:
        first, _, rest = self.name.partition(".")
        if asked != first:
            return getattr(self.part, asked)
        if not rest:
            raise AttributeError(asked)
        return Without(getattr(self.part, asked), rest)


def test_private_names_stand_in_one_module():
    found = [
        f"{path.relative_to(OPERATORS)}: {match.group()}"
        for path in sorted(OPERATORS.rglob("*.py"))
        if path.name not in HOME
        for match in PRIVATE.finditer(path.read_text())
        if "__" not in match.group()
    ]
    assert not found


def _results(backend: str) -> list[Tensor]:
    """Values and both derivatives."""
    query, points, features = (t.requires_grad_() for t in by_id("fp64").problem()[:3])
    aggregated = pointproj.knn_aggregate(query, points, features, 4, backend=backend)
    distances, _ = pointproj.knn(query, points, 4, backend=backend)
    value = aggregated.square().sum() + distances.sum()
    first = torch.autograd.grad(value, (query, points, features), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), features)
    return [aggregated, distances, *first, *second]


@pytest.mark.parametrize("name", [*NAMES, "forward_ad"])
@pytest.mark.parametrize("backend", ["torch", "warp"])
def test_a_torch_that_lacks_a_name(backend: str, name: str, monkeypatch: pytest.MonkeyPatch):
    expected = _results(backend)
    if name == "forward_ad":
        monkeypatch.setattr(
            torch_internals, "forward_ad", Without(torch_internals.forward_ad, "_current_level")
        )
    else:
        monkeypatch.setattr(torch_internals, "torch", Without(torch, name))
    for number, (got, want) in enumerate(zip(_results(backend), expected, strict=True)):
        assert_close(f"result {number}", got, want)


def test_importing_the_package_needs_none_of_them():
    gone = [f"torch.{name}".rpartition(".")[::2] for name in NAMES]
    lines = [f"{owner}.__dict__.pop({name!r}, None)" for owner, name in gone]
    code = "\n".join(["import torch", *lines, "import pointproj"])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
