"""The run: plan the rows, then measure workload after workload."""

import logging
from dataclasses import replace

import torch

from pointproj.benchmark import clouds, interop, large, models, start
from pointproj.benchmark.ahead import compile_ahead
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import backend_names, executions, peer_names
from pointproj.benchmark.display import Display
from pointproj.benchmark.peers import prepare_environment
from pointproj.benchmark.processes import Prepared
from pointproj.benchmark.recorder import Recorder
from pointproj.benchmark.results import ResultsFile, Row
from pointproj.config import AllocatorConfig, ConfigError
from pointproj.machine import device_name, machine_columns, slug
from pointproj.runtime import distributed
from pointproj.runtime.devices import choose_device
from pointproj.runtime.distributed import Processes
from pointproj.runtime.memory import configure_allocator

log = logging.getLogger(__name__)

ROOMS = (clouds, interop, large, models, start)  # each plans and measures the rows of its workloads


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
    output = config.output or f"benchmarks/{slug(machine['device'])}.csv"
    file = ResultsFile(output, writes=processes.is_first)
    with Display(shown=processes.is_first) as display, Prepared() as prepared:
        recorder = Recorder(config, device, machine, file, display, prepared)
        _measure(recorder, ahead=device.type == "cuda" and processes.alone)
    return recorder.rows


def _measure(recorder: Recorder, ahead: bool) -> None:
    config, display, device = recorder.config, recorder.display, recorder.device
    display.header(recorder.machine, str(recorder.file.path))
    if ahead:
        models.begin(recorder)
    parts = [
        (name, part)
        for name in config.workloads
        for room in ROOMS
        for part in room.parts(replace(config, workloads=[name]), device.type)
    ]
    display.expect(sum(part.rows for _, part in parts))
    if ahead:
        compile_ahead(config, device, display)
        recorder.prepared.until_ready()
        recorder.mark("ahead, what rows compile and import")
    for name, part in parts:
        if part.rows and recorder.limits.is_over:
            log.warning("minutes=%g are over: %d rows of %s are left out", config.minutes, part.rows, name)
        elif part.rows:
            part.measure(recorder)
    display.footer(recorder.rows, recorder.spent, config.row_s)


def _device_names(device: torch.device, processes: Processes) -> str:
    name = device_name(device)
    return name if processes.alone else f"{processes.count} x {name}"
