"""Batches of shapes: their order, how processes share them, and how samples are stacked."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from pointproj.data.clouds import Sampling
from pointproj.data.dataset import Draw, ShapeDataset
from pointproj.runtime.distributed import SINGLE_PROCESS, Processes
from pointproj.runtime.failures import SharedMemoryFull


def batches(
    dataset: ShapeDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    epochs: int = 1,
    start: int = 0,
    workers: int = 0,
    processes: Processes = SINGLE_PROCESS,
    draw: Callable[[Sequence[Draw]], dict[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the batches of one or more epochs.

    Equal arguments give equal batches, for any number of workers.

    Parameters
    ----------
    dataset : ShapeDataset
        Shapes to sample.
    batch_size : int
        Shapes of each batch; the last batch of an epoch may hold fewer.
    shuffle : bool
        Whether each epoch has another order, which depends on ``seed`` and the epoch.
    seed, epoch : int
        Seed of the order, and number of the first epoch.
    epochs : int
        Number of epochs. One call for all of them keeps its workers; each call starts new ones.
    start : int
        Batches of the first epoch to skip. A resumed run gets the batches that it would have got.
    workers : int
        Processes that sample ahead; 0 samples in this process.
    processes : Processes
        Batches are ``processes.count`` times as large, and each process gets its own part. If the last batch
        has fewer shapes than there are processes, each process without a shape gets the first one, with
        share 0.
    draw : callable, optional
        Makes a batch from a list of :class:`~pointproj.data.dataset.Draw`, in this process and without
        workers. By default the samples of ``dataset`` are stacked.

    Yields
    ------
    dict
        ``reference_points`` (B, N, 3), ``normals`` (B, N, 3) and ``target`` (B, Q), float32;
        ``query_points``, float32, (Q, 3) for all shapes or (B, Q, 3) for each its own; ``name``,
        ``class_name`` and ``identity``, lists of B; ``sampling``, the
        :class:`pointproj.data.clouds.Sampling` of its points. With several processes also ``share`` (),
        float32: the share of this part in the whole batch.
    """
    whole = batch_size * processes.count
    parts = (
        _part(batch, number, sampling, processes)
        for number in range(epoch, epoch + epochs)
        for batch, sampling in _whole_batches(
            dataset, whole, number, seed if shuffle else None, start if number == epoch else 0
        )
    )
    ahead, behind = itertools.tee(parts)
    chunks = (chunk for chunk, _ in ahead)
    if draw is not None:
        stacked = map(draw, chunks)
    elif workers == 0:
        stacked = (collate([dataset[index] for index in chunk]) for chunk in chunks)
    else:
        stacked = DataLoader(
            dataset,
            batch_sampler=chunks,
            num_workers=workers,
            collate_fn=collate_shared,
            generator=torch.Generator(),  # else starting workers would advance torch's global random state
        )
    for batch, (chunk, share) in zip(stacked, behind, strict=True):
        shared = {} if processes.is_single else {"share": torch.tensor(share, device="cpu")}
        yield {"query_points": dataset.query_points, "sampling": chunk[0].sampling, **batch, **shared}


def _whole_batches(
    dataset: ShapeDataset, batch_size: int, epoch: int, seed: int | None, start: int
) -> Iterator[tuple[Int[np.ndarray, " B"], Sampling]]:
    """Yield indices and sampling of an epoch's batches from ``start`` on; shuffled if there is a seed.

    Batches cycle through the samplings, and each epoch begins one sampling later than the epoch before. So
    over many epochs all samplings have equally many batches, even if an epoch has few.
    """
    count, samplings = len(dataset), dataset.samplings
    order = np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)
    for number in range(start, -(-count // batch_size)):
        batch = order[number * batch_size : (number + 1) * batch_size]
        yield batch, samplings[(epoch + number) % len(samplings)]


def _part(
    batch: Int[np.ndarray, " B"], epoch: int, sampling: Sampling, processes: Processes
) -> tuple[list[Draw], float]:
    """Return what this process draws of a batch, and its share of the whole."""
    part = np.array_split(batch, processes.count)[processes.rank]
    indices = part if len(part) else batch[:1]
    return [Draw(epoch, int(index), sampling) for index in indices], len(part) / len(batch)


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of samples along a new first axis and list their names."""
    return {
        key: torch.stack([sample[key] for sample in samples])
        if isinstance(samples[0][key], Tensor)
        else [sample[key] for sample in samples]
        for key in samples[0]
    }


def collate_shared(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack samples in a worker, into shared memory; raise SharedMemoryFull if it has no room.

    Without this, torch moves a batch in a thread of the worker, whose errors nobody gets: the run would wait
    for the batch for ever.
    """
    batch = collate(samples)
    try:
        for value in batch.values():
            if isinstance(value, Tensor):
                value.share_memory_()
    except RuntimeError as error:
        raise SharedMemoryFull(str(error)) from error
    return batch
