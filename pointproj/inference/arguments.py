"""What the command lines of a trained network share; torch is not imported here, so ``--help`` is quick."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from pointproj.geometry.meshes import DEFAULT_SIDE, GPU_SIDE

MOST_SIDE = 1024  # of the grid that a surface is extracted from: 4 GiB of values

PACKAGED = Path(__file__).parent / "weights" / "furniture.safetensors"
"""Weights for users without a trained network; ``README.md`` in their folder tells data and licence."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that all command lines with a trained model share."""
    help_side = "grid points a side that the surface is extracted from; by default"
    help_side += f" {GPU_SIDE} on a GPU, else {DEFAULT_SIDE}"
    parser.add_argument("--side", type=whole(2, MOST_SIDE), help=help_side)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the argparse type of a whole number within these bounds."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return int(text)

    return read
