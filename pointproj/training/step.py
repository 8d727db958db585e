"""One training step (forward, loss, backward, clipping, optimizer), run in the fastest correct way.

With ``compile=true``, ``torch.compile`` compiles the model. On CUDA, one CUDA graph then captures the whole
step, and is replayed with new inputs. The host does not wait for the device: losses are summed on the device,
and read on request.

A batch with fewer clouds than others, such as the last one of an epoch, runs the model without compilation,
since compiling for it takes up to half a minute. Its step is captured too.

If several processes train together, each has its own part of the batch. All gradients and the loss are summed
as one tensor between backward and clipping. The graph captures this sum too.
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
from pointproj.runtime.graph_memory import GraphMemory
from pointproj.training.divergence import FiniteGuard, Status
from pointproj.training.losses import Loss, eikonal_penalty

log = logging.getLogger(__name__)

# ``share`` with several processes, ``neighbor_indices`` if neighbours are searched once.
INPUTS = (
    *("query_points", "reference_points", "features", "query_features", "neighbor_indices", "target"),
    "share",
)

STEPS_BEFORE_CAPTURE = 3  # ordinary steps, which compile, tune kernels and make the optimizer's state
SECONDS_ON_CPU = 20.0  # for timing a step

Batch = Mapping[str, Tensor]


class TrainingStep:
    """The step as an object: each call with a batch trains the model by one step.

    Parameters
    ----------
    model : Module
        ``model(query_points, reference_points, features=...)`` returns (B, Q, 1). ``features`` may be None;
        ``neighbor_indices`` are an argument too if the batch has them.
    optimizer : Adam
        Fused, and made with ``capturable=True`` if the step is to be captured.
    loss_function : callable
        Takes prediction and target, (B, Q) each, and returns a scalar.
    clip, amp, eikonal
        As in the config. The eikonal penalty needs second derivatives, which torch.compile does not support.
    compile, capture : bool
        Whether to compile the model, and to capture the step on CUDA. If that fails, the reason is logged,
        and steps run without it; :attr:`mode` tells how they run.
    processes : Processes
        Processes that train together. They have the same weights, and take each step at the same time.
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
            # Small operations cost only their launches, so they are compiled into fewer.
            self._compare = torch.compile(lambda *compared: loss_function(*compared), fullgraph=True)
            self._guard.compiled = True
            self._side_stream = torch.cuda.Stream(self.device)
            self._memory: dict[tuple, GraphMemory] = {}  # by the shapes too

    @property
    def mode(self) -> str:
        """How steps run: eager, compiled, or captured (compiled, and replayed as a CUDA graph)."""
        if self.captured:
            return "captured"
        return "compiled" if self.compiled else "eager"

    def __call__(self, batch: Batch) -> None:
        """Take one step with a batch on the model's device.

        The batch has ``query_points`` (Q, 3) or (B, Q, 3), ``reference_points`` (B, N, 3) and ``target``
        (B, Q). It has ``features`` (B, N, C) if the model takes them, ``neighbor_indices`` (B, Q, k) if they
        are known, and with several processes ``share`` (), the share of this part in all shapes of the step.
        """
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        if self.captured:
            self._run_captured(inputs)
        else:
            self._take_step(inputs)
        self._steps += 1

    def forward(self, batch: Batch, *, compiled: bool = True) -> Float[Tensor, "b q *c"]:
        """Predict for a batch as in a step: under autocast if it is on, and compiled if the model is.

        The result is (B, Q), or (B, Q, C) for a model of several channels.

        Use ``compiled=False`` for unseen meshes, since their batches would be compiled for their own sizes.
        """
        model = self._called if compiled and self._is_full(batch) else self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            known = {name: batch[name] for name in ("neighbor_indices", "query_features") if name in batch}
            prediction = model(
                batch["query_points"], batch["reference_points"], features=batch.get("features"), **known
            )
        return prediction.squeeze(-1).float()

    def take_status(self) -> Status:
        """Return the status of the steps since the last status, without waiting for them."""
        steps, self._steps = self._steps, 0
        return self._guard.take_status(steps)

    def _take_step(self, inputs: Batch) -> None:
        """Take a step; this is also the function that a CUDA graph captures."""
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
        """Return whether no earlier batch had more clouds."""
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
        loss = self._loss_with_gradients(inputs)  # raises again if the model itself is wrong
        log.warning("torch.compile failed, so steps run without it: %s", first_line(failure))
        return loss

    def _loss_with_gradients(self, inputs: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        if self.eikonal:
            clouds = inputs["reference_points"].shape[0]
            query_points = inputs["query_points"].expand(clouds, -1, -1).detach().requires_grad_()
            inputs = {**inputs, "query_points": query_points}
        # In this thread, whose memory may come from a pool. Besides, switching to torch's own thread for the
        # GPU and back takes time in every backward.
        with torch.autograd.set_multithreading_enabled(False):
            prediction = self.forward(inputs)
            compare = self._compare if self._is_full(inputs) else self.loss_function
            loss = compare(prediction, inputs["target"])
            if self.eikonal:
                loss = loss + self.eikonal * eikonal_penalty(prediction, query_points)
            if "share" in inputs:
                loss = loss * inputs["share"]
            loss.backward()
        return loss.detach()

    def _add_up(self, loss: Tensor, gradients: list[Tensor]) -> Tensor:
        """Sum gradients and loss over all processes, as one tensor: for a small model latency decides."""
        flat = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
        self.processes.all_reduce(flat)
        loss, *sums = flat.split([1, *(gradient.numel() for gradient in gradients)])
        pairs = zip(sums, gradients, strict=True)
        torch._foreach_copy_(gradients, [total.view_as(gradient) for total, gradient in pairs])
        return loss.view(())

    def _run_captured(self, inputs: Batch) -> None:
        """Replay the step for inputs of these shapes; the first steps are ordinary, the next is captured."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        if shapes not in self._memory:
            self._memory[shapes] = GraphMemory(next(iter(self._memory.values()), None))
        if shapes not in self._captured_calls and self._steps_taken[shapes] >= STEPS_BEFORE_CAPTURE:
            self._capture(shapes, inputs)
        if shapes in self._captured_calls:
            self._captured_calls[shapes](inputs)
            return
        with on_stream(self._side_stream), self._memory[shapes].before_capture():
            self._take_step(inputs)
        self._steps_taken[shapes] += 1

    def _capture(self, shapes: tuple, inputs: Batch) -> None:
        # Gradients made outside of the graph would be accumulated into, and the graph does not own them.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._captured_calls[shapes] = CapturedCall(
                self._take_step, inputs, self._side_stream, self._memory[shapes]
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
    """Return the medians ``forward_ms`` and ``step_ms`` on one batch; the timed steps train the model.

    Both run as the step does: eager, compiled or captured. Each is timed ``repetitions`` times after a few
    runs without timing; on the CPU fewer times, if they would take more than 20 seconds.
    """
    for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
        step(batch)  # the last of these captures the step, if possible
    inputs, forward = {name: batch[name] for name in INPUTS if name in batch}, step.forward
    if step.captured:
        stream, memory = torch.cuda.Stream(step.device), GraphMemory()
        with on_stream(stream), memory.before_capture():
            step.forward(inputs)
        forward = CapturedCall(lambda own: step.forward(own).detach(), inputs, stream, memory)
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
    # Processes that train together must take equally many steps, so no time limit applies to them.
    while len(times) < repetitions and (sum(times) < SECONDS_ON_CPU or not step.processes.is_single):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


class CapturedCall:
    """The GPU work of a function, captured once in a CUDA graph and replayed with inputs of the same shapes.

    ``function`` takes a mapping of tensors, and must have run before, on ``stream`` and in
    ``memory.before_capture()``; it is captured without being executed. Calls that share memory must not run
    at the same time, and overwrite each other's results.
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Tensor]], object],
        inputs: Mapping[str, Tensor],
        stream: torch.cuda.Stream,
        memory: GraphMemory,
    ) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._function = function  # keeps the tensors alive that the captured work reads
        self._graph = torch.cuda.CUDAGraph()
        # thread_local, since a thread that loads data may allocate pinned memory meanwhile.
        with (
            memory.capture(),
            torch.cuda.graph(self._graph, pool=memory.id, stream=stream, capture_error_mode="thread_local"),
        ):
            self.result = function(self._inputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> object:
        """Replay with these inputs; the result is overwritten by the next replay."""
        for name, own in self._inputs.items():  # one call for all tensors would use few blocks of the GPU
            own.copy_(inputs[name], non_blocking=True)
        self._graph.replay()
        return self.result


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block's GPU work on ``stream``, after work queued before the block and before later work."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
