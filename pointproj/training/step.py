"""One training step (forward, loss, backward, clipping, optimizer), run in the fastest correct way.

``compile=true`` means: the model through ``torch.compile``, and on CUDA the whole step captured in one CUDA
graph, which is then replayed with new inputs. Nothing here waits for the device: losses are summed there and
read when somebody asks for them.

Where several processes train together, each has its own part of the batch, and all gradients and the loss are
summed as one tensor between backward and clipping. The sum is recorded in the graph like everything else.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.ops.registry import waits
from pointproj.runtime.devices import to_host
from pointproj.runtime.distributed import ALONE, Processes
from pointproj.runtime.memory import graphs_unsupported
from pointproj.training.divergence import FiniteGuard
from pointproj.training.optimizers import Loss, eikonal_penalty

log = logging.getLogger(__name__)

STEPS_BEFORE_CAPTURE = 3  # real steps: they compile, tune kernels and make the optimizer's state
# ``share`` where several processes train, ``neighbor_indices`` where they are kept.
INPUTS = ("query_points", "reference_points", "features", "neighbor_indices", "target", "share")

Batch = Mapping[str, Tensor]


class Note(NamedTuple):
    """What the device was asked about its steps; the tensors are filled in when it has taken them."""

    loss_sum: Tensor
    history: Tensor  # of :class:`FiniteGuard`
    calls: int  # taken by then
    steps: int | None  # over which the losses are summed, where an interval ends
    arrived: torch.cuda.Event | None


class TrainingStep:
    """The step as an object: call it with a batch, and the model is one step further.

    Parameters
    ----------
    model : Module
        Called as ``model(query_points, reference_points, features=features or None)``, and with
        ``neighbor_indices`` where the batch has them; the last axis of its result has size 1.
    optimizer : Optimizer
        Over the model's parameters; made with ``capturable=True`` if the step is to be captured.
    loss_function : callable
        ``loss_function(prediction, target)`` on two (B, Q) tensors.
    clip : float or None
        Largest gradient norm; None leaves gradients as they are.
    amp : bool
        Run the model under bf16 autocast.
    eikonal : float
        Weight of :func:`pointproj.training.optimizers.eikonal_penalty`. It needs second derivatives, which
        torch.compile does not give: the model then runs uncompiled.
    compile : bool
        Compile the model and, on CUDA, capture the step. Whatever prevents that is logged, and the steps
        go on without it; :attr:`mode` says how they run.
    capture : bool
        False where :func:`capture_obstacle` knows beforehand that the step cannot be captured.
    processes : Processes
        Who trains together. All have the same weights, and take every step at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        if self.captured:  # what is small costs its launches, and here nothing else
            self._compare = torch.compile(lambda *compared: loss_function(*compared), fullgraph=True)
            self._guard.compiled = True
        self._noted: Note | None = None  # what is on its way to the host
        self._not_finite: list[int] = []  # numbers of calls that nobody has asked for yet
        self._mean_loss = float("nan")
        self._calls = self._calls_noted = 0
        self._loss_sum = torch.zeros((), device=self.device)
        self._steps_since_read = 0
        self._replays: dict[tuple, CapturedCall] = {}
        self._steps_taken: Counter[tuple] = Counter()
        self._side_stream = torch.cuda.Stream(self.device) if self.captured else None

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
            self._replay(inputs)
        else:
            self._take(inputs)
        self._calls += 1
        self._steps_since_read += 1

    def forward(self, batch: Batch) -> Float[Tensor, "b q"]:
        """Predict for a batch the way the step does: compiled and under autocast where those are on."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            known = {"neighbor_indices": batch["neighbor_indices"]} if "neighbor_indices" in batch else {}
            prediction = self._called(
                batch["query_points"], batch["reference_points"], features=batch.get("features"), **known
            )
        return prediction.squeeze(-1).float()

    def note(self, *, ends_interval: bool = False) -> None:
        """Ask the device how the steps up to now went; :meth:`read_noted` answers, also while later ones run.

        Parameters
        ----------
        ends_interval : bool
            The losses of later steps belong to the next mean.
        """
        self._take_in()
        asked = to_host(self._loss_sum), self._guard.note()
        arrived = torch.cuda.current_stream(self.device).record_event() if self._loss_sum.is_cuda else None
        self._noted = Note(*asked, self._calls, self._steps_since_read if ends_interval else None, arrived)
        if ends_interval:
            self._loss_sum.zero_()
            self._steps_since_read = 0

    def read_noted(self) -> tuple[float, list[int]]:
        """Read the last note; waits for the steps it is about, and not for later ones.

        Returns
        -------
        loss : float
            Mean over the steps of the last interval that ended which were finite; NaN without any.
        ages : list of int
            How many steps before the note each step was that changed nothing: loss or gradient was not
            finite. Of those since the last call, oldest first; 0 is the step taken last. To be called at
            least every 64 steps: older ones are forgotten.
        """
        self._take_in()
        ages = [self._calls_noted - 1 - call for call in self._not_finite]
        self._not_finite.clear()
        return self._mean_loss, ages

    def read_loss(self) -> float:
        """Return the mean loss of the steps since the last read that were finite (NaN without any); waits."""
        self.note(ends_interval=True)
        self._take_in()
        return self._mean_loss

    def read_not_finite(self) -> list[int]:
        """Return the ages of :meth:`read_noted` up to the last step; waits for it."""
        self.note()
        return self.read_noted()[1]

    def state_dict(self) -> dict[str, float | int]:
        """Losses that nobody has read yet, so that a resumed run reports them."""
        self.note()
        self._take_in()
        return {"loss_sum": self._loss_sum.item(), "steps_since_read": self._steps_since_read}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take over what :meth:`state_dict` of another run returned."""
        self._loss_sum.fill_(state["loss_sum"])
        self._steps_since_read = int(state["steps_since_read"])

    def _take(self, inputs: Batch) -> None:
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

    def _take_in(self) -> None:
        """Learn from the note under way, if any, which steps were passed over; they do not count."""
        if self._noted is None:
            return
        note, self._noted = self._noted, None
        if note.arrived is not None:
            note.arrived.synchronize()
        ages = self._guard.passed_over(note.history)
        self._calls_noted = note.calls
        self._not_finite += [note.calls - 1 - age for age in ages]
        if note.steps is None:
            self._steps_since_read -= len(ages)
            return
        finite = note.steps - len(ages)
        self._mean_loss = note.loss_sum.item() / finite if finite else float("nan")

    def _backward(self, inputs: Batch) -> Tensor:
        try:
            return self._loss_with_gradients(inputs)
        except Exception as error:
            if not self.compiled or _is_capturing(self.device) or isinstance(error, torch.OutOfMemoryError):
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
        loss = self._compare(prediction, inputs["target"])
        if self.eikonal:
            loss = loss + self.eikonal * eikonal_penalty(prediction, query_points)
        if "share" in inputs:
            loss = loss * inputs["share"]
        loss.backward()
        return loss.detach()

    def _add_up(self, loss: Tensor) -> Tensor:
        """Sum gradients and loss over all processes, as one tensor: a small model waits for latency alone."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
        self.processes.add_up(flat)
        loss, *sums = flat.split([1, *(gradient.numel() for gradient in gradients)])
        pairs = zip(sums, gradients, strict=True)
        torch._foreach_copy_(gradients, [total.view_as(gradient) for total, gradient in pairs])
        return loss.view(())

    def _replay(self, inputs: Batch) -> None:
        """Replay the step for inputs of a known shape; take real steps first, then capture it."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        if shapes in self._replays:
            self._replays[shapes](inputs)
            return
        if self._steps_taken[shapes] >= STEPS_BEFORE_CAPTURE and self._capture(shapes, inputs):
            self._replays[shapes](inputs)
            return
        with beside(self._side_stream):
            self._take(inputs)
        self._steps_taken[shapes] += 1

    def _capture(self, shapes: tuple, inputs: Batch) -> bool:
        # Gradients made outside the graph would be added to, and they are not the graph's to keep.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._replays[shapes] = CapturedCall(self._take, inputs, self._side_stream)
        except Exception as error:
            self.captured = False
            self.optimizer.zero_grad(set_to_none=True)
            cause = error.__context__ or error  # what ended the capture, not that it ended
            log.warning("no CUDA graph of the step, which runs %s: %s", self.mode, first_line(cause))
            return False
        log.info("the training step is captured in a CUDA graph for %d shapes a batch", len(inputs["target"]))
        return True


