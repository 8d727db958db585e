"""What training samples tell about all samples: scales of values, places and parameters.

A checkpoint keeps these, so that a prediction needs no training sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.data.errors import DataError
from pointproj.geometry.meshes import LONGEST_SIDE

FEWEST_STD = 1e-12  # relative to the mean; a channel that varies less is constant


@dataclass(frozen=True)
class FieldStatistics:
    """Names and scales of the fields, the parameters and the places of the training samples."""

    fields: list[str]
    channels: list[int]  # of each field
    mean: list[float]  # of each channel; over areas, if the samples are surfaces
    std: list[float]
    parameters: list[str]
    parameter_mean: list[float]
    parameter_std: list[float]
    centre: list[float]  # of all geometries, in the unit of the files
    scale: float  # length that becomes 1
    on_surface: bool  # whether the fields lie on surfaces, so that their points have normals and areas
    place: str  # "points" or "cells" of the files

    @property
    def vector_parameters(self) -> list[int]:
        """Index of the first component of each vector among the parameters: NAME_x, NAME_y, NAME_z."""
        return _vectors(self.parameters)

    @property
    def vector_channels(self) -> list[int]:
        """Index of the first channel of each field of three channels."""
        return _first_of_three(self.channels)

    @classmethod
    def of(cls, facts: Sequence[Mapping[str, Any]], fields: Sequence[str], on_surface: bool) -> Self:
        """Return the statistics of training samples from the facts that preparation stored about each.

        All components of a vector have mean 0 and the same standard deviation, so that it can be turned.
        """
        mean = np.mean([fact["mean"] for fact in facts], axis=0)
        square = np.mean([fact["mean_square"] for fact in facts], axis=0)
        std = np.sqrt(np.maximum(square - mean**2, 0))
        names = sorted(facts[0]["parameters"])
        table = np.array([[fact["parameters"][name] for name in names] for fact in facts])
        parameter_mean, parameter_std = table.mean(0), table.std(0)
        channels = [*facts[0]["channels"]]
        for firsts, means, stds in (
            (_first_of_three(channels), mean, std),
            (_vectors(names), parameter_mean, parameter_std),
        ):
            for first in firsts:
                some = slice(first, first + 3)
                stds[some] = np.sqrt(np.mean(means[some] ** 2 + stds[some] ** 2))
                means[some] = 0
        low = np.min([fact["low"] for fact in facts], axis=0)
        high = np.max([fact["high"] for fact in facts], axis=0)
        return cls(
            fields=[*fields],
            channels=channels,
            mean=mean.tolist(),
            std=_not_constant(std, mean),
            parameters=names,
            parameter_mean=parameter_mean.tolist(),
            parameter_std=_not_constant(parameter_std, parameter_mean),
            centre=((low + high) / 2).tolist(),
            scale=float((high - low).max() / LONGEST_SIDE),
            on_surface=on_surface,
            place=facts[0]["place"],
        )

    @property
    def box(self) -> tuple[np.ndarray, float]:
        """Centre and half the side of the query cube [-1, 1]^3, in the unit of the files."""
        return np.asarray(self.centre), self.scale

    def placed(self, points: Float[np.ndarray, "n 3"], origin: Sequence[float] = (0, 0, 0)) -> np.ndarray:
        """Return points of a file, less ``origin``, in units of the network; float32."""
        shift = (np.asarray(origin) - self.centre) / self.scale
        return (points.astype(np.float64) / self.scale + shift).astype(np.float32)

    def normalized(self, values: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
        """Return values of the files with mean 0 and standard deviation 1 in each channel."""
        return (values - values.new_tensor(self.mean)) / values.new_tensor(self.std)

    def in_units(self, values: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
        """Undo :meth:`normalized`."""
        return values * values.new_tensor(self.std) + values.new_tensor(self.mean)

    def parameter_row(self, parameters: Mapping[str, float]) -> Float[Tensor, " p"]:
        """Return the network's input for a sample's parameters, in the order of the names."""
        given = np.array([parameters[name] for name in self.parameters], dtype=np.float64)
        row = (given - self.parameter_mean) / self.parameter_std if len(given) else given
        return torch.from_numpy(row.astype(np.float32))

    def split(self, values: Float[Tensor, "*n c"]) -> dict[str, Tensor]:
        """Return the channels of each field by its name."""
        return dict(zip(self.fields, values.split(self.channels, dim=-1), strict=True))

    def require_parameters(self, given: Mapping[str, float]) -> None:
        """Raise DataError if a parameter is missing."""
        missing = [name for name in self.parameters if name not in given]
        if missing:
            written = " ".join(f"{name}=NUMBER" for name in missing)
            raise DataError(
                f"the network needs the parameters {', '.join(missing)}: write --parameters {written}"
            )

    def as_mapping(self) -> dict[str, Any]:
        """Return all values, as a checkpoint stores them."""
        return asdict(self)


def _vectors(names: Sequence[str]) -> list[int]:
    return [
        place
        for place, name in enumerate(names)
        if name.endswith("_x") and [*names[place + 1 : place + 3]] == [name[:-1] + axis for axis in "yz"]
    ]


def _first_of_three(channels: Sequence[int]) -> list[int]:
    return [sum(channels[:place]) for place, count in enumerate(channels) if count == 3]


def _not_constant(std: np.ndarray, mean: np.ndarray) -> list[float]:
    return np.where(std > FEWEST_STD * np.abs(mean), std, 1.0).tolist()
