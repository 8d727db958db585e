"""Building the extension: once for each version of its sources, of CUDA, and of the machine's kind.

A build lies in a folder of its own, named by a hash of all that it depends on and by the GPU architectures
it holds. The library gets its name when it is whole, so a build that was interrupted is begun again. Several
processes that start at once wait for the one that builds.
"""

import fcntl
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pointproj.ops.registry import BackendUnavailable

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
NAME = "pointproj_native"
LIBRARY = f"{NAME}.so"
BUILD_AHEAD = "python -m pointproj build-native"
_TORCH = Path(torch.__file__).parent
# The oldest torch that a build is for: 2.10.
HEADERS = ["-std=c++20", "-isystem", str(_TORCH / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def obstacle() -> str | None:
    """None if the extension is built or can be, else one sentence: what is missing, and how to get it."""
    if find_build() is not None:
        return None
    if shutil.which(_compiler()) is None:
        return f"the C++ compiler {_compiler()} is missing; install one with: apt-get install g++"
    return _toolkit_obstacle() if architectures_here() else None


@functools.cache
def extension() -> Any:
    """``torch.ops.pointproj`` with the extension's operators; builds the extension if need be.

    Raises
    ------
    BackendUnavailable
        If it cannot be built; the message says why and what to do.
    """
    build = find_build() or make_build(architectures_here())
    torch.ops.load_library(build / LIBRARY)
    return torch.ops.pointproj


def find_build() -> Path | None:
    """The folder of a finished build for this machine, if there is one."""
    needed = set(architectures_here())
    for folder in sorted(_root().glob(f"{_fingerprint()}-*")):
        if needed <= set(folder.name.split("-")[1:]) and (folder / LIBRARY).exists():
            return folder
    return None


def make_build(architectures: Iterable[str]) -> Path:
    """Build for these GPU architectures (``"90"`` is sm_90), the CPU part alone if there are none.

    Raises
    ------
    BackendUnavailable
        If a tool is missing or the compiler fails; the message says which, and what to do.
    """
    architectures = tuple(architectures)
    folder = _root() / "-".join((_fingerprint(), *(architectures or ("cpu",))))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "process", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it if this process dies
        if not (folder / LIBRARY).exists():
            reason = obstacle() or (_toolkit_obstacle() if architectures else None)
            if reason:
                raise BackendUnavailable(f"backend 'native': {reason}")
            os.replace(_compile(folder, architectures), folder / LIBRARY)
    return folder


def _compile(folder: Path, architectures: tuple[str, ...]) -> Path:
    devices = ", ".join(["the CPU", *(f"sm_{a}" for a in architectures)])
    log.warning(f"building backend native for {devices}: takes a minute, once (ahead of time: {BUILD_AHEAD})")
    started = time.monotonic()
    made = folder / f"building-{os.getpid()}.so"
    try:
        compile_library(architectures, made)
    except (RuntimeError, OSError) as error:
        raise BackendUnavailable(
            f"backend 'native' does not compile; for all that the compiler says run: {BUILD_AHEAD}\n{error}"
        ) from error
    log.info(f"built backend native in {time.monotonic() - started:.0f} s: {folder}")
    return made


def compile_library(architectures: Sequence[str], out: Path) -> None:
    """Compile ``csrc`` to one shared library: every file for the CPU, and again for GPUs, all at once.

    It is made from torch's stable ABI and holds CUDA's runtime: whatever torch from 2.10 on and whatever
    Python loads it, it need not be built again.

    Raises
    ------
    RuntimeError
        If the compiler fails; the message is what it says.
    """
    compilers = [[_compiler(), *_cpp_flags()]]
    if architectures:
        compilers.append([find_nvcc(), "-ccbin", _compiler(), *_cuda_flags(architectures)])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects, running = [], []
        for source in sorted(SOURCES.glob("*.cu")):
            for number, compiler in enumerate(compilers):
                objects.append(f"{folder}/{source.stem}{number}.o")
                running.append(pool.submit(_run, [*compiler, *HEADERS, "-c", str(source), "-o", objects[-1]]))
        for made in running:
            made.result()
        link = ["-shared", *objects, f"-L{_TORCH / 'lib'}", "-ltorch", "-o", str(out)]
        # libtorch refers to all that there is of torch; the functions of CUDA's runtime stay our own.
        hide = ["--no-as-needed", "--exclude-libs", "ALL"]
        if architectures:
            _run([find_nvcc(), "-cudart", "static", *(x for h in hide for x in ("-Xlinker", h)), *link])
        else:
            _run([_compiler(), f"-Wl,{','.join(hide)}", *link])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")


def _cpp_flags() -> list[str]:
    # Distances are rounded after every operation, as those of the reference.
    flags = ["-x", "c++", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        flags.append("-march=x86-64-v3")
    return flags


def _cuda_flags(architectures: Sequence[str]) -> list[str]:
    flags = ["-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    return [*flags, *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures)]


@functools.cache
def _fingerprint() -> str:
    """All that a build depends on but for the architectures."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = [str(torch.version.cuda), sysconfig.get_platform(), *_cpp_flags(), *_cuda_flags(())]
    digest.update("\n".join(versions).encode())
    return digest.hexdigest()[:16]


def _root() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default) / NAME


@functools.cache
def architectures_here() -> tuple[str, ...]:
    """Architectures of the GPUs that torch sees."""
    if not torch.cuda.is_available():
        return ()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(capabilities))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def find_nvcc() -> str | None:
    """The CUDA compiler that a build takes: that of CUDA_HOME, in the path, or at its usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _toolkit_obstacle() -> str | None:
    """None if there is an nvcc for the CUDA that torch was built with."""
    wanted = torch.version.cuda
    if wanted is None:
        return "this torch is built without CUDA; install one that is: https://pytorch.org/get-started"
    major, dashed = wanted.split(".")[0], wanted.replace(".", "-")
    mend = f"install it with: apt-get install cuda-toolkit-{dashed}, or set CUDA_HOME to where it is"
    nvcc = find_nvcc()
    if nvcc is None:
        return f"the CUDA toolkit {wanted} (nvcc) is missing; {mend}"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or found[1] != major:
        version = f"{found[1]}.{found[2]}" if found else "of unknown version"
        return f"{nvcc} is {version}, but this torch needs CUDA {major}; {mend}"
    return None
