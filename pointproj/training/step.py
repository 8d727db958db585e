"""One training step (forward, loss, backward, clipping, optimizer), run in the fastest correct way.

``compile=true`` means: the model through ``torch.compile``, and on CUDA the whole step captured in one CUDA
graph, which is then replayed with new inputs. Nothing here waits for the device: losses are summed there and
read on request.

A batch with fewer clouds than others, the last one of an epoch, runs the model as it is: compiling for it
takes up to half a minute, and it is captured all the same.

Where several processes train together, each has its own part of the batch, and all gradients and the loss are
summed as one tensor between backward and clipping. The sum is recorded in the graph like everything else.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.runtime.distributed import SINGLE_PROCESS, Processes
from pointproj.runtime.errors import first_line
from pointproj.training.divergence import FiniteGuard, Status
from pointproj.training.losses import Loss, eikonal_penalty

log = logging.getLogger(__name__)

# ``share`` where several processes train, ``neighbor_indices`` where they are kept.
INPUTS = ("query_points", "reference_points", "features", "neighbor_indices", "target", "share")

STEPS_BEFORE_CAPTURE = 3  # real steps: they compile, tune kernels and make the optimizer's state
SECONDS_ON_CPU = 20.0  # that timing a step may take

Batch = Mapping[str, Tensor]


class TrainingStep:
    """The step as an object: call it with a batch, and the model is one step further.

    ``model(query_points, reference_points, features=features or None)``, and with ``neighbor_indices`` where
    the batch has them, returns (B, Q, 1); ``loss_function(prediction, target)`` takes two (B, Q) tensors. The
    optimizer is fused, and made with ``capturable=True`` if the step is to be captured. ``clip``, ``amp`` and
    ``eikonal`` are those of the config; the eikonal penalty needs second derivatives, which torch.compile
    does not give. Whatever prevents ``compile`` or ``capture`` is logged, and the steps go on without it;
    :attr:`mode` says how they run. ``processes`` that train together have the same weights, and take every
    step at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Adam,
        loss_function: Loss,
        *,
        clip: float | None = None,
        amp: bool = False,
        eikonal: float = 0.0,
        compile: bool = False,
        capture: bool = True,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.model, self.optimizer, self.loss_function = model, optimizer, loss_function
        self.clip, self.amp, self.eikonal, self.processes = clip, amp, eikonal, processes
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.device = self.parameters[0].device
        self.compiled = compile
        self.captured = compile and capture and self.device.type == "cuda"
        self._called = torch.compile(model, fullgraph=True) if compile else model
        self._guard = FiniteGuard(optimizer)
        self._compare = loss_function
        self._most_clouds = 0  # in a batch so far
        self._steps = 0  # since the last status
        self._captured_calls: dict[tuple, CapturedCall] = {}  # by the shapes of their inputs
        self._steps_taken: Counter[tuple] = Counter()
        if self.captured:
            # What is small costs its launches, and here nothing else.
            self._compare = torch.compile(lambda *compared: loss_function(*compared), fullgraph=True)
            self._guard.compiled = True
            self._side_stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()  # of all sizes of batches

    @property
    def mode(self) -> str:
        """How steps run: eager, compiled, or captured (compiled, then replayed as a CUDA graph)."""
        if self.captured:
            return "captured"
        return "compiled" if self.compiled else "eager"

    def __call__(self, batch: Batch) -> None:
        """Take one step with a batch on the model's device.

        It has ``query_points`` (Q, 3) or (B, Q, 3), ``reference_points`` (B, N, 3) and ``target`` (B, Q);
        ``features`` (B, N, C) if the model takes any, ``neighbor_indices`` (B, Q, k) if they are known; of
        several processes ``share`` (), this part's share of all shapes of the step.
        """
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        if self.captured:
            self._run_captured(inputs)
        else:
            self._take_step(inputs)
        self._steps += 1

    def forward(self, batch: Batch, *, compiled: bool = True) -> Float[Tensor, "b q"]:
        """Predict for a batch the way the step does, under autocast and compiled where those are on.

        ``compiled=False`` is for unseen meshes: compilation would begin anew for the shapes of their batches.
        """
        model = self._called if compiled and self._is_full(batch) else self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            known = {"neighbor_indices": batch["neighbor_indices"]} if "neighbor_indices" in batch else {}
            prediction = model(
                batch["query_points"], batch["reference_points"], features=batch.get("features"), **known
            )
        return prediction.squeeze(-1).float()

    def take_status(self) -> Status:
        """Ask how the steps since the last status went, without waiting for them."""
        steps, self._steps = self._steps, 0
        return self._guard.take_status(steps)

    def _take_step(self, inputs: Batch) -> None:
        """The step itself; in a capture this is what the graph records."""
        loss = self._backward(inputs)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not self.processes.is_single:
            loss = self._add_up(loss, gradients)
        norm = None if self.clip is None else nn.utils.get_total_norm(gradients)
        self._guard(loss, gradients, norm)
        if norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.optimizer.step()

    def _is_full(self, batch: Batch) -> bool:
        """Whether no batch before had more clouds."""
        clouds = len(batch["reference_points"])
        self._most_clouds = max(self._most_clouds, clouds)
        return clouds == self._most_clouds

    def _backward(self, inputs: Batch) -> Tensor:
        try:
            return self._loss_with_gradients(inputs)
        except Exception as error:
            capturing = self.captured and torch.cuda.is_current_stream_capturing()
            if not self.compiled or capturing or isinstance(error, torch.OutOfMemoryError):
                raise
            failure = error
        self._called, self._compare = self.model, self.loss_function
        self.compiled = self._guard.compiled = False
        loss = self._loss_with_gradients(inputs)  # raises what is wrong with the model itself, if anything is
        log.warning("torch.compile failed, so steps run without it: %s", first_line(failure))
        return loss

    def _loss_with_gradients(self, inputs: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        if self.eikonal:
            clouds = inputs["reference_points"].shape[0]
            query_points = inputs["query_points"].expand(clouds, -1, -1).detach().requires_grad_()
            inputs = {**inputs, "query_points": query_points}
        prediction = self.forward(inputs)
        compare = self._compare if self._is_full(inputs) else self.loss_function
        loss = compare(prediction, inputs["target"])
        if self.eikonal:
            loss = loss + self.eikonal * eikonal_penalty(prediction, query_points)
        if "share" in inputs:
            loss = loss * inputs["share"]
        # In this thread: torch's own for a GPU has to be woken, and to wake this one, for every backward.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach()

    def _add_up(self, loss: Tensor, gradients: list[Tensor]) -> Tensor:
        """Sum gradients and loss over all processes, as one tensor: a small model waits for latency alone."""
        flat = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
        self.processes.all_reduce(flat)
        loss, *sums = flat.split([1, *(gradient.numel() for gradient in gradients)])
        pairs = zip(sums, gradients, strict=True)
        torch._foreach_copy_(gradients, [total.view_as(gradient) for total, gradient in pairs])
        return loss.view(())

    def _run_captured(self, inputs: Batch) -> None:
        """Replay the step for inputs of a known shape; take real steps first, then capture it."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        if shapes not in self._captured_calls and self._steps_taken[shapes] >= STEPS_BEFORE_CAPTURE:
            self._capture(shapes, inputs)
        if shapes in self._captured_calls:
            self._captured_calls[shapes](inputs)
            return
        with on_stream(self._side_stream):
            self._take_step(inputs)
        self._steps_taken[shapes] += 1

    def _capture(self, shapes: tuple, inputs: Batch) -> None:
        # Gradients made outside the graph would be added to, and they are not the graph's to keep.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._captured_calls[shapes] = CapturedCall(
                self._take_step, inputs, self._side_stream, self._pool
            )
        except Exception as error:
            self.captured = False
            self.optimizer.zero_grad(set_to_none=True)
            cause = error.__context__ or error  # what ended the capture, not that it ended
            log.warning("no CUDA graph of the step; it runs %s instead: %s", self.mode, first_line(cause))
        else:
            clouds = len(inputs["target"])
            log.info("the training step is captured in a CUDA graph for %d shapes a batch", clouds)


def time_step(step: TrainingStep, batch: Batch, repetitions: int) -> dict[str, float]:
    """Return medians ``forward_ms`` and ``step_ms`` on one batch; every step timed trains the model.

    Both run as the step does: eager, compiled or captured. Each is timed ``repetitions`` times after a few
    runs that are not; on the CPU fewer, if they would take more than 20 seconds.
    """
    for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
        step(batch)  # the last of these captures the step, if it can be
    inputs, forward = {name: batch[name] for name in INPUTS if name in batch}, step.forward
    if step.captured:
        stream = torch.cuda.Stream(step.device)
        with on_stream(stream):
            step.forward(inputs)
        forward = CapturedCall(lambda kept: step.forward(kept).detach(), inputs, stream)
    calls = {"forward_ms": lambda: forward(inputs), "step_ms": lambda: step(batch)}
    return {name: _median_ms(call, step, repetitions) for name, call in calls.items()}


def _median_ms(function: Callable[[], object], step: TrainingStep, repetitions: int) -> float:
    function()
    if step.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        torch.cuda.synchronize(step.device)
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        torch.cuda.synchronize(step.device)
        return median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    times: list[float] = []
    # Processes that train together have to take equally many steps, however long these take.
    while len(times) < repetitions and (sum(times) < SECONDS_ON_CPU or not step.processes.is_single):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


class CapturedCall:
    """A function's GPU work, recorded once in a CUDA graph and replayed with other inputs of that shape.

    The ``function`` takes a mapping of tensors, and has run before on ``stream``; recording does not run it.
    Calls that share a ``pool`` of memory may not run at the same time, and overwrite each other's results.
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Tensor]], object],
        inputs: Mapping[str, Tensor],
        stream: torch.cuda.Stream,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._function = function  # keeps alive what the recorded work reads
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that loads data may allocate pinned memory meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.result = function(self._inputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> object:
        """Replay with these inputs; the result is overwritten by the next replay."""
        for name, kept in self._inputs.items():  # one call for all has few blocks for few tensors
            kept.copy_(inputs[name], non_blocking=True)
        self._graph.replay()
        return self.result


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block's GPU work on ``stream``, after what is queued now and before what comes after."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
