"""The command ``export``: its arguments; nothing heavy is imported before they are read."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pointproj import command_line

DESCRIPTION = """Export a trained network as files that need only torch.

The program (ExportedProgram) has only plain torch operators, and runs on any device of torch. The package
(AOTInductor) is compiled for this machine's device and needs no Python. It checks nothing: in
Python, the script ``load.py`` beside it loads it and checks inputs. Both take query points ``(Q, 3)`` and
reference points ``(N, 3)``, then normals and sensors ``(N, 3)`` if the network uses them, and return
``(Q, 1)``. Q and N must be at least 2, and N at least the number of neighbours.
"""


def main(arguments: Sequence[str]) -> None:
    """Export the checkpoint that the arguments name, and print what was written."""
    parser = argparse.ArgumentParser(prog="python -m pointproj export", description=DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    parser.add_argument("--out", type=Path, help="folder for the files; by default that of the checkpoint")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--backend", default="auto", help="of the package: torch, or on CUDA triton")
    help_hub = "write only arguments, weights and a card to FOLDER, in the layout of huggingface_hub"
    parser.add_argument("--hub", type=Path, metavar="FOLDER", help=help_hub)
    help_onnx = "write only projector.onnx; needs the extra onnx"
    parser.add_argument("--onnx", action="store_true", help=help_onnx)
    given = command_line.parse(parser, arguments)
    from pointproj.inference.export import export
    from pointproj.runtime.run_folder import require_writable

    if given.hub:
        from pointproj.inference.hub import write_folder

        require_writable(given.hub)
        print(*write_folder(given.checkpoint, given.hub), sep="\n")
        return
    folder = given.checkpoint if given.checkpoint.is_dir() else given.checkpoint.parent
    out = given.out or folder
    require_writable(out)
    if given.onnx:
        from pointproj.inference.onnx_program import export_onnx

        path, difference = export_onnx(given.checkpoint, out)
        print(f"{path}  differs from the network by {difference:.1e}")
        return
    written = export(given.checkpoint, out, given.device, given.backend)
    for path in (written.program, written.package):
        size = path.stat().st_size / 2**20
        print(f"{path}  {size:.1f} MiB  differs from the network by {written.differences[path.name]:.1e}")
    print(f"{written.loader}  loads the package and checks its inputs")
