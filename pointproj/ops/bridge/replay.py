"""What an operator does on the host, recorded once and replayed with other tensors of the same shapes.

A launcher in Python divides work, allocates, and describes arrays to kernels: that takes longer than most
kernels. All of it follows from shapes, dtypes and numbers, but for the addresses of tensors. So the second
call with the same ones is recorded: what it allocates, which operators of torch it calls, what it launches.
Later calls allocate anew, and launch the same with other addresses.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from pointproj.ops.bridge.scratch import ALIGNMENT

MOST_PLANS = 64  # that an operator keeps, of each thread
MOST_BYTES = 2**26  # of the tensors of a call, and of what a plan allocates together: others take longer than
# their host, and free memory on the way
ADDRESSES = 16  # kernels may be compiled for addresses that are multiples of it
SEEN, NOT_REPEATABLE = "seen", "not repeatable"

ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "new_empty"))
# What may be called besides: what these do follows from their arguments alone.
VIEWS = ("expand", "select", "slice", "unsqueeze", "view")
CHANGES = ("copy_", "cumsum_", "fill_", "zero_")
OTHERS = ("_to_copy", "clone", "full", "new_full", "new_zeros", "sort", "sum", "zeros", "zeros_like")
SAME = frozenset(("aten::alias", "aten::detach"))  # nothing is differentiated here
REPLAYED = frozenset(f"aten::{name}" for name in (*VIEWS, *CHANGES, *OTHERS))

Source = (
    tuple[int, int] | None
)  # the tensor that an address is in, and bytes from its beginning; None: no array
Run = Callable[[list[Any], list[int], int], None]  # its arguments: tensors, their addresses, the stream


class Launch(Protocol):
    """A launch of a kernel as it was made."""

    pointers: Sequence[int]  # that the kernel got

    @staticmethod
    def again(launches: Sequence[Any], sources: Sequence[Sequence[Source]]) -> Run:
        """Launch these one after another, with pointers from other sources."""


class _Call(NamedTuple):
    """A call of an operator of torch; tensors are places among all."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    made: tuple[int, ...]


class _Place(NamedTuple):
    """Stands for a tensor."""

    number: int


_of_thread = threading.local()


def recording() -> "Recording | None":
    """Where launches have to be reported now."""
    return getattr(_of_thread, "recording", None)


