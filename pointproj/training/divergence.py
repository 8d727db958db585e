"""Steps whose loss or gradient is not finite: they change nothing, and their batches are kept.

The optimizer skips such a step on the device, captured or not, and nothing waits for it. The host checks
every :data:`CHECK_EVERY` steps, and before anything is validated or saved, so that

- no weight and no moment of the optimizer ever takes part in a step that is not finite;
- no checkpoint hides one: it is written after the check;
- the batch is known, and saved, at most :data:`CHECK_EVERY` steps later.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.config import Config
from pointproj.runtime import tensor_file
from pointproj.runtime.devices import to_host
from pointproj.training.optimizers import GuardedAdam

log = logging.getLogger(__name__)

CHECK_EVERY = 20
MOST_SAVED = 5  # batches of one run

_HISTORY_BITS = 64
_NONE_SKIPPED = -1  # all bits are set


class TrainingDiverged(RuntimeError):  # noqa: N818 - says what happened
    """A loss or gradient is not finite; the message says when, with which batch, and what to change."""


class FiniteGuard:
    """On the device: lets an optimizer skip steps that are not finite, and remembers which.

    Parameters
    ----------
    optimizer : GuardedAdam
        Its flag and its count are set here.

    Attributes
    ----------
    compiled : bool
        Whether its few operations on scalars are compiled: one launch each time instead of several.
    """

    def __init__(self, optimizer: GuardedAdam) -> None:
        device = optimizer.count.device
        self.compiled = False
        self._optimizer = optimizer
        self._found = torch.zeros((), device=device)  # not 0 where a gradient is not finite
        self._history = torch.full((), _NONE_SKIPPED, device=device)  # a bit a step, the last is lowest
        self._one = torch.ones((), device=device)

    def __call__(
        self,
        loss: Float[Tensor, ""],
        gradients: list[Tensor],
        gradient_norm: Float[Tensor, ""] | None,
        loss_sum: Float[Tensor, ""],
    ) -> None:
        """Decide about the step that the optimizer takes next; unless it is skipped, its loss counts.

        Parameters
        ----------
        loss : () float tensor
        gradients : list of Tensor
            Looked through one by one, as loss scaling does it, unless their norm is known.
        gradient_norm : () float tensor or None
        loss_sum : () float tensor
            Gets the loss added.
        """
        checked = [*gradients, loss] if gradient_norm is None else [loss + gradient_norm]
        torch._amp_foreach_non_finite_check_and_unscale_(checked, self._found, self._one)
        decide = _compiled(_decide) if self.compiled else _decide
        optimizer = self._optimizer
        decide(loss, self._found, optimizer.skipped, optimizer.count, self._history, loss_sum)

    def take_history(self) -> Int[Tensor, ""]:
        """Return what :meth:`skipped` reads, on its way to the host, and begin a new history."""
        history = to_host(self._history)
        self._history.fill_(_NONE_SKIPPED)
        return history

    @staticmethod
    def skipped(history: Int[Tensor, ""]) -> list[int]:
        """Return how many steps before it was taken each skipped step was, oldest first.

        Of the last 64 steps since the history before; 0 is the step taken last.
        """
        bits = ~history.item() % 2**_HISTORY_BITS
        return [age for age in reversed(range(bits.bit_length())) if bits >> age & 1]


def _decide(
    loss: Float[Tensor, ""],
    found: Float[Tensor, ""],
    skipped: Float[Tensor, ""],
    count: Float[Tensor, ""],
    history: Int[Tensor, ""],
    loss_sum: Float[Tensor, ""],
) -> None:
    """Set the flag and what follows from it: one kernel when compiled, else as few as there can be."""
    good = found == 0
    torch.ne(found, 0, out=skipped)  # after a copy, the compiler would take the two for one tensor
    found.sub_(skipped)  # not zero_(): the compiler joins what reads the same into one kernel
    count.add_(good)
    torch.add(good, history, alpha=2, out=history)
    loss_sum.add_(torch.where(good, loss, 0.0))


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # By default the compiler leaves kernels apart that share less than ten bytes: two numbers.
    return torch.compile(function, fullgraph=True, options={"score_fusion_memory_threshold": 0})


class DivergenceCheck:
    """Keeps the batches of the last steps until these are known to be finite, and acts where one was not.

    Parameters
    ----------
    config : Config
        ``training.on_nan``: ``stop`` raises, ``skip`` warns and goes on, unless no step is finite any more.
    folder : Path
        Of the run; gets ``nonfinite_STEP.pt``.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=CHECK_EVERY)
        self._in_a_row = 0
        self._saved = 0

    def add(self, step: int, batch: dict[str, Any]) -> bool:
        """Keep the batch of a step just taken; return whether it is time to :meth:`check`."""
        self._recent.append((step, batch))
        return len(self._recent) == CHECK_EVERY

    def check(self, ages: list[int]) -> None:
        """Act on what :meth:`FiniteGuard.skipped` returned, of a history taken after the last batch added.

        Raises
        ------
        TrainingDiverged
            For the first step that was not finite; if such steps are skipped, after :data:`CHECK_EVERY` in a
            row.
        """
        bad = [self._recent[-1 - age] for age in ages if age < len(self._recent)]
        finite_since = next((age for age in range(len(self._recent)) if age not in ages), None)
        self._in_a_row = finite_since if finite_since is not None else self._in_a_row + len(self._recent)
        self._recent.clear()
        for step, batch in bad:
            self._report(step, batch)
        if self._in_a_row >= CHECK_EVERY:
            raise TrainingDiverged(
                f"none of the last {self._in_a_row} steps was finite, so skipping them does not help: "
                + self._advice()
            )

    def _report(self, step: int, batch: dict[str, Any]) -> None:
        words = f"step {step}: loss or gradient is not finite; {_described(batch)}{self._keep(step, batch)}"
        if self.config.training.on_nan == "skip":
            log.warning("%s; the step was skipped", words)
            return
        raise TrainingDiverged(
            f"{words}. The step changed nothing: {self._advice()}, or training.on_nan=skip to skip such steps"
        )

    def _keep(self, step: int, batch: dict[str, Any]) -> str:
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

    def _advice(self) -> str:
        lr, clip = self.config.optimizer.lr, self.config.optimizer.clip
        return f"write a lower optimizer.lr (now {lr:g}), a lower optimizer.clip (now {clip})"


def _described(batch: dict[str, Any]) -> str:
    """Which shapes a batch holds, and whether they are the cause."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    odd = [name for name, value in tensors.items() if not value.isfinite().all()]
    state = f"which holds NaN or infinity in {', '.join(odd)}" if odd else "whose numbers are all finite"
    return f"the batch of {', '.join(batch.get('name', ['unnamed shapes']))}, {state}"