class CapturedCall:
    """A function's GPU work, recorded once in a CUDA graph and replayed with other inputs of that shape.

    Parameters
    ----------
    function : callable
        Takes a mapping of tensors, and has run before on ``stream``. Recording does not run it.
    inputs : mapping
        Its argument, by which the shapes are fixed; copied.
    stream : torch.cuda.Stream
        Where it is recorded.
    """

    def __init__(self, function: Callable[[Batch], object], inputs: Batch, stream: torch.cuda.Stream) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._function = function  # keeps alive what the recorded work reads
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that loads data may allocate pinned memory meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self.result = function(self._inputs)

    def __call__(self, inputs: Batch) -> object:
        """Replay with these inputs; the result is overwritten by the next replay."""
        if self._inputs:
            given = [inputs[name] for name in self._inputs]
            torch._foreach_copy_(list(self._inputs.values()), given, non_blocking=True)  # one launch for all
        self._graph.replay()
        return self.result


def capture_obstacle(backend: str) -> str | None:
    """Why no step with this backend can be captured in a CUDA graph, or None."""
    return graphs_unsupported() or waits(backend)


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block's GPU work on ``stream``, after what is queued now and before what comes after."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def first_line(error: BaseException) -> str:
    """Return the kind and first line of an error: those of compilers run to pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
