"""Where and how a run is executed, and the step that trains its network there."""

import logging
from typing import NamedTuple

import torch

from pointproj.config import Config, ConfigError, nearest
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.ops.registry import load, resolve
from pointproj.ops.registry import names as backend_names
from pointproj.runtime import memory
from pointproj.runtime.compiler import choose_compilers
from pointproj.runtime.devices import choose_device
from pointproj.runtime.distributed import Processes, join
from pointproj.training.losses import loss_function
from pointproj.training.networks import build_model
from pointproj.training.optimizers import build_optimizer
from pointproj.training.step import TrainingStep

log = logging.getLogger(__name__)


class Execution(NamedTuple):
    """Where and how a run is executed."""

    device: torch.device
    backend: str  # name of the operators' backend; not "auto"
    capture: bool  # whether to capture the step in a CUDA graph
    processes: Processes  # those that train together; only the first one writes to the run's folder


def may_capture(config: Config) -> bool:
    """Return whether CUDA graphs may be captured, as far as the config tells before a device is used."""
    name = config.backend.name
    return config.compile and (name not in backend_names() or load(name).WAITS is None)


def choose_execution(config: Config) -> Execution:
    """Choose device and backend as the config says, and log why."""
    device, name = choose_device(config.device), config.backend.name
    known = ("auto", *backend_names())
    if name not in known:
        listed = ", ".join(known)
        raise ConfigError(f"backend.name={name}: expected one of {listed}{nearest(name, known)}")
    backend, why = resolve(name, device.type, config.projector.OPERATOR)
    gpu = device.type == "cuda"
    about = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} threads"
    log.info("device    %s (%s)", device, about)
    log.info("backend   %s: %s", backend, why)
    if config.backend.algorithm is not None:
        load(name).use_algorithm(config.backend.algorithm)
    if name == "cuml":
        load(name).use_exact(config.backend.exact)
    obstacle = None
    if config.compile and gpu:
        choose_compilers(few_kernels=config.projector.FEW_KERNELS)
        obstacle = load(backend).WAITS or memory.graphs_unsupported()
        if obstacle:
            words = "compile=true compiles the model but captures no CUDA graph of the step"
            log.warning("%s: %s", words, obstacle)
    return Execution(device, backend, config.compile and gpu and not obstacle, join())


def new_step(config: Config, execution: Execution, statistics: FieldStatistics | None = None) -> TrainingStep:
    """Make the network, its optimizer, and the step that trains it."""
    model = build_model(config, execution.backend, statistics).to(execution.device)
    optimizer = build_optimizer(config.optimizer, model.parameters(), capturable=execution.capture)
    return TrainingStep(
        model,
        optimizer,
        loss_function(config.target),
        clip=config.optimizer.clip,
        amp=config.training.amp,
        eikonal=config.target.eikonal,
        compile=config.compile,
        capture=execution.capture,
        processes=execution.processes,
    )
