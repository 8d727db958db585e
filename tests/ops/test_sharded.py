"""Clouds divided among processes: values and every gradient are those of one device with all rows."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import pointproj as ops
from pointproj import build_index
from pointproj.ops import sharded
from tests.processes import TWO_GPUS, environment, free_port

BACKEND = next(name for name in ("native", "torch") if ops.backends()[name] is None)
NAMES = ("query_points", "reference_points", "features", "sigma")


def problem(device, queries=90, references=240, channels=3, seed=0):
    """A flat, lopsided cloud in fp64 with some points that are no points."""
    g = torch.Generator().manual_seed(seed)
    query_points = torch.rand(queries, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 3.0, 1.0])
    reference_points = torch.rand(references, 3, generator=g, dtype=torch.float64).pow(2)
    reference_points[:, 1] *= 3
    features = torch.randn(references, channels, generator=g, dtype=torch.float64)
    upstream = torch.randn(queries, channels, generator=g, dtype=torch.float64)
    if references > 7:
        reference_points[3, 0], reference_points[7, 1] = torch.nan, torch.inf
    made = query_points, reference_points, features, torch.tensor(0.2, dtype=torch.float64), upstream
    return [tensor.to(device) for tensor in made]


def gradients(aggregate, leaves, upstream):
    """Values, first derivatives, and those of a loss on the derivative by the queries."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    values = aggregate(*leaves)
    first = torch.autograd.grad((values * upstream).sum(), leaves, create_graph=True)
    slope = first[0].nan_to_num().square().sum()
    second = torch.autograd.grad(slope, leaves, allow_unused=True, materialize_grads=True)
    return values.detach(), [grad.detach() for grad in first], second


def compare(got, expected, rows, own_rows):
    """``rows``: which queries are here. ``own_rows``: which references, None if they are replicated."""
    torch.testing.assert_close(got[0], expected[0][rows], equal_nan=True)
    kept = (rows, own_rows, own_rows, None)
    for order, ours, whole in (("first", got[1], expected[1]), ("second", got[2], expected[2])):
        for name, one, other, keep in zip(NAMES, ours, whole, kept, strict=True):
            other = other if keep is None else other[keep]
            torch.testing.assert_close(
                one, other, rtol=1e-9, atol=1e-11, msg=f"{order} {name}", equal_nan=True
            )


def operators(backend):
    def knn(module, **keywords):
        return lambda q, r, f, s: module.knn_aggregate(q, r, f, 6, sigma=s, backend=backend, **keywords)

    def radius(module, **keywords):
        return lambda q, r, f, s: module.radius_aggregate(q, r, f, 0.35, sigma=s, backend=backend, **keywords)

    return knn, radius


def divide_everything(rank, count, device):
    knn, radius = operators(BACKEND)
    *leaves, upstream = problem(device)
    rows = torch.arange(len(upstream))[rank::count]
    here = [leaves[0][rows], *leaves[1:]]
    for operator, cutoff in ((knn, None), (radius, 0.35)):
        expected = gradients(operator(ops), leaves, upstream)
        index = build_index(leaves[1], radius=cutoff, backend=BACKEND)
        compare(gradients(operator(sharded, index=index), here, upstream[rows]), expected, rows, None)
    in_slab = [leaf[:, 1].argsort().tensor_split(count)[rank].cpu() for leaf in leaves[:2]]
    for own in (torch.arange(240)[rank::count], torch.arange(240 if rank == 0 else 0)):
        one_by_one(radius, leaves, upstream, rows, own)
    slabs = one_by_one(radius, leaves, upstream, *in_slab)
    assert len(slabs.others) < len(rows) - 5
    assert len(slabs.near) < 90


def one_by_one(radius, leaves, upstream, rows, own):
    """Slabs from rows in turn, from rows that one process has all of, from rows in their slabs."""
    expected = gradients(radius(ops), leaves, upstream)
    here = [leaves[0][rows], leaves[1][own], leaves[2][own], leaves[3]]
    slabs = sharded.make_slabs(here[0], here[1], 0.35)
    assert slabs.axis == 1
    compare(gradients(radius(sharded, slabs=slabs), here, upstream[rows]), expected, rows, own)
    return slabs


def few_points(rank, device):
    """No query here, no reference there, fewer points than processes: the calls stay collective."""
    _, radius = operators(BACKEND)
    for references in (0, 1, 40):
        *leaves, _ = problem(device, queries=6, references=references)
        rows, own = torch.arange(6 if rank == 1 else 0), torch.arange(references if rank == 0 else 0)
        slabs = sharded.make_slabs(leaves[0][rows], leaves[1][own], 0.35)
        here = [leaves[0][rows], leaves[1][own], leaves[2][own]]
        got = radius(sharded, slabs=slabs)(*here, leaves[3])
        torch.testing.assert_close(got, radius(ops)(*leaves)[rows])
    with pytest.raises(ValueError, match=r"halo is for a radius up to 0\.35; got 0\.4"):
        sharded.radius_aggregate(*here, 0.4, slabs=slabs)
    wider = [torch.cat([tensor, tensor[:1], tensor.new_zeros(1, tensor.shape[1])]) for tensor in here]
    for others in ([wider[0], *here[1:]], [here[0], *wider[1:]], [tensor.float() for tensor in here]):
        with pytest.raises(ValueError, match=r"the slabs were made for .*: make slabs for these"):
            sharded.radius_aggregate(*others, 0.3, slabs=slabs)


def check_all(rank, count, port, device):
    """What each process does; no application is needed to bring them together."""
    os.environ.update(environment(rank, count, port, device=device))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=count)
    divide_everything(rank, count, device)
    few_points(rank, device)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_divided_clouds_are_whole(device):
    multiprocessing.spawn(check_all, args=(2, free_port(), device), nprocs=2)
