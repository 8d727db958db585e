"""The command ``predict``: its arguments, which are checked before anything heavy is imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pointproj import command_line
from pointproj.geometry.files import WRITERS
from pointproj.geometry.files.measured import SUFFIXES as MEASURED_SUFFIXES
from pointproj.geometry.files.measured.writing import SUFFIXES as VALUE_SUFFIXES
from pointproj.geometry.files.points import SUFFIXES
from pointproj.inference.arguments import add_arguments, chosen

READ = tuple(dict.fromkeys((*SUFFIXES, *MEASURED_SUFFIXES)))
CHECKPOINTS = (".pt", ".safetensors", "")  # a folder may be missing


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; files of kinds that nothing here reads end it with their names."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj predict",
        usage="%(prog)s [CHECKPOINT] FILE ... [options]",
        description="Reconstruct solids from meshes or clouds of points; z points up.",
    )
    add_arguments(parser)
    help_files = "optionally a checkpoint or the folder of a run, instead of the weights of the package; "
    help_files += f"then the files to reconstruct: {', '.join(SUFFIXES)}"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=help_files)
    help_sensors = (
        "file with the positions of the sensors that saw the cloud's points, in its coordinates: one "
        "position for each point, or one for all"
    )
    parser.add_argument("--sensors", type=Path, help=help_sensors)
    help_points = "predict values: at the file's own points, as for target=field, or on a grid, as for udf; "
    help_points += "the suffix of --out tells it too"
    parser.add_argument("--points", choices=("own", "grid"), help=help_points)
    help_parameters = "of the sample, as in parameters.csv, for target=field"
    parser.add_argument("--parameters", nargs="+", default=[], metavar="NAME=NUMBER", help=help_parameters)
    kinds = ", ".join([*WRITERS, *VALUE_SUFFIXES, ".vti"])
    help_out = f"folder of the results; or the file of the one result: {kinds}"
    parser.add_argument("--out", type=Path, default=Path("outputs/predictions"), help=help_out)
    given = command_line.parse(parser, arguments)
    first = given.files[0]
    checkpoint = given.files.pop(0) if _is_checkpoint(first) else None
    given.checkpoint = chosen(parser, checkpoint, given.weights)
    suffix = given.out.suffix.lower()
    if given.points is None and suffix in (".vti", *VALUE_SUFFIXES) and not given.out.is_dir():
        given.points = "grid" if suffix == ".vti" else "own"
    if not given.files:
        parser.error(f"no FILE to reconstruct after the checkpoint {first}: expected {', '.join(SUFFIXES)}")
    for path in given.files:
        if path.suffix.lower() not in READ:
            parser.error(
                f"{path} is of the kind {path.suffix or 'without suffix'}: expected {', '.join(READ)}"
            )
    return given


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in CHECKPOINTS


def main(arguments: Sequence[str]) -> None:
    """Predict for the files of the arguments."""
    given = parsed(arguments)
    from pointproj.inference.reconstruct import predict_files

    predict_files(given)
