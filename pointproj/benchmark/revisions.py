"""Measure two commits on this machine, one after the other: an earlier one, and the tree of this code."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pointproj.benchmark.results import Row, read_rows
from pointproj.machine import PROJECT


class RevisionError(RuntimeError):
    """A commit that cannot be checked out or measured."""


def measure(base: str, arguments: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Run ``bench.py`` with the same arguments at the commit ``base`` and here; return the rows of both.

    The commit is checked out in a temporary worktree, and its libraries are compiled if they differ.
    RevisionError if there is no such commit, or a benchmark fails.
    """
    with TemporaryDirectory() as folder, checked_out(base, Path(folder) / "tree") as tree:
        files = []
        for name, root in (("before", tree), ("after", PROJECT)):
            files.append(Path(folder) / f"{name}.csv")
            _bench(root, [*arguments, f"output={files[-1]}"])
        before, after = map(read_rows, files)
        return before, after


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
