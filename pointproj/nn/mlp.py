"""The MLP that is applied to every point."""

import functools
import importlib.util
import logging

import torch
from jaxtyping import Float
from torch import Tensor, nn

log = logging.getLogger(__name__)

WIDEST_IN_ONE_KERNEL = 32  # channels; the sums of wider layers do not fit into registers


class MLP(nn.Sequential):
    """Three linear layers with ReLU between them.

    On a GPU, narrow layers in fp32 run as one kernel (:mod:`pointproj.nn.narrow_mlp`). Setting
    ``in_one_kernel`` to False forbids that kernel.

    Parameters
    ----------
    in_channels : int
        Channels of the input.
    hidden_channels : int
        Width of both hidden layers.
    out_channels : int
        Channels of the result.
    """

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Linear(in_channels, hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, out_channels),
        )
        widest = max(in_channels, hidden_channels, out_channels)
        self.in_one_kernel = widest <= WIDEST_IN_ONE_KERNEL and importlib.util.find_spec("triton") is not None

    def forward(self, rows: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Apply the layers to each row; layers in half precision, as after ``.half()``, convert the rows."""
        if _is_half(self[0]):
            rows = rows.to(self[0].weight.dtype)  # positions are in single precision
        # Layers get a matrix. With more axes, compiled code stores masks, which is slow on a CPU.
        matrix = rows.reshape(-1, rows.shape[-1])
        if self._runs_as_one_kernel(rows):
            from pointproj.nn.narrow_mlp import narrow_mlp

            layers = self[0], self[2], self[4]
            parameters = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
            result = narrow_mlp(matrix.contiguous(), *parameters)
        else:
            result = super().forward(matrix)
        return result.view(*rows.shape[:-1], result.shape[-1])

    def _runs_as_one_kernel(self, rows: Tensor) -> bool:
        if not self.in_one_kernel or not rows.is_cuda:
            return False
        whole = rows.dtype == self[0].weight.dtype == torch.float32
        if not whole or torch.is_autocast_enabled(rows.device.type):
            return False
        return torch.compiler.is_compiling() or _kernels_run(rows.device)  # torch.compile needs Triton itself


class GatedMLP(nn.Module):
    """Residual gated blocks: they represent products of inputs, which an MLP has to approximate.

    A block adds ``W_2 (silu(a) * b)`` to its input x, where (a, b) = ``W_1 norm(x)`` (Shazeer, GLU variants
    improve transformer, 2020). Linear layers come before the first block and after the last.

    Parameters
    ----------
    in_channels : int
        Channels of the input.
    hidden_channels : int
        Width of all blocks.
    out_channels : int
        Channels of the result.
    blocks : int
        Number of blocks.
    """

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_channels, hidden_channels)
        self.blocks = nn.ModuleList(_GatedBlock(hidden_channels) for _ in range(blocks))
        self.last = nn.Linear(hidden_channels, out_channels)

    def forward(self, rows: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Apply the blocks to each row; after ``.half()`` and the like, rows are converted."""
        hidden = self.first(rows.to(self.first.weight.dtype) if _is_half(self.first) else rows)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class _GatedBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(channels, channels)

    def forward(self, hidden: Float[Tensor, "*rows c"]) -> Float[Tensor, "*rows c"]:
        gate, values = self.up(self.norm(hidden)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * values)


def _is_half(layer: nn.Linear) -> bool:
    return layer.weight.dtype in (torch.float16, torch.bfloat16)


@functools.cache
def _kernels_run(device: torch.device) -> bool:
    """Return whether Triton works here, tried once: it needs a C compiler and Python's headers."""
    from pointproj.nn.narrow_mlp import narrow_mlp

    single = {"dtype": torch.float32, "device": device}
    parameters = [torch.zeros(shape, **single) for shape in ((1, 1), (1,)) * 3]
    try:
        narrow_mlp(torch.zeros(1, 1, **single), *parameters)
    except Exception as error:
        log.warning("MLPs run as matrix products, since Triton fails here: %s", error)
        return False
    return True
