"""Compile every kernel for GPUs that need not be here, and show what each takes of them.

    python -m tools.cuda_code /usr/local/cuda [--arch 80 90] [--of native warp triton]

Writes benchmarks/kernels/cuda_code.csv, and ends with an error if a kernel does not compile, needs more
than a GPU has, or holds an instruction that this GPU does not know. The toolkit's own assembler takes all:
also what Warp's and Triton's compilers make, once their assembly is marked as of the toolkit's version.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pointproj.machine import PROJECT, machine_columns

RESULTS = PROJECT / "benchmarks" / "kernels" / "cuda_code.csv"  # a folder of its own: it holds no times
REGISTERS = 65_536  # of a multiprocessor of an A100, and of an H100
SHARED = {80: 164 * 1024, 90: 228 * 1024}  # bytes of a multiprocessor
SHARED_OF_BLOCK = 48 * 1024  # bytes, without asking for more
THREADS = 2048  # of a multiprocessor
BLOCKS = 32  # of a multiprocessor
RESERVED = 1024  # bytes of shared memory that each block takes besides its own


@dataclass(frozen=True)
class Used:
    """What one kernel takes."""

    kernel: str  # what the table calls it; several forms may share it
    registers: int
    shared: int  # bytes
    spilled: int  # bytes stored and loaded
    threads: int  # of a block

    def blocks(self, architecture: int) -> int:
        """Blocks that a multiprocessor holds at once."""
        per_warp = -(-self.registers * 32 // 256) * 256
        warps = -(-self.threads // 32)
        by_registers = REGISTERS // per_warp // warps
        by_shared = SHARED[architecture] // (self.shared + RESERVED)
        return min(by_registers, by_shared, THREADS // (32 * warps), BLOCKS)


class Toolkit:
    """A CUDA toolkit, in a folder with ``bin/nvcc`` and ``bin/ptxas``."""

    def __init__(self, home: Path):
        self.nvcc, self.ptxas = home / "bin" / "nvcc", home / "bin" / "ptxas"
        said = subprocess.run([self.ptxas, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = re.search(r"release (\d+\.\d+)", said)[1]

    def native(self, source: Path, architecture: int, into: Path) -> str:
        """Assembly of one of ``native``'s sources, with the flags of its build."""
        from pointproj.ops.backends.native.compiler import HEADERS, cuda_flags

        made = into / f"{source.stem}-{architecture}.ptx"
        flags = [*HEADERS, *cuda_flags(()), f"-arch=compute_{architecture}"]
        subprocess.run([self.nvcc, *flags, "-ptx", "-o", made, source], check=True)
        return made.read_text(encoding="utf-8")

    def used(self, assembly: str, into: Path) -> Iterator[Used]:
        """What the assembler says of each kernel; CalledProcessError where it refuses."""
        target = re.search(r"^\.target (\w+)", assembly, flags=re.M)[1]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx", dir=into, encoding="utf-8") as file:
            file.write(re.sub(r"^\.version .*", f".version {self._newest_assembly()}", assembly, flags=re.M))
            file.flush()
            made = ["-o", f"{file.name}.cubin"]
            done = subprocess.run(
                [self.ptxas, "-v", f"-arch={target}", file.name, *made], capture_output=True, text=True
            )
        if done.returncode:
            raise RuntimeError(f"ptxas {self.version} refuses what was compiled:\n{done.stderr[-2000:]}")
        entries = re.split(r"Compiling entry function '", done.stderr)[1:]
        for entry in entries:
            name = entry.partition("'")[0]
            yield Used(
                kernel=name,
                registers=_number(r"Used (\d+) registers", entry),
                shared=_number(r"(\d+) bytes smem", entry),
                spilled=sum(_number(rf"(\d+) bytes spill {way}", entry) for way in ("stores", "loads")),
                threads=_threads(name, assembly),
            )

    def _newest_assembly(self) -> str:
        major, minor = map(int, self.version.split("."))
        return f"8.{minor - (minor >= 6)}" if major == 12 else f"9.{minor}"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _threads(name: str, assembly: str) -> int:
    head = assembly[assembly.index(f".entry {name}(") :].partition("{")[0]
    most = re.search(r"\.(?:maxntid|reqntid) (\d+)", head)
    return int(most[1]) if most else 0


def native(toolkit: Toolkit, architecture: int, into: Path) -> Iterator[Used]:
    """The kernels of all tasks, one name for all forms of a task."""
    from pointproj.ops.backends.native.compiler import SOURCES

    def of(source: Path) -> list[Used]:
        return list(toolkit.used(toolkit.native(source, architecture, into), into))

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(of, sorted(SOURCES.glob("*.cu"))):
            for used in found:
                yield replace(used, kernel=_task(used.kernel))


def _task(mangled: str) -> str:
    """``each_kernel<SearchByWarp<float>>`` from the linker's name: ``SearchByWarp, fp32``."""
    plain = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    task = re.search(r"_kernel<pointproj::gpu::(\w+)", plain)
    name = task[1] if task else plain.strip().partition("(")[0].removeprefix("pointproj::gpu::")
    return f"{name}, {'fp64' if 'double' in plain else 'fp32'}"


