"""Prepared samples on disk; damaged ones are made again.

An entry's name is a digest of everything that it depends on, so an old entry is never read for new settings.
A file is a plain ``.npz`` archive, followed by its SHA-256, which numpy's reader ignores.
"""

import hashlib
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pointproj.geometry.files.writing import replacing
from pointproj.runtime.run_folder import writing

log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


def entry_key(content_digest: str, settings: Mapping[str, str | int | float]) -> str:
    """Return the name of an entry, 64 hex digits: a digest of its source file's digest and its settings."""
    described = json.dumps([content_digest, sorted(settings.items())])
    return hashlib.sha256(described.encode()).hexdigest()


class Cache:
    """A folder of entries, each a set of named arrays.

    The folder is made with the first entry, and may be deleted. Several processes may use it at once: entries
    appear whole, and the same key always means the same arrays.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def path(self, key: str) -> Path:
        """Return the path of an entry's file, whether or not the file exists."""
        return self.folder / key[:2] / f"{key}.npz"

    def load(self, key: str) -> dict[str, np.ndarray] | None:
        """Return the arrays of an entry, or None where it is missing, incomplete or damaged."""
        try:
            content = self.path(key).read_bytes()
        except OSError:
            return None
        archive, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(archive).digest() != digest:
            log.warning("%s is damaged and is made again", self.path(key))
            return None
        with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
            return dict(arrays)

    def store(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write an entry in one step; raise RunError if it cannot be written, for example on a full disk."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        archive = buffer.getvalue()
        path = self.path(key)
        with writing(path, "data.cache=FOLDER"), replacing(path) as temporary:
            temporary.write_bytes(archive + hashlib.sha256(archive).digest())
