"""PhysicsNeMo's profiler around a bounded number of training steps.

PhysicsNeMo keeps one profiler a process and takes tools only until it is first entered, while a sweep runs
many jobs in one process: each recording therefore begins with a fresh one.
"""

import importlib.util
import linecache
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pointproj.config import ProfilerConfig

log = logging.getLogger(__name__)

TOP = 10  # operations or lines shown in the log; the files hold all


class ProfilerUnavailable(RuntimeError):  # noqa: N818 - named as BackendUnavailable
    """The profiler asked for is not installed; the message holds the command that installs it."""


class StepProfiler:
    """Record some training steps: ``start()``, then ``step()`` after each step, then ``close()``.

    Without a profiler (``profiler=none``) all three do nothing.

    Parameters
    ----------
    config : ProfilerConfig
        Which profiler, the steps to let pass (``skip``) and the steps to record (``steps``).
    folder : Path
        The run's folder; files are written below ``folder/profile``.
    functions : sequence of callable
        What ``profiler=line_profile`` times line by line.
    """

    def __init__(
        self, config: ProfilerConfig, folder: Path, functions: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self._config = config
        self._functions = functions
        self._folder = folder / "profile"
        self._recorder: TorchRecorder | LineRecorder | None = None
        self._taken = 0
        # A step more before the recording lets the tracer set itself up outside of what it reports.
        self._warmup = min(1, config.skip)

    @property
    def recording(self) -> bool:
        """Whether a recorder is attached to the steps at this moment."""
        return self._recorder is not None

    def start(self) -> None:
        """To be called before the first step."""
        config = self._config
        if config.name == "none" or self._taken != config.skip - self._warmup:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if config.name == "torch":
            self._recorder = TorchRecorder(self._folder, self._warmup, config.steps)
        else:
            self._recorder = LineRecorder(self._folder, self._warmup, self._functions)

    def step(self) -> None:
        """To be called after each step."""
        self._taken += 1
        if self._recorder is None:
            self.start()
            return
        self._recorder.step()
        if self._taken == self._config.skip + self._config.steps:
            self._end(self._config.steps)

    def close(self) -> None:
        """To be called after the last step; writes what was recorded if the recording is still on."""
        config, recorded = self._config, self._taken - self._config.skip
        if config.name != "none" and recorded <= 0:
            log.warning(
                "profiler: nothing recorded, training took %d steps; recording begins after profiler.skip=%d",
                self._taken,
                config.skip,
            )
        elif self._recorder is not None:
            log.warning("profiler: only %d of profiler.steps=%d steps were taken", recorded, config.steps)
        if self._recorder is not None:
            self._end(recorded)

    def _end(self, recorded: int) -> None:
        recorder, self._recorder = self._recorder, None
        rows = recorder.finish(recorded)
        _forget_profilers()
        if rows:
            log.info("profiler: %d steps recorded in %s", recorded, self._folder)
        for row in rows:
            log.info("  %s", row)


def require_profiler(config: ProfilerConfig) -> None:
    """Raise :class:`ProfilerUnavailable` unless the package behind ``profiler=`` is installed."""
    if config.name == "line_profile" and importlib.util.find_spec("line_profiler") is None:
        raise ProfilerUnavailable(
            "profiler=line_profile needs a package that is not installed: pip install 'line_profiler>=5', or "
            "write profiler=torch"
        )


class TorchRecorder:
    """Torch's profiler: ``torch/trace.json``, ``torch/cpu_time.txt`` and ``torch/gpu_time.txt``."""

    def __init__(self, folder: Path, warmup: int, steps: int) -> None:
        from torch.profiler import schedule

        self._profiler = _fresh_profiler(folder)
        self._tool = self._profiler.enable("torch")
        # Memory and shapes of every operation make the trace many times larger than its use.
        self._tool.reconfigure(
            schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            record_shapes=False,
            profile_memory=False,
            with_flops=False,
        )
        self._profiler.__enter__()
        self.step = self._profiler.step

    def finish(self, steps: int) -> list[str]:
        """Stop; of any recorded steps write the files, and return the operations that took longest."""
        self._profiler.__exit__(None, None, None)
        if steps <= 0:
            return []
        self._profiler.finalize()
        return _top_operations(self._tool._profiler.key_averages(), steps)


class LineRecorder:
    """Time by source line of some functions: ``line_profiler/profiler_stats.txt``."""

    def __init__(self, folder: Path, warmup: int, functions: Sequence[Callable[..., Any]]) -> None:
        self._waiting = warmup + 1
        self._profiler = _fresh_profiler(folder)
        tool = self._profiler.enable("line_profile")
        self._profiler.initialize()
        self._lines = tool._profiler
        for function in functions:
            self._profiler(function)  # registers the code; the wrapper it returns is not used
        self.step()

    def step(self) -> None:
        """To be called after each step."""
        self._waiting -= 1
        if self._waiting == 0:
            self._lines.enable_by_count()

    def finish(self, steps: int) -> list[str]:
        """Stop; of any recorded steps write the file, and return the lines that took longest."""
        if steps <= 0:
            return []
        self._lines.disable_by_count()
        self._profiler.finalize()
        return _top_lines(self._lines.get_stats(), steps)


def _fresh_profiler(folder: Path) -> Any:
    """Return a PhysicsNeMo profiler that no earlier job has used, writing below ``folder``."""
    from physicsnemo.utils.profiling import Profiler

    _forget_profilers()
    profiler = Profiler()
    profiler.output_path = folder
    return profiler


def _forget_profilers() -> None:
    """Detach all tools, so that neither the next job nor the end of the process writes them again."""
    from physicsnemo.utils.profiling import Profiler

    Profiler._profilers.clear()
    Profiler._clear_instance()


def _top_operations(events: Any, steps: int) -> list[str]:
    """Lay out the operations with most time of their own: kernels if a GPU ran any, else CPU operations."""
    from torch.autograd import DeviceType

    events = [
        event for event in events if not event.key.startswith("ProfilerStep") and not event.is_user_annotation
    ]
    kernels = [
        (event, event.self_device_time_total) for event in events if event.device_type == DeviceType.CUDA
    ]
    timed = kernels or [(event, event.self_cpu_time_total) for event in events]
    total = sum(time for _, time in timed) or 1.0
    timed.sort(key=lambda pair: pair[1], reverse=True)
    rows = [f"{'share':>6} {'ms/step':>9} {'calls/step':>10}  {'GPU kernel' if kernels else 'operation'}"]
    for event, time in timed[:TOP]:
        rows.append(
            f"{time / total:6.1%} {time / 1e3 / steps:9.3f} {event.count / steps:10.1f}  {event.key[:70]}"
        )
    return rows


def _top_lines(stats: Any, steps: int) -> list[str]:
    """Lay out the source lines with most time."""
    timed = [
        (time * stats.unit * 1e3 / steps, hits / steps, Path(file), line)
        for (file, _, _), lines in stats.timings.items()
        for line, hits, time in lines
    ]
    timed.sort(key=lambda row: row[0], reverse=True)
    rows = [f"{'ms/step':>9} {'hits/step':>9}  line"]
    for milliseconds, hits, file, line in timed[:TOP]:
        source = linecache.getline(str(file), line).strip()
        rows.append(f"{milliseconds:9.3f} {hits:9.1f}  {file.name}:{line}  {source[:70]}")
    return rows
