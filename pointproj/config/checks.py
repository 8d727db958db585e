"""Checks of a config: single values out of bounds, and values that conflict with others."""

from collections.abc import Iterator
from pathlib import Path

from pointproj.config.networks import NETWORKS
from pointproj.config.schema import AllocatorConfig, AugmentationConfig, Config
from pointproj.config.targets import TARGETS
from pointproj.config.values import nearest, value_problems

FEWEST_POINTS = 16  # fewer points do not describe a shape


def problems_of(config: Config) -> Iterator[str]:
    """Yield every reason why a config cannot run, with what to write instead."""
    yield from value_problems(config, "")
    yield from _network_problems(config)
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        listed = ",".join(str(beta) for beta in betas)
        yield f"optimizer.betas=[{listed}]: expected two numbers from 0 to below 1"
    if config.resume not in (None, "auto") and not Path(config.resume).exists():
        yield f"resume={config.resume}: there is no such file; expected auto or the path of a checkpoint"
    yield from _misplaced(config)
    yield from _data_problems(config)
    yield from _query_problems(config)
    if config.profiler.times_lines and config.compile:
        written = "profiler=line_profile" if config.profiler.name == "line_profile" else "profiler.lines=true"
        yield (
            f"{written} times lines of Python, which a compiled model does not run: "
            "write compile=false, or profiler=torch"
        )
    yield from _allocator_problems(config.allocator)


def _misplaced(config: Config) -> Iterator[str]:
    """Yield a problem for each value that belongs to another choice of its group."""
    data, allocator = config.data, config.allocator
    generated = "furniture", "mixed"
    values = [
        ("backend", "algorithm", config.backend.algorithm, ("cuml",), "leave it out"),
        ("backend", "exact", "" if config.backend.exact else "false", ("cuml",), "leave it out"),
        ("data", "download", data.download, ("modelnet10",), "leave it out"),
        ("data", "varied", data.varied, generated, "leave it out"),
        ("data", "defects", data.defects, generated, "leave it out"),
        ("data", "variants", data.variants, generated, "leave it out"),
        ("data", "fields", data.fields, ("fields", "flow"), "leave it out"),
        ("data", "repeats", data.repeats > 1 and data.repeats, ("mixed",), "write training.epochs instead"),
        ("allocator", "expandable_segments", allocator.expandable_segments, ("torch",), "leave it out"),
        *(
            ("allocator", key, getattr(allocator, key), ("rmm",), "write allocator=rmm, or leave it out")
            for key in ("resource", "initial_gib", "maximum_gib")
        ),
    ]
    for group, key, given, readers, onwards in values:
        name = getattr(config, group).name
        if given and name not in readers:
            written = "true" if given is True else given
            choices = " and ".join(f"{group}={reader}" for reader in readers)
            yield f"{group}.{key}={written} is for {choices}, got {group}={name}: {onwards}"
    if config.device == "cpu":
        why = "GPU memory and device=cpu uses none: leave one of them out"
        if allocator.name == "rmm":
            yield f"allocator=rmm manages {why}"
        if allocator.expandable_segments:
            yield f"allocator.expandable_segments=true is about {why}"


def _network_problems(config: Config) -> Iterator[str]:
    name = config.projector.name
    if NETWORKS.get(name) is type(config.projector):
        yield from config.projector.problems(config)
    elif name in NETWORKS:
        yield f"projector.name={name}: write projector={name}, which brings its own values"
    else:
        yield f"projector.name={name}: expected one of {', '.join(NETWORKS)}{nearest(name, NETWORKS)}"


