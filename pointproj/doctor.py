"""Report what runs on this machine, and for the rest why not.

    python -m pointproj doctor                              # versions, devices, backends, allocators
    python -m pointproj doctor backend=warp device=cuda     # tries this backend; exit code 1 if it fails
    python -m pointproj doctor allocator=rmm

A named backend is tried on a few points, and its result is compared with the reference implementation.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pointproj import command_line
from pointproj.machine import device_name, driver_version, installed_version, missing_gpu

KEYS = ("backend", "device", "allocator")
DEVICES = ("auto", "cpu", "cuda")
OPERATORS = ("knn", "radius", "aggregate", "attend", "farthest_points", "edge_mlp", "vector_attend")
PACKAGES = ("pointproj", "torch", "warp-lang", "numpy", "jaxtyping", "triton")
APPLICATION_PACKAGES = (
    *("hydra-core", "omegaconf", "nvidia-physicsnemo", "matplotlib", "rich", "scipy"),
    *("manifold3d", "trimesh", "lxml", "requests", "safetensors", "jinja2"),
)
VARIANTS = {  # one package for each version of CUDA
    "cuml": ("cuml-cu12", "cuml-cu13"),
    "rmm": ("rmm-cu12", "rmm-cu13"),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x"),
}


class Verdict(NamedTuple):
    """Whether something can be used."""

    subject: str  # as on the command line
    reason: str | None  # why it cannot be used; None if it can
    found: str = "works"  # the verdict if it can be used

    def __str__(self) -> str:
        return f"{self.subject}: " + (self.found if self.reason is None else f"NOT usable: {self.reason}")


def main(arguments: Sequence[str]) -> int:
    """Print the report, and try the backend, device or allocator of ``arguments``, named as for ``train.py``.

    Returns 0 if all named ones work, 1 if one does not, 2 for wrong arguments.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    requested = {}
    for argument in command_line.overrides(arguments, KEYS):
        key, _, value = argument.partition("=")
        if key not in KEYS or not value:
            print(f"{argument}: expected {', '.join(f'{key}=NAME' for key in KEYS)}", file=sys.stderr)
            return 2
        requested[key] = value
    for line in _report():
        print(line)
    verdicts = []
    if "backend" in requested or "device" in requested:
        verdicts.append(_try_backend(requested.get("backend", "auto"), requested.get("device", "auto")))
    if "allocator" in requested:
        verdicts.append(_try_allocator(requested["allocator"]))
    for verdict in verdicts:
        print(verdict)
    return int(any(verdict.reason for verdict in verdicts))


def _report() -> Iterator[str]:
    import torch

    from pointproj.ops.registry import names

    yield "versions"
    yield f"  {'python':20s} {sys.version.split()[0]}"
    for package in PACKAGES:
        yield _version_line(package, (package,))
    for library, packages in VARIANTS.items():
        yield _version_line(library, packages)
    yield f"  {'CUDA of torch':20s} {torch.version.cuda or 'none: torch was built for the CPU'}"
    yield "devices"
    yield f"  {'cpu':8s} {device_name(torch.device('cpu'))}"
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        sm, memory = f"sm_{facts.major}{facts.minor}", f"{facts.total_memory / 2**30:.0f} GiB"
        yield f"  {f'cuda:{number}':8s} {facts.name}, {sm}, {memory}, driver {driver_version()}"
    yield "backends"
    for name in names():
        for device in ("cpu", "cuda"):
            yield f"  {name:8s} {device:5s} {_usable(name, device)}"
    yield "library of the backend native"
    yield from _native_library()
    yield "application"
    reason = missing_application()
    if reason is not None:
        yield f"  not installed: {reason}"
        return
    for package in APPLICATION_PACKAGES:
        yield _version_line(package, (package,))
    yield "allocators of GPU memory"
    yield f"  torch    {'yes' if torch.cuda.is_available() else 'no: torch finds no GPU'}"
    obstacle = _rmm_obstacle()
    yield f"  rmm      {'yes' if obstacle is None else f'no: {obstacle}'}"


def missing_application() -> str | None:
    """Return None if the application can be used, else a sentence: what is missing, and how to get it."""
    install = 'pip install -c constraints.txt -e ".[train]"'
    if importlib.util.find_spec("pointproj.training") is None:
        return f"only the library is installed; clone the repository and run there: {install}"
    missing = [package for package in APPLICATION_PACKAGES if installed_version(package) is None]
    if missing:
        return f"it needs {', '.join(missing)} (extra train): {install}"
    return None