class Recording(TorchDispatchMode):
    """What happens while it is entered."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = len(inputs)
        self.tensors = list(inputs)  # all there are, kept so that no other gets their addresses
        self.places = {id(t): place for place, t in enumerate(inputs)}
        self.owners = list(range(len(inputs)))  # places of tensors that are not views of others
        self.allocated: list[int] = []
        self.steps: list[_Call | Launch] = []
        self.is_repeatable = not _overlap(inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch's compiler need not be kept out: to do so, torch would import it, for seconds."""
        return False

    # Entered without what TorchDispatchMode does besides: it notes for all threads whether any is in a mode,
    # and where two are at a time, that may stay so, and nothing be compiled any more.
    def __enter__(self) -> "Recording":
        _push_mode(self)
        _of_thread.recording = self
        return self

    def __exit__(self, *raised: Any) -> None:
        _of_thread.recording = None
        _pop_mode()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        name = function._schema.name
        if name in ALLOCATIONS and made.is_contiguous():
            self.allocated.append(self._add(made))
        elif name in SAME and id(args[0]) in self.places:
            self.tensors.append(made)
            self.places[id(made)] = self.places[id(args[0])]
        elif name in REPLAYED and self.is_repeatable:
            places = tuple(self._add(t) for t in (made if isinstance(made, tuple) else (made,)))
            self.steps.append(_Call(function, self._placed(args), kwargs, places))
        else:
            self.is_repeatable = False
        return made

    def report(self, launch: Launch | None) -> None:
        """A launch was made, None if it cannot be made again."""
        self.is_repeatable &= launch is not None
        self.steps.append(launch)

    def source_of(self, pointer: int) -> Source:
        """Where a pointer comes from."""
        if pointer == 0:
            return None
        for place in self.owners:
            begin = self.tensors[place].data_ptr()
            if begin <= pointer < begin + max(1, self.tensors[place].nbytes):
                return place, pointer - begin
        self.is_repeatable = False
        return None

    def _add(self, tensor: Tensor) -> int:
        known = self.places.get(id(tensor))
        if known is not None:  # it was changed in place
            return known
        memory = tensor.untyped_storage().data_ptr()
        if all(self.tensors[owner].untyped_storage().data_ptr() != memory for owner in self.owners):
            self.owners.append(len(self.tensors))
        self.tensors.append(tensor)
        return self.places.setdefault(id(tensor), len(self.tensors) - 1)

    def _placed(self, value: Any) -> Any:
        """An operator's arguments, with places for tensors."""
        if isinstance(value, Tensor):
            self.is_repeatable &= id(value) in self.places
            return _Place(self.places.get(id(value), 0))
        return tuple(map(self._placed, value)) if isinstance(value, tuple | list) else value


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether any share memory without beginning where the other does."""
    parts = sorted((t.data_ptr(), t.nbytes) for t in tensors if t.numel())
    return any(one < other < one + size for (one, size), (other, _) in pairwise(parts))


class Plan:
    """What a recorded call did, to be done again; for one thread alone."""

    def __init__(self, recording: Recording, results: Sequence[Tensor | None], device: torch.device) -> None:
        self.device = device
        self.results = [None if t is None else recording.places[id(t)] for t in results]
        steps = _alive(recording.steps, {place for place in self.results if place is not None})
        sources = {id(s): [recording.source_of(p) for p in s.pointers] for s in steps if not _is_call(s)}
        apart = {place for step in steps if _is_call(step) for place in (*_places(step.args), *step.made)}
        apart |= set(self.results) | set(range(recording.inputs))
        self.blank = [None] * (len(recording.tensors) - recording.inputs)
        self.no_addresses = [0] * (len(self.blank) + 1)  # the last is that of the scratch memory
        # A view's memory is its owner's, which an operator of torch must find as a tensor too.
        self.new = [
            (place, tuple(recording.tensors[place].shape), recording.tensors[place].dtype)
            for place in recording.allocated
            if place in apart
        ]
        self.scratch, within = 0, {}
        for place in recording.allocated:
            if place not in apart:
                within[place] = self.scratch
                self.scratch += -(-recording.tensors[place].nbytes // ALIGNMENT) * ALIGNMENT
        self.runs: list[Run] = []
        for is_call, group in groupby(steps, _is_call):
            if is_call:
                self.runs += [_call_again(call, set(recording.owners)) for call in group]
                continue
            launches = list(group)
            moved = [[_moved(source, within) for source in sources[id(launch)]] for launch in launches]
            self.runs.append(launches[0].again(launches, moved))

    def __call__(self, inputs: Sequence[Tensor], addresses: list[int]) -> tuple[Tensor | None, ...]:
        tensors = [*inputs, *self.blank]
        addresses = [*addresses, *self.no_addresses]
        device = self.device
        for place, shape, dtype in self.new:
            tensor = tensors[place] = torch.empty(shape, dtype=dtype, device=device)
            addresses[place] = tensor.data_ptr()
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            addresses[-1] = scratch.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        for run in self.runs:
            run(tensors, addresses, stream)
        return tuple([None if place is None else tensors[place] for place in self.results])


def _is_call(step: _Call | Launch) -> bool:
    return type(step) is _Call


def _places(value: Any) -> list[int]:
    """Of all tensors among arguments."""
    if type(value) is _Place:
        return [value.number]
    return [place for v in value for place in _places(v)] if type(value) is tuple else []


def _alive(steps: Sequence[_Call | Launch], needed: set[int]) -> list[_Call | Launch]:
    """Without views that nothing but a launch uses, which has addresses of its own for that."""
    alive = []
    for step in reversed(steps):
        if _is_call(step):
            name = step.function._schema.name.removeprefix("aten::")
            if name in VIEWS and needed.isdisjoint(step.made):
                continue
            needed = needed.union(_places(step.args))
        alive.append(step)
    return alive[::-1]


def _moved(source: Source, within: dict[int, int]) -> Source:
    """The source of an address in the scratch memory, where a tensor has gone there."""
    if source is None or source[0] not in within:
        return source
    return -1, within[source[0]] + source[1]


def _call_again(call: _Call, owners: set[int]) -> Run:
    function, args, kwargs, made = call

    def run(tensors: list[Any], addresses: list[int], _: int) -> None:
        results = function(*_filled(args, tensors), **kwargs)
        for place, tensor in zip(made, results if isinstance(results, tuple) else (results,), strict=True):
            tensors[place] = tensor
            if place in owners:
                addresses[place] = tensor.data_ptr()

    return run


def _filled(value: Any, tensors: list[Any]) -> Any:
    """Arguments with tensors in their places."""
    if type(value) is _Place:
        return tensors[value.number]
    return tuple([_filled(v, tensors) for v in value]) if type(value) is tuple else value


class Replayable:
    """A function of tensors, lists of them, numbers and strings, whose second call is recorded.

    Parameters
    ----------
    function : callable
        It returns a tuple of new tensors, None for some. What it does follows from shapes and dtypes, from
        its other arguments, from which tensors begin at one address, and from whether deterministic
        algorithms are asked for. Whatever it does to tensors it does through torch, or through launches that
        are reported to :func:`recording`.
    """

    def __init__(self, function: Callable[..., tuple[Tensor | None, ...]]) -> None:
        self.function = function
        self.of_thread = _Plans()

    def __call__(self, *args: Any) -> tuple[Tensor | None, ...]:
        """Do it; tensors are plain ones of one device, as :mod:`pointproj.ops.bridge.eager` finds them."""
        tensors, facts = _flat(args)
        addresses = list(map(Tensor.data_ptr, tensors))
        if False in map(Tensor.is_contiguous, tensors) or functools.reduce(or_, addresses) % ADDRESSES:
            return self.function(*detached(args))
        device, plans = tensors[0].device, self.of_thread.plans
        shared = [addresses.index(a) for a in addresses] if len(set(addresses)) < len(addresses) else ()
        key = (torch.are_deterministic_algorithms_enabled(), device, *shared, *facts)
        plan = plans.get(key)
        if type(plan) is Plan:
            return plan(tensors, addresses)
        if plan == SEEN:
            made, plans[key] = self._recorded(tensors, device, args)
            return made
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[key] = SEEN if sum(t.nbytes for t in tensors) <= MOST_BYTES else NOT_REPEATABLE
        return self.function(*detached(args))

    def _recorded(
        self, tensors: list[Tensor], device: torch.device, args: Sequence[Any]
    ) -> tuple[tuple[Tensor | None, ...], Plan | str]:
        with Recording(tensors) as recording:
            made = self.function(*detached(args))
        known = all(t is None or recording.places.get(id(t), -1) >= recording.inputs for t in made)
        if recording.is_repeatable and known:
            plan = Plan(recording, made, device)
            if recording.is_repeatable and plan.scratch <= MOST_BYTES:
                return made, plan
        return made, NOT_REPEATABLE


class _Plans(threading.local):
    """Plans by what they are for, or what is known instead."""

    def __init__(self) -> None:
        self.plans: dict[tuple, Plan | str] = {}


def _flat(args: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """All tensors among arguments, also those in lists; shapes and dtypes of these, and everything else."""
    tensors: list[Tensor] = []
    facts: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            tensors.append(a)
            facts += a.shape, a.dtype
        elif type(a) is list:
            members, others = _flat(a)
            tensors += members
            facts += len(a), *others
        else:
            facts.append(a)
    return tensors, facts


def detached(args: Sequence[Any]) -> list[Any]:
    """Tensors, also those in lists, without ``requires_grad``, which foreign libraries trip over."""
    return [
        (a.detach() if a.requires_grad else a)
        if isinstance(a, Tensor)
        else detached(a)
        if isinstance(a, list)
        else a
        for a in args
    ]
