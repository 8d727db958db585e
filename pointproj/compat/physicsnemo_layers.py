"""PhysicsNeMo's local point transformer blocks on :func:`pointproj.vector_attend`, in a model.

    from pointproj.compat.physicsnemo_layers import replace

    print(replace(model))  # what was replaced, and what was left, with the reason

``LocalPointTransformerBlock`` and ``LocalTokenCrossAttentionBlock`` (of AeroJEPA, among others) keep their
parameters, the names in the ``state_dict``, their search or given lists, masks and conditioning. Only their
attention is exchanged, which holds five tensors of queries, neighbours and channels. A replaced block is of a
subclass of the library's class, which this module has by name, so it can be pickled.
Written against nvidia-physicsnemo 2.2; results differ by rounding.
"""

import importlib
from functools import cache
from typing import Any

from torch import Tensor, nn

from pointproj.compat.replacement import CannotReplace, Replacement, replace_layers
from pointproj.ops.layers import checked_layers
from pointproj.ops.neighbor_lists import Neighbors
from pointproj.ops.vector_attention import vector_attend

LIBRARY = "physicsnemo.nn.module.point_transformer_attention"
BLOCKS = ("LocalPointTransformerBlock", "LocalTokenCrossAttentionBlock")


def replace(model: nn.Module) -> Replacement:
    """Replace the attention of the blocks in a model, in place.

    Blocks are left whose networks are made by Transformer Engine, or that are of a subclass of the library's.
    ValueError for a model without any of the two blocks.
    """
    library = importlib.import_module(LIBRARY)
    return replace_layers(model, {getattr(library, name): _with_our_attention for name in BLOCKS})


def __getattr__(name: str) -> Any:
    if name in BLOCKS:
        return _subclass(name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


@cache
def _subclass(name: str) -> type[nn.Module]:
    base = getattr(importlib.import_module(LIBRARY), name)
    about = f"The library's ``{name}`` with :func:`pointproj.vector_attend`."
    return type(name, (base,), {"_attend": _attend, "__module__": __name__, "__doc__": about})


def _with_our_attention(block: nn.Module) -> nn.Module:
    for name in ("pos_proj", "attn_proj"):
        try:
            checked_layers(name, getattr(block, name).layers, "", block.q_proj.weight)
        except (AttributeError, TypeError, ValueError) as reason:
            raise CannotReplace(f"its {name} cannot run on pairs: {reason}") from None
    block.__class__ = _subclass(type(block).__name__)
    return block


def _attend(
    self: nn.Module,
    q_in: Tensor,
    kv_in: Tensor,
    query_coords: Tensor,
    key_coords: Tensor,
    idx: Tensor,
    neighbor_mask: Tensor | None,
) -> Tensor:
    """As the library's: (N, D) from (N, D) and (M, D) features, coordinates, and (N, K) rows of the keys."""
    rows = idx if neighbor_mask is None else idx.masked_fill(~neighbor_mask, -1)
    found = vector_attend(
        self.q_proj(q_in),
        self.k_proj(kv_in),
        self.v_proj(kv_in),
        query_coords,
        key_coords,
        Neighbors(rows, query_coords.new_zeros(()).expand(rows.shape)),
        groups=self.num_heads,
        position_layers=self.pos_proj.layers,
        score_layers=self.attn_proj.layers,
    )
    return self.dropout(self.out_proj(found))
