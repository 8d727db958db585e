"""A network for reconstruction. Its input is visibility: in which directions one sees out of the disks.

- ``surface``: planes, edges and disks of a cloud, without gradients;
- ``rays``, ``sight_lines``: visibility past the disks;
- ``network``, ``attention``: the layers that learn from visibility;
- ``constants``: every number that was tuned;
- ``plain``: the operators in plain torch, without kernels.
"""

from pointproj.nn.visibility.network import VisibilityNetwork

__all__ = ["VisibilityNetwork"]
