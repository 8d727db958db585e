"""Exported networks, loaded where this package cannot be imported."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths

from pointproj.__main__ import main
from pointproj.config import Config
from pointproj.inference import onnx_program
from pointproj.inference.export import (
    LOADER,
    PACKAGE,
    PROGRAM,
    CloudField,
    ExportError,
    PackageCrashError,
    _difference,
    export,
    plain_program,
)
from pointproj.inference.load import load
from pointproj.nn.visibility import plain
from pointproj.training import checkpoint
from pointproj.training.networks import build_model
from tests.configs import config_of

ELSEWHERE = """
import json, sys
sys.modules["pointproj"] = None  # importing it fails from here on
import torch
from load import load
program, package, inputs = sys.argv[1:]
inputs = torch.load(inputs)
package = load(package)
wide = lambda *inputs: package(*(torch.cat([points, points], 1)[:, 3:] for points in inputs))
functions = [torch.export.load(program).module(), package, wide]
with torch.no_grad():
    print(json.dumps([[function(*points).tolist() for points in inputs] for function in functions]))
"""
SOURCE = Path(__file__).parents[2] / "docs" / "reconstruct" / "run_package.cpp"
SMALL = ("projector=knn", "projector.hidden_channels=8")
SIZES = ((5, 40), (97, 300), (200, 33))


def _trained(config: Config, path: Path) -> CloudField:
    """A checkpoint of a network whose every weight matters, and the network."""
    network = build_model(config, "torch")
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    checkpoint.save(path, {"model": network.state_dict()}, config)
    return CloudField(network, config).eval()


def _inputs(network: CloudField) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    count = len(network.inputs) - 2
    return [
        tuple(torch.rand(n, 3, generator=generator) * 2 - 1 for n in (queries, points, *[points] * count))
        for queries, points in SIZES
    ]


def _run_elsewhere(folder: Path, network: CloudField) -> list[list[torch.Tensor]]:
    torch.save(_inputs(network), folder / "inputs.pt")
    files = [folder / PROGRAM, folder / PACKAGE, folder / "inputs.pt"]
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *files],  # from the folder, where load.py is
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [[torch.tensor(values) for values in made] for made in json.loads(ended.stdout)]


def _run_without_python(package: Path, inputs: tuple[torch.Tensor, ...], folder: Path) -> torch.Tensor:
    """The program that the documentation shows, given a network's inputs."""
    root = Path(torch.__file__).parent
    libraries = ["torch", "torch_cpu", "c10"] + ["torch_cuda", "c10_cuda"] * torch.cuda.is_available()
    program = folder / "run_package"
    build = ["g++", "-std=c++20", SOURCE, "-o", program, f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    includes = [f"-I{path}" for path in include_paths("cuda" if torch.cuda.is_available() else "cpu")]
    subprocess.run([*build, *includes, "-Wl,--no-as-needed", *(f"-l{n}" for n in libraries)], check=True)
    files = [folder / f"{place}.f32" for place in range(1 + len(inputs))]
    for path, points in zip(files[1:], inputs, strict=True):
        path.write_bytes(points.numpy().tobytes())
    ended = subprocess.run([program, package, *files], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.frombuffer(bytearray(files[0].read_bytes()), dtype=torch.float32)[:, None]


takes_loops = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13),
    reason="the compiler of this torch stops at loops of open length",
)


@takes_loops
@pytest.mark.slow
def test_program_and_package_run_where_pointproj_is_not(tmp_path: Path):
    network = _trained(config_of(*SMALL, "target=sdf"), tmp_path / "best.pt")
    written = export(tmp_path, tmp_path / "out", device="cpu")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {PROGRAM, PACKAGE, LOADER}
    assert max(written.differences.values()) < 1e-5
    for made in _run_elsewhere(tmp_path / "out", network):
        for inputs, got in zip(_inputs(network), made, strict=True):
            torch.testing.assert_close(got, network(*inputs).detach(), rtol=1e-5, atol=1e-5)
    got = _run_without_python(tmp_path / "out" / PACKAGE, inputs, tmp_path)
    torch.testing.assert_close(got, network(*inputs).detach(), rtol=1e-5, atol=1e-5)


class _Package:
    """In place of a compiled one: it reads memory as if it were contiguous, and returns its inputs."""

    def get_metadata(self) -> dict[str, str]:
        names = "query_points reference_points normals"
        return {"AOTI_DEVICE_KEY": "cpu", "inputs": names, "fewest_points": "4"}

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        assert not any(points.data_ptr() % 16 or points.is_neg() for points in inputs)
        return [points.as_strided(points.shape, (3, 1), points.storage_offset()) for points in inputs]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: _Package())
    return load(PACKAGE)


