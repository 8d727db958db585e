"""The networks as models of PhysicsNeMo, which it saves, loads and finds in its registry by name.

This module alone imports PhysicsNeMo. :mod:`pointproj` does not import this module.
"""

from pointproj.nn import attention_projector, pairs_projector, projector

try:
    from physicsnemo.core import ModelMetaData, Module
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pointproj.nn.physicsnemo needs {error.name}, which is not installed: pip install nvidia-physicsnemo"
    ) from error

__all__ = ["AttentionProjector", "PairsProjector", "Projector"]


class _Model(Module):
    """``save()`` and ``from_checkpoint()`` for a network whose arguments are numbers, words and lists."""

    def __init__(self) -> None:
        super().__init__(meta=ModelMetaData())


class Projector(projector.Projector, _Model, register=True):
    """:class:`pointproj.Projector` as a ``physicsnemo.Module``; arguments and results are the same."""


class AttentionProjector(attention_projector.AttentionProjector, _Model, register=True):
    """:class:`pointproj.nn.attention_projector.AttentionProjector` as a ``physicsnemo.Module``."""


class PairsProjector(pairs_projector.PairsProjector, _Model, register=True):
    """:class:`pointproj.nn.pairs_projector.PairsProjector` as a ``physicsnemo.Module``."""
