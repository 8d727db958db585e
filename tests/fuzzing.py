"""Files that nobody would write, for every reader: ``python -m tests.fuzzing --inputs 20000``.

Each input is a valid file with one change or a few: bytes, numbers, counts, lines and whole sections changed,
removed, repeated or taken from another file. A reader may return or raise its own error; everything else, and
more than a few seconds or megabytes for a few kilobytes, is a finding, and its input is kept.
"""

import argparse
import io
import logging
import multiprocessing
import re
import resource
import signal
import struct
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch

from pointproj.geometry.files import parse_mesh
from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.meshes import MeshError
from pointproj.runtime import memory, tensor_file
from pointproj.training import checkpoint
from pointproj.training.checkpoint import CheckpointError
from tests.geometry import test_scans as scans
from tests.geometry.test_files import READABLE
from tests.geometry.test_formats import BOX_GLB, BOX_SCENE, BOX_TEXT, OTHER_FORMATS, STL_FILES, archive_of

SECONDS = 5  # that one input may take
MEGABYTES = 1024  # of address space that a process of this may add to what it has

NUMBERS = b"0 1 2 3 9 -1 255 256 65535 2147483647 4294967295 -9223372036854775808".split()
NUMBERS += [*b"1e9 1e308 nan inf 0x10 1_0".split(), b"9" * 30, b"9" * 5000, "٣".encode()]
WORDS = b"OFF COFF ply element face property list uchar int vertex end_header".split()
WORDS += b"solid facet endfacet endsolid v f # \\".split()
WORDS += [b"\n", b"\r\n", b"\r", b"\x00", b"\x0b", b" ", "\u2028".encode(), b"\xff\xfe", b"ascii"]
WORDS += [b"element vertex 0\n"]
LARGEST = {"i": -1, "I": 2**32 - 1, "q": 2**63 - 1, "H": 65535, "f": np.inf, "d": np.nan}
EXTREMES = [struct.pack(order + code, value) for order in "<>" for code, value in LARGEST.items()]