LAYOUTS = {
    "columns": lambda n: torch.rand(n, 6)[:, 1:4],
    "transposed": lambda n: torch.rand(3, n).T,
    "expanded": lambda n: torch.rand(1, 3).expand(n, 3),
    "every-second-row": lambda n: torch.rand(2 * n, 3)[::2],
    "not-aligned": lambda n: torch.rand(3 * n + 1)[1:].view(n, 3),
    "negated": lambda n: torch.rand(n, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loaded_package_takes_every_layout(name: str, package):
    inputs = [LAYOUTS[name](n) for n in (2, 4, 4)]
    for points, read in zip(inputs, package(*inputs), strict=True):
        assert torch.equal(points, read)


@pytest.mark.parametrize(
    ("place", "changed", "words"),
    [
        (0, torch.rand(5, 3).double(), "query_points must be a torch.float32 tensor; got torch.float64"),
        (1, [[0.0] * 3] * 5, "reference_points must be a torch.float32 tensor; got list"),
        (2, torch.rand(5, 3, device="meta"), "normals must be on cpu; got meta"),
        (0, torch.rand(1, 5, 3), r"query_points must have shape \(n, 3\), one cloud; got \(1, 5, 3\)"),
        (0, torch.rand(1, 3), "query_points must be at least 2 points; got 1"),
        (1, torch.rand(3, 3), "reference_points must be at least 4 points; got 3"),
        (2, torch.rand(6, 3), "normals must have a row for each of 5 points; got 6"),
    ],
)
def test_the_loaded_package_refuses_what_it_would_misread(place: int, changed, words: str, package):
    inputs = [torch.rand(5, 3) for _ in range(3)]
    inputs[place] = changed
    with pytest.raises((TypeError, ValueError), match=words):
        package(*inputs)
    with pytest.raises(TypeError, match="3 tensors, query_points, reference_points, normals; got 2"):
        package(*inputs[:2])


def test_a_network_of_a_radius_becomes_a_program_of_plain_torch(tmp_path: Path):
    config = config_of(
        "projector=radius", "projector.radius=0.6", "target=udf", "projector.hidden_channels=8"
    )
    network = _trained(config, tmp_path / "best.pt")
    with torch.no_grad():
        program = plain_program(network, config, torch.device("cpu")).module()
        for inputs in _inputs(network):
            torch.testing.assert_close(program(*inputs), network(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("projector", "target"), [("knn", "sdf"), ("radius", "udf")])
def test_onnxruntime_computes_what_the_network_does(projector: str, target: str, tmp_path: Path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    more = f"target={target}", f"projector={projector}", "projector.hidden_channels=8"
    wide = "projector.sigma=0.5"  # the spread of one neighbour would be the root of a rounding error
    network = _trained(config_of(*more, wide), tmp_path / "best.pt")
    assert main(["export", str(tmp_path), "onnx=true", f"out={tmp_path / 'out'}"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["projector.onnx"]
    given = _inputs(network)
    for inputs, got in zip(given, onnx_program.run(str(tmp_path / "out/projector.onnx"), given), strict=True):
        torch.testing.assert_close(got, network(*inputs).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("projector", "why"), [("attention", "attend has no"), ("pairs", "edge_mlp has no")])
def test_networks_without_a_plain_form_are_refused(projector: str, why: str, tmp_path: Path):
    _trained(config_of(f"projector={projector}", "target=udf"), tmp_path / "best.pt")
    with pytest.raises(ExportError, match=f"projector={projector} cannot be exported: {why}"):
        export(tmp_path / "best.pt", tmp_path, device="cpu")


class _PlainForms(TorchDispatchMode):
    """The visibility network's operators in plain torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called = plain.FORMS.get(func._schema.name.removeprefix("pointproj::"), func)
        return called(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_visibility_network_becomes_a_program_of_plain_torch(tmp_path, monkeypatch):
    config = config_of("experiment=reconstruct", "projector.hidden_channels=8", "projector.sensors=true")
    network = _trained(config, tmp_path / "best.pt")
    inputs_of_two_sizes = _inputs(network)[::2]
    with torch.no_grad():
        for inputs in inputs_of_two_sizes:
            with _PlainForms():
                formula = network(*inputs)
            torch.testing.assert_close(formula, network(*inputs), rtol=1e-4, atol=1e-4)
    # A tenth of the iterations and rays, which a program holds one after the other, is traced as fast.
    fewer = {"SQUARED": 2, "REFINED": 1, "REFITTED": 1, "ROUNDS": 2, "LAST_ROUNDS": 1, "MOVED": 1, "WHOLE": 1}
    for constants in (plain.LocalPlane, plain.FacePlane):
        monkeypatch.setattr(plain, constants.__name__, type("Fewer", (constants,), fewer))
    monkeypatch.setattr(plain, "directions", plain.directions[:6])
    monkeypatch.setattr(plain, "neighboring", plain.neighboring[:6, :6])
    with torch.no_grad():
        program = plain_program(network, config, torch.device("cpu")).module()
        for inputs in inputs_of_two_sizes:
            with _PlainForms():
                expected = network(*inputs)
            torch.testing.assert_close(program(*inputs), expected, rtol=1e-4, atol=1e-4)


def test_a_backend_that_cannot_be_exported_is_refused_with_those_that_can(tmp_path: Path):
    _trained(config_of(*SMALL, "target=udf"), tmp_path / "best.pt")
    with pytest.raises(ExportError, match=r"'warp' cannot be exported for cpu.*--backend torch"):
        export(tmp_path / "best.pt", tmp_path / "out", device="cpu", backend="warp")
    with pytest.raises(
        ExportError, match=r"--backend wrap: expected one of auto, .*did you mean warp\?; of these"
    ):
        export(tmp_path / "best.pt", tmp_path / "out", device="cpu", backend="wrap")
    assert not (tmp_path / "out").exists()


def test_what_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _trained(config_of(*SMALL, "target=udf"), tmp_path / "best.pt")
    (tmp_path / PROGRAM).write_text("the program before")
    monkeypatch.setattr("pointproj.inference.export._difference", lambda *_: 0.1)
    with pytest.raises(ExportError, match=f"{PROGRAM} differs from the network by 1.0e-01"):
        export(tmp_path / "best.pt", tmp_path, device="cpu")
    assert (tmp_path / PROGRAM).read_text() == "the program before"
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", PROGRAM}


def test_values_that_are_not_numbers_do_not_pass_for_equal():
    values = [torch.ones(3), torch.ones(2)]
    assert _difference(values, values) == 0
    assert math.isnan(_difference([values[0], values[1] * math.nan], values))


def test_the_command_line_says_what_is_missing(tmp_path: Path):
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        main(["export", str(tmp_path / "nothing.pt")])


def test_a_compiler_that_fails_leaves_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise InductorError(RuntimeError("no such loop\nand a page more"), None)

    _trained(config_of(*SMALL, "target=udf"), tmp_path / "best.pt")
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(
        ExportError, match=r"could not compile .*no such loop\); projector.program.pt2 is written"
    ):
        export(tmp_path / "best.pt", tmp_path, device="cpu")
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", PROGRAM}


def test_a_package_that_does_not_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _trained(config_of(*SMALL, "target=udf"), tmp_path / "best.pt")
    monkeypatch.setattr(
        "pointproj.inference.export._compile",
        lambda program, cxx, about, path: Path(path).write_text("broken"),
    )
    with pytest.raises(ExportError, match=r"it does not run \(exit code 1.*projector.program.pt2 is written"):
        export(tmp_path / "best.pt", tmp_path, device="cpu")
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", PROGRAM}


def test_a_compiler_whose_package_crashes_is_followed_by_the_systems(tmp_path, monkeypatch, caplog):
    network = _trained(config_of(*SMALL, "target=udf"), tmp_path / "best.pt")

    def compile_with(
        program: torch.export.ExportedProgram, compiler: str, about: dict[str, str], path: str
    ) -> None:
        Path(path).write_text(compiler)

    def run(package: str, given: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        if Path(package).read_text() == "newer":
            raise PackageCrashError("exit code -11: while it was loaded")
        return [network(*points) for points in given]

    monkeypatch.setattr("pointproj.inference.export._compile", compile_with)
    monkeypatch.setattr("pointproj.inference.export._package", run)
    monkeypatch.setattr("pointproj.inference.export._compilers", lambda: ["newer", "of the system"])
    written = export(tmp_path / "best.pt", tmp_path, device="cpu")
    assert written.package.read_text() == "of the system"
    assert "compiled with newer" in caplog.text
    assert "exit code -11" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [pytest.param("torch", marks=takes_loops), "triton"])
def test_a_package_for_the_gpu(backend: str, tmp_path: Path):
    network = _trained(config_of(*SMALL, "target=sdf"), tmp_path / "best.pt")
    written = export(tmp_path, tmp_path, device="cuda", backend=backend)
    package = torch._inductor.aoti_load_package(str(written.package))
    network = network.cuda()
    for inputs in _inputs(network):
        inputs = [points.cuda() for points in inputs]
        expected = network(*inputs).detach()
        torch.testing.assert_close(package(*inputs), expected, rtol=1e-4, atol=1e-4)
    got = _run_without_python(written.package, [points.cpu() for points in inputs], tmp_path)
    torch.testing.assert_close(got, expected.cpu(), rtol=1e-4, atol=1e-4)
