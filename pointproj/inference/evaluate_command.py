"""The command ``evaluate``: its arguments; nothing heavy is imported before they are read."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pointproj import command_line
from pointproj.config.schema import SAMPLINGS
from pointproj.inference.arguments import WEIGHTS, add_arguments, chosen, whole

BASELINES = ("flood", "poisson")
MOST_WORKERS = 8
WORKER_BYTES = 8 * 2**30  # GPU memory of a process, for surfaces from 160^3 of clouds of 16,384 points

SCAN_POINTS, SCAN_NOISE = 3000, 0.005
"""Points and noise of scans in the literature on ModelNet10: see :mod:`pointproj.geometry.scanning`."""

DSR = "dsr"
"""The protocol of Sulzer et al., Deep surface reconstruction from point clouds with visibility information,
2022: meshes are made watertight, scanned, and taken as the truth."""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj evaluate",
        description="How well a trained model reconstructs test meshes.",
    )
    help_checkpoint = "a checkpoint, or the folder of a run; by default the weights of the package"
    parser.add_argument("checkpoint", type=Path, nargs="?", help=help_checkpoint)
    add_arguments(parser)
    parser.add_argument("--meshes", type=Path, help="other test meshes: FOLDER/<class>/test/*.off")
    parser.add_argument("--limit", type=whole(1), help="at most this many meshes a class")
    parser.add_argument("--points", type=whole(1), help="even or random samples; by default as in training")
    parser.add_argument(
        "--samples",
        nargs="+",
        choices=SAMPLINGS,
        help=f"how meshes are sampled: evenly; at random by area; as scans of {SCAN_POINTS:,} points with "
        f"noise of {SCAN_NOISE}; or as such scans with the directions to the sensors; by default all that "
        "the model can read",
    )
    parser.add_argument(
        "--protocol",
        choices=[DSR],
        help=f"{DSR}: scans of meshes made watertight, as in arXiv 2202.01810; needs the extra baselines",
    )
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, help="by default all")
    parser.add_argument(
        "--workers",
        type=whole(1),
        help="processes that evaluate meshes side by side; by default one for each core, at most "
        f"{MOST_WORKERS}, and on a GPU one for each {WORKER_BYTES // 2**30} GiB of free memory",
    )
    help_out = "folder; by default evaluation/ beside the checkpoint, outputs/evaluation for the package's"
    parser.add_argument("--out", type=Path, help=help_out)
    given = command_line.parse(parser, arguments)
    given.checkpoint = chosen(parser, given.checkpoint, given.weights)
    folder = given.checkpoint if given.checkpoint.is_dir() else given.checkpoint.parent
    given.out = given.out or (Path("outputs") if folder.parent == WEIGHTS else folder) / "evaluation"
    return given


def main(arguments: Sequence[str]) -> None:
    """Evaluate the checkpoint that the arguments name."""
    given = parsed(arguments)
    from pointproj.inference.evaluate import evaluate

    evaluate(given)
