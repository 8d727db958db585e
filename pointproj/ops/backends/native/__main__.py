"""Build the extension ahead of time, as for a Docker image: ``python -m pointproj.ops.backends.native``."""

import argparse
import logging
import re
import sys

from pointproj.ops.backends.native import build
from pointproj.ops.registry import BackendUnavailable


def main() -> int:
    """Build, unless that was done before, and say where it lies."""
    parser = argparse.ArgumentParser(prog="python -m pointproj.ops.backends.native", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        type=_architecture,
        metavar="X.Y",
        help="GPU architectures, as 8.0 9.0; by default those that are here, the CPU part alone if none is",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        folder = build.make_build(arguments.arch or build.architectures_here())
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


if __name__ == "__main__":
    sys.exit(main())
