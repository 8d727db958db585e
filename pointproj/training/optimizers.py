"""Optimizer and learning-rate schedule, chosen from the config."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
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
    GuardedAdam
    """
    parameters = list(parameters)
    lr = torch.tensor(settings.lr, device=parameters[0].device) if capturable else settings.lr
    kind = {"adam": torch._fused_adam_, "adamw": torch._fused_adamw_}[settings.name]
    return GuardedAdam(
        parameters, kind, lr=lr, betas=tuple(settings.betas), weight_decay=settings.weight_decay
    )


class GuardedAdam(torch.optim.Optimizer):
    """Adam or AdamW in one kernel, which leaves everything as it was where a flag on the device says so.

    torch's own keep a count of steps for each parameter, and need two more kernels to advance them and to
    take that back. Here there is one count for all, which is advanced by whoever sets the flag:
    :class:`pointproj.training.divergence.FiniteGuard`.

    Parameters
    ----------
    parameters : list of Parameter
        All on one device.
    fused : callable
        ``torch._fused_adam_`` or ``torch._fused_adamw_``.
    lr : float or () tensor
    betas : tuple of float
    weight_decay : float

    Attributes
    ----------
    count : () float32 tensor
        Steps that were not skipped, the next one included.
    skipped : () float32 tensor
        1 where the next step is to be skipped, else 0.
    """

    count: Float[Tensor, ""]
    skipped: Float[Tensor, ""]

    # torch's own keep its compiler out by importing it, which takes seconds; nothing here is compiled.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    _load = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(
        self,
        parameters: list[nn.Parameter],
        fused: Any,
        *,
        lr: float | Float[Tensor, ""],
        betas: tuple[float, ...],
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._fused = fused
        self.count, self.skipped = (torch.zeros((), device=parameters[0].device) for _ in range(2))
        for parameter in parameters:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": self.count, **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Change the parameters by their gradients."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            beta1, beta2 = group["betas"]
            self._fused(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [self.count] * len(parameters),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                found_inf=self.skipped,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over moments and count of another run, also of torch's own optimizers."""
        self._load(state_dict)
        for state in self.state.values():
            self.count.copy_(state["step"])
            state["step"] = self.count


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
