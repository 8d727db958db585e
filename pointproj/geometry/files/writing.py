"""Files that are written completely or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name, and move it to its place at the end.

    Nothing is left behind by an error. Several processes may write the same file: the last one's stays.

    Parameters
    ----------
    path : Path
        Its folder is made as needed; a file of that name is replaced.

    Yields
    ------
    Path
        Where to write, in the same folder.

    Raises
    ------
    OSError
        If the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