def require_application() -> None:
    """End the program with exit code 2 and a sentence if the application cannot be used."""
    reason = missing_application()
    if reason is not None:
        print(f"{Path(sys.argv[0]).name} belongs to the application: {reason}", file=sys.stderr)
        sys.exit(2)


def _version_line(library: str, packages: Sequence[str]) -> str:
    versions = {package: installed_version(package) for package in packages}
    installed = [
        version if package == library else f"{version} ({package})"
        for package, version in versions.items()
        if version
    ]
    return f"  {library:20s} {', '.join(installed) or 'not installed'}"


def _native_library() -> Iterator[str]:
    """Yield the library's file, its architectures, and whether it works; nothing is compiled."""
    from pointproj.ops.backends.native import BUILD_AHEAD
    from pointproj.ops.backends.native.build import IN_THE_WHEEL, architectures_here, find_build
    from pointproj.ops.backends.native.compiler import LIBRARY, architectures_in

    def made_for(folder: Path) -> str:
        return ", ".join(["the CPU", *(f"sm_{code}" for code in architectures_in(folder.name))])

    folder = find_build(architectures_here())
    if folder is None:
        packed = [f"that of the wheel is for {made_for(found)}" for found in IN_THE_WHEEL.glob("*-*")]
        why = "; ".join(packed) or "there is none in the package"
        yield f"  none for this machine ({why}): it is built on first use, or by {BUILD_AHEAD}"
        return
    origin = "from the wheel" if folder.parent == IN_THE_WHEEL else "built here"
    yield f"  {folder / LIBRARY}"
    yield f"  {origin}, for {made_for(folder)}"
    for device in ("cpu",) if missing_gpu() else ("cpu", "cuda"):
        yield f"  {_try_backend('native', device)}"


def _usable(name: str, device_type: str) -> str:
    """Return words that name the operators of a backend on a kind of device, or say why there are none."""
    from pointproj.ops.backends import BackendUnavailable
    from pointproj.ops.registry import load, resolve

    if device_type == "cuda" and missing_gpu():
        return "no: torch finds no GPU"
    obstacles = {}
    own = [operator for operator in OPERATORS if operator in load(name).OPERATORS]
    for operator in own:
        try:
            resolve(name, device_type, operator)
        except BackendUnavailable as reason:
            obstacles[operator] = str(reason).removeprefix(f"backend {name!r}: ")
    usable = [operator for operator in own if operator not in obstacles]
    return f"yes: {', '.join(usable)}" if usable else f"no: {obstacles['knn']}"


def _try_backend(backend: str, device: str) -> Verdict:
    """Compare a backend's neighbours on a device with those of the reference implementation."""
    import torch

    from pointproj.ops.backends import BackendUnavailable
    from pointproj.ops.functional import knn
    from pointproj.ops.specification import reference

    subject = f"backend={backend} device={device}"
    if device not in DEVICES:
        return Verdict(subject, f"device={device}: expected one of {', '.join(DEVICES)}")
    if device == "cuda" and missing_gpu():
        return Verdict(subject, f"{missing_gpu()}; write device=cpu or device=auto")
    chosen = "cpu" if device == "cpu" or missing_gpu() else "cuda"
    generator = torch.Generator("cpu").manual_seed(0)
    query, points = (torch.rand(count, 3, generator=generator, device="cpu") for count in (32, 256))
    try:
        rows = knn(query.to(chosen), points.to(chosen), 7, backend=backend)[1].cpu()
    except (BackendUnavailable, ValueError) as error:
        return Verdict(subject, str(error))
    except Exception as error:  # a broken installation may raise anything
        return Verdict(subject, f"{type(error).__name__}: {error}")
    exact = torch.equal(rows, reference.knn_search(query, points, 7))
    return Verdict(f"{subject}, on {chosen}", None if exact else "its neighbours differ from the reference's")


def _try_allocator(name: str) -> Verdict:
    obstacle = "expected torch or rmm"
    if name in ("torch", "rmm"):
        obstacle = missing_gpu() if name == "torch" else missing_application() or _rmm_obstacle()
    return Verdict(f"allocator={name}", obstacle, found="available")


def _rmm_obstacle() -> str | None:
    from pointproj.runtime.rmm_memory import unavailable

    return unavailable()
