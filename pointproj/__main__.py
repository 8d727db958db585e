"""The command line: ``python -m pointproj COMMAND``, also installed as ``pointproj``.

Each command parses its own options. Its module is imported when the command runs. So ``--help`` is quick, and
the library's commands do not need the application.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from pointproj import __version__


class Command(NamedTuple):
    """A command of the command line."""

    summary: str
    module: str  # in pointproj; its main() takes the arguments, and returns the exit code, or None for 0


LIBRARY = {
    "doctor": Command("report what runs on this machine; backend=NAME device=NAME tries one", "doctor"),
    "build-native": Command(
        "build the backend native now instead of on first use", "ops.backends.native.build_command"
    ),
}
APPLICATION = {
    "evaluate": Command(
        "measure how well a trained network reconstructs test meshes", "inference.evaluate_command"
    ),
    "predict": Command("reconstruct a mesh or a point file with a trained network", "inference.predict"),
    "export": Command("export a trained network as files that need only torch", "inference.export_command"),
    "sweep": Command("make the table of a sweep again", "runtime.sweep"),
    "download": Command("fetch ModelNet10", "data.download"),
    "benchmark": Command(
        "compare our operators with the libraries installed here, in two minutes", "benchmark.quick_command"
    ),
    "benchmark-table": Command("make Markdown tables of benchmark results", "benchmark.table"),
    "benchmark-plots": Command("draw plots of benchmark results", "benchmark.plots"),
    "benchmark-compare": Command("compare two files of results, or two commits", "benchmark.compare"),
    "benchmark-tutorial": Command(
        "measure the table of the tutorial, with one process for each line", "benchmark.tutorial"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments``, by default those of the process; return the exit code.

    It is 0 for success, 1 for failure, 2 for a wrong command line, and 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pointproj",
        usage="%(prog)s COMMAND ...",
        description="Operators for point clouds, and the application that trains networks with them.",
        epilog=f"{_listed('library', LIBRARY)}\n\n{_listed('application', APPLICATION)}\n\n"
        "COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pointproj {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=[*LIBRARY, *APPLICATION], help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    module = f"pointproj.{(LIBRARY | APPLICATION)[given.command].module}"
    if given.command in LIBRARY:
        return import_module(module).main(given.arguments) or 0

    from pointproj.doctor import missing_application

    reason = missing_application()
    if reason is not None:
        print(f"{given.command} is a command of the application: {reason}", file=sys.stderr)
        return 1
    from pointproj.geometry.files.scans import missing_packages

    reason = missing_packages(given.arguments)
    if reason is not None:
        print(f"{given.command}: {reason}", file=sys.stderr)
        return 1
    from pointproj.runtime.errors import exit_on_user_error, print_any_text

    print_any_text()
    if not given.command.startswith("benchmark"):  # the benchmark measures torch with its own settings
        # OpenMP reads this when torch is imported; waiting threads then leave their cores to other work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with exit_on_user_error():
        return import_module(module).main(given.arguments) or 0


def _listed(title: str, commands: dict[str, Command]) -> str:
    return "\n".join([f"{title}:", *(f"  {name:20s}{command.summary}" for name, command in commands.items())])


if __name__ == "__main__":
    sys.exit(main())
