"""Export a trained network as files that need only torch: a program and a package, as export_command says."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InductorError

from pointproj.config import Config, nearest
from pointproj.inference.trained_model import saved_config, saved_network
from pointproj.nn.mlp import MLP
from pointproj.nn.visibility.plain import FORMS
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import exportable, functions_of, names, resolve
from pointproj.runtime.devices import choose_device
from pointproj.runtime.errors import first_line
from pointproj.training.checkpoint import load_best
from pointproj.training.networks import features_of

log = logging.getLogger(__name__)

PROGRAM = "projector.program.pt2"
PACKAGE = "projector.package.pt2"
LOADER = "load.py"
SIZES = ((300, 500), (71, 130))  # Q and N for the comparison; the first are those of the trace
WITHOUT_PLAIN_FORM = {"attention": "attend", "pairs": "edge_mlp"}  # by the network's name, its operator
TOLERANCE = 1e-4  # largest difference from eager, relative to the largest value

Inputs = list[tuple[Tensor, ...]]  # of several calls


class ExportError(RuntimeError):
    """A network cannot be exported; the message says why and what to do."""


class PackageCrashError(ExportError):
    """A package crashes the process that loads or runs it."""

    def __init__(self, said: str) -> None:
        self.said = said
        super().__init__(
            f"torch {torch.__version__} compiled {PACKAGE}, but it does not run ({said}), so it was not "
            f"kept; {PROGRAM} is written. Take another --backend or --device, another C++ compiler (CXX), or "
            f"a newer torch"
        )


class Exported(NamedTuple):
    """The written files, and their differences from the network in eager mode."""

    program: Path
    package: Path
    loader: Path  # a Python script that loads the package, and checks its inputs
    differences: dict[str, float]  # by file name: largest difference, relative to the largest value


class CloudField(nn.Module):
    """A network as a function of queries (Q, 3), cloud (N, 3), perhaps normals and sensors, to (Q, 1)."""

    def __init__(self, network: nn.Module, config: Config) -> None:
        super().__init__()
        self.network = network
        self.settings = config.projector
        more = {"normals": self.settings.normals, "sensors": self.settings.sensors}
        self.inputs = ["query_points", "reference_points", *(name for name, used in more.items() if used)]

    def forward(
        self,
        query_points: Float[Tensor, "q 3"],
        reference_points: Float[Tensor, "n 3"],
        first: Float[Tensor, "n 3"] | None = None,
        second: Float[Tensor, "n 3"] | None = None,
    ) -> Float[Tensor, "q 1"]:
        """Evaluate the network for one cloud; ``first`` and ``second`` are normals and sensors, if used."""
        normals, sensors = (first, second) if self.settings.normals else (None, first)
        features = features_of(self.settings, reference_points, normals, sensors)
        return self.network(query_points, reference_points, features=features)


def export(checkpoint: Path, out: Path, device: str = "auto", backend: str = "auto") -> Exported:
    """Write the files, each completely or not at all, and compare them with the network.

    Parameters
    ----------
    checkpoint : Path
        A checkpoint, or the folder of a run with a best checkpoint.
    out : Path
        Folder for the files; made if it does not exist.
    device : str
        Device that the package is compiled for.
    backend : str
        Backend of the package's operators: ``torch``, on CUDA also ``triton``, or ``auto``.

    Raises
    ------
    CheckpointError, DeviceError, BackendUnavailable
        If there is no such checkpoint, device or backend.
    ExportError
        If the backend cannot be exported, if torch cannot compile the package, or if an exported file
        computes other values.
    """
    path, content = load_best(checkpoint)
    config = saved_config(path, content)
    chosen = choose_device(device)
    backend = _exportable(backend, chosen.type, config.projector.OPERATOR)
    plain = network_to_export(path, content, config, "torch", chosen)
    network = plain if backend == "torch" else network_to_export(path, content, config, backend, chosen)
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        program = plain_program(plain, config, chosen)
        traced = program if network is plain else _trace(network, config, chosen)
        differences = {
            PROGRAM: write(out / PROGRAM, partial(torch.export.save, program), _program, plain, chosen)
        }
        differences[PACKAGE] = _write_package(out / PACKAGE, traced, plain, chosen)
        _copy_loader(out / LOADER)
    return Exported(out / PROGRAM, out / PACKAGE, out / LOADER, differences)


def network_to_export(
    path: Path, content: dict[str, Any], config: Config, backend: str, device: torch.device
) -> CloudField:
    """Make the network of a checkpoint as it is traced; raise ExportError if it has no plain form."""
    if "statistics" in content:
        raise ExportError(
            "a network of target=field cannot be exported as a program, since `predict` places samples and "
            "scales values: --hub FOLDER writes its weights"
        )
    name = config.projector.name
    if name in WITHOUT_PLAIN_FORM:
        raise ExportError(
            f"projector={name} cannot be exported: {WITHOUT_PLAIN_FORM[name]} has no form in plain torch "
            "that a tracer can follow for any number of points; knn, radius and visibility can be exported"
        )
    network = saved_network(path, content, config, backend)
    for module in network.modules():
        if isinstance(module, MLP):
            module.in_one_kernel = False  # its operator is not a part of torch
    return CloudField(network, config).to(device).eval()


def _copy_loader(path: Path) -> None:
    """Write the script, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        os.replace(shutil.copy(Path(__file__).with_name(LOADER), folder), path)


