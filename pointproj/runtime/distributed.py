"""Several processes that train one model: their ranks, and the communication between them.

A launcher starts them (torchrun, srun, mpirun). On GPUs, PhysicsNeMo's DistributedManager finds the rank.
NCCL sums gradients between GPUs, gloo between CPUs. All other communication (names, errors of meshes,
requests to stop) uses gloo, which needs no device and may wait as long as data is prepared. torch.distributed
and PhysicsNeMo are imported only when processes join, since a run of one process does not need them.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")

# Environment variables of torchrun, srun and mpirun with the number of processes of the program.
COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
COLLECTIVE_TIMEOUT = timedelta(hours=12)  # one process prepares data or draws plots while the others wait
JOIN_TIMEOUT = timedelta(minutes=10)  # limited, since a process that has failed never joins


class LaunchError(RuntimeError):
    """Processes were started in a way that cannot work; the message says how to start them."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run, as one of them sees them; by default a run of one process."""

    rank: int = 0  # of this process
    count: int = 1  # on all machines
    on_this_machine: int = 1  # which share its cores
    host: "ProcessGroup | None" = None  # group for tensors in host memory and for objects

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes files and the log."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether this is the only process."""
        return self.count == 1

    def all_reduce(self, tensor: "Tensor") -> None:
        """Replace ``tensor`` by its sum over all processes; the host does not wait for a GPU."""
        if self.is_single:
            return
        import torch.distributed as dist

        dist.all_reduce(tensor, group=None if tensor.is_cuda else self.host)

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every process, in the order of the ranks."""
        if self.is_single:
            return [value]
        import torch.distributed as dist

        values = [None] * self.count
        dist.all_gather_object(values, value, group=self.host)
        return values

    @contextlib.contextmanager
    def first_process_first(self) -> Iterator[None]:
        """Run the block in the first process, then in the others, which can use the files of the first."""
        if not self.is_first:
            self.gather(None)
        yield
        if self.is_first:
            self.gather(None)


SINGLE_PROCESS = Processes()


class StopTogether:
    """Tells all processes after the same step that one of them has to stop; no process waits for it."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._pending: tuple[Tensor, Any] | None = None

    def __call__(self, stop_here: bool) -> bool:
        """Report whether this process has to stop; return whether any process reported so a step earlier."""
        if self._processes.is_single:
            return stop_here
        import torch
        import torch.distributed as dist

        answer, flag = self.close(), torch.tensor([int(stop_here)], device="cpu")
        self._pending = flag, dist.all_reduce(flag, group=self._processes.host, async_op=True)
        return answer

    def close(self) -> bool:
        """Wait for the pending reduction, and return its result; False if there is none."""
        if self._pending is None:
            return False
        flag, work = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())


def process_count() -> int:
    """Return the number of processes that a launcher started for this run; 1 without a launcher."""
    return next((int(os.environ[name]) for name in COUNTS if name in os.environ), 1)


@functools.cache
def join() -> Processes:
    """Connect to the other processes of this run, if there are any; later calls return the same.

    Raises LaunchError if this machine has more processes than GPUs, or if not all processes connect in time.
    """
    if process_count() == 1:
        return SINGLE_PROCESS
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", process_count())))
    if torch.cuda.is_available():
        if local > torch.cuda.device_count():
            raise LaunchError(
                f"{local} processes were started on a machine with {torch.cuda.device_count()} GPU(s): start "
                "as many as there are GPUs (torchrun --nproc_per_node), or hide them all "
                "(CUDA_VISIBLE_DEVICES=) to run on the CPU"
            )
        from physicsnemo.distributed import DistributedManager

        DistributedManager.initialize()
    else:  # not by the manager, which gives gloo the CPU as its device; torch refuses that
        try:
            dist.init_process_group("gloo", timeout=JOIN_TIMEOUT)
        except dist.DistError as error:
            raise LaunchError(
                f"the {process_count()} processes of this run did not all connect within {JOIN_TIMEOUT}: see "
                f"the errors of the others, and MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0]})"
            ) from error
    host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return Processes(dist.get_rank(), dist.get_world_size(), local, host)


def agree_on_run(name: str, arguments: Sequence[str]) -> str:
    """Return the first process's name of the run, so that all processes use the same folder.

    Raises LaunchError if several processes were started for a sweep, since a sweep starts its own processes.
    """
    if process_count() > 1 and {"-m", "--multirun"} & set(arguments):
        raise LaunchError(
            "a sweep starts the processes of its jobs itself: write python train.py -m ..., for jobs side by "
            "side with hydra/launcher=joblib or hydra/launcher=submitit_slurm"
        )
    return join().gather(name)[0]


def leave() -> None:
    """Disconnect when all processes are done; CUDA graphs with NCCL calls must be freed before."""
    if join().is_single:
        return
    join().gather(None)
    join.cache_clear()
    if manager := sys.modules.get("physicsnemo.distributed"):
        manager.DistributedManager.cleanup()
    else:
        import torch.distributed as dist

        dist.destroy_process_group()


def log_errors_only(rank: int) -> None:
    """Log only errors of this process, with its rank, to stderr: a run has one log and one progress bar."""
    os.environ["TTY_COMPATIBLE"] = "0"  # prevents rich from drawing bars
    handler = logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    text = f"%(asctime)s %(levelname).1s process {rank}: %(message)s"
    logging.basicConfig(format=text, datefmt="%H:%M:%S", handlers=[handler], force=True)
