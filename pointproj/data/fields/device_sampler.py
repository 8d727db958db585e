"""Batches of samples with fields, drawn on the device: the rows of all samples are copied there once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointproj.data.batches import collate
from pointproj.data.dataset import Draw
from pointproj.data.device_sampler import DrawBatch, require_memory
from pointproj.data.fields.dataset import MOST_EVALUATED, FieldDataset, facts_of
from pointproj.runtime.devices import to_device

OF_CLOUDS, OF_SAMPLES = ("reference_points", "normals"), ("parameters",)  # all others are rows of fields


def field_sampler(dataset: FieldDataset, device: torch.device, most_bytes: int) -> DrawBatch:
    """Copy all rows to the device, and return a function that draws there what ``dataset`` draws.

    The function takes a list of :class:`~pointproj.data.dataset.Draw`, and returns a batch on the device as
    :func:`pointproj.data.batches.collate` does. Raises
    :class:`~pointproj.data.device_sampler.SamplerUnavailable` if the rows take more than ``most_bytes``.
    """
    samples = dataset.samples
    require_memory(sum(each.cloud.nbytes + each.field.nbytes for each in samples), most_bytes)
    rows = [to_device(dataset.scaled(each, each.cloud, each.field), device) for each in samples]
    tables = {
        name: (torch.stack if name in OF_SAMPLES else torch.cat)([each[name] for each in rows])
        for name in rows[0]
    }
    lengths = np.array([[len(each.cloud), len(each.field)] for each in samples])
    starts = lengths.cumsum(0) - lengths
    listed = [facts_of(each) for each in samples]
    bounds = lengths.tolist()

    def draw(chunk: Sequence[Draw]) -> dict[str, Any]:
        drawn = [each.index for each in chunk]
        firsts = [
            dataset.firsts(each.epoch, listed[each.index]["identity"], bounds[each.index]) for each in chunk
        ]
        numbers = np.stack([starts[drawn], lengths[drawn], firsts])  # (3, B, 2)
        chosen = to_device({"numbers": torch.from_numpy(numbers), "drawn": torch.tensor(drawn)}, device)
        counts = dataset.points, min(dataset.queries or MOST_EVALUATED, *(bounds[row][1] for row in drawn))
        of_cloud, of_field = map(_rows, chosen["numbers"].unbind(-1), counts)
        kinds = dict.fromkeys(OF_CLOUDS, of_cloud) | dict.fromkeys(OF_SAMPLES, chosen["drawn"])
        made = {name: table[kinds.get(name, of_field)] for name, table in tables.items()}
        return {**made, **collate([listed[row] for row in drawn])}

    return draw


def _rows(numbers: Tensor, count: int) -> Tensor:
    """Return rows (B, count) of a table from start, length and first row of each sample (3, B)."""
    start, length, first = numbers[..., None]
    return start + (first + torch.arange(count, device=numbers.device)) % length