@dataclass
class Tally:
    """What came of the inputs of one reader."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds
    grown: float = 0.0  # MiB of resident memory
    findings: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """One reader: files it understands, what it refuses with, and how an input is made of a changed file."""

    seeds: list[bytes]
    read: Callable[[bytes], object]
    error: type[Exception]
    wrap: Callable[[bytes], bytes] = lambda content: content


class Slow(BaseException):
    """An input took longer than :data:`SECONDS`."""


def as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def mesh_reader(suffix: str) -> Reader:
    named = {f"{name}.off": text for name, text in READABLE.items()} | OTHER_FORMATS | STL_FILES
    named |= {"box.glb": BOX_GLB, "box.gltf": BOX_TEXT, "box.3mf": BOX_SCENE.export(file_type="3mf")}
    seeds = [as_bytes(content) for name, content in named.items() if name.lower().endswith(suffix)]

    def read(content: bytes) -> None:
        mesh = parse_mesh(content, f"input{suffix}")
        assert np.isfinite(mesh.vertices).all()
        assert 0 <= mesh.faces.min() <= mesh.faces.max() < len(mesh.vertices)

    return Reader(seeds, read, MeshError)


def packed_reader() -> Reader:
    """Of 3MF files whose model is changed before it is packed."""
    plain = mesh_reader(".3mf")
    with zipfile.ZipFile(io.BytesIO(plain.seeds[0])) as archive:
        (model,) = (name for name in archive.namelist() if name.endswith(".model"))
        return Reader([archive.read(model)], plain.read, MeshError, archive_of)


def array_file(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def archived(*arrays: np.ndarray, **named: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, *arrays, **named)
    return buffer.getvalue()


def written(path: Path, write: Callable[..., None], *given: object, **named: object) -> bytes:
    write(path, *given, **named)
    return path.read_bytes()


def cloud_reader(suffix: str, folder: Path) -> Reader:
    """Of points, or of meshes where the format knows both."""
    corners = np.random.default_rng(0).normal(size=(12, 6))
    text = {n: "".join(" ".join(f"{x:.3f}" for x in row[:n]) + "\n" for row in corners) for n in (3, 6)}
    ply = "ply\nformat ascii 1.0\nelement vertex 12\n" + "".join(f"property float {name}\n" for name in "xyz")
    seeds = {
        ".xyz": [text[3], text[6], "# a cloud\n\n" + text[3].replace(" ", ",")],
        ".npy": [
            array_file(corners),
            array_file(corners[:, :3].astype("f4")),
            array_file(np.ones((5, 3), int)),
        ],
        ".npz": [archived(points=corners[:, :3], normals=corners[:, 3:]), archived(corners)],
        ".ply": [ply + "end_header\n" + text[3]],
        ".obj": ["".join(f"v {line}\n" for line in text[3].splitlines())],
        ".pts": ["12\n" + text[3], "x;y;z;nx;ny;nz\n" + text[6].replace(" ", ";").replace(".", ",")],
    }
    path = folder / f"cloud{suffix}"
    if suffix in (".las", ".laz"):
        seeds[suffix] = [written(path, scans.las, corners[:, :3] + scans.CENTRE, withheld=[1])]
    elif suffix == ".pcd":
        kinds = "ascii", "binary", "binary_compressed"
        seeds[suffix] = [written(path, scans.pcd, corners[:, :3], encoding=kind) for kind in kinds]
    elif suffix == ".e57":
        seeds[suffix] = [written(path, scans.e57, (corners[:, :3], {}))]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        cloud = read_cloud(path, 10)
        assert np.isfinite(cloud.points).all()
        assert 0 < len(cloud.points) <= 12

    return Reader([as_bytes(content) for content in seeds[suffix]], read, MeshError)


def checkpoint_content() -> dict[str, object]:
    """What a checkpoint holds."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "format": checkpoint.FORMAT,
        "config": {"seed": 0, "data": {"root": None}},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": {"losses": [[1, 0.5]]},
    }


def checkpoint_reader(folder: Path, *, inside: bool) -> Reader:
    """Of whole files, or with ``inside`` of files whose plain values are changed and whose sums are right."""
    path = folder / "last.pt"
    tensor_file.save(path, checkpoint_content())
    whole = path.read_bytes()
    with safetensors.safe_open(path, framework="pt") as file:
        text = file.metadata()["content"]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    def read(content: bytes) -> None:
        path.write_bytes(content)
        loaded = checkpoint.load(path)
        assert isinstance(loaded["config"], dict)

    def with_text(changed_text: bytes) -> bytes:
        told = changed_text.decode(errors="replace")
        total = tensor_file._check_sum(told, tensors)
        return safetensors.torch.save(tensors, {"content": told, "crc32": str(total)})

    if inside:
        return Reader([text.encode()], read, CheckpointError, with_text)
    return Reader([whole], read, CheckpointError)


def readers(folder: Path) -> dict[str, Reader]:
    """All readers by name; ``folder`` is theirs."""
    meshes = ".off", ".obj", ".ply", ".stl", ".glb", ".gltf", ".3mf"
    clouds = ".xyz", ".npy", ".npz", ".ply", ".obj", ".pts", ".las", ".laz", ".pcd", ".e57"
    return {
        **{suffix: mesh_reader(suffix) for suffix in meshes},
        **{f"{suffix}, cloud": cloud_reader(suffix, folder) for suffix in clouds},
        ".3mf, inside": packed_reader(),
        ".pt": checkpoint_reader(folder, inside=False),
        ".pt, inside": checkpoint_reader(folder, inside=True),
    }


def changed(content: bytes, seeds: list[bytes], rng: np.random.Generator) -> bytes:
    """Return ``content`` with one change or a few."""
    for _ in range(rng.geometric(0.5)):
        content = _change(content, seeds, rng)
    return content[: 1 << 16]


