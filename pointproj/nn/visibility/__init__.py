"""A network for reconstruction, by what a point and the sides of the samples see of the outside.

- ``surface``: planes, edges and disks of a cloud, without gradients;
- ``rays``, ``sight_lines``: what is seen past the disks;
- ``network``, ``attention``: what is learned from that;
- ``constants``: every number that was tuned;
- ``plain``: operators without kernels.
"""

from pointproj.nn.visibility.network import VisibilityNetwork

__all__ = ["VisibilityNetwork"]
