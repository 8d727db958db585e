"""CUDA graphs: what is recorded once and replayed, and whether it can be."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pointproj.ops.registry import waits
from pointproj.runtime.memory import graphs_unsupported

STEPS_BEFORE_CAPTURE = 3  # real steps: they compile, tune kernels and make the optimizer's state


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
    pool : tuple, optional
        Memory shared with other recorded calls, of which none may run at the same time; each result is
        overwritten by a replay of any.
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


def capture_obstacle(backend: str) -> str | None:
    """Why no step with this backend can be captured in a CUDA graph, or None."""
    return graphs_unsupported() or waits(backend)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block's GPU work on ``stream``, after what is queued now and before what comes after."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
