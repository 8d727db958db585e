"""What the operators must return: the formula in fp64, all pairs at once, derivatives from autograd.

Which points are neighbours is left to :mod:`pointproj.ops.specification.reference`, in the dtype of the
points, because rounding decides it. Everything else is written a second time here, so that a mistake in the
specification shows as well.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Problem
from pointproj.ops.specification import reference
from pointproj.ops.specification.reference import DEFAULT, Weighting

INPUTS = ("query_points", "reference_points", "features", "sigma")
FLOOR = {  # relative error that rounding may cause in any sum, by the dtype of the result
    torch.float64: 2e-13,
    torch.float32: 2e-5,
    torch.bfloat16: 2**-10,
    torch.float16: 2**-13,
}
TIMES_PLAIN = {  # how often plain torch's error: fp32 rounds in another order, which may cancel less well
    **dict.fromkeys((torch.float64, torch.float32), 4),
    **dict.fromkeys((torch.bfloat16, torch.float16), 2),
}


class Probe(NamedTuple):
    """Random vectors that derivatives are contracted with, and the sigma they are taken at."""

    sigma: Tensor
    grad: Tensor  # like the output
    directions: tuple[Tensor, ...]  # like the inputs, in the order of INPUTS


def probe(problem: Problem, sigma: float, seed: int = 1) -> Probe:
    """The probe for a problem, in its dtypes and on its device."""
    query, points, features = problem[:3]
    sigma = torch.tensor(sigma, dtype=query.dtype, device=query.device)
    shape = (*query.shape[:-1], features.shape[-1])
    generator = torch.Generator().manual_seed(seed)

    def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(query.device, dtype)

    inputs = query, points, features, sigma
    return Probe(sigma, like(shape, features.dtype), tuple(like(t.shape, t.dtype) for t in inputs))


def run(operator: str, problem: Problem, neighborhood: float, sigma: float | Tensor, **options) -> Tensor:
    """The public operator on a problem."""
    aggregate = pointproj.knn_aggregate if operator == "knn" else pointproj.radius_aggregate
    # Not by the property ``offsets``: torch.compile of torch 2.10 takes none of a named tuple.
    options |= {"query_offsets": problem.query_offsets, "reference_offsets": problem.reference_offsets}
    return aggregate(*problem[:3], neighborhood, sigma=sigma, **options)


def specified(
    operator: str,
    problem: Problem,
    neighborhood: float,
    sigma: float | Tensor,
    weighting: Weighting = DEFAULT,
) -> Tensor:
    """The specification, cloud after cloud, in the dtypes of the problem."""
    aggregate = reference.knn_aggregate if operator == "knn" else reference.radius_aggregate
    query, points, features = _flat(problem)
    rows = [query.new_zeros(len(query), features.shape[1]).to(features.dtype)[:0]]
    for q, r in problem.ranges():
        if len(r):
            cloud = query[q.start : q.stop], points[r.start : r.stop], features[r.start : r.stop]
            rows.append(aggregate(*cloud, neighborhood, sigma, weighting))
        else:
            rows.append(features.new_zeros(len(q), features.shape[1]))
    return torch.cat(rows).view(*problem.query_points.shape[:-1], -1 if len(query) else features.shape[1])


def exact(
    problem: Problem, is_neighbor: Tensor, sigma: float | Tensor, weighting: Weighting = DEFAULT
) -> Tensor:
    """The formula in fp64, with the neighbours as :func:`neighbors` gives them. Points must be finite."""
    query, points, features = (t.double() for t in _flat(problem))
    squared = (query[:, None] - points).square().sum(-1)
    apart = squared > 0
    distances = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
    logits = log_kernel(distances, torch.as_tensor(sigma).double(), weighting)
    logits = logits.masked_fill(~is_neighbor, -torch.inf)
    if weighting.reduce == "mean":
        largest = logits.detach().amax(1, keepdim=True)
        logits = logits - largest.where(largest.isfinite(), 0.0)
    weights = logits.exp()
    if weighting.reduce == "mean":
        total = weights.sum(1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return (weights @ features).view(*problem.query_points.shape[:-1], features.shape[1])


def log_kernel(distances: Tensor, sigma: float | Tensor, weighting: Weighting) -> Tensor:
    """Logarithm of the kernel, -inf where that is 0; the support may be a tensor like the distances."""
    match weighting.kernel:
        case "exponential":
            return -distances / sigma
        case "gaussian":
            return -((distances / sigma) ** 2) / 2
        case "inverse_distance":
            apart = distances >= weighting.eps  # as torch.clamp has it
            return -weighting.power * torch.where(apart, distances, weighting.eps).log()
        case "uniform":
            return torch.zeros_like(distances)
        case "compact":
            rest = 1 - (distances / weighting.support) ** 2
            inside = (distances < weighting.support) & (rest > 0)
            return torch.where(inside, 2 * torch.where(inside, rest, 1.0).log(), -torch.inf)
    raise AssertionError(weighting.kernel)


@torch.no_grad()
def neighbors(operator: str, problem: Problem, neighborhood: float) -> Tensor:
    """(Q, N) of the packed points: whether j is a neighbour of i."""
    query, points, _ = _flat(problem)
    is_neighbor = torch.zeros(len(query), len(points), dtype=torch.bool)
    for q, r in problem.ranges():
        if not len(q) or not len(r):
            continue
        mine, theirs = query[q.start : q.stop], points[r.start : r.stop]
        block = is_neighbor[q.start : q.stop, r.start : r.stop]
        if operator == "knn":
            block.scatter_(1, reference.knn_search(mine, theirs, neighborhood), True)
        else:
            block.copy_(reference.within(mine, theirs, neighborhood))
    return is_neighbor


def derivatives(
    function: Callable[[Problem, Tensor], Tensor], problem: Problem, at: Probe, *, double: bool = False
) -> dict[str, Tensor]:
    """Value, gradients and gradients of the gradients of ``function(problem, sigma)``, by name.

    With ``double`` the same numbers go in as fp64. Inputs that a value does not depend on have gradients 0.
    """

    def values(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = problem._replace(**{n: leaves[n] for n in INPUTS[:3]})
        return {"aggregated": function(inputs, leaves["sigma"])}

    leaves, directions = (dict(zip(INPUTS, t, strict=True)) for t in (problem[:3] + at[:1], at.directions))
    return all_derivatives(values, leaves, [at.grad], directions, double=double)


def all_derivatives(
    function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    inputs: dict[str, Tensor],
    upstream: list[Tensor],
    directions: dict[str, Tensor],
    *,
    double: bool = False,
    device: str | None = None,
) -> dict[str, Tensor]:
    """The same of a function with several outputs, of inputs by name; None is the device of the inputs."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, torch.float64 if double else tensor.dtype)

    leaves = {n: moved(t).requires_grad_() for n, t in inputs.items()}
    grads = [moved(t).requires_grad_() for t in upstream]
    named = function(leaves)
    values, of = list(named.values()), list(leaves.values())
    if any(v.requires_grad for v in values):
        unused = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(values, of, grads, create_graph=True, **unused)
        names = ["grad"] if len(values) == 1 else [f"grad_{n}" for n in named]
        named |= {f"d_{n}": g for n, g in zip(leaves, first, strict=True)}
        pairs = [(g, moved(directions[n])) for n, g in zip(leaves, first, strict=True) if g.requires_grad]
        if pairs:
            outputs, along = zip(*pairs, strict=True)
            second = torch.autograd.grad(outputs, [*grads, *of], along, **unused)
            named |= {f"dd_{n}": g for n, g in zip([*names, *leaves], second, strict=True)}
    return {n: t.detach() for n, t in named.items()}


