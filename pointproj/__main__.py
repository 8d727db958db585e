"""The command line: ``python -m pointproj COMMAND``, installed as ``pointproj`` too.

Each command parses its own options. Its module is imported when the command is run, so that ``--help`` is
quick and the library's commands need nothing of the application.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

Arguments = Sequence[str]


def _doctor(arguments: Arguments) -> int:
    from pointproj import doctor

    return doctor.main(arguments)


def _build_native(arguments: Arguments) -> int:
    from pointproj.ops.backends.native import build_ahead

    return build_ahead.main(arguments)


def _evaluate(arguments: Arguments) -> None:
    from pointproj.inference import evaluate

    evaluate.main(arguments)


def _predict(arguments: Arguments) -> None:
    from pointproj.inference import predict

    predict.main(arguments)


def _export(arguments: Arguments) -> None:
    from pointproj.inference import export

    export.main(arguments)


def _sweep(arguments: Arguments) -> int:
    from pointproj.runtime import sweep

    return sweep.main(arguments)


def _download(arguments: Arguments) -> None:
    from pointproj.data import download

    download.main(arguments)


def _benchmark(arguments: Arguments) -> int:
    from pointproj.benchmark import quick

    return quick.main(arguments)


def _benchmark_table(arguments: Arguments) -> None:
    from pointproj.benchmark import table

    table.main(arguments)


def _benchmark_plots(arguments: Arguments) -> None:
    from pointproj.benchmark import plots

    plots.main(arguments)


def _benchmark_compare(arguments: Arguments) -> None:
    from pointproj.benchmark import compare

    compare.main(arguments)


def _benchmark_tutorial(arguments: Arguments) -> int:
    from pointproj.benchmark import tutorial

    return tutorial.main(arguments)


class Command(NamedTuple):
    """A command of the command line."""

    summary: str
    run: Callable[[Arguments], int | None]  # returns the exit code, None for 0


LIBRARY = {
    "doctor": Command("what runs on this machine; with backend=NAME device=NAME try it", _doctor),
    "build-native": Command("build the backend native now instead of on first use", _build_native),
}
APPLICATION = {
    "evaluate": Command("measure how well a trained network reconstructs test meshes", _evaluate),
    "predict": Command("reconstruct a mesh or a point file with a trained network", _predict),
    "export": Command("export a trained network as files that need torch alone", _export),
    "sweep": Command("make the table of a sweep again", _sweep),
    "download": Command("fetch ModelNet10", _download),
    "benchmark": Command("measure ours beside the libraries installed here, in two minutes", _benchmark),
    "benchmark-table": Command("make Markdown tables of benchmark results", _benchmark_table),
    "benchmark-plots": Command("draw plots of benchmark results", _benchmark_plots),
    "benchmark-compare": Command("compare two files of benchmark results", _benchmark_compare),
    "benchmark-tutorial": Command(
        "measure the table of the tutorial, one process a line", _benchmark_tutorial
    ),
}


def main(arguments: Arguments | None = None) -> int:
    """Run the command that the command line names.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command and its arguments; those of the process by default.

    Returns
    -------
    int
        Exit code: 0 for success, 1 for failure, 2 for a command line that makes no sense, 130 after Ctrl-C.
    """
    parser = _parser()
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.command in LIBRARY:
        return LIBRARY[given.command].run(given.arguments) or 0

    from pointproj.doctor import missing_application

    reason = missing_application()
    if reason is not None:
        print(f"{given.command} is a command of the application: {reason}", file=sys.stderr)
        return 1
    from pointproj.runtime.errors import exit_on_user_error, print_any_text

    print_any_text()
    with exit_on_user_error():
        return APPLICATION[given.command].run(given.arguments) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pointproj",
        usage="%(prog)s COMMAND ...",
        description="Operators for point clouds, and the application that trains networks with them.",
        epilog=f"{_listed('library', LIBRARY)}\n\n{_listed('application', APPLICATION)}\n\n"
        "COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=[*LIBRARY, *APPLICATION], help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    return parser


def _listed(title: str, commands: dict[str, Command]) -> str:
    return "\n".join([f"{title}:", *(f"  {name:20s}{command.summary}" for name, command in commands.items())])


if __name__ == "__main__":
    sys.exit(main())
