"""One training step (forward, loss, backward, clipping, optimizer), run in the fastest correct way.

``compile=true`` means: the model through ``torch.compile``, and on CUDA the whole step captured in one CUDA
graph, which is then replayed with new inputs. Nothing here waits for the device: losses are summed there and
read on request.

A batch with fewer clouds than others, the last one of an epoch, runs the model as it is: compiling for it
takes up to half a minute, and it is captured all the same.

Where several processes train together, each has its own part of the batch, and all gradients and the loss are
summed as one tensor between backward and clipping. The sum is recorded in the graph like everything else.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.runtime.devices import to_host
from pointproj.runtime.distributed import ALONE, Processes
from pointproj.runtime.errors import first_line
from pointproj.training.capture import STEPS_BEFORE_CAPTURE, CapturedCall, is_capturing, on_stream
from pointproj.training.divergence import FiniteGuard
from pointproj.training.losses import Loss, eikonal_penalty
from pointproj.training.optimizers import GuardedAdam

log = logging.getLogger(__name__)

# ``share`` where several processes train, ``neighbor_indices`` where they are kept.
INPUTS = ("query_points", "reference_points", "features", "neighbor_indices", "target", "share")

Batch = Mapping[str, Tensor]


class Status(NamedTuple):
    """Copies on their way to the host: how the steps up to a request went; filled in when they have run."""

    loss_sum: Tensor
    history: Tensor  # of :class:`FiniteGuard`
    calls: int  # steps taken by then
    steps: int | None  # over which the losses are summed, where an interval ends
    ready: torch.cuda.Event | None


class TrainingStep:
    """The step as an object: call it with a batch, and the model is one step further.

    Parameters
    ----------
    model : Module
        Called as ``model(query_points, reference_points, features=features or None)``, and with
        ``neighbor_indices`` where the batch has them; the last axis of its result has size 1.
    optimizer : GuardedAdam
        Over the model's parameters; made with ``capturable=True`` if the step is to be captured.
    loss_function : callable
        ``loss_function(prediction, target)`` on two (B, Q) tensors.
    clip : float or None
        Largest gradient norm; None leaves gradients as they are.
    amp : bool
        Run the model under bf16 autocast.
    eikonal : float
        Weight of :func:`pointproj.training.losses.eikonal_penalty`. It needs second derivatives, which
        torch.compile does not give: the model then runs uncompiled.
    compile : bool
        Compile the model and, on CUDA, capture the step. Whatever prevents that is logged, and the steps
        go on without it; :attr:`mode` says how they run.
    capture : bool
        False where :func:`~pointproj.training.capture.capture_obstacle` knows of a reason against it.
    processes : Processes
        Who trains together. All have the same weights, and take every step at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: GuardedAdam,
        loss_function: Loss,
        *,
        clip: float | None = None,
        amp: bool = False,
        eikonal: float = 0.0,
        compile: bool = False,
        capture: bool = True,
        processes: Processes = ALONE,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_function = loss_function
        self.clip = clip
        self.amp = amp
        self.processes = processes
        self.eikonal = eikonal
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.device = self.parameters[0].device
        self.compiled = compile
        self.captured = compile and capture and self.device.type == "cuda"
        self._called = torch.compile(model, fullgraph=True) if compile else model
        self._guard = FiniteGuard(optimizer)
        self._compare = loss_function
        self._most_clouds = 0  # in a batch so far
        if self.captured:  # what is small costs its launches, and here nothing else
            self._compare = torch.compile(lambda *compared: loss_function(*compared), fullgraph=True)
            self._guard.compiled = True
        self._pending: Status | None = None  # requested and not yet received
        self._not_finite: list[int] = []  # numbers of calls that were not requested yet
        self._mean_loss = float("nan")
        self._calls = self._calls_received = 0
        self._loss_sum = torch.zeros((), device=self.device)
        self._steps_since_read = 0
        self._captured_calls: dict[tuple, CapturedCall] = {}
        self._steps_taken: Counter[tuple] = Counter()
        self._side_stream = torch.cuda.Stream(self.device) if self.captured else None
        self._pool = torch.cuda.graph_pool_handle() if self.captured else None  # of all sizes of batches

    @property
    def mode(self) -> str:
        """How steps run: eager, compiled, or captured (compiled, then replayed as a CUDA graph)."""
        if self.captured:
            return "captured"
        return "compiled" if self.compiled else "eager"

    def __call__(self, batch: Batch) -> None:
        """Take one step.

        Parameters
        ----------
        batch : mapping
            On the model's device: ``query_points`` (Q, 3) or (B, Q, 3), ``reference_points`` (B, N, 3) and
            ``target`` (B, Q); ``features`` (B, N, C) if the model takes any, ``neighbor_indices`` (B, Q, k)
            if they are known. Where several processes train together also ``share`` (), this part's share of
            all shapes of the step.
        """
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        if self.captured:
            self._run_captured(inputs)
        else:
            self._run(inputs)
        self._calls += 1
        self._steps_since_read += 1

    def forward(self, batch: Batch) -> Float[Tensor, "b q"]:
        """Predict for a batch the way the step does: compiled and under autocast where those are on."""
        model = self._called if self._is_full(batch) else self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            known = {"neighbor_indices": batch["neighbor_indices"]} if "neighbor_indices" in batch else {}
            prediction = model(
                batch["query_points"], batch["reference_points"], features=batch.get("features"), **known
            )
        return prediction.squeeze(-1).float()

    def request_status(self, *, ends_interval: bool = False) -> None:
        """Ask how the steps up to now went, without waiting; :meth:`read_status` returns the answer.

        Parameters
        ----------
        ends_interval : bool
            The losses of later steps belong to the next mean.
        """
        self._receive()
        copies = to_host(self._loss_sum), self._guard.take_history()
        ready = torch.cuda.current_stream(self.device).record_event() if self._loss_sum.is_cuda else None
        steps = self._steps_since_read if ends_interval else None
        self._pending = Status(*copies, self._calls, steps, ready)
        if ends_interval:
            self._loss_sum.zero_()
            self._steps_since_read = 0

    def read_status(self) -> tuple[float, list[int]]:
        """Return what was requested last; waits for the steps it is about, and not for later ones.

        Returns
        -------
        loss : float
            Mean over the steps of the last interval that ended which were finite; NaN without any.
        ages : list of int
            How many steps before the request each step was that changed nothing: loss or gradient was not
            finite. Of those since the last call, oldest first; 0 is the step taken last. To be called at
            least every 64 steps: older ones are forgotten.
        """
        self._receive()
        ages = [self._calls_received - 1 - call for call in self._not_finite]
        self._not_finite.clear()
        return self._mean_loss, ages

    def read_not_finite(self) -> list[int]:
        """Return the ages of :meth:`read_status` up to the last step; waits for it."""
        self.request_status()
        return self.read_status()[1]

    def state_dict(self) -> dict[str, float | int]:
        """Losses that were not read yet, so that a resumed run reports them."""
        self.request_status()
        self._receive()
        return {"loss_sum": self._loss_sum.item(), "steps_since_read": self._steps_since_read}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take over what :meth:`state_dict` of another run returned."""
        self._loss_sum.fill_(state["loss_sum"])
        self._steps_since_read = int(state["steps_since_read"])

    def _run(self, inputs: Batch) -> None:
        """The step itself; in a capture this is what the graph records."""
        loss = self._backward(inputs)
        if not self.processes.alone:
            loss = self._add_up(loss)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = None if self.clip is None else nn.utils.get_total_norm(gradients)
        self._guard(loss, gradients, norm, self._loss_sum)
        if norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.optimizer.step()

    def _receive(self) -> None:
        """Take in what was requested, if anything was; skipped steps do not count."""
        if self._pending is None:
            return
        status, self._pending = self._pending, None
        if status.ready is not None:
            status.ready.synchronize()
        ages = self._guard.skipped(status.history)
        self._calls_received = status.calls
        self._not_finite += [status.calls - 1 - age for age in ages]
        if status.steps is None:
            self._steps_since_read -= len(ages)
            return
        finite = status.steps - len(ages)
        self._mean_loss = status.loss_sum.item() / finite if finite else float("nan")

    def _is_full(self, batch: Batch) -> bool:
        """Whether no batch before had more clouds."""
        clouds = len(batch["reference_points"])
        self._most_clouds = max(self._most_clouds, clouds)
        return clouds == self._most_clouds

    def _backward(self, inputs: Batch) -> Tensor:
        try:
            return self._loss_with_gradients(inputs)
        except Exception as error:
            if not self.compiled or is_capturing(self.device) or isinstance(error, torch.OutOfMemoryError):
                raise
            failure = error
        loss = self._without_compile(inputs)  # raises what is wrong with the model itself, if anything is
        log.warning("torch.compile failed, so steps run without it: %s", first_line(failure))
        return loss

    def _without_compile(self, inputs: Batch) -> Tensor:
        self._called, self._compare = self.model, self.loss_function
        self.compiled = self._guard.compiled = False
        return self._loss_with_gradients(inputs)

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

    def _add_up(self, loss: Tensor) -> Tensor:
        """Sum gradients and loss over all processes, as one tensor: a small model waits for latency alone."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
        self.processes.all_reduce(flat)
        loss, *sums = flat.split([1, *(gradient.numel() for gradient in gradients)])
        pairs = zip(sums, gradients, strict=True)
        torch._foreach_copy_(gradients, [total.view_as(gradient) for total, gradient in pairs])
        return loss.view(())

    def _run_captured(self, inputs: Batch) -> None:
        """Replay the step for inputs of a known shape; take real steps first, then capture it."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        if shapes in self._captured_calls:
            self._captured_calls[shapes](inputs)
            return
        if self._steps_taken[shapes] >= STEPS_BEFORE_CAPTURE and self._capture(shapes, inputs):
            self._captured_calls[shapes](inputs)
            return
        with on_stream(self._side_stream):
            self._run(inputs)
        self._steps_taken[shapes] += 1

    def _capture(self, shapes: tuple, inputs: Batch) -> bool:
        # Gradients made outside the graph would be added to, and they are not the graph's to keep.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._captured_calls[shapes] = CapturedCall(self._run, inputs, self._side_stream, self._pool)
        except Exception as error:
            self.captured = False
            self.optimizer.zero_grad(set_to_none=True)
            cause = error.__context__ or error  # what ended the capture, not that it ended
            log.warning("no CUDA graph of the step; it runs %s instead: %s", self.mode, first_line(cause))
            return False
        log.info("the training step is captured in a CUDA graph for %d shapes a batch", len(inputs["target"]))
        return True
