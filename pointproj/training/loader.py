"""Batches of a run's data on the device, augmented for training."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pointproj.config import TARGETS, AugmentationConfig, Config
from pointproj.data.augmentation import augment
from pointproj.data.batches import batches
from pointproj.data.dataset import PreparedData, ShapeDataset
from pointproj.data.device_sampler import DrawBatch, SamplerUnavailable, device_sampler
from pointproj.data.fields.augmentation import augment_fields
from pointproj.data.fields.device_sampler import field_sampler
from pointproj.data.transfer import made_ahead
from pointproj.ops.functional import knn
from pointproj.runtime.devices import to_device
from pointproj.runtime.distributed import Processes
from pointproj.runtime.memory import free_bytes
from pointproj.training.checkpoint import Position
from pointproj.training.networks import with_features

log = logging.getLogger(__name__)


class BatchLoader:
    """This process's part of the batches of a run, on its device.

    ``shapes_a_step`` is the number of shapes of all processes together. ``sampler`` is "device" or "loader":
    what draws the points of training shapes. Raises SamplerUnavailable if ``data.sampler=device`` is not
    possible.
    """

    def __init__(
        self, config: Config, data: PreparedData, device: torch.device, processes: Processes, backend: str
    ) -> None:
        self.config, self.data, self.device, self.processes = config, data, device, processes
        kept = config.projector.kept_neighbors
        self._neighbors = None if kept is None else NeighborCache(kept, backend)
        self._draws = _device_samplers(config, data, device, processes)
        self.sampler = "device" if self._draws else "loader"
        self.shapes_a_step = config.training.batch_size * processes.count
        self.steps_per_epoch = math.ceil(len(data.train) / self.shapes_a_step)

    def shapes_of_step(self, step_in_epoch: int) -> int:
        """Return the number of shapes of a step in all processes; an epoch's last step may have fewer."""
        return min(self.shapes_a_step, len(self.data.train) - step_in_epoch * self.shapes_a_step)

    def unseen(self, dataset: ShapeDataset) -> Iterator[dict[str, Any]]:
        """Yield all batches of validation or test meshes."""
        return (self._with_features(batch) for batch in self._batches(dataset))

    def plain(self) -> Iterator[dict[str, Any]]:
        """Yield batches of the training meshes without augmentation."""
        batches = self._batches(self.data.train, shuffle=True)
        return (self._augmented(batch, AugmentationConfig(), 0) for batch in batches)

    def training(self, position: Position) -> Iterator[dict[str, Any]]:
        """Yield all batches that remain of a run after ``position``.

        Their order depends on the seed and the epoch, their augmentation on the seed and the step.
        """
        config, train = self.config, self.data.train
        left = {"epochs": config.training.epochs - position.epoch, "start": position.step_in_epoch}
        batches = self._batches(train, shuffle=True, seed=config.seed, epoch=position.epoch, **left)
        steps = enumerate(batches, start=position.step)
        changed = (self._augmented(batch, config.augmentation, step) for step, batch in steps)
        drawn_afresh = self.sampler == "device" and train.resample  # otherwise batches share tensors
        return made_ahead(changed, self.device) if drawn_afresh else changed

    def on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device, and add the features of its clouds that the network takes."""
        return self._with_features(to_device(batch, self.device))

    def _with_features(self, batch: dict[str, Any]) -> dict[str, Any]:
        return with_features(batch, self.config.projector, self.data.statistics)

    def _batches(self, dataset: ShapeDataset, **order: Any) -> Iterator[dict[str, Any]]:
        """Yield batches on the device, without features, since augmentation comes first."""
        draw = self._draws.get(id(dataset))
        order |= {"workers": self.config.data.workers, "draw": draw, "processes": self.processes}
        size = 1 if dataset.one_at_a_time else self.config.training.batch_size
        made = batches(dataset, size, **order)
        return (to_device(batch, self.device) for batch in made)

    def _augmented(self, batch: dict[str, Any], changes: AugmentationConfig, step: int) -> dict[str, Any]:
        """Augment this process's batch of a step, finish its clouds if they are new, and add features."""
        config, train = self.config, self.data.train
        batch = {**batch}
        sampling = batch.pop("sampling")  # a step does not read it, and a file of tensors cannot store it
        seed = config.seed, step * self.processes.count + self.processes.rank
        if (statistics := self.data.statistics) is not None:
            return self._with_features(augment_fields(batch, changes, statistics, seed=seed))
        finish = {"finish": sampling.finish} if train.resample else {}
        distances = TARGETS[config.target.name].is_distance
        changed = augment(batch, changes, seed=seed, distances=distances, **finish)
        shown = with_features(changed, config.projector)
        sizes = {each.points for each in train.samplings}
        if config.compile and len(sizes) > 1:  # otherwise the first size is compiled in vain as a fixed one
            for name in ("reference_points", "features"):
                if name in shown:
                    torch._dynamo.maybe_mark_dynamic(shown[name], 1)
        return shown if self._neighbors is None else self._neighbors(shown)


class NeighborCache:
    """The k nearest reference points of each query point, stored for each shape."""

    def __init__(self, k: int, backend: str) -> None:
        self.k, self.backend = k, backend
        self._of_shape: dict[int, Tensor] = {}  # identity -> (Q, k) int32, on the device of the batches

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add ``neighbor_indices`` (B, Q, k) int32 to a batch.

        The batch has ``reference_points`` (B, N, 3), ``query_points`` (Q, 3) or (B, Q, 3), and ``identity``,
        a list of B integers that identify the shapes. A shape must have the same points each time.
        """
        if any(shape not in self._of_shape for shape in batch["identity"]):
            reference_points = batch["reference_points"]
            points = batch["query_points"].expand(len(reference_points), -1, -1), reference_points
            _, rows = knn(*points, self.k, index_dtype=torch.int32, backend=self.backend)
            for shape, its_rows in zip(batch["identity"], rows, strict=True):
                self._of_shape[shape] = its_rows.clone()
        return {**batch, "neighbor_indices": torch.stack([self._of_shape[n] for n in batch["identity"]])}


def _device_samplers(
    config: Config, data: PreparedData, device: torch.device, processes: Processes
) -> dict[int, DrawBatch]:
    """Return functions that draw batches on the device, by dataset id; none if the loader draws them."""
    wanted = config.data.sampler
    if wanted == "loader" or (wanted == "auto" and device.type != "cuda"):
        return {}
    most_bytes = free_bytes(device) // 4
    if device.type == "cpu":
        most_bytes //= processes.on_this_machine
    used = {id(each): each for each in (data.train, data.validation, data.test) if each is not None}
    draws, reason = {}, None
    sampler = device_sampler if data.statistics is None else field_sampler
    try:
        draws = {key: sampler(dataset, device, most_bytes) for key, dataset in used.items()}
    except SamplerUnavailable as error:
        reason = str(error)
    reasons = [*filter(None, processes.gather(reason))]  # all processes decide alike
    if not reasons:
        log.info("sampler   device: shapes stay on %s, and batches are drawn there", device)
        return draws
    if wanted == "device":
        words = f"data.sampler=device: {reasons[0]}; write data.sampler=loader data.workers=8"
        raise SamplerUnavailable(words)
    log.warning("sampler   loader, with data.workers=%d: %s", config.data.workers, reasons[0])
    return {}
