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
    """Batches of epochs, the same for the same arguments, whatever ran before and however many workers.

    Parameters
    ----------
    dataset : ShapeDataset
    batch_size : int
        Shapes a batch; the last batch of an epoch may hold fewer.
    shuffle : bool
        Another order in every epoch, fixed by ``seed``.
    seed, epoch : int
        What the order depends on.
    epochs : int
        How many, one after the other: the workers go on where another call would start new ones.
    start : int
        Batches of the first epoch to pass over: resumed there, it yields what it would have yielded.
    workers : int
        Processes that sample ahead; 0 samples in this one.
    processes : Processes
        Each gets its own part of batches that are ``processes.count`` times as large. Where the last one is
        too small for all, the others get a shape of it again, with the share 0.
    draw : callable, optional
        Makes a batch of what is to be drawn of its shapes, here and without workers; by default the samples
        of ``dataset`` are stacked.

    Yields
    ------
    dict
        ``reference_points`` (B, N, 3), ``normals`` (B, N, 3), ``target`` (B, Q) and the shared
        ``query_points`` (Q, 3), or a shape's own (B, Q, 3), float32; ``name``, ``class_name`` and
        ``identity``, lists of B; ``sampling``, a :class:`pointproj.data.clouds.Sampling`, how its points are
        drawn. Where there are several processes also ``share`` (), float32: this part's share of the whole
        batch.
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
            collate_fn=collate,
            generator=torch.Generator(),  # else starting workers would advance torch's global random state
        )
    for batch, (chunk, share) in zip(stacked, behind, strict=True):
        shared = {} if processes.is_single else {"share": torch.tensor(share)}
        yield {"query_points": dataset.query_points, "sampling": chunk[0].sampling, **batch, **shared}


def _whole_batches(
    dataset: ShapeDataset, batch_size: int, epoch: int, seed: int | None, start: int
) -> Iterator[tuple[Int[np.ndarray, " B"], Sampling]]:
    """Yield indices and sampling of an epoch's batches from ``start`` on; shuffled if there is a seed.

    Samplings take turns, and every epoch begins with the next: so batches of each are equally many, however
    few an epoch has.
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
