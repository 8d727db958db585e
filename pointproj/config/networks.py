"""The values of each network, and the checks of a config with that network.

A new network needs a module in :mod:`pointproj.nn`, a class here, and a file in ``conf/projector/`` that
begins with ``defaults: [/NAME_schema@_here_]``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pointproj.config.schema import AugmentationConfig, Config, ProjectorConfig
from pointproj.config.targets import TARGETS
from pointproj.config.values import value

PLANE_POINTS = 33  # fewest points of a cloud that planes are fitted to


@dataclass
class _FieldConfig(ProjectorConfig):
    """Values of all networks for ``target=field``."""

    READS_FIELDS: ClassVar[bool] = True

    pool: bool = value(False, "whether the second MLP gets the mean of the cloud's features too")
    blocks: int = value(
        0,
        "gated blocks of the second network, which represent products of inputs; 0: MLPs",
        least=0,
        most=1024,
    )

    def fill_in(self, config: Config) -> None:
        """Fill in normals: with fields they are known."""
        if self.normals is None:
            self.normals = config.data.has_fields


@dataclass
class _AggregatingConfig(_FieldConfig):
    """Values for both neighbourhoods of the Projector."""

    NETWORK: ClassVar[str] = "pointproj.nn.projector:Projector"

    sigma: float | int | str = value(
        0.02,
        "softmax temperature, in units of the query cube; `learned`: one for each scale, at first 0.1 or a "
        "third of the radius",
        above=0,
        words=("learned",),
    )
    hidden_channels: int = value(25, "width of both MLPs", least=1, most=65_536)
    context: bool | None = value(
        None, "whether the second MLP gets the positions of the neighbours; null: unless `target=random`"
    )

    @property
    def predicts_distances(self) -> bool:
        """True with context, since the network's output is added to the context's soft distance."""
        return bool(self.context)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`pointproj.Projector`."""
        own = super().arguments()
        own.pop("keep_neighbors", None)
        return {**own, "kind": self.name, "context": bool(self.context)}

    def fill_in(self, config: Config) -> None:
        """Fill in context, for all targets of meshes, and normals, if they tell inside from outside."""
        if self.context is None:
            self.context = config.target.name != "random"
        if self.normals is None and config.data.name == "furniture":  # real faces have arbitrary orientation
            self.normals = TARGETS[config.target.name].inside_sign is not None
        super().fill_in(config)


@dataclass
class KnnConfig(_AggregatingConfig):
    """MLP on the reference points, aggregation of the k nearest onto each query point, MLP."""

    name: str = value("knn", "the network")
    k: int = value(7, "neighbours of each query point", least=1)
    scales: list[int] | None = value(None, "several `k` instead of one, such as `[8,64]`; one search for all")  # noqa: RUF009 - a field
    keep_neighbors: bool = value(
        False, "search each training shape once and keep its neighbours; needs `data.resample=false`"
    )

    @property
    def kept_neighbors(self) -> int | None:
        """The largest ``k`` with ``keep_neighbors``, else None."""
        return max(self.scales or [self.k]) if self.keep_neighbors else None

    @property
    def fewest_points(self) -> int:
        """Reference points that a cloud needs: as many as the largest ``k``."""
        return max(self.scales or [self.k])

    def problems(self, config: Config) -> Iterator[str]:
        """Yield too many neighbours, and for ``keep_neighbors`` all values that change the neighbours."""
        yield from super().problems(config)
        if self.scales is not None and not all(k > 0 for k in self.scales or [0]):
            yield f"projector.scales={self.scales}: expected whole numbers of at least 1, such as [8,64]"
        elif self.fewest_points > max(self.k, config.data.fewest_points):
            points = config.data.fewest_points
            yield f"projector.scales={self.scales}: expected at most data.points={points}, or more points"
        if not self.keep_neighbors:
            return
        why = "projector.keep_neighbors=true needs shapes that stay as they are"
        if config.data.resample and config.data.name != "gaussian":
            yield f"{why}: data.resample=true draws other points every epoch: write data.resample=false"
        if config.data.queries:
            yield f"{why}: data.queries are other points every time: write data.queries=0"
        if config.augmentation != AugmentationConfig():
            yield f"{why}: augmentation changes the points: leave it out"


