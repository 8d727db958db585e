"""Turn Warp launches into a torch operator: compilable, capturable, differentiable.

    @warp_op("demo::rosenbrock", outputs=lambda xy, **_: {"z": (xy.shape[:1], xy.dtype)},
             differentiable=("xy",), backward=ADJOINT)
    def rosenbrock(launch, xy: Tensor, a: float, b: float, *, z: Tensor):
        launch(rosenbrock_kernel, len(xy), xy, a, b, z)

The launcher names its inputs, then its outputs, and passes torch tensors straight to kernels. torch owns
all memory, and launches go to torch's current stream, so torch alone decides on memory, CUDA graphs and
streams. Conversions copy nothing, and never allocate a gradient (which would synchronise the device).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.open_numbers import is_float
from pointproj.ops.bridge.torch_op import Spec, empty_like, opaque, signed, torch_op, with_defaults
from pointproj.ops.bridge.warp_checks import CheckedLaunch, kinds_of
from pointproj.ops.bridge.warp_launch import Launch, has_gradient
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

wp.config.log_level = wp.LOG_WARNING  # the banner and every kernel that loads would land in the log

ADJOINT = "adjoint"  # backward=ADJOINT: Warp's own reverse mode of the forward's kernels


def warp_op(
    name: str,
    *,
    outputs: Callable[..., dict[str, Spec]],
    differentiable: Sequence[str] = (),
    grad_outputs: int = 1,
    backward: Callable[..., None] | str | None = None,
    second_backward: Callable[..., None] | None = None,
    mutates_args: Sequence[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., Tensor | tuple[Tensor, ...]]]:
    """Decorate a launcher, ``launcher(launch, *inputs, *outputs)``, to make it a torch operator.

    Parameters
    ----------
    name : str
        ``"namespace::operator"``.
    outputs : callable
        Takes the inputs; shape and dtype of each output by name. The launcher gets them allocated and
        uninitialised, as the arguments that carry these names. It may name some of the inputs and end in
        ``**others``; the launcher's outputs are then its keyword-only arguments. torch.compile makes code for
        each value of a number that it names, and one code for all values of the others.
    differentiable : sequence of str
        Names of the inputs that get a gradient.
    grad_outputs : int
        How many outputs, from the first, a gradient can arrive for.
    backward : callable, ADJOINT or None
        :data:`ADJOINT`, or a launcher whose arguments say what it needs, by name: ``launch``, any input,
        any output, ``grad_<output>`` (its upstream gradient) and ``d_<input>`` (the gradient to fill,
        allocated and uninitialised; None where torch does not need it). ``**values`` takes all others.

        Warp's reverse mode differentiates launches only. Between them the forward may allocate, fill and
        view tensors, and compute what has no gradient. Warp's reverse mode does not repeat loops of unknown
        length: the sum of such a loop must not enter a quotient or another nonlinear term in the same kernel.
    second_backward : callable or None
        A launcher with, besides those, ``direction_<input>`` (upstream gradient of ``d_<input>``),
        ``d_grad_<output>`` and ``d_<input>`` to fill. Without it ``create_graph=True`` raises when, and
        only when, something differentiates the gradient.
    mutates_args : sequence of str
        Names of the inputs that kernels write to. Such an operator has no gradient, and need have no outputs.

    Returns
    -------
    callable
        The operator. Its arguments are the inputs, with the launcher's defaults; tensors may be optional
        (``Tensor | None``).

    Raises
    ------
    TypeError
        At the first call with arguments of some dtypes: the launcher calls ``wp.launch``, or its kernels
        write to an input that ``mutates_args`` does not name. For :data:`ADJOINT` also: a launch gets what
        torch computed from an input with gradient, or a grid that is gone before the adjoint runs.

    Notes
    -----
    Tensors must be dense where the kernel's array type is a vector or matrix; other strides are passed on.
    For an argument of ``wp.uint64`` a launch takes a ``wp.HashGrid`` or ``wp.Mesh`` itself, and keeps it.
    Generic kernels are compiled for the dtypes of the tensors.
    """

    def decorate(launcher: Callable[..., None]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        adjoint = backward == ADJOINT
        bridge = _Bridge(name, launcher, outputs, tuple(differentiable), tuple(mutates_args), adjoint)
        if mutates_args:
            return bridge.mutating()
        first = bridge.adjoint if adjoint else backward and bridge.first(backward)
        made = tuple[(Tensor,) * len(bridge.output_names)]
        return torch_op(
            name,
            signed(lambda *args: bridge.run(args)[1], bridge.annotations, made, bridge.defaults),
            lambda *args: tuple(bridge.specs(args).values()),
            differentiable=differentiable,
            grad_outputs=grad_outputs,
            backward=first,
            second_backward=second_backward and bridge.second(second_backward),
            numbers=bridge.numbers,
        )

    return decorate


class _Bridge:
    """A launcher's forward, backward and second backward as functions of tensors."""

    def __init__(
        self,
        name: str,
        launcher: Callable,
        outputs: Callable,
        differentiable: tuple[str, ...],
        mutable: tuple[str, ...],
        has_adjoint: bool,
    ):
        self.name, self.launcher, self.outputs = name, launcher, outputs
        self.differentiable, self.mutable, self.has_adjoint = differentiable, mutable, has_adjoint
        self.checked: set[tuple] | None = None if name.startswith("pointproj::") else set()  # ours have tests
        parameters = list(inspect.signature(launcher, eval_str=True).parameters.values())[1:]
        names = [p.name for p in parameters]
        read = inspect.signature(outputs).parameters
        inputs = list(read)
        if any(p.kind is p.VAR_KEYWORD for p in read.values()):
            inputs = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
            read = [p.name for p in read.values() if p.kind is not p.VAR_KEYWORD]
        self.inputs = parameters[: len(inputs)]
        self.annotations = {p.name: p.annotation for p in self.inputs}
        self.defaults = [p.default for p in self.inputs if p.default is not p.empty]
        self.output_names = names[len(inputs) :]
        if names[: len(inputs)] != inputs:
            raise TypeError(
                f"{launcher.__name__}: after `launch`, its arguments must begin with those of `outputs`, "
                f"{inputs}; got {names}"
            )
        self.read = [names.index(name) for name in read]  # by the function of the outputs
        self.numbers = [n for n, kind in self.annotations.items() if is_float(kind) and n not in read]
        self.tensor = next(i for i, p in enumerate(self.inputs) if p.annotation is Tensor)  # always there

    def specs(self, args: Sequence[Any]) -> dict[str, Spec]:
        """Shape and dtype of each output, for the inputs in their order."""
        return self.outputs(*[args[i] for i in self.read])

    def run(self, args: Sequence[Any]) -> tuple[Launch, tuple[Tensor, ...]]:
        device, specs = args[self.tensor].device, self.specs(args)
        if list(specs) != self.output_names:
            raise TypeError(f"{self.launcher.__name__} fills {self.output_names}; declared are {list(specs)}")
        made = {n: torch.empty(shape, dtype=dtype, device=device) for n, (shape, dtype) in specs.items()}
        kinds = kinds_of(args) if self.checked is not None else None
        if kinds is None or kinds in self.checked:
            launch = Launch(device)
            self.launcher(launch, *args, **made)
        else:
            launch = self.checking(device, args, made)
            self.checked.add(kinds)
        return launch, tuple(made.values())

    def checking(self, device: torch.device, args: Sequence[Any], made: dict[str, Tensor]) -> Launch:
        """Call the launcher with checks of what it does."""
        inputs = dict(zip(self.annotations, args, strict=True))
        launch = CheckedLaunch(device, self.name, inputs, self.differentiable if self.has_adjoint else ())
        with launch.watching(self.mutable):
            self.launcher(launch, *args, **made)
        launch.check_owners()
        return launch

    def mutating(self) -> Callable[..., Any]:
        """An operator that writes to some of its inputs, which torch does not differentiate."""
        count = len(self.output_names)
        if self.differentiable:
            raise TypeError(
                f"{self.name}: torch differentiates no operator that writes to its inputs: leave out "
                "mutates_args, and make what is written an output, or leave out differentiable"
            )

        def of(made: Sequence[Tensor]) -> Any:
            return tuple(made) if count > 1 else made[0] if made else None

        def function(*args: Any) -> Any:
            return of(self.run(with_defaults(args, len(self.inputs), self.defaults))[1])

        def fake(*args: Any) -> Any:
            args = with_defaults(args, len(self.inputs), self.defaults)
            like = args[self.tensor]
            return of([like.new_empty(shape, dtype=dtype) for shape, dtype in self.specs(args).values()])

        returns = tuple[(Tensor,) * count] if count > 1 else Tensor if count else None
        return opaque(
            self.name, signed(function, self.annotations, returns, self.defaults), fake, self.mutable
        )

    def adjoint(self, grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
        # The forward runs again into fresh outputs: reverse mode needs every intermediate, and kernels
        # that accumulate would spoil the saved ones. Inputs are copied, since gradients of those that share
        # memory would be added up, and torch.compile is promised contiguous ones.
        whole = torch.contiguous_format
        copies = {n: v.clone(memory_format=whole) for n, v in saved.inputs.items() if has_gradient(v)}
        inputs = saved.inputs | copies
        launch, made = self.run(list(inputs.values()))
        gradients = _Gradients()
        for output, grad in zip(made, grads, strict=False):
            gradients.of(output).copy_(grad)
        launch.reverse(gradients)
        return tuple(gradients.of(inputs[n]) if needs[n] else None for n in self.differentiable)

    def first(self, launcher: Callable[..., None]) -> Callable:
        fill = self._filler(launcher)

        def backward(grads: tuple, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
            made = {f"d_{n}": empty_like(saved.inputs[n]) if needs[n] else None for n in self.differentiable}
            return fill(saved, grads, made)

        return backward

    def second(self, launcher: Callable[..., None]) -> Callable:
        fill = self._filler(launcher)

        def second_backward(directions: tuple, grads: tuple, saved: Saved) -> OptionalTensors:
            values = {n: saved.inputs[n] for n in self.differentiable}
            made = {f"d_grad_{n}": empty_like(g) for n, g in zip(self.output_names, grads, strict=False)}
            made |= {f"d_{n}": None if v is None else empty_like(v) for n, v in values.items()}
            pairs = zip(values.items(), directions, strict=True)
            known = {f"direction_{n}": None if v is None else d for (n, v), d in pairs}
            return fill(saved, grads, made, **known)

        return second_backward

    def _filler(self, launcher: Callable) -> Callable[..., OptionalTensors]:
        """Calls a launcher with those of all values that its arguments name; returns what it filled."""
        parameters = inspect.signature(launcher).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = [p.name for p in parameters]
        grad_names = [f"grad_{name}" for name in self.output_names]
        tensor = self.inputs[self.tensor].name

        def fill(saved: Saved, grads: tuple, made: dict[str, Any], **known: Any) -> OptionalTensors:
            known |= {"launch": Launch(saved.inputs[tensor].device), **saved.inputs, **made}
            known.update(zip(self.output_names, saved.outputs, strict=True))
            known.update(zip(grad_names, grads, strict=False))
            launcher(**(known if takes_all else {name: known[name] for name in names}))
            return tuple(made.values())

        return fill


class _Gradients:
    """Gradient buffers, one for each piece of memory, so that views of a tensor share one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The gradient of a tensor, laid out as the tensor; 0 at first."""
        memory = tensor.untyped_storage()
        key = (memory.data_ptr(), tensor.dtype)
        if key not in self._buffers:
            self._buffers[key] = tensor.new_zeros(memory.nbytes() // tensor.element_size())
        return self._buffers[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
