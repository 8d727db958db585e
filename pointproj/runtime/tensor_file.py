"""Tensors and plain values in one file: written completely or not at all, and safe to read from any origin.

The format is safetensors, which has only data and no code. The file has tensors by name; its metadata has all
other values as JSON text, and a checksum of both.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save as tensor_bytes
from torch import Tensor

_TENSOR = "$tensor"  # key in the JSON text of a mapping that stands for a tensor; the value is its name


class DamagedFile(ValueError):  # noqa: N818 - says what is true of the file
    """The file is incomplete, altered, or of another kind; the message says which."""


def save(path: Path, content: Mapping[str, Any], *, keep: Path | None = None, bare: str = "") -> None:
    """Write a file; an older one is replaced in one move, and stays as it is if writing is interrupted.

    ``content`` has tensors, numbers, strings, None, and lists and mappings of these; keys become strings.
    With ``keep``, the old file is moved there; at each moment, at least one of the two files is complete.
    Tensors of the mapping ``bare`` have in the file the names that they have there.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_separated(content, "", tensors, f"/{bare}/"))
    blob = tensor_bytes(tensors, {"content": text, "crc32": str(_check_sum(text, tensors))})
    temporary, spare = (path.with_name(f".{path.name}.{part}") for part in ("new", "old"))
    try:
        with temporary.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            spare.unlink(missing_ok=True)
            try:
                os.link(path, spare)
            except OSError:  # a file system without links
                shutil.copyfile(path, spare)
            os.replace(temporary, path)
            os.replace(spare, keep)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        spare.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a file that :func:`save` wrote: tensors on the CPU, tuples as lists, and all keys as strings.

    Raises DamagedFile if it is another file or damaged, and OSError if it cannot be opened. Memory and time
    are bounded by the size of the file.
    """
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise DamagedFile("expected a file")
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise DamagedFile("torch.save wrote it, and files of that kind may run code")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if int(metadata["crc32"]) != _check_sum(metadata["content"], tensors):
            raise DamagedFile("it was altered: its checksum differs")
        content = _joined(json.loads(metadata["content"]), tensors)
        if not isinstance(content, dict):
            raise DamagedFile(f"expected a mapping, got {type(content).__name__}")
        return content
    except DamagedFile:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        reason = f"{type(error).__name__}: {error}"
        raise DamagedFile(f"it is not a complete file of tensors ({reason})") from error


def _separated(value: Any, name: str, tensors: dict[str, Tensor], bare: str) -> Any:
    """Return values for the JSON text, and move the tensors among them to ``tensors``."""
    if isinstance(value, Tensor):
        name = name.removeprefix(bare)
        tensors[name] = value.detach().cpu().contiguous().clone()  # the format forbids shared memory
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _separated(item, f"{name}/{key}", tensors, bare) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_separated(item, f"{name}/{place}", tensors, bare) for place, item in enumerate(value)]
    return value


def _joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`_separated`."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _joined(item, tensors) for key, item in value.items()}
    return [_joined(item, tensors) for item in value] if isinstance(value, list) else value


def _check_sum(text: str, tensors: Mapping[str, Tensor]) -> int:
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        numbers = tensors[name].reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(numbers, zlib.crc32(name.encode(), total))
    return total