@dataclass
class RadiusConfig(_AggregatingConfig):
    """MLP on the reference points, aggregation of all within a radius onto each query point, MLP."""

    OPERATOR: ClassVar[str] = "radius"

    name: str = value("radius", "the network")
    radius: float = value(
        1.0, "radius, in units of the query cube; a query without neighbours gets no features", above=0
    )
    scales: list[float] | None = value(None, "several radii instead of one, such as `[0.1,1]`; one index")  # noqa: RUF009 - a field

    def problems(self, config: Config) -> Iterator[str]:
        """Yield scales that are no radii."""
        yield from super().problems(config)
        if self.scales is not None and not all(radius > 0 for radius in self.scales or [0]):
            yield f"projector.scales={self.scales}: expected radii above 0, such as [0.1,1]"


@dataclass
class VisibilityConfig(ProjectorConfig):
    """Attention with what the sides of samples and the query points see of the outside."""

    NETWORK: ClassVar[str] = "pointproj.nn.visibility.network:VisibilityNetwork"
    FEW_KERNELS: ClassVar[bool] = False

    name: str = value("visibility", "the network")
    hidden_channels: int = value(16, "width of all layers, a multiple of 8", least=1, most=65_536)
    neighbors: int = value(13, "reference points that a point attends to, including itself", least=13)
    rounds: int = value(1, "how often the sides of reference points attend to each other", least=0, most=100)
    sensors: bool | None = value(
        None,
        "whether it gets the direction to each point's sensor, where known; null: if `data` has such clouds "
        "(`sampling: sensors`)",
    )

    @property
    def fewest_points(self) -> int:
        """Reference points that a cloud needs: for its neighbours, and to fit a plane."""
        return max(self.neighbors, PLANE_POINTS)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`pointproj.nn.visibility.network.VisibilityNetwork`."""
        return {**super().arguments(), "sensors": bool(self.sensors)}

    def fill_in(self, config: Config) -> None:
        """Fill in sensors, if clouds have them, and no normals, which it does not need."""
        super().fill_in(config)
        if self.sensors is None:
            self.sensors = any(cloud.sampling == "sensors" for cloud in config.data.clouds)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield an odd width, and too many neighbours."""
        if (width := self.hidden_channels) % 8:
            yield f"projector.hidden_channels={width}: projector=visibility needs a multiple of 8"
        points = config.data.fewest_points
        if self.neighbors <= points < PLANE_POINTS:
            yield f"clouds of {points} points: projector=visibility needs {PLANE_POINTS} to fit planes to"
        yield from super().problems(config)


@dataclass
class AttentionConfig(_FieldConfig):
    """MLPs on both sets of points, attention of each query point to the k nearest reference points, MLP."""

    NETWORK: ClassVar[str] = "pointproj.nn.attention_projector:AttentionProjector"
    OPERATOR: ClassVar[str] = "attend"  # fewer backends have this than kNN

    name: str = value("attention", "the network")
    k: int = value(16, "neighbours of each query point", least=1)
    heads: int = value(4, "heads of the attention", least=1)
    hidden_channels: int = value(32, "width of all layers, a multiple of heads", least=1, most=65_536)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield a width that is not a multiple of the heads, and too many neighbours."""
        if (width := self.hidden_channels) % self.heads:
            yield f"projector.hidden_channels={width}: expected a multiple of projector.heads={self.heads}"
        yield from super().problems(config)


@dataclass
class PairsConfig(_FieldConfig):
    """MLP on the reference points, an MLP on the pairs of each query point at two scales, MLP."""

    NETWORK: ClassVar[str] = "pointproj.nn.pairs_projector:PairsProjector"

    name: str = value("pairs", "the network")
    k: int = value(8, "neighbours of each query point, at each of two scales", least=1)
    wide: int = value(4, "how many times as many neighbours the larger scale spans", least=1, most=1000)
    hidden_channels: int = value(32, "width of all layers", least=1, most=512)


NETWORKS: dict[str, type[ProjectorConfig]] = {
    network.name: network
    for network in (KnnConfig, RadiusConfig, VisibilityConfig, AttentionConfig, PairsConfig)
}