def _write_package(
    path: Path, program: torch.export.ExportedProgram, network: CloudField, device: torch.device
) -> float:
    """Compile with each compiler in turn until the package runs; return the largest difference."""
    compiler, *others = _compilers()
    metadata = {"inputs": " ".join(network.inputs), "fewest_points": str(_fewest_points(network.settings))}

    def compile_with(compiler: str) -> Callable[[str], None]:
        return partial(_compile, program, compiler, metadata)

    for following in others:
        try:
            return write(path, compile_with(compiler), _package, network, device)
        except PackageCrashError as error:
            log.warning("compiled with %s, %s does not run (%s)", compiler, PACKAGE, error.said)
            log.warning("compiling it again, with %s", following)
            compiler = following
    return write(path, compile_with(compiler), _package, network, device)


def _compilers() -> list[str]:
    """Return the C++ compiler that torch uses (CXX, if it is set), then the system's, if it is another one.

    Code from a compiler that is newer than the C++ library of the process crashes when it is loaded.
    """
    first = get_cpp_compiler()
    found = shutil.which("g++", path=os.defpath)
    known = shutil.which(first)
    return [first] if not (found and known) or os.path.samefile(found, known) else [first, found]


def _compile(
    program: torch.export.ExportedProgram, compiler: str, metadata: dict[str, str], path: str
) -> None:
    settings = {"cpp.cxx": (None, compiler), "aot_inductor.metadata": metadata}
    try:
        with torch._inductor.config.patch(settings):
            torch._inductor.aoti_compile_and_package(program, package_path=path)
    except InductorError as error:
        raise ExportError(
            f"torch {torch.__version__} could not compile {PACKAGE} ({first_line(error.inner_exception)}); "
            f"{PROGRAM} is written. Take another --backend or --device, or a newer torch"
        ) from error


# Wrong compiled code crashes its process, so a separate process tries it, and reports how far it came.
_RUN_PACKAGE = """
import sys, torch
package, inputs, output = sys.argv[1:]
with torch.no_grad():
    print("while it was loaded", file=sys.stderr, flush=True)
    function = torch._inductor.aoti_load_package(package)
    given = torch.load(inputs)
    print("while it ran", file=sys.stderr, flush=True)
    torch.save([function(*points).cpu() for points in given], output)
    print("after it had run", file=sys.stderr, flush=True)
"""


def _package(path: str, given: Inputs) -> list[Tensor]:
    """Run a package in a process of its own; the values are on the CPU."""
    inputs, output = f"{path}.inputs", f"{path}.output"
    torch.save(given, inputs)
    command = [sys.executable, "-c", _RUN_PACKAGE, path, inputs, output]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or ["no message"]
        raise PackageCrashError(f"exit code {ended.returncode}: {said[-1]}")
    return torch.load(output)


