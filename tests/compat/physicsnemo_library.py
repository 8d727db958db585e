"""The library that :mod:`pointproj.compat.physicsnemo` stands in for, imported beside any torch."""

import importlib
import sys

import pytest
import torch

_declared = []  # what is declared lives as long as this


def import_physicsnemo() -> None:
    """Import ``physicsnemo.nn``, or skip with a reason.

    It imports timm, which imports torchvision. A torchvision that was made for another torch fails then,
    because its compiled operators are missing; none of them is called here, so they are declared instead.
    """
    pytest.importorskip("physicsnemo", reason="nvidia-physicsnemo is not installed: extra train")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    importlib.import_module("physicsnemo.nn")