def _data_problems(config: Config) -> Iterator[str]:
    data, target = config.data, config.target.name
    yield from _field_problems(config)
    if data.classes is not None and not data.classes:
        yield "data.classes=[]: expected at least one class, or null for all that are found"
    if data.name == "gaussian" and target in TARGETS and TARGETS[target].of_mesh:
        yield (
            f"data=gaussian has no surface, so target={target} has no values: write target=random, or "
            f"data=furniture target={target}"
        )
    if data.name == "gaussian" and (data.sampling != "area" or data.noise or data.mixture):
        yield (
            "data=gaussian is one cloud and has no surface: leave data.sampling, data.noise and data.mixture "
            "out, or write data=furniture"
        )
    if data.mixture is not None:
        if not data.mixture:
            yield "data.mixture=[]: expected at least one kind of clouds, such as [{sampling:even}], or null"
        if not data.resample:
            yield "data.mixture draws other points in every epoch: write data.resample=true, or leave it out"


def _field_problems(config: Config) -> Iterator[str]:
    """Yield conflicts between data with fields and targets of meshes."""
    data, target = config.data, config.target.name
    if data.has_fields != (target == "field"):
        if data.has_fields:
            yield f"data={data.name} has fields, got target={target}: write target=field"
        else:
            yield f"data={data.name} has no fields: write data=flow or data=fields, or another target"
    if data.name == "fields" and not data.fields:
        yield "data=fields: write data.fields=[NAME,...], the names of the fields in the files"
    if len({*(data.fields or [])}) < len(data.fields or []):
        yield f"data.fields={data.fields} names a field twice: write each once"
    if not data.has_fields:
        return
    network = config.projector.name
    if not config.projector.READS_FIELDS:
        readers = ", ".join(name for name, of in NETWORKS.items() if of.READS_FIELDS)
        yield f"target=field is for projector={readers}; got projector={network}"
    if data.sampling != "area" or data.noise or data.mixture:
        yield "samples with fields have points of their own: leave data.sampling, noise and mixture out"
    if data.classes is not None:
        yield "samples with fields have no classes: leave data.classes out"
    if config.augmentation != AugmentationConfig(
        rotate=config.augmentation.rotate, mirror=config.augmentation.mirror
    ):
        yield "samples with fields can be turned and mirrored: of augmentation, write rotate and mirror only"


def _query_problems(config: Config) -> Iterator[str]:
    """Yield conflicts with random queries, and with the lack of random queries."""
    target, augmentation = config.target, config.augmentation
    if augmentation.moves and not config.data.queries:
        yield (
            "augmentation moves the shapes, and targets on a fixed grid cannot follow: write "
            "data.queries=2048 for random query points, or augmentation.rotate=none and no mirror, stretch, "
            "warp or shrink"
        )
    points = config.data.fewest_points
    kept = int(points * (1 - augmentation.drop))
    if augmentation.drop and kept < FEWEST_POINTS:
        most = 1 - FEWEST_POINTS / points
        yield (
            f"augmentation.drop={augmentation.drop} leaves {kept} of {points} points: expected "
            f"at most {max(0.0, most):.3g}, so that {FEWEST_POINTS} are left"
        )
    facts = TARGETS.get(target.name)
    if facts is None:  # an unknown name is reported by another check
        return
    if config.data.queries and not (facts.of_mesh or facts.is_measured):
        yield f"target={target.name} has values only on the grid: write data.queries=0"
    for name in ("stretch", "warp"):
        if getattr(augmentation, name) and facts.is_distance:
            yield f"augmentation.{name} changes distances unevenly, and target={target.name} is one: write 0"
    if target.eikonal and not facts.is_distance:
        yield f"target.eikonal is for distances, and target={target.name} is not one: write target.eikonal=0"
    if target.loss in ("cross_entropy", "overlap") and facts.output != "logit":
        yield f"target.loss={target.loss} is for target=occupancy, got target={target.name}: write absolute"


def _allocator_problems(allocator: AllocatorConfig) -> Iterator[str]:
    initial, maximum = allocator.initial_gib, allocator.maximum_gib
    if initial is not None and allocator.resource in ("arena", "managed"):
        yield (
            f"allocator.initial_gib={initial} has no meaning for allocator.resource={allocator.resource}: "
            "write allocator.maximum_gib"
        )
    if initial and maximum and initial > maximum:
        yield (
            f"allocator.initial_gib={initial} is above allocator.maximum_gib={maximum}: expected at most that"
        )
