"""Download ModelNet10 with one command, which may be interrupted and repeated.

The archive is written to a ``.part`` file; the next attempt continues it. The archive is unpacked into a
temporary folder, which is moved to its destination when it is complete.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import requests

from pointproj import command_line
from pointproj.data.errors import DataError
from pointproj.data.layout import layout_root
from pointproj.runtime.progress_bar import progress

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30
LARGEST_UNPACKED_BYTES = 16 << 30  # several times the unpacked size of ModelNet10

# Errors of zipfile for archives that are truncated, overwritten, encrypted, or name a file twice.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)


class DownloadError(DataError):
    """The archive could not be fetched, or is not the expected one; the message says what to do."""


class Archive(NamedTuple):
    """A zip file on the web that holds one folder of meshes."""

    url: str
    folder: str
    size: int  # bytes; another size raises an error
    sha256: str  # another digest gives a warning: this one is of a copy, the publisher gives none


MODELNET10 = Archive(
    url="http://3dvision.princeton.edu/projects/2014/3DShapeNets/ModelNet10.zip",
    folder="ModelNet10",
    size=473_402_300,
    sha256="9d8679435fc07d1d26f13009878db164a7aa8ea5e7ea3c8880e42794b7307d51",
)


def download_modelnet10(root: Path | str, archive: Archive = MODELNET10) -> Path:
    """Fetch and unpack the official archive, unless its folder exists; return that folder.

    Parameters
    ----------
    root : Path or str
        Folder for ``ModelNet10.zip`` and the folder ``ModelNet10``. A zip file placed there by hand is used.
    archive : Archive
        The archive to fetch.

    Raises
    ------
    DownloadError
        If the server cannot be reached, the connection breaks, or the archive is not the expected one.
        The fetched part stays, and the next call continues it.
    """
    root = Path(root)
    folder = root / archive.folder
    if folder.exists():
        log.info("%s exists already, so nothing is downloaded", folder)
        return folder
    root.mkdir(parents=True, exist_ok=True)
    zip_file = root / f"{archive.folder}.zip"
    with open(root / f".{archive.folder}.lock", "w") as lock:  # the jobs of a sweep may start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another process made it while this one waited
            return folder
        if not zip_file.exists():
            part = zip_file.with_name(zip_file.name + ".part")
            _fetch(archive, part)
            os.replace(part, zip_file)
        _check(zip_file, archive)
        unpack(zip_file, root, archive.folder)
    log.info("%s is ready; %s can be deleted", folder, zip_file)
    return folder


def _fetch(archive: Archive, part: Path) -> None:
    """Append the missing bytes to ``part``."""
    have = part.stat().st_size if part.exists() else 0
    if have == archive.size:
        return
    have = have if have < archive.size else 0
    log.info("fetching %s into %s%s", archive.url, part, f", from byte {have:,} on" if have else "")
    missing = {"Range": f"bytes={have}-"} if have else {}
    try:
        with requests.get(archive.url, headers=missing, stream=True, timeout=TIMEOUT_SECONDS) as response:
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:  # the server sends the whole file
                have = 0
            offered = have + int(response.headers.get("Content-Length", archive.size - have))
            if offered != archive.size:
                raise DownloadError(
                    f"{archive.url} offers {offered:,} bytes; expected {archive.size:,}: the file at that "
                    "address has changed, or is an error page"
                )
            title = f"fetching {archive.folder}"
            with open(part, "ab") as file, progress(title, archive.size, done=have, unit="bytes") as advance:
                file.truncate(have)
                for chunk in response.iter_content(CHUNK_BYTES):
                    have += file.write(chunk)
                    advance(len(chunk))
    except OSError as error:  # all errors of requests are OSErrors
        reason = f"fetching {archive.url} failed: {error}"
        if (response := getattr(error, "response", None)) is not None:
            answer = f"the server answers {response.status_code} {response.reason}"
            reason = f"fetching {archive.url} failed: {answer}"
        elif have:
            reason = f"the connection ended after {have:,} of {archive.size:,} bytes ({error})"
        zip_file = part.with_suffix("")
        raise DownloadError(
            f"{reason}. Run the same command again to go on from where it stopped, or place the data by "
            f"hand: fetch that address on a machine that reaches it and put the file at {zip_file}, or "
            f"unpack it so that {zip_file.with_suffix('')}/<class>/train/*.off exist"
        ) from error


def _check(zip_file: Path, archive: Archive) -> None:
    """Check size and digest of a whole archive."""
    size = zip_file.stat().st_size
    if size != archive.size:
        raise DownloadError(
            f"{zip_file} has {size:,} bytes, expected {archive.size:,}: delete it and run the command again"
        )
    with zip_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != archive.sha256:
        other = f"has SHA-256 {digest}, expected {archive.sha256}"
        log.warning("%s %s; continuing, since its size is right", zip_file, other)


def unpack(zip_file: Path, root: Path, folder: str) -> None:
    """Unpack ``folder`` of an archive into ``root``, completely or not at all; it must not exist there.

    Resource forks (``__MACOSX``, ``._*``) and ``.DS_Store`` are skipped. A DownloadError is raised, and no
    file is left behind, if the archive is damaged, too large, or holds links or paths that lead out of the
    folder.
    """
    workspace = root / f".{folder}.unpacking"
    shutil.rmtree(workspace, ignore_errors=True)  # left by an attempt that was killed
    workspace.mkdir()
    try:
        with zipfile.ZipFile(zip_file) as archive:
            members = [member for member in archive.infolist() if _is_wanted(member, folder)]
            needed, free = sum(member.file_size for member in members), shutil.disk_usage(root).free
            if needed > min(free, LARGEST_UNPACKED_BYTES):
                raise DownloadError(
                    f"{zip_file} would unpack to {needed:,} bytes; expected at most "
                    f"{LARGEST_UNPACKED_BYTES:,}, and {root} has {free:,} left: make room, or fetch it again"
                )
            with progress(f"unpacking {folder}", len(members), unit="files") as advance:
                for member in members:
                    # writes at most the size that the archive declares, which was checked above
                    archive.extract(member, workspace)
                    advance(1)
        if layout_root(workspace / folder) is None:
            raise DownloadError(f"{zip_file} holds no {folder}/<class>/train folder: it is not {folder}")
        os.replace(workspace / folder, root / folder)
    except _DAMAGE as error:
        raise DownloadError(
            f"{zip_file} is damaged ({error}): delete it and run the command again"
        ) from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _is_wanted(member: zipfile.ZipInfo, folder: str) -> bool:
    """Return whether a file of the archive belongs to the data; raise for files that must not be unpacked."""
    path = PurePosixPath(member.filename.replace("\\", "/"))
    if not path.parts:
        return False
    outside = path.is_absolute() or ".." in path.parts or ":" in path.parts[0]
    if outside or stat.S_ISLNK(member.external_attr >> 16):
        what = "leads out of its folder" if outside else "is a link"
        raise DownloadError(f"the archive holds {member.filename!r}, which {what}: refused")
    resource_fork = path.parts[0] == "__MACOSX" or path.name.startswith("._") or path.name == ".DS_Store"
    if member.is_dir() or resource_fork or path.parts[0] != folder:
        return False
    # zipfile would find these only while unpacking, and raise errors that a full disk raises too.
    if member.header_offset < 0:
        raise zipfile.BadZipFile(f"{member.filename!r} begins before the archive")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{member.filename!r} is compressed by method {member.compress_type}")
    return True


def main(arguments: Sequence[str]) -> None:
    """Fetch ModelNet10 into the folder that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m pointproj download", description="Fetch ModelNet10.")
    parser.add_argument(
        "--root", type=Path, default=Path("data/modelnet10"), help="folder; data/modelnet10 by default"
    )
    print(download_modelnet10(command_line.parse(parser, arguments).root))
