"""The fields that can be learned: one entry for each target, with all facts that other code needs about it.

:data:`pointproj.geometry.fields.FIELDS` computes a target from a mesh, under the same name.
"""

from dataclasses import dataclass
from typing import Literal

Output = Literal["distance", "signed_distance", "logit", "number", "field"]


@dataclass(frozen=True)
class Target:
    """Facts about a target."""

    title: str  # the kind of values, for headings
    output: Output  # of the network; "logit" is the logit of being inside, for labels 0 and 1
    loss: str  # the default of ``target.loss``
    metric: str  # the error by which models are compared; lower is better
    unit: str  # of the metric; empty if it has none
    colors: str  # Matplotlib's name of the colour map for its values
    of_mesh: bool = True  # whether a mesh gives the values, so that they can be computed at any point

    @property
    def is_measured(self) -> bool:
        """Whether the values come from files of ``data=fields``, and not from a mesh."""
        return self.output == "field"

    @property
    def is_distance(self) -> bool:
        """Whether the values scale with the shape."""
        return self.output in ("distance", "signed_distance")

    @property
    def inside_sign(self) -> int | None:
        """Factor that makes the network's output negative inside; None if the output does not tell."""
        return {"signed_distance": 1, "logit": -1}.get(self.output)


# Colour-blind readers can see the order of the colours too. The map of signed distances has two hues, which
# meet at the surface.
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
    "field": Target(
        title="measured or simulated fields",
        output="field",
        loss="squared",
        metric="relative_l2",
        unit="",
        colors="viridis",
        of_mesh=False,
    ),
}
