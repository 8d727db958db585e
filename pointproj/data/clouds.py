"""How clouds are made from points drawn on a surface: thinned to even distances, and with noise."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj import notebook
from pointproj.config import DataConfig, MixtureConfig
from pointproj.geometry.meshes import LONGEST_SIDE
from pointproj.geometry.sampling import PointSource, random_subset
from pointproj.geometry.scanning import scan
from pointproj.ops.farthest_points import farthest_points

DENSER = 5
"""Points drawn by area for each point of an even cloud."""


@dataclass(frozen=True)
class Sampling:
    """How a surface is sampled."""

    kind: str  # area | even | scan | sensors, as ``data.sampling``
    points: int  # of each cloud
    noise: float = 0.0  # standard deviation of each coordinate, as a fraction of a shape's longest side

    @classmethod
    def of(cls, cloud: MixtureConfig) -> "Sampling":
        """Return the sampling of one of ``data.clouds``."""
        return cls(cloud.sampling, cloud.points, cloud.noise)

    @classmethod
    def for_prediction(cls, data: DataConfig) -> "Sampling":
        """Return how to sample a mesh for a trained network: evenly if it was trained on even clouds."""
        knows_even = any(cloud.sampling == "even" for cloud in data.clouds)
        return cls("even" if knows_even else data.sampling, data.points)

    @property
    def is_scan(self) -> bool:
        """Whether points are those that cameras see; ``"sensors"`` also has the directions to the cameras."""
        return self.kind in ("scan", "sensors")

    @property
    def drawn(self) -> int:
        """Number of points to draw for a cloud."""
        return DENSER * self.points if self.kind == "even" else self.points

    def draw(
        self, source: PointSource, generator: np.random.Generator
    ) -> dict[str, Float[np.ndarray, "n 3"]]:
        """Draw the points of a cloud, and return them as :meth:`finish` takes them."""
        drawn = scan(source, self.points, generator) if self.is_scan else source.draw(self.drawn, generator)
        return self.known(*drawn)

    def known(self, points: Any, normals: Any, sensors: Any = None) -> dict[str, Any]:
        """Return what was drawn, under its names in a batch; sensors only for ``"sensors"``."""
        known = {"reference_points": points, "normals": normals}
        return {**known, "sensors": sensors} if self.kind == "sensors" else known

    def thin(
        self, points: Float[np.ndarray, "n 3"], count: int, generator: np.random.Generator
    ) -> Int[np.ndarray, " count"]:
        """Choose rows of a cloud that has too many points."""
        if self.kind != "even":
            return random_subset(points, count, generator)
        return farthest_points(torch.from_numpy(points), count).numpy()

    def finish(self, batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        """Turn the drawn points of a batch into clouds.

        Augmentation changes shapes before this, not after: a stretched even cloud would not be even, and its
        noise would not have the same size in all directions.

        Parameters
        ----------
        batch : dict
            ``reference_points`` and ``normals`` (B, n, 3), where ``n`` is :attr:`drawn`. All other entries
            are passed on, such as ``sensors`` (B, n, 3), unit vectors to the cameras of a scan.
        generator : torch.Generator
            Source of the noise, on the batch's device.
        """
        points, normals = batch["reference_points"], batch["normals"]
        if self.kind == "even":
            rows = farthest_points(points, self.points)[..., None].expand(-1, -1, 3)
            points, normals = points.gather(1, rows), normals.gather(1, rows)
        if self.noise:
            size = self.noise * LONGEST_SIDE
            points = points + size * torch.randn(points.shape, generator=generator, device=points.device)
        return {**batch, "reference_points": points, "normals": normals}


class SampledCloud(NamedTuple):
    """A cloud as float32 arrays; ``sensors`` are unit vectors from points to the sensors that saw them."""

    points: Float[np.ndarray, "n 3"]
    normals: Float[np.ndarray, "n 3"]
    sensors: Float[np.ndarray, "n 3"] | None = None

    def _repr_html_(self) -> str:
        """A table and a picture for notebooks."""
        facts = {"points": len(self.points), "sensors": self.sensors is not None}
        return notebook.table("sample", facts, notebook.drawing(self.points))


def sample_cloud(source: PointSource, sampling: Sampling, generator: np.random.Generator) -> SampledCloud:
    """Sample a normalised shape once, as test shapes are in training.

    The generator is advanced; the same state gives the same cloud.
    """
    drawn = {name: torch.from_numpy(values) for name, values in sampling.draw(source, generator).items()}
    cloud = finished_cloud(drawn, sampling, generator)
    return SampledCloud(*(values.numpy() for values in cloud.values()))


def finished_cloud(
    cloud: dict[str, Tensor], sampling: Sampling, generator: np.random.Generator
) -> dict[str, Tensor]:
    """Turn drawn points (n, 3) on the CPU into a cloud, as :meth:`Sampling.finish` does for a batch.

    The generator is advanced; the same state gives the same noise.
    """
    seeded = torch.Generator().manual_seed(int(generator.integers(2**63)))
    finished = sampling.finish({name: tensor[None] for name, tensor in cloud.items()}, seeded)
    return {name: tensor[0] for name, tensor in finished.items()}
