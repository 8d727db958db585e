"""Try a wheel beside each supported Python and torch. By hand, before a release.

    python -m tools.versions dist/pointproj-*.whl FOLDER python3.13:2.11.0 python3.12:2.10.0,warp-lang==1.17.0

Each environment lies in FOLDER, and is used again if it is there. It has the wheel and what that depends on,
in the versions that are named, and no tree of the project: the tests are copied. Prints a table for the docs;
the exit code is 1 if anything failed.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
TESTS = ("operators", "gradients", "neighbor_lists", "native", "compile")
CHOSEN = "native or warp-cpu-knn or test_native"
FIRST_RESULT = (
    "import pointproj, torch; "
    "print(pointproj.knn(torch.zeros(1, 3), torch.eye(3), 2, backend='native')[1].tolist())"
)
VERSIONS = (
    "import importlib.metadata as m, platform; "
    "print(platform.python_version(), *(m.version(p) for p in ('torch', 'warp-lang', 'numpy')), sep=' | ')"
)
HEAD = "| Python | torch | Warp | numpy | first result of `native` | README's example | tests |"


class Environment(NamedTuple):
    """A virtual environment with the wheel."""

    folder: Path  # of the environment
    tree: Path  # where the tests are, without the package

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        """Run the environment's Python."""
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(self.tree / "built"), **variables}
        environment.pop("PYTHONPATH", None)
        return subprocess.run(
            [self.folder / "bin" / "python", *command],
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
        )


def prepared(python: str, packages: list[str], wheel: Path, folder: Path) -> Environment:
    """An environment of this Python with these packages and the wheel, and the tests beside it."""
    home = folder / "-".join((Path(python).name.removeprefix("python"), packages[0].partition("==")[2]))
    if not home.exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    install = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *packages, wheel, "pytest", "hypothesis", "scipy"], check=True)
    subprocess.run([*install, "--force-reinstall", "--no-deps", wheel], check=True)
    tree = folder / f"tree-{home.name}"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(PROJECT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tree)
    example = re.search(r"```python\n(.*?)```", (PROJECT / "README.md").read_text("utf-8"), re.DOTALL)
    (tree / "example.py").write_text(example[1], encoding="utf-8")
    return Environment(home, tree)


def tried(environment: Environment) -> tuple[list[str], bool]:
    """Cells of the table, and whether all went well."""
    without_compiler = {"PATH": str(environment.tree), "CXX": "no-such-compiler"}
    environment.run("-c", "import pointproj.nn.projector")  # compiles the files of torch
    started = time.monotonic()
    first = environment.run("-c", FIRST_RESULT, **without_compiler)
    seconds = time.monotonic() - started
    example = environment.run("example.py", **without_compiler)
    files = [f"tests/ops/test_{name}.py" for name in TESTS]
    tests = environment.run("-m", "pytest", "-q", "-o", "addopts=", "-m", "not slow", "-k", CHOSEN, *files)
    well = first.stdout == "[[0, 1]]\n" and seconds < 10 and example.returncode == tests.returncode == 0
    if not well:
        print(first.stderr, example.stderr, tests.stdout[-6000:], tests.stderr[-2000:], file=sys.stderr)
    result = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?)\b", tests.stdout))
    said = environment.run("-c", VERSIONS).stdout.strip()
    return [said, f"{seconds:.1f} s", "runs" if example.returncode == 0 else "fails", result], well


def main(wheel: str, folder: str, *wanted: str) -> int:
    """Try every environment; return the exit code."""
    print(HEAD)
    print("|---" * (HEAD.count("|") - 1) + "|")
    all_well = True
    for one in wanted:
        python, _, packages = one.partition(":")
        torch, *others = packages.split(",")
        environment = prepared(python, [f"torch=={torch}", *others], Path(wheel), Path(folder).resolve())
        cells, well = tried(environment)
        print(f"| {' | '.join(cells)} |", flush=True)
        all_well &= well
    return int(not all_well)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
