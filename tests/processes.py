"""Runs a function in several connected processes, as a launcher would start them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

PROJECT = Path(__file__).resolve().parent.parent

# Processes that have imported everything and started no thread: to start or kill one takes no time.
FORKS = torch.multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.training.test_faults", "matplotlib.pyplot", "scipy.ndimage"])

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]


def environment(rank: int, count: int, port: int, *, device: str = "cpu") -> dict[str, str]:
    """What torchrun tells a process on one machine, whose GPUs are hidden unless ``device`` is ``cuda``."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
        **{"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_together(
    function: Callable[..., None], *arguments: object, count: int = 2, device: str = "cpu"
) -> None:
    """Call ``function(processes, *arguments)`` in each of ``count`` processes; errors of any come out here.

    Parameters
    ----------
    function
        At the top level of a module.
    arguments
        Passed on; they must pickle.
    device
        ``cpu``, or ``cuda`` for a GPU each.
    """
    pytest.importorskip("pointproj.runtime", reason="processes connect through the application's runtime")
    method = "forkserver" if device == "cpu" else "spawn"
    given = count, free_port(), device, function, arguments
    torch.multiprocessing.start_processes(_in_one, given, nprocs=count, start_method=method)


def _in_one(
    rank: int, count: int, port: int, device: str, function: Callable[..., None], arguments: tuple
) -> None:
    os.environ.update(environment(rank, count, port, device=device))
    torch.set_num_threads(1)
    from pointproj.runtime import distributed

    function(distributed.join(), *arguments)
    distributed.leave()