def _change(content: bytes, seeds: list[bytes], rng: np.random.Generator) -> bytes:
    low, high = sorted(rng.integers(0, len(content) + 1, 2).tolist())
    high = min(high, low + int(rng.integers(1, 40)))
    pick = lambda items: items[rng.integers(len(items))]  # noqa: E731
    match rng.integers(10):
        case 0:  # one byte
            return content[:low] + bytes([rng.integers(256)]) + content[low + 1 :]
        case 1:  # a part removed
            return content[:low] + content[high:]
        case 2:  # cut short
            return content[:low]
        case 3:  # a part repeated many times
            return content[:low] + content[low:high] * int(rng.integers(2, 50)) + content[high:]
        case 4:  # any bytes
            return content[:low] + rng.bytes(int(rng.integers(1, 12))) + content[low:]
        case 5:  # a word of some format
            return content[:low] + pick(WORDS) + content[high if rng.integers(2) else low :]
        case 6:  # another number
            numbers = list(re.finditer(rb"[-+.\w]*\d[-+.\w]*", content))
            span = pick(numbers).span() if numbers else (low, high)
            return content[: span[0]] + pick(NUMBERS) + content[span[1] :]
        case 7:  # another binary number
            extreme = pick(EXTREMES)
            return content[:low] + extreme + content[low + len(extreme) :]
        case 8:  # lines in another order
            lines = content.splitlines(keepends=True)
            rng.shuffle(lines)
            return b"".join(lines)
        case _:  # the end of another file
            other = pick(seeds)
            return content[:low] + other[rng.integers(len(other) + 1) :]


def fuzz(reader: Reader, count: int, seed: int) -> Tally:
    """Give a reader ``count`` inputs, the same for the same seed."""
    rng = np.random.default_rng(seed)
    tally = Tally()
    memory.reset_peak("cpu")
    before = memory.peak_bytes("cpu")
    plain = signal.signal(signal.SIGALRM, _too_slow)
    try:
        for number in range(count):
            content = reader.wrap(changed(reader.seeds[number % len(reader.seeds)], reader.seeds, rng))
            _feed(reader, content, tally)
    finally:
        signal.signal(signal.SIGALRM, plain)
    tally.grown = (memory.peak_bytes("cpu") - before) / 2**20
    return tally


def _too_slow(*_: object) -> None:
    raise Slow


def _feed(reader: Reader, content: bytes, tally: Tally) -> None:
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.read(content)
        tally.read += 1
    except reader.error:
        tally.refused += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.findings.append((f"{type(error).__name__}: {error}", content))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    tally.inputs += 1
    tally.slowest = max(tally.slowest, time.perf_counter() - started)


def _in_bounds(name: str, count: int, seed: int) -> Tally:
    """In a process of its own, which may not take much more memory than it has."""
    logging.disable()
    warnings.simplefilter("ignore")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (MEGABYTES << 20), resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(readers(Path(folder))[name], count, seed)


def main() -> None:
    """Fuzz all readers, print what came of it, and keep the inputs of findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("outputs/fuzzing"))
    given = parser.parse_args()
    print(f"{'reader':<12} {'inputs':>8} {'read':>8} {'refused':>8} {'slowest':>9} {'memory':>9}  findings")
    with tempfile.TemporaryDirectory() as folder:
        names = list(readers(Path(folder)))
    failed = False
    for name in names:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            tally = pool.apply(_in_bounds, (name, given.inputs, given.seed))
        print(
            f"{name:<12} {tally.inputs:>8} {tally.read:>8} {tally.refused:>8} {tally.slowest * 1e3:>6.0f} ms "
            f"{tally.grown:>5.0f} MiB  {len(tally.findings)}",
            flush=True,
        )
        for number, (words, content) in enumerate(tally.findings):
            given.findings.mkdir(parents=True, exist_ok=True)
            path = given.findings / f"{number}{name.partition(',')[0]}"
            path.write_bytes(content)
            print(f"  {path}: {words[:200]}")
            failed = True
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
