"""Tensors and plain values in one file: written whole or not at all, and read safely whoever made it.

The file is torch's own zip archive. ``weights_only=True`` alone runs no code of a stranger, but it believes
the sizes in the file and lets it call constructors that allocate. What does not add up is refused before
torch opens the file, and what comes out is looked through: tensors and plain values, of bounded number and
size.
"""

import io
import os
import pickletools
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_PICKLE_BYTES = 16 << 20
"""Most that the description of all values may take; tensors' numbers lie beside it."""

_MAX_USES = 4  # of the same numbers, by tensors that share them
_MAX_DEPTH, _MAX_VALUES = 16, 4_000_000

# What torch.save names for tensors and plain values; anything else is refused before it is called.
_NAMES = frozenset(
    {"collections OrderedDict", "torch._utils _rebuild_tensor_v2"}
    | {f"torch {kind}Storage" for kind in ("Bool", "Byte", "Char", "Short", "Int", "Long")}
    | {f"torch {kind}Storage" for kind in ("Half", "BFloat16", "Float", "Double")}
)


class DamagedFile(ValueError):  # noqa: N818 - says what is true of the file
    """The file is incomplete, altered, or was never what it should be; the message says which."""


def save(path: Path, content: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Write a file, replacing an older one in one move.

    Parameters
    ----------
    path : Path
        Its folder exists. Whatever interrupts the write leaves the old file as it was.
    content : mapping
        Tensors, numbers, strings, None, and lists and mappings of them.
    keep : Path, optional
        Where the file that was at ``path`` goes. At every moment one of the two is whole.

    Raises
    ------
    OSError
        If it cannot be written: no space, no permission.
    """
    # In memory first: on a full disk torch's writer says only that it lost its place.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary, spare = (path.with_name(f".{path.name}.{part}") for part in ("new", "old"))
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            spare.unlink(missing_ok=True)
            _link(path, spare)
            os.replace(temporary, path)
            os.replace(spare, keep)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        spare.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a file that :func:`save` wrote, or refuse it.

    Parameters
    ----------
    path : Path

    Returns
    -------
    dict
        The content; tensors on the CPU.

    Raises
    ------
    DamagedFile
        If it is anything else. Memory and time are bounded by the size of the file.
    OSError
        If it cannot be opened.
    """
    if path.exists() and not path.is_file():  # a pipe could be waited for for ever
        raise DamagedFile("expected a file")
    with path.open("rb") as file:
        _check_archive(file)
    try:
        # Mapped, since torch otherwise believes the number of elements that the pickle gives for a record.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch says about foreign bytes, the file is the cause
        raise DamagedFile(f"torch cannot load it: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise DamagedFile(f"expected a mapping, got {type(content).__name__}")
    return _Copy(_MAX_USES * path.stat().st_size).of(content)


def _link(path: Path, other: Path) -> None:
    """Give a file a second name, or a copy where the file system has no links."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def _check_archive(file: io.BufferedReader) -> None:
    """Refuse an archive that is incomplete, altered, compressed, or calls what tensors do not need."""
    size = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise DamagedFile("expected an archive without compression")
            if sum(member.file_size for member in members) > size:
                raise DamagedFile("its parts are larger than the file")
            if (altered := archive.testzip()) is not None:
                raise DamagedFile(f"its part {altered} was altered")
            pickles = [member for member in members if member.filename.lower().endswith(".pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise DamagedFile(f"expected one description of at most {MAX_PICKLE_BYTES:,} bytes")
            _check_names(archive.read(pickles[0]))
    except DamagedFile:
        raise
    except Exception as error:  # zipfile and pickletools raise a dozen kinds, all for the same cause
        raise DamagedFile(f"it is no whole archive ({type(error).__name__})") from error


def _check_names(pickle: bytes) -> None:
    for operation, argument, _ in pickletools.genops(pickle):
        if operation.name == "GLOBAL" and argument not in _NAMES:
            raise DamagedFile(f"it asks for {argument!r}, which tensors and plain values do not need")


class _Copy:
    """Copies a loaded tree off its file; refuses other types, cycles, and trees that unfold without end."""

    def __init__(self, most_bytes: int) -> None:
        self._left = _MAX_VALUES
        self._bytes_left = most_bytes

    def of(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise DamagedFile(f"it holds more than {_MAX_VALUES:,} values, or more than {_MAX_DEPTH} levels")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            if not all(type(key) in (int, str) for key in value):
                raise DamagedFile("it has keys that are neither strings nor integers")
            return {key: self.of(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, depth + 1) for item in value)
        raise DamagedFile(f"it holds a {type(value).__name__}, which is neither tensor nor plain value")

    def _tensor(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        self._bytes_left -= size
        if size > tensor.untyped_storage().nbytes() or self._bytes_left < 0:
            raise DamagedFile("its tensors have more elements than it holds numbers")
        return tensor.detach().clone()
