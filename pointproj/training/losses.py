"""Losses: one for each target, and the eikonal penalty for distances."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.config import TARGETS, TargetConfig
from pointproj.ops.specification.reference import safe_sqrt

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_function(target: TargetConfig) -> Loss:
    """Return the loss of a target: ``loss(prediction, target)`` takes two (B, Q) tensors to a scalar.

    ``target.loss`` names the loss; by default it is that of the target in :data:`pointproj.config.TARGETS`.
    If the output is a logit, the absolute, smooth and squared losses compare probabilities.
    """
    facts = TARGETS[target.name]
    name = target.loss or facts.loss
    compare = {
        "absolute": nn.functional.l1_loss,
        "smooth": partial(nn.functional.smooth_l1_loss, beta=0.01),
        "squared": nn.functional.mse_loss,
        "cross_entropy": nn.functional.binary_cross_entropy_with_logits,
        "overlap": overlap_loss,
    }[name]
    if facts.output == "logit" and name in ("absolute", "smooth", "squared"):
        return lambda prediction, label: compare(prediction.sigmoid(), label)
    return compare


def overlap_loss(logit: Float[Tensor, "b q"], label: Float[Tensor, "b q"]) -> Float[Tensor, ""]:
    """Return the cross-entropy plus 1 - IoU of probabilities and labels, averaged over the shapes.

    In the cross-entropy, a shape's weight grows with its number of doubtful points. In the second term all
    shapes have the same weight, so that the few points inside thin shapes matter too.
    """
    probability = logit.sigmoid()
    both = (probability * label).sum(1)
    either = (probability + label).sum(1) - both
    overlap = (both + 1) / (either + 1)  # 1 if no point is inside and none is predicted to be
    return nn.functional.binary_cross_entropy_with_logits(logit, label) + (1 - overlap).mean()


def eikonal_penalty(
    prediction: Float[Tensor, "b q"], query_points: Float[Tensor, "b q 3"]
) -> Float[Tensor, ""]:
    """Return the mean of (|gradient| - 1)^2: distances have gradients of length 1 (Gropp et al. 2020, eq. 2).

    ``query_points`` require grad, and each prediction must depend on its own query point only. The penalty is
    differentiable in the network's parameters.
    """
    (gradient,) = torch.autograd.grad(prediction.sum(), query_points, create_graph=True)
    return (safe_sqrt(gradient.square().sum(-1)) - 1).square().mean()
