"""Steps whose loss or gradient is not finite: they change nothing, and their batches are kept.

The optimizer skips such a step on the device, captured or not, and nothing waits for it. The host checks
every :data:`CHECK_EVERY` steps, and before anything is validated or saved. So no weight, no moment of the
optimizer and no checkpoint ever takes part in one, and its batch is saved at most that many steps later.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.config import Config
from pointproj.runtime import tensor_file

log = logging.getLogger(__name__)

CHECK_EVERY = 20
MOST_SAVED = 5  # batches of one run

_HISTORY_BITS = 64
_NONE_SKIPPED = -1  # all bits are set


class TrainingDiverged(RuntimeError):  # noqa: N818 - says what happened
    """A loss or gradient is not finite; the message says when, with which batch, and what to change."""


class Status(NamedTuple):
    """How the steps since the status before went; the tensors are on their way to the host."""

    loss_sum: Tensor
    history: Tensor
    steps: int
    ready: torch.cuda.Event | None

    def read(self) -> tuple[float, list[int]]:
        """Return the sum of all finite losses, and the ages of the other steps: of the last 64, oldest first.

        Waits for the steps it is about, and not for later ones. The last of them has age 0.
        """
        if self.ready is not None:
            self.ready.synchronize()
        bits = ~self.history.item() % 2**_HISTORY_BITS
        return self.loss_sum.item(), [age for age in reversed(range(bits.bit_length())) if bits >> age & 1]


class FiniteGuard:
    """On the device: lets an optimizer skip steps that are not finite, and remembers which.

    The optimizer is fused and gets ``found_inf``, its flag for a step to be skipped.
    """

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        self.compiled = False  # the few operations on scalars, to one launch instead of several
        self._found = torch.zeros((), device=device)  # not 0 where a gradient is not finite
        self._history = torch.full((), _NONE_SKIPPED, device=device)  # a bit a step, the last is lowest
        # float64 holds sums of float32 exactly, however the steps are divided among statuses. With an axis,
        # since torch.compile does not change a float64 number without one.
        self._loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        self._skipped = optimizer.found_inf = torch.zeros((), device=device)

    def __call__(
        self, loss: Float[Tensor, ""], gradients: list[Tensor], gradient_norm: Float[Tensor, ""] | None
    ) -> None:
        """Decide about the step that the optimizer takes next; unless it is skipped, its loss counts.

        Gradients are looked through one by one, as loss scaling does it, unless their norm is known.
        """
        checked = [*gradients, loss] if gradient_norm is None else [loss + gradient_norm]
        torch._amp_foreach_non_finite_check_and_unscale_(checked, self._found, self._one)
        decide = _compiled(_decide) if self.compiled else _decide
        decide(loss, self._found, self._skipped, self._history, self._loss_sum)

    def take_status(self, steps: int) -> Status:
        """Return how the last ``steps`` steps went, and begin anew."""
        tensors = self._loss_sum, self._history
        copies = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self._loss_sum.zero_()
        self._history.fill_(_NONE_SKIPPED)
        device = self._found.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return Status(*copies, steps, ready)


def _decide(
    loss: Float[Tensor, ""],
    found: Float[Tensor, ""],
    skipped: Float[Tensor, ""],
    history: Int[Tensor, ""],
    loss_sum: Float[Tensor, "1"],
) -> None:
    """Set the flag and what follows from it: one kernel when compiled, else as few as there can be."""
    good = found == 0
    torch.ne(found, 0, out=skipped)  # after a copy, the compiler would take the two for one tensor
    found.sub_(skipped)  # not zero_(): the compiler joins what reads the same into one kernel
    torch.add(good, history, alpha=2, out=history)
    loss_sum.add_(torch.where(good, loss, 0.0))


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # By default the compiler leaves kernels apart that share less than ten bytes: two numbers.
    return torch.compile(function, fullgraph=True, options={"score_fusion_memory_threshold": 0})


class DivergenceCheck:
    """Keeps the batches of the last steps until these are known to be finite, and acts where one was not.

    With ``training.on_nan=stop`` it raises, with ``skip`` it warns and goes on, unless no step is finite any
    more. ``folder``, that of the run, gets ``nonfinite_STEP.pt``.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=CHECK_EVERY)
        self._in_a_row = self._saved = 0

    def add(self, step: int, batch: dict[str, Any]) -> bool:
        """Keep the batch of a step just taken; return whether it is time to :meth:`check`."""
        self._recent.append((step, batch))
        return len(self._recent) == CHECK_EVERY

    def check(self, ages: list[int]) -> None:
        """Act on the ages of a :class:`Status` that was taken after the last batch added.

        Raises TrainingDiverged for the first step that was not finite; if such steps are skipped, after
        :data:`CHECK_EVERY` in a row.
        """
        lr, clip = self.config.optimizer.lr, self.config.optimizer.clip
        advice = f"write a lower optimizer.lr (now {lr:g}), a lower optimizer.clip (now {clip})"
        bad = [self._recent[-1 - age] for age in ages]
        finite_since = next((age for age in range(len(self._recent)) if age not in ages), None)
        self._in_a_row = finite_since if finite_since is not None else self._in_a_row + len(self._recent)
        self._recent.clear()
        for step, batch in bad:
            words = f"step {step}: loss or gradient is not finite; {_described(batch)}"
            words += self._write_batch(step, batch)
            if self.config.training.on_nan == "stop":
                words += f". The step changed nothing: {advice}, or training.on_nan=skip to skip such steps"
                raise TrainingDiverged(words)
            log.warning("%s; the step was skipped", words)
        if self._in_a_row >= CHECK_EVERY:
            words = f"none of the last {self._in_a_row} steps was finite, so skipping them does not help"
            raise TrainingDiverged(f"{words}: {advice}")

    def _write_batch(self, step: int, batch: dict[str, Any]) -> str:
        """Save a batch, and say where."""
        self._saved += 1
        if self._saved > MOST_SAVED:
            return ""
        path = self.folder / f"nonfinite_{step}.pt"
        try:
            tensor_file.save(path, {"step": step, **batch})
        except OSError as error:
            return f", which cannot be saved ({error.strerror})"
        return f", saved in {path}"


def _described(batch: dict[str, Any]) -> str:
    """Which shapes a batch holds, and whether they are the cause."""
    odd = [name for name, each in batch.items() if isinstance(each, Tensor) and not each.isfinite().all()]
    state = f"which holds NaN or infinity in {', '.join(odd)}" if odd else "whose numbers are all finite"
    return f"the batch of {', '.join(batch.get('name', ['unnamed shapes']))}, {state}"
