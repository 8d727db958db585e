"""Export a network as an ONNX program, for onnxruntime and what else reads ONNX; needs the extra ``onnx``.

It has the operators of the plain program, but for all queries at once, since torch does not translate its
loop: memory is that of a few matrices of queries and points.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from pointproj.inference.export import ExportError, Inputs, network_to_export, plain_program, write
from pointproj.inference.trained_model import saved_config
from pointproj.training.checkpoint import load_best

ONNX = "projector.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_onnx(checkpoint: Path, out: Path) -> tuple[Path, float]:
    """Write ``projector.onnx`` if onnxruntime computes the network's values from it.

    Returns the file and the largest difference, relative to the largest value. Raises CheckpointError if
    there is no such checkpoint, and ExportError if its network has no such program, a package is missing, or
    the program computes other values.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        install = 'pip install -c constraints.txt -e ".[onnx]"'
        raise ExportError(f"an export to ONNX needs {', '.join(missing)}: {install}")
    path, content = load_best(checkpoint)
    config = saved_config(path, content)
    if config.projector.name == "visibility":
        raise ExportError(
            "projector=visibility cannot be exported to ONNX: its program has 15,000 operators, and torch "
            "does not translate them in minutes; export it without --onnx"
        )
    device = torch.device("cpu")
    network = network_to_export(path, content, config, "torch", device)
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        program = plain_program(network, config, device, for_onnx=True)
        return out / ONNX, write(out / ONNX, partial(_save, program), run, network, device)


def _save(program: torch.export.ExportedProgram, path: str) -> None:
    torch.onnx.export(program, (), path, dynamo=True, verbose=False, external_data=False)


def run(path: str, given: Inputs) -> list[Tensor]:
    """Run the program with tensors on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    called = [dict(zip(names, (each.numpy() for each in points), strict=True)) for points in given]
    return [torch.from_numpy(session.run(None, points)[0]) for points in called]
