"""The run: plan the rows, then measure workload after workload."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from pointproj.benchmark import import_time, interop, large, lists, models, start
from pointproj.benchmark.ahead import compile_ahead
from pointproj.benchmark.clouds import measure_workload
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import backend_names, peer_names
from pointproj.benchmark.display import Display
from pointproj.benchmark.peers import prepare_environment
from pointproj.benchmark.plan import entries, executions
from pointproj.benchmark.recorder import Recorder
from pointproj.benchmark.results import ResultsFile, Row
from pointproj.benchmark.waiting import WaitingProcesses
from pointproj.benchmark.workloads import workloads
from pointproj.config import AllocatorConfig, ConfigError
from pointproj.machine import device_name, machine_columns, slug
from pointproj.runtime import distributed
from pointproj.runtime.devices import choose_device
from pointproj.runtime.distributed import Processes
from pointproj.runtime.memory import configure_allocator

log = logging.getLogger(__name__)

OTHER_WORKLOADS = {  # each plans and measures its own rows
    **{"lists": lists, "interop": interop, "large": large, "gino": models, "geotransolver": models},
    **{"import": import_time, "start": start},
}


def run(config: BenchConfig) -> list[Row]:
    """Measure what the config asks for.

    Parameters
    ----------
    config : BenchConfig
        Checked, from :func:`pointproj.benchmark.config.to_bench_config`.

    Returns
    -------
    list of Row
        In the order in which they were measured. Each is in the CSV file as soon as it is measured.

    Raises
    ------
    ConfigError, DeviceError, AllocatorUnavailable
        Before anything is measured.
    KeyboardInterrupt
        After Ctrl-C; the file holds the rows up to then.
    """
    prepare_environment()
    configure_allocator(AllocatorConfig(name=config.gpu_memory))
    device = choose_device(config.device)
    backend_names(config.backends), peer_names(config.peers), executions(config, device.type)
    processes = distributed.join()
    if not processes.alone and config.workloads != ["large"]:
        raise ConfigError("several processes measure one workload together: write workloads=[large]")
    machine = {**machine_columns(device), "device": _device_names(device, processes)}
    machine["date"] = config.started or machine["date"]
    file = ResultsFile(config.output or _default_output(machine), writes=processes.is_first)
    with Display(shown=processes.is_first) as display, WaitingProcesses() as waiting:
        recorder = Recorder(config, device, machine, file, display, waiting)
        _measure(recorder)
    return recorder.rows


def _measure(recorder: Recorder) -> None:
    config, display = recorder.config, recorder.display
    display.header(recorder.machine, str(recorder.file.path))
    ahead = recorder.device.type == "cuda" and distributed.join().alone
    if ahead:
        models.begin(recorder, models.planned(config, "cuda"))
    parts = [(name, *part) for name in config.workloads for part in _parts(recorder, name)]  # imports peers
    display.expect(sum(rows for _, rows, _ in parts))
    if ahead:
        compile_ahead(config, recorder.device, display)
        recorder.waiting.until_ready()
        recorder.mark("ahead, what rows compile and import")
    for name, rows, measure in parts:
        if rows and recorder.projection.is_over:
            log.warning("minutes=%g are over: %d rows of %s are left out", config.minutes, rows, name)
        elif rows:
            measure()
    display.footer(recorder.rows, recorder.spent, config.row_s)


def _parts(recorder: Recorder, name: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """How many rows each part of a named workload has, and what measures it."""
    config, device_type = replace(recorder.config, workloads=[name]), recorder.device.type
    if name in OTHER_WORKLOADS:
        other = OTHER_WORKLOADS[name]
        planned = other.planned(config, device_type)
        yield len(planned), partial(other.measure, recorder, planned)
    for workload in workloads(config, device_type):
        of = [*entries(config, workload, device_type)]
        yield sum(entry.rows for entry in of), partial(measure_workload, recorder, workload, of)


def _device_names(device: torch.device, processes: Processes) -> str:
    name = device_name(device)
    return name if processes.alone else f"{processes.count} x {name}"


def _default_output(machine: dict[str, str]) -> str:
    return f"benchmarks/{slug(machine['device'])}.csv"
