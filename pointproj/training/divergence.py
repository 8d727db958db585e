"""Steps whose loss or gradient is not finite: they change nothing, and their batches are saved.

The optimizer skips such a step on the device, captured or not, without waiting. The host checks every
:data:`CHECK_EVERY` steps, and before each validation and checkpoint. So such a step never changes a weight, a
moment of the optimizer or a checkpoint, and its batch is saved at most that many steps later.
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
    """Losses of the steps since the previous status; the tensors are being copied to the host."""

    loss_sum: Tensor
    history: Tensor
    steps: int
    ready: torch.cuda.Event | None

    def read(self) -> tuple[float, list[int]]:
        """Return the sum of all finite losses, and the ages of steps that were not finite, oldest first.

        The last step of this status has age 0; ages go up to 63. Waits for the steps of this status, but not
        for later ones.
        """
        if self.ready is not None:
            self.ready.synchronize()
        bits = ~self.history.item() % 2**_HISTORY_BITS
        return self.loss_sum.item(), [age for age in reversed(range(bits.bit_length())) if bits >> age & 1]


class FiniteGuard:
    """Lets an optimizer skip steps that are not finite, and records on the device which.

    The optimizer is fused; it reads the attribute ``found_inf``, which is set here, to skip a step.
    """

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        self.compiled = False  # whether operations on scalars are compiled to one launch instead of several
        self._found = torch.zeros((), device=device)  # not 0 if a gradient is not finite
        self._history = torch.full((), _NONE_SKIPPED, device=device)  # one bit a step; the lowest is the last
        # In float64, sums of float32 are exact, so they do not depend on when a status is taken. The tensor
        # has an axis, since compiled code does not change a float64 scalar in place.
        self._loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        self._skipped = optimizer.found_inf = torch.zeros((), device=device)

    def __call__(
        self, loss: Float[Tensor, ""], gradients: list[Tensor], gradient_norm: Float[Tensor, ""] | None
    ) -> None:
        """Decide whether the optimizer skips its next step; if not, add the loss to the sum.

        Gradients are checked one by one, as for loss scaling, unless their norm is given.
        """
        checked = [*gradients, loss] if gradient_norm is None else [loss + gradient_norm]
        torch._amp_foreach_non_finite_check_and_unscale_(checked, self._found, self._one)
        decide = _compiled(_decide) if self.compiled else _decide
        decide(loss, self._found, self._skipped, self._history, self._loss_sum)

    def take_status(self, steps: int) -> Status:
        """Return the status of the last ``steps`` steps, and begin a new one."""
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
    """Set ``skipped``, reset ``found``, update history and sum: in one kernel when compiled, else in few."""
    good = found == 0
    torch.ne(found, 0, out=skipped)  # not copy_(), after which the compiler would treat both as one tensor
    found.sub_(skipped)  # not zero_(), since the compiler fuses operations that read the same tensor
    torch.add(good, history, alpha=2, out=history)
    loss_sum.add_(torch.where(good, loss, 0.0))


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # By default, the compiler does not fuse kernels that share less than ten bytes, as two numbers do.
    return torch.compile(function, fullgraph=True, options={"score_fusion_memory_threshold": 0})


class DivergenceCheck:
    """Stores the batches of the last steps until these are known to be finite; acts on those that are not.

    With ``training.on_nan=stop`` it raises an error. With ``skip`` it warns, and raises only after many such
    steps in a row. It saves their batches as ``nonfinite_STEP.pt`` in ``folder``, the run's folder.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=CHECK_EVERY)
        self._in_a_row = self._saved = 0

    def add(self, step: int, batch: dict[str, Any]) -> bool:
        """Store the batch of the last step; return whether it is time to :meth:`check`."""
        self._recent.append((step, batch))
        return len(self._recent) == CHECK_EVERY

    def check(self, ages: list[int]) -> None:
        """Act on the ages of a :class:`Status` that was taken after the last batch added.

        Raises TrainingDiverged for the first step that was not finite; or, if such steps are skipped, after
        :data:`CHECK_EVERY` of them in a row.
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
        """Save a batch; return words that say where, or that it cannot be saved."""
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
    """Return words that name the shapes of a batch, and its values that are not finite."""
    odd = [name for name, each in batch.items() if isinstance(each, Tensor) and not each.isfinite().all()]
    state = f"which holds NaN or infinity in {', '.join(odd)}" if odd else "whose numbers are all finite"
    return f"the batch of {', '.join(batch.get('name', ['unnamed shapes']))}, {state}"
