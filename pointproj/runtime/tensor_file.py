"""Tensors and plain values in one file: written whole or not at all, and read safely whoever made it.

The file is in the format of safetensors, which holds numbers and runs no code: tensors by name, and in its
metadata a JSON text of all other values, with a check sum of both.
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

_TENSOR = "$tensor"  # key of what stands for a tensor in the JSON text; its value is the tensor's name


class DamagedFile(ValueError):  # noqa: N818 - says what is true of the file
    """The file is incomplete, altered, or was never what it should be; the message says which."""


def save(path: Path, content: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Write a file, replacing an older one in one move; an interrupted write leaves the old one as it was.

    ``content`` are tensors, numbers, strings, None, and lists and mappings of them; keys become strings. The
    file that was at ``path`` goes to ``keep``, if that is given; at every moment one of the two is whole.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_separated(content, "", tensors))
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
    """Read a file that :func:`save` wrote: tensors on the CPU, tuples as lists, and all keys strings.

    Raises DamagedFile if it is anything else, OSError if it cannot be opened. Memory and time are bounded by
    the size of the file.
    """
    if path.exists() and not path.is_file():  # a pipe could be waited for for ever
        raise DamagedFile("expected a file")
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise DamagedFile("torch.save wrote it, and files of that kind may run code")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if int(told["crc32"]) != _check_sum(told["content"], tensors):
            raise DamagedFile("it was altered: its check sum is another")
        content = _joined(json.loads(told["content"]), tensors)
        if not isinstance(content, dict):
            raise DamagedFile(f"expected a mapping, got {type(content).__name__}")
        return content
    except DamagedFile:
        raise
    except Exception as error:  # whatever is said about foreign bytes, the file is the cause
        raise DamagedFile(f"it is no whole file of tensors ({type(error).__name__}: {error})") from error


def _separated(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Values for a JSON text; the tensors among them go to ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()  # no two may share their numbers
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _separated(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_separated(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
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
