"""Measure how well a trained model reconstructs unseen meshes; or, for target=field, predicts fields.

Every test mesh is sampled in several ways, reconstructed by the model and by baselines that need no training,
and compared with the truth (:mod:`pointproj.geometry.metrics`). The results are a table, CSV files,
reconstructions, and a page of pictures, the worst ones first.
"""

import argparse
import hashlib
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from pointproj.data.clouds import SampledCloud, Sampling, sample_cloud
from pointproj.data.dataset import TEST_SEED
from pointproj.data.errors import DataError
from pointproj.data.layout import MeshFile, find_meshes
from pointproj.data.sources import first_of_classes, unseen_meshes
from pointproj.geometry.baselines import baseline, baselines
from pointproj.geometry.files import parse_mesh, read_content, write_mesh
from pointproj.geometry.isosurfaces import Reconstruction, extract_surface, reconstruct
from pointproj.geometry.meshes import MeshError, normalize
from pointproj.geometry.metrics import Measured, measure, truth_of
from pointproj.geometry.sampling import SurfaceSampler
from pointproj.geometry.watertight import require_alpha_wrap, watertight_truth
from pointproj.geometry.well_posed import label_agreement
from pointproj.inference.evaluate_command import DSR, MOST_WORKERS, SCAN_NOISE, SCAN_POINTS, WORKER_BYTES
from pointproj.inference.evaluate_fields import evaluate_fields
from pointproj.inference.trained_model import TrainedModel, load_trained, target_of
from pointproj.runtime.helpers import HelperProcesses
from pointproj.runtime.run_folder import require_writable
from pointproj.viz.evaluation_page import summary_table, write_csv, write_page, write_summary
from pointproj.viz.renderings import cloud_panel, draw_rows, surface_panel
from pointproj.viz.scenes import write_scene

log = logging.getLogger(__name__)

NETWORK = "network"
FEWEST_MESHES = 4  # helper processes are started from this number on; a mesh takes some ten seconds
Method = Callable[[SampledCloud], Reconstruction]


def samplings(points: int) -> dict[str, Sampling]:
    """Return all ways of sampling a mesh by name: ``points`` samples, or scans as in the literature."""
    return {
        "even": Sampling("even", points),
        "area": Sampling("area", points),
        "scan": Sampling("scan", SCAN_POINTS, SCAN_NOISE),
        "sensors": Sampling("sensors", SCAN_POINTS, SCAN_NOISE),
    }


def _chosen_baselines(names: Sequence[str] | None) -> list[str]:
    """Return the baselines of the arguments, or by default all that can run here."""
    if names is not None:
        return [*names]
    usable = baselines()
    for name, reason in usable.items():
        if reason is not None:
            log.warning("baseline %s is left out: %s", name, reason)
    return [name for name, reason in usable.items() if reason is None]


def _network_method(trained: TrainedModel, side: int) -> Method:
    device = str(trained.device)
    return lambda cloud: reconstruct(trained.field(*cloud), NETWORK, side, cloud=cloud.points, device=device)


def _baseline_methods(names: Sequence[str], device: str) -> dict[str, Method]:
    chosen = {name: baseline(name, device) for name in names}
    return {name: lambda cloud, run=run: run(cloud.points) for name, run in chosen.items()}


def _chosen_samplings(
    names: Sequence[str] | None, points: int | None, trained: TrainedModel
) -> dict[str, Sampling]:
    """Return the samplings of the arguments, or by default all that the model can read."""
    every = samplings(points or trained.config.data.points)
    if not trained.config.projector.sensors:
        if "sensors" in (names or []):
            raise DataError("the model was trained without sensors: leave --samples sensors out")
        del every["sensors"]
    return {name: every[name] for name in names or every if name in every}


