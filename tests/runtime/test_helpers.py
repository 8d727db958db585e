"""Helper processes: they end with the process that started them, however that ends."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

from pointproj.runtime.helpers import FEWEST_JOBS, HelperProcesses


def note_and_wait(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def helped(folder: Path) -> None:
    jobs = {number: partial(note_and_wait, folder) for number in range(FEWEST_JOBS)}
    with HelperProcesses(2) as helpers:
        list(helpers.results("waiting", jobs, "jobs"))


def alive(number: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever inherited it to look."""
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_helpers_of_a_killed_process_end(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=helped, args=(tmp_path,))
    process.start()
    while process.is_alive() and len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    helpers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(helpers) == 2
    assert all(map(alive, helpers))
    process.kill()
    process.join()
    ended = time.monotonic() + 30  # a hang, not a slow machine
    while any(map(alive, helpers)) and time.monotonic() < ended:
        time.sleep(0.02)
    assert not any(map(alive, helpers))
