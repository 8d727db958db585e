"""What the command lines of a trained network share; torch is not imported here, so ``--help`` is quick."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from pointproj.geometry.meshes import DEFAULT_SIDE, GPU_SIDE

MOST_SIDE = 1024  # of the grid that a surface is extracted from: 4 GiB of values

WEIGHTS = Path(__file__).parents[1] / "nn" / "weights"
"""Folders of weights for users without a trained network; ``README.md`` in each tells data and licence."""
PACKAGED = "furniture"  # of these, the default


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that all command lines with a trained model share."""
    help_weights = f"weights of the package, by default {PACKAGED}, instead of a checkpoint"
    parser.add_argument(
        "--weights", choices=sorted(path.name for path in WEIGHTS.iterdir()), help=help_weights
    )
    help_side = "grid points a side that the surface is extracted from; by default"
    help_side += f" {GPU_SIDE} on a GPU, else {DEFAULT_SIDE}"
    parser.add_argument("--side", type=whole(2, MOST_SIDE), help=help_side)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def chosen(parser: ArgumentParser, checkpoint: Path | None, weights: str | None) -> Path:
    """Return the checkpoint, or the folder of weights of the package; both end the program."""
    if checkpoint is not None and weights is not None:
        parser.error(f"--weights {weights} and the checkpoint {checkpoint}: expected one of them")
    return checkpoint or WEIGHTS / (weights or PACKAGED)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the argparse type of a whole number within these bounds."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return int(text)

    return read