def warp(toolkit: Toolkit, architecture: int, into: Path) -> Iterator[Used]:
    """Warp's kernels, as they are made for a GPU, for 25 channels and seven neighbours."""
    import warp as wp

    wp.config.log_level = wp.LOG_WARNING
    for number, (name, threads, kernel) in enumerate(_warp_kernels()):
        folder = into / f"{number}-{architecture}"
        wp.compile_aot_module(kernel.module, arch=architecture, module_dir=folder, use_ptx=True)
        assembly = next(folder.glob("*.ptx")).read_text(encoding="utf-8").rstrip("\0")
        for used in toolkit.used(assembly, into):
            if "cuda_kernel_backward" not in used.kernel:
                yield replace(used, kernel=name, threads=used.threads or threads)


def _warp_kernels() -> Iterator[tuple[str, int, object]]:
    """Name in the table, threads of a block where the kernel names no bound, and kernel."""
    from pointproj.ops.backends.warp import (
        cell_list,
        cell_list_build,
        gradients,
        knn_search,
        lists,
        neighbors,
        sums,
    )
    from pointproj.ops.backends.warp.knn_search import search_kernel

    usual = 256
    for real, label in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        yield f"cell list: bounds, {label}", 64, cell_list_build.bound_kernel(real, 32)
        yield f"cell list: grids, {label}", usual, cell_list_build.divide_kernel(real, 32)
        yield f"cell list: count, {label}", usual, cell_list_build.count_kernel(real)
        yield f"cell list: scatter, {label}", usual, cell_list_build.scatter_kernel(real)
        for k in (7, 32, None):
            name = f"kNN search, k = {k or 'more'}, {label}"
            yield name, knn_search.BLOCK, search_kernel(cell_list.CellList, real, k, torch.int64, 8)
            name = f"the nearest within a radius, k = {k or 'more'}, {label}"
            yield name, lists.BLOCK, search_kernel(neighbors.Ball, real, k, torch.int64, lists.BLOCKS)
        for part, kernel in zip(("count", "fill"), lists.list_kernels(real, 8), strict=True):
            yield f"lists: {part}, {label}", lists.BLOCK, kernel
        for source, where in ((neighbors.Ball, "within a radius"), (neighbors.Lists, "over lists")):
            vector = 4 if source is neighbors.Ball else 1
            variant = neighbors.Variant(source, real, real, 8, 4, vector, True, "exponential", "mean")
            yield f"sums {where}, {label}", usual, sums.aggregate_kernel(variant)
            query, reference = gradients.query_gradient_kernel, gradients.reference_gradient_kernel
            made = [("queries", query, True, False), ("features", reference, False, True)]
            made += [("references", reference, True, True)]
            if source is neighbors.Lists:
                made = [("features", query, False, True), ("queries", query, True, True)]
            for of, kernel, *needed in made:
                yield f"gradients of {of} {where}, {label}", usual, kernel(variant, *needed)


def triton(toolkit: Toolkit, architecture: int, into: Path) -> Iterator[Used]:
    """Triton's kernels, with the constants of their test and the warps that they are launched with."""
    from tests.ops.test_triton_compile import KERNELS, compiled

    for name in KERNELS:
        made = compiled(name, architecture, "fp32", "i32", warps=4 if name == "numbers" else 1)
        for used in toolkit.used(made.asm["ptx"], into):
            yield replace(used, kernel=name, shared=made.metadata.shared)


COMPILED = {"native": native, "warp": warp, "triton": triton}


def table(of: str, by_architecture: dict[int, list[Used]]) -> Iterator[list[str]]:
    """Rows of one backend, in the columns of :func:`heading`: a range where the forms of a kernel differ."""
    forms: dict[str, dict[int, list[Used]]] = defaultdict(lambda: defaultdict(list))
    for architecture, kernels in by_architecture.items():
        for used in kernels:
            forms[used.kernel][architecture].append(used)
    for kernel, made in forms.items():
        one = next(iter(made.values()))
        cells = [of, kernel, str(len(one)), _range(used.threads for used in one)]
        for architecture in by_architecture:
            each = made[architecture]
            cells += [_range(used.registers for used in each), _range(used.shared for used in each)]
            cells += [_range(used.spilled for used in each)]
            cells += [_range(used.blocks(architecture) for used in each)]
        yield cells


def heading(architectures: Iterable[int]) -> list[str]:
    """The columns of the results; shared memory and what is spilled are bytes."""
    taken = "registers", "shared", "spilled", "blocks"
    columns = ["backend", "kernel", "forms", "threads"]
    return columns + [f"sm_{a} {what}" for a in architectures for what in taken]


def _range(numbers: Iterable[int]) -> str:
    low, *_, high = [(found := sorted(numbers))[0], *found]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def too_large(used: Used, architecture: int) -> bool:
    """Whether a launch of this kernel would fail."""
    return used.shared > SHARED_OF_BLOCK or used.registers > 255 or used.blocks(architecture) < 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("toolkit", type=Path, help="folder of a CUDA toolkit")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--of", nargs="+", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file")
    given = parser.parse_args()
    toolkit = Toolkit(given.toolkit)
    failed, rows = [], []
    for backend in given.of:
        with tempfile.TemporaryDirectory() as folder:
            made = {a: list(COMPILED[backend](toolkit, a, Path(folder))) for a in given.arch}
        rows += table(backend, made)
        failed += [f"sm_{a}: {used}" for a, kernels in made.items() for used in kernels if too_large(used, a)]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*heading(given.arch), "cuda", "commit"])
        commit = machine_columns(torch.device("cpu"))["commit"]
        writer.writerows([*row, toolkit.version, commit] for row in rows)
    if failed:
        sys.exit("does not fit:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
