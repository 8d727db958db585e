"""The command ``build-native``: its arguments; torch is not imported before they are read."""

import argparse
import re
import sys
from collections.abc import Sequence

from pointproj.ops.backends.native import BUILD_AHEAD


def main(arguments: Sequence[str]) -> int:
    """``python -m pointproj build-native``, as for a Docker image: print the folder, return the exit code."""
    parser = argparse.ArgumentParser(
        prog=BUILD_AHEAD, description="Build the C++ and CUDA extension of the backend native."
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        type=_architecture,
        metavar="X.Y",
        help="GPU architectures, as 8.0 9.0; by default those of this machine; without a GPU none",
    )
    given = parser.parse_args(arguments)
    from pointproj.ops.backends import BackendUnavailable
    from pointproj.ops.backends.native.build import architectures_here, find_or_make, make_autograd

    try:
        folder = find_or_make(given.arch or architectures_here())
    except BackendUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    print(folder)
    try:
        make_autograd()
    except (RuntimeError, OSError) as error:
        print(f"autograd of native stays in Python, since C++ does not compile:\n{error}", file=sys.stderr)
    return 0


def _architecture(text: str) -> str:
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected an architecture such as 9.0; got {text!r}")
    return match[1] + match[2]
