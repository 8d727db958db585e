"""What can be learned on the query points: one row for each target, read by all that depends on the target.

How a target is computed from a mesh is in :data:`pointproj.geometry.fields.FIELDS`, under the same name.
"""

from dataclasses import dataclass
from typing import Literal

Output = Literal["distance", "signed_distance", "logit", "number"]


@dataclass(frozen=True)
class Target:
    """What is true of a target."""

    title: str  # what the values are, for headings
    output: Output  # of the network; the logit is that of being inside, where the target has labels 0 and 1
    loss: str  # ``target.loss`` where the config names none
    metric: str  # the error by which models are compared; lower is better
    unit: str  # of the metric; empty if it has none
    colors: str  # Matplotlib's name of the colour map for its values
    of_mesh: bool = True  # whether the values follow from a mesh, so that they can be computed at any point

    @property
    def is_distance(self) -> bool:
        """Whether the values scale with the shape."""
        return self.output in ("distance", "signed_distance")

    @property
    def inside_sign(self) -> int | None:
        """Factor that makes the network's output negative inside; None if the output does not tell."""
        return {"signed_distance": 1, "logit": -1}.get(self.output)


# The colour maps keep their order for colour-blind readers and in grey. That of signed distances changes its
# hue at the surface, the others do not.
TARGETS = {
    "udf": Target(
        title="distance to the surface",
        output="distance",
        loss="absolute",
        metric="mean_absolute_error",
        unit="units of the query cube",
        colors="viridis",
    ),
    "sdf": Target(
        title="signed distance to the surface, negative inside",
        output="signed_distance",
        loss="absolute",
        metric="mean_absolute_error",
        unit="units of the query cube",
        colors="PuOr",
    ),
    "occupancy": Target(
        title="probability of being inside",
        output="logit",
        loss="cross_entropy",
        metric="error_rate",
        unit="",
        colors="cividis",
    ),
    "random": Target(
        title="random numbers",
        output="number",
        loss="squared",
        metric="mean_squared_error",
        unit="",
        colors="viridis",
        of_mesh=False,
    ),
}
