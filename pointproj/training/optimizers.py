"""Optimizer and learning-rate schedule of a config."""

import inspect
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pointproj.config import OptimizerConfig


class Adam(torch.optim.Adam):
    """torch's Adam without the decorators of its methods, which import torch's compiler and take seconds."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def build_optimizer(
    settings: OptimizerConfig, parameters: Iterable[nn.Parameter], *, capturable: bool = False
) -> Adam:
    """Make the optimizer of a config, fused into one kernel, for parameters on one device.

    With ``capturable``, a CUDA graph can capture its step: step counts and learning rate are tensors on the
    device, so that :func:`set_learning_rate` has an effect on a replayed graph.
    """
    parameters = list(parameters)
    return Adam(
        parameters,
        lr=torch.tensor(settings.lr, device=parameters[0].device) if capturable else settings.lr,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        decoupled_weight_decay=settings.name == "adamw",
        fused=True,
        capturable=capturable,
    )


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of one step, counted from 0: a linear warm-up, then constant or half a cosine to 0.

    It follows from the step alone, so a resumed run needs no other schedule state, and is above 0 for every
    step below ``total_steps``.
    """
    warmup_steps = math.ceil(settings.warmup * total_steps)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    fraction = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * fraction))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of all parameter groups; a tensor, which a CUDA graph reads, is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
