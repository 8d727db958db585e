"""Measure two commits on this machine, each twice: an earlier one, and the tree of this code."""

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pointproj.benchmark.results import OK, Row, fastest, read_rows, select
from pointproj.machine import COMMIT_VARIABLE, PROJECT


class RevisionError(RuntimeError):
    """A commit that is not there or cannot be measured."""


def measure(base: str, arguments: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Run ``bench.py`` with the same arguments at the commit ``base`` and here; return the rows of both.

    The order is base, here, here, base, so that a machine that gets slower is no difference. Of each row the
    lesser time counts: other programs only add to it. How far the two times of a row differ is printed.
    The commit's files are in a temporary folder, and its libraries are compiled if they differ.
    RevisionError if there is no such commit, or a benchmark fails.
    """
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        commits = {tree: extract(base, tree), PROJECT: None}
        rows: dict[Path, list[list[Row]]] = {root: [] for root in commits}
        for turn, root in enumerate((tree, PROJECT, PROJECT, tree)):
            file = Path(folder) / f"{turn}.csv"
            _bench(root, commits[root], [*arguments, f"output={file}"])
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


def extract(base: str, folder: Path) -> str:
    """Write the files of a commit into a folder; return the commit's short name."""
    failure = f"there is no commit {base!r}"
    name = ("rev-parse", "--verify", "--quiet", "--short=12", "--end-of-options", f"{base}^{{commit}}")
    commit = _git(*name, failure=failure).decode().strip()
    archive = _git("archive", "--format=zip", commit, failure=f"{base} cannot be written to {folder}")
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    return commit


def _git(*arguments: str, failure: str) -> bytes:
    ended = subprocess.run(["git", "-C", PROJECT, *arguments], capture_output=True)
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        raise RevisionError(f"{failure} in {PROJECT} ({said or 'git says no more'})")
    return ended.stdout


def _bench(root: Path, commit: str | None, arguments: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root)}  # instead of an installed package
    environment.pop(COMMIT_VARIABLE, None)
    if commit:
        environment[COMMIT_VARIABLE] = commit
    command = [sys.executable, str(root / "bench.py"), *arguments]
    print(f"measuring {root}", file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=root, env=environment).returncode:
        raise RevisionError(f"bench.py {' '.join(arguments)} failed in {root}: its output is above")
