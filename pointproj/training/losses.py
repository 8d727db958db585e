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
    """Return the loss of a target: ``loss(prediction, target)``, both (B, Q), as a scalar.

    That of the target's row in :data:`pointproj.config.TARGETS`, unless ``target.loss`` names one. Where the
    output is a logit, the first three compare the probability.
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
    """Cross-entropy, plus 1 - IoU of the probabilities with the labels, averaged over the shapes.

    In the cross-entropy a shape counts as much as it has doubtful points. In the second term every shape
    counts the same, so that the few points inside thin ones do too.
    """
    probability = logit.sigmoid()
    both = (probability * label).sum(1)
    either = (probability + label).sum(1) - both
    overlap = (both + 1) / (either + 1)  # 1 where nothing is inside and nothing is said to be
    return nn.functional.binary_cross_entropy_with_logits(logit, label) + (1 - overlap).mean()


def eikonal_penalty(
    prediction: Float[Tensor, "b q"], query_points: Float[Tensor, "b q 3"]
) -> Float[Tensor, ""]:
    """Mean of (|gradient| - 1)^2: a distance has a gradient of length 1 (Gropp et al. 2020, equation 2).

    Each prediction is made from its own query point alone, and ``query_points`` require grad. The penalty is
    differentiable in the network's parameters.
    """
    (gradient,) = torch.autograd.grad(prediction.sum(), query_points, create_graph=True)
    return (safe_sqrt(gradient.square().sum(-1)) - 1).square().mean()
