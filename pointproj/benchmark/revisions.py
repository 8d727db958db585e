"""Measure two commits on this machine, each twice: an earlier one, and the tree of this code."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pointproj.benchmark.results import OK, Row, fastest, read_rows, select
from pointproj.machine import PROJECT


class RevisionError(RuntimeError):
    """A commit that cannot be checked out or measured."""


def measure(base: str, arguments: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Run ``bench.py`` with the same arguments at the commit ``base`` and here; return the rows of both.

    The order is base, here, here, base, so that a machine that gets slower is no difference. Of each row the
    lesser time counts: other programs only add to it. How far the two times of a row differ is printed.
    The commit is checked out in a temporary worktree, and its libraries are compiled if they differ.
    RevisionError if there is no such commit, or a benchmark fails.
    """
    with TemporaryDirectory() as folder, checked_out(base, Path(folder) / "tree") as tree:
        rows: dict[Path, list[list[Row]]] = {tree: [], PROJECT: []}
        for turn, root in enumerate((tree, PROJECT, PROJECT, tree)):
            file = Path(folder) / f"{turn}.csv"
            _bench(root, [*arguments, f"output={file}"])
            rows[root].append(read_rows(file))
        before, after = (least(*runs) for runs in rows.values())
        return before, after


def least(first: list[Row], second: list[Row]) -> list[Row]:
    """The rows of two runs as one run, each with the lesser time; prints how far the two times differ."""
    other = {row.measurement: row for row in second}
    pairs = [(row, other.get(row.measurement, row)) for row in first]
    both = [sorted(row.p50_ms for row in pair) for pair in pairs if {row.status for row in pair} == {OK}]
    if both:
        most = max(slow / fast for fast, slow in both)
        print(f"commit {first[0].commit}: two times of a row differ by up to {most - 1:.0%}", file=sys.stderr)
    return [replace(fastest(select(pair, status=OK)) or pair[0], date=pair[0].date) for pair in pairs]


@contextmanager
def checked_out(base: str, tree: Path) -> Iterator[Path]:
    """Check a commit out in a worktree, which is removed afterwards."""
    _git(
        "rev-parse",
        "--verify",
        "--quiet",
        "--end-of-options",
        f"{base}^{{commit}}",
        failure=f"there is no commit {base!r}",
    )
    _git("worktree", "add", "--detach", str(tree), base, failure=f"{base} cannot be checked out")
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree), failure=f"the worktree {tree} cannot be removed")


def _git(*arguments: str, failure: str) -> None:
    ended = subprocess.run(["git", "-C", PROJECT, *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise RevisionError(f"{failure} in {PROJECT} ({ended.stderr.strip() or 'git says no more'})")


def _bench(root: Path, arguments: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root)}  # instead of an installed package
    environment.pop("POINTPROJ_COMMIT", None)
    command = [sys.executable, str(root / "bench.py"), *arguments]
    print(f"measuring {root}", file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=root, env=environment).returncode:
        raise RevisionError(f"bench.py {' '.join(arguments)} failed in {root}: its output is above")
