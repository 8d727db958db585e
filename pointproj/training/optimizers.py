"""Optimizer and learning-rate schedule, chosen from the config."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pointproj.config import OptimizerConfig


def build_optimizer(
    settings: OptimizerConfig, parameters: Iterable[nn.Parameter], *, capturable: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer the config names, fused into one kernel.

    Parameters
    ----------
    settings : OptimizerConfig
    parameters : iterable of Parameter
        All on one device.
    capturable : bool
        Make it fit for a CUDA graph: step count and learning rate live in tensors on the device, so that
        :func:`set_learning_rate` reaches a graph that is replayed.

    Returns
    -------
    torch.optim.Adam or torch.optim.AdamW
    """
    parameters = list(parameters)
    lr = torch.tensor(settings.lr, device=parameters[0].device) if capturable else settings.lr
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.name]
    return kind(
        parameters,
        lr=lr,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        fused=True,
        capturable=capturable,
    )


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of one step: a linear warm-up, then constant or half a cosine down to 0.

    Parameters
    ----------
    settings : OptimizerConfig
    step : int
        Counted from 0. The rate follows from it alone, so a resumed run needs no other schedule state.
    total_steps : int
        Steps of the whole run.

    Returns
    -------
    float
        Above 0 for every step below ``total_steps``.
    """
    warmup_steps = math.ceil(settings.warmup * total_steps)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    fraction = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * fraction))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of all parameter groups, in place where it is a tensor that a CUDA graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