def assert_close(name: str, got: Tensor, expected: Tensor, plain: Tensor | None = None) -> None:
    """Raise, with both errors, unless ``got`` is as good as plain torch in its dtype.

    Parameters
    ----------
    name
        Said in the message.
    got, expected
        The result and its fp64 truth.
    plain
        The specification's result in the dtype of ``got``: its error, times :data:`TIMES_PLAIN`, is
        allowed next to :data:`FLOOR`. Without it, ``expected`` is a result of that dtype as well, and each
        may have been rounded the other way.
    """
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if plain is not None:
        assert got.dtype == plain.dtype, f"{name}: dtype {got.dtype}, expected {plain.dtype}"
    got, expected = got.detach().cpu(), expected.detach().cpu().double()
    # One number is a sum whose terms may cancel; there is no larger entry next to it that says how much.
    allowed = [FLOOR[got.dtype] * (10 if expected.numel() == 1 else 1)] * 2
    if plain is None:
        allowed = [max(a, torch.finfo(got.dtype).eps) for a in allowed]
    else:
        times = TIMES_PLAIN[got.dtype]
        allowed = [allowed[0] + times * e for e in _errors(plain.cpu().double(), expected)]
    errors = _errors(got.double(), expected)
    if not all(e <= a for e, a in zip(errors, allowed, strict=True)):  # written so that NaN fails
        worst = (got.double() - expected).abs().flatten().nan_to_num(nan=torch.inf).argmax().item()
        raise AssertionError(
            f"{name}: relative error {errors[0]:.3g} (allowed {allowed[0]:.3g}), largest error relative to "
            f"the largest value {errors[1]:.3g} (allowed {allowed[1]:.3g}); worst at flat index {worst}: "
            f"got {got.flatten()[worst].item()}, expected {expected.flatten()[worst].item()}"
        )


def _errors(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """Norm of the difference over the norm, and largest difference over the largest value."""
    if got.numel() == 0:
        return 0.0, 0.0
    tiny = torch.finfo(torch.float32).tiny
    difference = got - expected
    norm = difference.norm() / expected.norm().clamp(min=tiny) if difference.any() else difference.norm()
    return norm.item(), (difference.abs().max() / expected.abs().max().clamp(min=tiny)).item()


def _flat(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(t.reshape(-1, t.shape[-1]) for t in problem[:3])
