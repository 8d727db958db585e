"""The folder of a run below ``outputs/``: config, environment, metrics, pictures and log."""

import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)

# A run writes a few MiB: config, log, pictures and three checkpoints of small networks.
MIN_FREE_BYTES = 16 << 20
LOCK = ".lock"
FOLDER_SETTING = "hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER in a sweep)"


class RunError(RuntimeError):
    """A run cannot use its folder; the message says which folder and what to write instead."""


class RunFolder:
    """The folder with all files of a run; as a context, it is released at the end.

    A missing folder is made. If several processes share a folder, one has ``writes=True``; for the others,
    all methods that write do nothing. ``named`` tells that the user named the folder; then ``resume=auto``
    continues the run in it, and no other run.
    """

    def __init__(self, path: Path | str, *, writes: bool = True, named: bool = False) -> None:
        self.path = Path(path)
        self.named = named
        self._writes = writes
        self._lock: int | None = None
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _repr_html_(self) -> str:
        """The results and the first picture of a run that has ended, for notebooks."""
        from pointproj import notebook  # numpy comes with it

        metrics = read_json(self.path / "metrics.json") or {"status": "has no metrics.json yet"}
        shown = {name: metrics.get(name) for name in ("status", "backend", "device", "steps", "loss")}
        shown |= {f"{name}, on test data": value for name, value in metrics.get("measured", {}).items()}
        more = ""
        for picture in sorted(self.path.glob("pictures/*.png"))[:1]:
            content = b64encode(picture.read_bytes()).decode()
            more = f'<img src="data:image/png;base64,{content}" width="600"/>'
        return notebook.table(str(self.path), shown, more)

    def claim(self, config_text: str, *, continues: bool = False) -> None:
        """Lock the folder for this run until :meth:`release`, and write ``config.yaml`` into it.

        Raises RunError, and changes nothing, if another process uses the folder; or if it has a checkpoint or
        report of a run that this run does not continue.
        """
        if not self._writes:
            return
        self._lock = _locked(self.path)
        holds_a_run = any(self.path.glob("*.pt")) or (self.path / "metrics.json").exists()
        if holds_a_run and not continues:
            self.release()
            raise RunError(
                f"{self.path} holds a run already, and nothing in it was changed. Name another folder "
                f"with {FOLDER_SETTING}, or continue it with resume={self.path}"
            )
        replace_text(self.path / "config.yaml", config_text)

    def release(self) -> None:
        """Unlock the folder for other processes."""
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``; numbers that are not finite become null."""
        if not self._writes:
            return
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_json(metrics) + "\n")

    def take_metrics(self, step: int, source: Path | None = None) -> None:
        """Begin ``metrics.jsonl`` with the complete lines, up to a step, of the run in ``source`` or here."""
        path = (source or self.path) / "metrics.jsonl"
        if not self._writes or not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = (line for line in lines if _is_until(step, line))
        replace_text(self.path / "metrics.jsonl", "".join(kept))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``content`` as the JSON file ``name``, completely or not at all."""
        if self._writes:
            replace_text(self.path / name, _json(content, indent=2) + "\n")

    def picture_path(self, name: str) -> Path:
        """Return the path for a picture ``name``, with or without ``.png``, and make its folder."""
        folder = self.path / "pictures"
        folder.mkdir(exist_ok=True)
        return folder / f"{name.removesuffix('.png')}.png"


def require_writable(folder: Path) -> None:
    """Raise RunError if a folder cannot be made or written to; call this before any work for it.

    The reasons are a file in its path, missing permissions, or an almost full disk. Nothing is made.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise RunError(f"{folder} cannot be made: {nearest} is a file; name another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunError(f"{folder} cannot be written to: {nearest} is read-only here; name another folder")
    free = shutil.disk_usage(nearest).free
    if free < MIN_FREE_BYTES:
        raise RunError(
            f"{folder} has {free / 2**20:.1f} MiB left, expected at least {MIN_FREE_BYTES >> 20} MiB: make "
            "room there or name another folder"
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file of a run, or None if the run has not written it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def run_name() -> str:
    """Return a name for a new run, ``DATE/TIME-TOKEN``, which is its folder below ``outputs/``."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{run_token()}"


def run_token() -> str:
    """Return a string that differs between processes, also on other machines that share the folder."""
    return f"{os.getpid():x}{os.urandom(6).hex()}"


def _json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return numbers, tensors, arrays and paths as JSON text; null for numbers that are not finite."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else os.fspath(value)

    text = json.dumps(content, default=plain)
    return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=indent)


def _is_until(step: int, line: str) -> bool:
    """Return whether a line of ``metrics.jsonl`` is complete and not of a later step."""
    try:
        return line.endswith("\n") and json.loads(line).get("step", 0) <= step
    except ValueError:
        return False


def replace_text(target: Path, text: str) -> None:
    """Write a file by way of a temporary one, so that a reader sees the whole old or new content."""
    temporary = target.with_name(f".{target.name}.{run_token()}")
    with writing(target):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, setting: str = FOLDER_SETTING) -> Iterator[None]:
    """Raise RunError when ``path`` cannot be written in the block; ``setting`` names its folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror or error}): make room there, or name another folder "
            f"with {setting}. A checkpoint that is there already is whole, and resume=FOLDER continues it"
        ) from error


_locks: set[int] = set()  # descriptors of the locks that this process holds


def _close_locks() -> None:
    while _locks:
        os.close(_locks.pop())


# Otherwise a forked process would keep the lock of its parent after the parent was killed.
os.register_at_fork(after_in_child=_close_locks)


def require_idle(folder: Path) -> None:
    """Raise :class:`RunError`, which names the process, if a process uses the folder."""
    if os.access(folder / LOCK, os.W_OK):
        _unlock(_locked(folder))


def _unlock(lock: int) -> None:
    _locks.discard(lock)
    os.close(lock)


def _locked(folder: Path) -> int:
    """Return the descriptor of a lock on the folder; the system releases it when this process ends."""
    path = folder / LOCK
    with writing(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        user = os.pread(lock, 1000, 0).decode(errors="replace")
        os.close(lock)
        raise RunError(
            f"{folder} is in use by {user or 'another process'}: wait until it has ended, stop it, or name "
            "another folder with hydra.run.dir=FOLDER"
        ) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): see that no other process works in it", folder, error.strerror)
    _locks.add(lock)
    os.ftruncate(lock, 0)
    user = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    os.pwrite(lock, user.encode(), 0)
    return lock


def resume_argument(path: Path) -> str:
    """Return the command-line argument that continues from ``path``, quoted for a shell."""
    if re.fullmatch(r"[\w./-]+", str(path)):
        return f"resume={path}"
    return shlex.quote(f'resume="{path}"')  # Hydra needs quotes for blanks, commas and equals signs
