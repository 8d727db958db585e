"""Query and reference points as every backend takes them: packed, cloud after cloud."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Clouds(NamedTuple):
    """The packed points of one call; without offsets all clouds are of equal size."""

    query_points: Float[Tensor, "q 3"]  # q is the sum over all clouds; contiguous
    query_offsets: Int[Tensor, " count+1"] | None  # int32: cloud b has rows offsets[b]:offsets[b + 1]
    reference_points: Float[Tensor, "n 3"]
    reference_offsets: Int[Tensor, " count+1"] | None  # given if and only if query_offsets are
    count: int

    def detached(self) -> "Clouds":
        """The same points without their history."""
        return self._replace(
            query_points=self.query_points.detach(), reference_points=self.reference_points.detach()
        )


def pack(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    query_offsets: Int[Tensor, " count+1"] | None,
    reference_offsets: Int[Tensor, " count+1"] | None,
) -> Clouds:
    """Bring one cloud, a dense batch or a ragged batch into the one form that backends know."""
    if query_offsets is not None:
        query_offsets, reference_offsets = query_offsets.to(torch.int32), reference_offsets.to(torch.int32)
        count = query_offsets.shape[0] - 1
    else:
        count = query_points.shape[0] if query_points.ndim == 3 else 1
    return Clouds(
        query_points.reshape(-1, 3).contiguous(),
        query_offsets,
        reference_points.reshape(-1, 3).contiguous(),
        reference_offsets,
        count,
    )
