"""The run: plan the rows, then measure workload after workload."""

import torch

from pointproj.benchmark import import_time, interop, large, lists, models
from pointproj.benchmark.clouds import measure_workload
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import backend_names, peer_names
from pointproj.benchmark.display import Display
from pointproj.benchmark.peers import prepare_environment
from pointproj.benchmark.plan import entries, executions
from pointproj.benchmark.recorder import Recorder
from pointproj.benchmark.results import ResultsFile, Row
from pointproj.benchmark.workloads import workloads
from pointproj.config import AllocatorConfig, ConfigError
from pointproj.machine import device_name, machine_columns, slug
from pointproj.runtime import distributed
from pointproj.runtime.devices import choose_device
from pointproj.runtime.distributed import Processes
from pointproj.runtime.memory import configure_allocator

OTHER_WORKLOADS = (lists, interop, large, models, import_time)  # each plans and measures its own rows


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
    file = ResultsFile(config.output or _default_output(machine), writes=processes.is_first)
    with Display(shown=processes.is_first) as display:
        recorder = Recorder(config, device, machine, file, display)
        _measure(recorder)
    return recorder.rows


def _measure(recorder: Recorder) -> None:
    config, device_type, display = recorder.config, recorder.device.type, recorder.display
    display.header(recorder.machine, str(recorder.file.path))
    planned = [(w, [*entries(config, w, device_type)]) for w in workloads(config, device_type)]
    others = [(workload, workload.planned(config, device_type)) for workload in OTHER_WORKLOADS]
    rows = [entry.rows for _, of in planned for entry in of] + [len(of) for _, of in others]
    display.expect(sum(rows))
    for workload, of in planned:
        if of:
            measure_workload(recorder, workload, of)
    for workload, of in others:
        if of:
            workload.measure(recorder, of)
    display.footer(recorder.rows)


def _device_names(device: torch.device, processes: Processes) -> str:
    name = device_name(device)
    return name if processes.alone else f"{processes.count} x {name}"


def _default_output(machine: dict[str, str]) -> str:
    return f"benchmarks/{slug(machine['device'])}.csv"
