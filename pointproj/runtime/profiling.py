"""A profiler around a bounded number of training steps: PhysicsNeMo's, or NVTX ranges for Nsight Systems.

PhysicsNeMo has one profiler for each process, which accepts tools only until it is first entered. But a sweep
runs many jobs in one process. So each recording begins with a new profiler.
"""

import importlib.util
import linecache
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pointproj.config import ProfilerConfig

log = logging.getLogger(__name__)

TOP = 10  # operations or lines shown in the log; the files have all


class ProfilerUnavailable(RuntimeError):  # noqa: N818 - named as BackendUnavailable
    """The requested profiler is not installed; the message has the command that installs it."""


def require_profiler(config: ProfilerConfig) -> None:
    """Raise :class:`ProfilerUnavailable` unless the package or device behind ``profiler=`` is there."""
    if config.times_lines and importlib.util.find_spec("line_profiler") is None:
        raise ProfilerUnavailable(
            "profiler=line_profile needs a package that is not installed: pip install 'line_profiler>=5', or "
            "write profiler=torch"
        )
    if config.name == "nvtx" and not torch.cuda.is_available():
        raise ProfilerUnavailable("profiler=nvtx needs a GPU, and torch finds none: write profiler=torch")


class StepProfiler:
    """Records some training steps: call ``step()`` after each step, and ``close()`` at the end.

    Files are written below ``folder/profile``. ``functions`` are those whose lines are timed.
    With ``profiler=none`` nothing is recorded.
    """

    def __init__(
        self, config: ProfilerConfig, folder: Path, functions: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self._config = config
        self._functions = functions
        self._folder = folder / "profile"
        self.recording: Any = None  # PhysicsNeMo's profiler, while it is attached to the steps
        # The profilers of torch and of line_profiler in it.
        self._torch: Any = None
        self._lines: Any = None
        self._taken = 0
        # torch's tracer starts one step earlier, so that its setup is not part of the recording.
        self._warmup = min(1, config.skip) if config.name == "torch" else 0
        self._start_if_due()

    def step(self) -> None:
        """Call this after each step."""
        self._taken += 1
        if self.recording is None:
            self._start_if_due()
            return
        self.recording.step()
        if self._taken == self._config.skip:
            self._start_lines()
        elif self._taken == self._config.skip + self._config.steps:
            self._end(self._config.steps)

    def close(self) -> None:
        """Call this after the last step; it ends and writes a recording that is still running."""
        config, recorded = self._config, self._taken - self._config.skip
        if config.name != "none" and recorded <= 0:
            words = "nothing recorded, training took %d steps; recording begins after profiler.skip=%d"
            log.warning(f"profiler: {words}", self._taken, config.skip)
        elif self.recording:
            log.warning("profiler: only %d of profiler.steps=%d steps were taken", recorded, config.steps)
        if self.recording:
            self._end(recorded)

    def _start_if_due(self) -> None:
        config = self._config
        if config.name == "none" or self._taken != config.skip - self._warmup:
            return
        if config.name == "nvtx":
            self.recording = NvtxRanges(config.shapes)
            return
        from physicsnemo.utils.profiling import Profiler

        _forget_profilers()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.recording = profiler = Profiler()
        profiler.output_path = self._folder
        of_torch = profiler.enable("torch") if config.name == "torch" else None
        of_lines = profiler.enable("line_profile") if config.times_lines else None
        if of_torch:
            from torch.profiler import schedule

            steps = schedule(wait=0, warmup=self._warmup, active=config.steps, repeat=1)
            recorded = {"record_shapes": config.shapes, "profile_memory": config.memory}
            of_torch.reconfigure(schedule=steps, with_flops=config.flops, with_stack=config.stack, **recorded)
        profiler.initialize()
        if of_lines:
            self._lines = of_lines._profiler
            for function in self._functions:
                of_lines(function)  # registers the function; the returned wrapper is not used
        if of_torch:
            profiler.__enter__()
            self._torch = of_torch._profiler
        if self._taken == config.skip:
            self._start_lines()

    def _start_lines(self) -> None:
        if self._lines:  # not while torch warms up
            self._lines.enable_by_count()

    def _end(self, recorded: int) -> None:
        """Stop the recording; if steps were recorded, write the files, and log what took longest."""
        profiler, self.recording = self.recording, None
        if self._config.name == "nvtx":
            profiler.close()
            return
        if self._lines and self._taken >= self._config.skip:
            self._lines.disable_by_count()
        if self._torch:
            profiler.__exit__(None, None, None)
        if recorded > 0:
            profiler.finalize()
            self._complete_tables()
            log.info("profiler: %d steps recorded in %s", recorded, self._folder)
            for unit, timed in self._timed():
                timed.sort(key=lambda row: row[0], reverse=True)
                total = sum(row[0] for row in timed) or 1.0
                log.info("  %6s %9s %10s  %s", "share", "ms/step", "calls/step", unit)
                for milliseconds, calls, name in timed[:TOP]:
                    share, each = milliseconds / total, milliseconds / recorded
                    log.info("  %6s %9.3f %10.1f  %s", f"{share:.1%}", each, calls / recorded, name)
        _forget_profilers()

    def _complete_tables(self) -> None:
        """Add a table by the shapes of inputs, and remove that of a GPU where there was none."""
        if not self._torch:
            return
        folder = self._folder / "torch"
        if not torch.cuda.is_available():
            (folder / "gpu_time.txt").unlink(missing_ok=True)
        if self._config.shapes:
            by_shape = self._torch.key_averages(group_by_input_shape=True).table(
                sort_by="self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            )
            (folder / "by_shape.txt").write_text(by_shape, encoding="utf-8")

    def _timed(self) -> Iterator[tuple[str, list[tuple[float, int, str]]]]:
        """Yield the kinds of what was timed, and rows of milliseconds, calls and name.

        If there were GPU kernels, they are yielded instead of torch's operations.
        """
        if self._lines:
            yield "line", [*_lines(self._lines.get_stats())]
        if not self._torch:
            return
        from torch.autograd import DeviceType

        averages = (event for event in self._torch.key_averages() if not event.is_user_annotation)
        events = [event for event in averages if not event.key.startswith("ProfilerStep")]
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        unit, clock = ("GPU kernel", "device") if kernels else ("operation", "cpu")
        name = f"self_{clock}_time_total"
        yield unit, [(getattr(e, name) / 1e3, e.count, e.key[:70]) for e in kernels or events]


class NvtxRanges:
    """A range for each step and, inside, for each operator of ours and of torch, in C++ and in backwards.

    ``nsys profile --capture-range cudaProfilerApi`` records these steps alone. ``shapes`` adds shapes.
    """

    def __init__(self, shapes: bool) -> None:
        torch.cuda.profiler.start()
        self._of_operators = torch.autograd.profiler.emit_nvtx(record_shapes=shapes)
        self._of_operators.__enter__()
        torch.cuda.nvtx.range_push("step")

    def step(self) -> None:
        """End the range of a step, and begin the next."""
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_push("step")

    def close(self) -> None:
        """End the recording."""
        torch.cuda.nvtx.range_pop()
        self._of_operators.__exit__(None, None, None)
        torch.cuda.profiler.stop()


def _lines(stats: Any) -> Iterator[tuple[float, int, str]]:
    for (file, _, _), lines in stats.timings.items():
        for line, hits, time in lines:
            source = linecache.getline(file, line).strip()
            yield time * stats.unit * 1e3, hits, f"{Path(file).name}:{line}  {source[:70]}"


def _forget_profilers() -> None:
    """Detach all tools, so that their results are not written again by the next job or at the end."""
    from physicsnemo.utils.profiling import Profiler

    Profiler._profilers.clear()
    Profiler._clear_instance()
