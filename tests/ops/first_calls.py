"""First calls of backends' operators, each kind in a process that has not called them: ``DEVICE BACKEND...``.

The processes are forks of one that has imported torch. It fails with what went wrong in them.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import torch
from torch import Tensor, func
from torch._subclasses.fake_tensor import FakeTensorMode

import pointproj
from pointproj.ops.registry import load
from pointproj.ops.specification import reference

DEVICE, *BACKENDS = sys.argv[1:]
K, RADIUS, SIGMA = 4, 0.4, 0.1
THREADS, INTERRUPTIONS = 6, 60


def inputs(seed: int = 0) -> list[Tensor]:
    """Queries, reference points and features."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(*shape, generator=generator).to(DEVICE) for shape in ((20, 3), (50, 3), (50, 3))]


def loss(query: Tensor, points: Tensor, features: Tensor) -> Tensor:
    """Of every search and every sum that the backend has."""
    distances, rows = pointproj.knn(query, points, K, backend=BACKEND)
    total = distances.sum() + pointproj.knn_aggregate(query, points, features, K, backend=BACKEND).sum()
    neighbors = pointproj.Neighbors(rows, distances)
    if "attend" in load(BACKEND).OPERATORS:
        total = total + pointproj.attend(query, points, points, neighbors, backend=BACKEND).sum()
    if "radius" in load(BACKEND).OPERATORS:
        lists = pointproj.radius_neighbors(query, points, RADIUS, max_neighbors=K, backend=BACKEND)
        total = total + lists.distances.nan_to_num(posinf=0.0).sum()
        total = total + pointproj.radius_aggregate(query, points, features, RADIUS, backend=BACKEND).sum()
    return total


def check_training(seed: int = 0) -> None:
    """Ordinary calls with gradients: those of the specification."""
    leaves = [tensor.requires_grad_() for tensor in inputs(seed)]
    query, points, features = leaves
    results = {"knn": pointproj.knn_aggregate(*leaves, K, sigma=SIGMA, backend=BACKEND)}
    expected = {"knn": reference.knn_aggregate(*leaves, K, SIGMA)}
    if "radius" in load(BACKEND).OPERATORS:
        results["radius"] = pointproj.radius_aggregate(*leaves, RADIUS, sigma=SIGMA, backend=BACKEND)
        expected["radius"] = reference.radius_aggregate(*leaves, RADIUS, SIGMA)
    for name, got in results.items():
        torch.testing.assert_close(got, expected[name])
        gradients, of_specification = (
            torch.autograd.grad(value.square().sum(), leaves) for value in (got, expected[name])
        )
        for number, (one, other) in enumerate(zip(gradients, of_specification, strict=True)):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=f"{name}, gradient {number}")
    distances, rows = pointproj.knn(query, points, K, backend=BACKEND)
    assert torch.equal(rows, reference.knn_search(query, points, K))
    assert torch.autograd.grad(distances.sum(), query)[0].isfinite().all()
    assert torch.autograd.grad(loss(*leaves), features)[0].isfinite().all()


def several_threads() -> None:
    ready, failures = threading.Barrier(THREADS), []

    def call(seed: int) -> None:
        ready.wait()
        try:
            check_training(seed)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)


def inference_mode() -> None:
    with torch.inference_mode():
        loss(*inputs())


def transform() -> None:
    query, points, features = inputs()
    gradient = func.grad(lambda values: loss(query, points, values))(features)
    assert gradient.isfinite().all()


def export() -> None:
    class Loss(torch.nn.Module):
        def forward(self, query: Tensor, points: Tensor, features: Tensor) -> Tensor:
            return loss(query, points, features)

    program = torch.export.export(Loss(), tuple(inputs()))
    torch.testing.assert_close(program.module()(*inputs(1)), loss(*inputs(1)))


def fake_tensors() -> None:
    with FakeTensorMode() as mode:
        made = loss(*(mode.from_tensor(tensor) for tensor in inputs()))
    assert made.shape == ()


def signal_handler() -> None:
    """A handler calls the operators that it interrupts; what it interrupts has gradients."""
    expected, handled, wrong = [loss(*inputs(seed)) for seed in range(2)], [], []

    def handler(*_: object) -> None:
        handled.append(True)
        with torch.no_grad():  # where torch was interrupted, nothing may have a gradient
            if not torch.allclose(loss(*inputs(1)), expected[1]):
                wrong.append("in the handler")

    signal.signal(signal.SIGALRM, handler)
    while len(handled) < INTERRUPTIONS:
        signal.setitimer(signal.ITIMER_REAL, (1 + len(handled) * 37 % 50) * 2e-5)
        query, points, features = inputs()
        value = loss(query, points, features.requires_grad_())
        if not torch.allclose(value, expected[0]) or not torch.autograd.grad(value, features)[0].any():
            wrong.append("in what it interrupts")
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not wrong, wrong


def forked(first: Callable[[], None], backend: str) -> str:
    """What went wrong in a process that begins with these calls of a backend, and then trains."""
    global BACKEND
    BACKEND = backend
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        failure = ""
        try:
            if backend == "warp":  # the compiler's optimisations take longer than the calls
                importlib.import_module("warp").config.optimization_level = 0
            first()
            check_training()
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(failure)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        failure = pipe.read()
    status = os.waitpid(child, 0)[1]
    return failure or (f"exit status {status}" if status else "")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process with threads cannot be forked
    failures = []
    for kind in (several_threads, inference_mode, transform, fake_tensors, signal_handler, export):
        if kind is not several_threads:  # what these import of torch takes longer than the calls
            importlib.import_module("torch.export._trace")
        said = {backend: forked(kind, backend) for backend in BACKENDS}
        failures += [
            f"{backend}, {kind.__name__}:\n{failure}" for backend, failure in said.items() if failure
        ]
    sys.exit("\n".join(failures) or None)