def _program(path: str, given: Inputs) -> list[Tensor]:
    """Run a program in this process."""
    program = torch.export.load(path).module()
    return [program(*points) for points in given]


def _exportable(backend: str, device: str, operator: str) -> str:
    """Return the requested backend if it can be exported; for ``auto``, the fastest that can be."""
    able, known = exportable(device), ("auto", *names())
    if backend not in known:
        raise ExportError(
            f"--backend {backend}: expected one of {', '.join(known)}{nearest(backend, known)}; of these "
            f"{' and '.join(able)} can be exported for {device}"
        )
    if backend == "auto":
        for name in able:
            try:
                return resolve(name, device, operator)[0]
            except BackendUnavailable as reason:
                log.info("not exported with %s", reason)
    if backend not in able:
        raise ExportError(
            f"backend {backend!r} cannot be exported for {device}: its operators run code that would have to "
            f"be installed beside the files; give --backend {' or '.join(able)} (weights fit any backend)"
        )
    return resolve(backend, device, operator)[0]


def plain_program(
    network: CloudField, config: Config, device: torch.device, for_onnx: bool = False
) -> torch.export.ExportedProgram:
    """Return the network as a program of plain torch operators; without loops ``for_onnx``."""
    from pointproj.ops.specification import portable

    functions_of("torch")  # registers its operators
    ops = torch.ops.pointproj
    forms = {
        ops.torch_search.default: partial(portable.search, for_onnx=for_onnx),
        ops.torch_radius_aggregate.default: partial(portable.radius_aggregate, for_onnx=for_onnx),
        ops.aggregate_neighbors.default: portable.aggregate_neighbors,
    }
    # Otherwise numbers that differ between calls in a loop (k, radius) would become variable arguments.
    with torch._dynamo.config.patch(specialize_int=True, specialize_float=True):
        program = _trace(network, config, device, forms)
    own = {str(node.target) for node in program.graph.nodes if "pointproj" in str(node.target)}
    if own:
        raise ExportError(f"these operators have no plain form: {', '.join(sorted(own))}")
    return program


def _trace(
    network: CloudField, config: Config, device: torch.device, forms: dict[Any, Callable] | None = None
) -> torch.export.ExportedProgram:
    """Trace the network; operators of the visibility network and those of ``forms`` become plain torch."""
    queries = torch.export.Dim("queries", min=2)
    points = torch.export.Dim("points", min=_fewest_points(config.projector))
    example = _example(network, SIZES[0], device)
    shapes = ({0: queries}, *[{0: points}] * (len(example) - 1))
    program = torch.export.export(network, example, dynamic_shapes=shapes, strict=False)
    own = {getattr(torch.ops.pointproj, name).default: form for name, form in FORMS.items()}
    return program.run_decompositions(own | (forms or {}))


def _fewest_points(settings: Any) -> int:
    return max(2, settings.fewest_points)  # for a tracer, 1 is another case than more


def _example(network: CloudField, sizes: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Return points in the query cube, the same in each call."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = (sizes[0], *[sizes[1]] * (len(network.inputs) - 1))
    return tuple((torch.rand(n, 3, generator=generator, device="cpu") * 2 - 1).to(device) for n in rows)


def write(
    path: Path,
    save: Callable[[str], object],
    run: Callable[[str, Inputs], list[Tensor]],
    network: CloudField,
    device: torch.device,
) -> float:
    """Save a temporary file, run it, compare its values, and move it; return the largest difference."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = os.path.join(folder, path.name)
        save(made)
        given = [_example(network, sizes, device) for sizes in SIZES]
        difference = _difference(run(made, given), [network(*points) for points in given])
        if not difference <= TOLERANCE:
            raise ExportError(
                f"{path.name} differs from the network by {difference:.1e} (allowed: "
                f"{TOLERANCE:.0e}), so it was not kept; please report this with the checkpoint's config"
            )
        os.replace(made, path)
    return difference


def _difference(made: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value."""
    pairs = [(one.cpu(), other.cpu()) for one, other in zip(made, expected, strict=True)]
    apart = [(one - other).abs().max() / other.abs().max() for one, other in pairs]
    return torch.stack(apart).max().item()  # NaN if any is
