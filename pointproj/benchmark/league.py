"""Our backends beside the fastest other library in everything that both measured, where we lose first.

``python -m pointproj benchmark --peers all`` first installs the libraries that pip brings without a compiler.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence

from pointproj.benchmark import peers
from pointproj.benchmark.implementations import import_failure
from pointproj.benchmark.results import OK, Row, select
from pointproj.benchmark.standings import standings
from pointproj.machine import installed_version

KEPT = ("torch", "numpy", "scipy", "warp-lang", "nvidia-physicsnemo")  # no peer may change their versions
NEEDS_COMPILER = {"torch-cluster"}  # pip would compile it


def missing(device_type: str) -> list[str]:
    """The distributions of peers for a type of device that are not installed and that pip brings."""
    absent = [p.package for p in peers.PEERS if device_type in p.devices and p.not_installed()]
    known = NEEDS_COMPILER | {name for name in absent if installed_version(name)}
    return [name for name in dict.fromkeys(absent) if name not in known]


def install(packages: Sequence[str], agreed: Callable[[str], bool]) -> None:
    """Install packages one by one, if the user agrees; the versions of :data:`KEPT` stay as they are.

    A package that cannot be installed is said, and its rows of the benchmark say that it is missing.
    """
    if not packages or not agreed(f"Install {', '.join(packages)} into {sys.prefix}?"):
        return
    kept = [f"{name}=={version}" for name in KEPT if (version := installed_version(name))]
    for package in packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", package, *kept]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = "installed" if done.returncode == 0 else f"not installed: {done.stderr.strip()[-300:]}"
        print(f"{package}: {said}", flush=True)
    importlib.invalidate_caches()
    import_failure.cache_clear()


def page(rows: Sequence[Row]) -> str:
    """Markdown: the machine, the standings, and every row without a time, with the reason."""
    first = rows[0]
    versions = {f"{row.implementation}: {row.package}": None for row in select(rows, status=OK)}
    without = [
        f"- {row.implementation}, `{row.workload}` {row.mode}: {row.status}, {row.note}"
        for row in rows
        if row.status != OK
    ]
    head = f"{first.device}, driver {first.driver or 'none'}, torch {first.torch}, commit {first.commit}"
    parts = [head, "\n".join(standings(rows)), ", ".join(versions), "\n".join(without)]
    return "\n\n".join(part for part in parts if part) + "\n"
