"""Build the extension ahead of its first use, as for a Docker image: ``python -m pointproj build-native``."""

import argparse
import re
import sys
from collections.abc import Sequence

from pointproj.ops.backends.native import build
from pointproj.ops.registry import BackendUnavailable


def main(arguments: Sequence[str]) -> int:
    """Build the extension unless there is one, and print its folder; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=build.BUILD_AHEAD, description="Build the C++ and CUDA extension of the backend native."
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        type=_architecture,
        metavar="X.Y",
        help="GPU architectures, as 8.0 9.0; by default those of this machine; without a GPU none",
    )
    given = parser.parse_args(arguments)
    try:
        folder = build.find_or_make(given.arch or build.architectures_here())
    except BackendUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    print(folder)
    return 0


def _architecture(text: str) -> str:
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected an architecture such as 9.0; got {text!r}")
    return match[1] + match[2]