@dataclass(frozen=True)
class _Job:
    """The work for each mesh, in this process or in a helper; each process loads the model once."""

    checkpoint: Path
    device: str
    side: int  # points a side of the grid that surfaces are extracted from
    baselines: Sequence[str]
    chosen: Mapping[str, Sampling]
    watertight: bool  # whether meshes are made watertight first, and their interior is the truth
    out: Path

    def __call__(self, file: MeshFile) -> list[Measured]:
        """Reconstruct a mesh from each sampling by each method; return the metrics, and write files.

        The files are ``meshes/NAME-SAMPLES-METHOD.{ply,off}``, ``pictures/NAME.png``, and
        ``views/NAME/*.glb`` for the first sampling, all in the query cube. A mesh that cannot be used, or has
        no inside, is left out with a warning.
        """
        if multiprocessing.parent_process() is not None:  # other processes use the other cores
            torch.set_num_threads(1)
        trained = _loaded(self.checkpoint, self.device)
        device, grid = str(trained.device), trained.config.data.grid
        methods = {NETWORK: _network_method(trained, self.side), **_baseline_methods(self.baselines, device)}
        try:
            content = read_content(file.path)
            mesh = normalize(parse_mesh(content, file.path))
            truth = (watertight_truth if self.watertight else truth_of)(mesh, grid, device=device)
        except MeshError as error:
            log.warning("left out %s: %s", file.path, error.reason)
            return []
        mesh = truth.mesh
        agreement = label_agreement(mesh, truth.grid_inside, device=device)
        sampler = SurfaceSampler(mesh.vertices, mesh.faces)
        identity = int(hashlib.sha256(content).hexdigest()[:16], 16)
        label = extract_surface(np.where(truth.grid_inside, -1.0, 1.0).reshape((grid,) * 3), "label")
        known = {"label": label, "file": mesh}
        known_panels = [surface_panel(*each) for each in known.items()]
        views, rows, measured = {}, [], []
        for samples, sampling in self.chosen.items():
            generator = np.random.default_rng([TEST_SEED, 0, identity])  # as for the test meshes in training
            cloud = sample_cloud(sampler, sampling, generator)
            shown = {}
            for name, method in methods.items():
                started = time.perf_counter()
                solid = method(cloud)
                seconds = time.perf_counter() - started
                of_mesh = file.name, file.class_name, samples, sampling.points, name, agreement
                measured.append(Measured(*of_mesh, measure(solid, truth), seconds))
                shown[name] = solid.mesh
                for suffix in (".ply", ".off"):
                    write_mesh(solid.mesh, self.out / "meshes" / f"{file.name}-{samples}-{name}{suffix}")
            panels = [cloud_panel(f"{sampling.points:,} points", cloud.points)]
            panels += [surface_panel(*each) for each in shown.items()]
            rows.append((samples, [*panels, *known_panels]))
            views = views or {"cloud": cloud.points, **shown, **known}
        draw_rows(self.out / "pictures" / f"{file.name}.png", rows)
        for name, view in views.items():
            write_scene(view, self.out / "views" / file.name / f"{name}.glb")
        return measured


@cache
def _loaded(checkpoint: Path, device: str) -> TrainedModel:
    return load_trained(checkpoint, device)


def _default_workers(device: torch.device) -> int:
    """Return the number of processes that cores and GPU memory allow; more would slow each other down."""
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    if device.type == "cuda":
        workers = min(workers, torch.cuda.mem_get_info(device)[0] // WORKER_BYTES)
    return max(1, workers)


def _test_files(trained: TrainedModel, folder: Path | None, limit: int | None) -> list[MeshFile]:
    if folder is None:
        files = unseen_meshes(trained.config.data, limit)
    else:
        files = first_of_classes([file for file in find_meshes(folder) if file.split == "test"], limit)
    if not files:
        raise DataError(f"there is no test mesh in {folder or trained.config.data.root}")
    return files


def evaluate(given: argparse.Namespace) -> None:
    """Evaluate a checkpoint as the command line says."""
    if target_of(given.checkpoint) == "field":
        evaluate_fields(given.checkpoint, given.out, given.device, given.limit)
        return
    out, watertight = given.out, given.protocol == DSR
    require_writable(out)
    _loaded.cache_clear()  # the file may have changed
    trained = _loaded(given.checkpoint, given.device)
    device, side = str(trained.device), given.side or trained.default_side
    names = _chosen_baselines(given.baselines)
    _baseline_methods(names, device)  # raises an error for a missing baseline before any work
    if watertight:
        require_alpha_wrap()
    files = _test_files(trained, given.meshes, given.limit)
    chosen = _chosen_samplings(given.samples, given.points, trained)
    if watertight and given.samples is None:
        chosen = {name: sampling for name, sampling in chosen.items() if sampling.is_scan}
    sampled = ", ".join(f"{name} ({sampling.points:,} points)" for name, sampling in chosen.items())
    log.info("%s", trained.origin)
    log.info("%d meshes, sampled as %s, surface from %d^3, %s", len(files), sampled, side, device)
    protocol = given.protocol or "pointproj"
    facts = {"checkpoint": given.checkpoint, "side": side, "device": device, "protocol": protocol}
    job = _Job(given.checkpoint, given.device, side, names, chosen, watertight, out)
    measured: dict[MeshFile, list[Measured]] = {file: [] for file in files}
    jobs = {file: partial(job, file) for file in files}
    workers = given.workers or _default_workers(trained.device)
    results: list[Measured] = []
    try:
        with HelperProcesses(workers, fewest_jobs=FEWEST_MESHES) as helpers:
            for file, of_file in helpers.results("evaluating", jobs, "meshes"):
                measured[file] = of_file
                results = [*itertools.chain(*measured.values())]
                if results:
                    write_csv(out / "results.csv", results, facts)  # also if this process is killed
                for result in of_file:
                    if result.method == NETWORK:
                        iou, f_score = result.values["iou"], result.values["f_score"]
                        log.info("%-18s %-5s IoU %.3f, F-score %.3f", file.name, result.samples, iou, f_score)
    finally:  # also of the meshes that were finished before an interruption
        if results:
            write_page(out / "index.html", results, facts)
            write_summary(out, results)
    if not results:
        raise DataError(f"none of the {len(files)} meshes has an inside, so there is nothing to compare")
    log.info("%s", summary_table(results))
    log.info("pictures, worst first: %s; in its folder summary.md, CSV files, meshes/", out / "index.html")
