"""Every value of a run's config, with its default, its meaning and its bounds.

Bounds allow every sensible use. They are checked, since a config may come with a checkpoint of unknown
origin. Values of single networks are in :mod:`pointproj.config.networks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from pointproj.config.targets import TARGETS
from pointproj.config.values import LARGEST_WHOLE, value

SAMPLINGS = ("area", "even", "scan", "sensors")


@dataclass
class BackendConfig:
    """The implementation of the operators."""

    name: str = value(MISSING, "a backend, or `auto` for the fastest that can run here")
    algorithm: str | None = value(None, "how `backend=cuml` searches", choices=("auto", "brute", "rbc"))
    exact: bool = value(True, "false: with `backend=cuml` cuML's own result, rounded in single precision")


@dataclass
class ProjectorConfig:
    """The network: each choice has its own values, which are the fields of a subclass."""

    NETWORK: ClassVar[str]  # the class that arguments() are for, as ``package.module:Class``
    OPERATOR: ClassVar[str] = "knn"  # the operator that a backend must have: knn, radius or attend
    FEW_KERNELS: ClassVar[bool] = True  # whether one process compiles the network's kernels fastest

    READS_FIELDS: ClassVar[bool] = False  # whether the network takes features of query points

    sensors = False  # whether the network gets directions to sensors; a field of networks that can use them

    name: str = value(MISSING, "the network")
    normals: bool | None = value(None, "whether it gets the points' normals; null: the network's own choice")

    def arguments(self) -> dict[str, Any]:
        """Return arguments of the network's constructor, all but `in_channels`, `predicts` and `backend`."""
        return {key: given for key, given in vars(self).items() if key not in ("name", "normals")}

    @property
    def fewest_points(self) -> int:
        """Reference points that a cloud needs: as many as neighbours."""
        return getattr(self, "k", 1)

    @property
    def kept_neighbors(self) -> int | None:
        """Neighbours of each query point, if each training shape is searched only once; else None."""
        return None

    @property
    def predicts_distances(self) -> bool:
        """Whether the network's output is added to the distance of the neighbours."""
        return True

    def fill_in(self, config: "Config") -> None:
        """Replace each null among these values by its meaning in this config."""
        self.normals = bool(self.normals)

    def problems(self, config: "Config") -> Iterator[str]:
        """Yield reasons why this network cannot run with this config; here, too many neighbours."""
        key, points = "k" if hasattr(self, "k") else "neighbors", config.data.fewest_points
        neighbors = getattr(self, key, 0)
        if neighbors > points:
            named = "data.points" if points == config.data.points else "the smallest cloud of data.mixture"
            yield (
                f"projector.{key}={neighbors} neighbours of {named}={points} reference points: "
                f"expected at most {points}, or more points"
            )


@dataclass
class MixtureConfig:
    """One kind of clouds in ``data.mixture``; null means the value with this name in ``data``."""

    sampling: str | None = value(None, "as `data.sampling`", choices=SAMPLINGS)
    points: int | None = value(None, "as `data.points`", least=1, most=1_000_000_000)
    noise: float | None = value(None, "as `data.noise`", least=0, below=1)


@dataclass
class DataConfig:
    """The source of the shapes, and how they are sampled."""

    name: str = value(
        MISSING,
        "which shapes",
        choices=("furniture", "modelnet10", "meshes", "mixed", "flow", "fields", "gaussian"),
    )
    root: str | None = value(
        None,
        "folder with `<class>/{train,test}/*.off`, for `data=meshes` any folder of mesh files, for "
        "`data=fields` of samples; null: `data/<name>`",
    )
    fields: list[str] | None = value(None, "`data=fields`: names of the fields to learn, as in the files")  # noqa: RUF009 - a field
    download: bool = value(False, "`data=modelnet10` only: fetch the official archive into `data.root`")
    strict: bool = value(False, "stop at the first unusable mesh instead of leaving it out")
    classes: list[str] | None = value(None, "class folders to read; null: all that are found")  # noqa: RUF009 - a field
    limit: int | None = value(None, "at most this many meshes of each class and split", least=1)
    validation: float = value(
        0.1,
        "share of the training meshes that is held out to choose `best.pt`; 0: test meshes choose it",
        least=0,
        below=1,
    )
    test: float = value(
        0.1, "`meshes`, `fields`: share of the meshes or samples that are for tests", least=0, below=1
    )
    split_seed: int = value(0, "seed of the choice of meshes for these shares", least=0)
    train_meshes: int = value(
        6, "generated training meshes of each class, for `furniture` and `mixed`", least=1
    )
    test_meshes: int = value(2, "generated test meshes of each class, for `furniture`", least=1)
    varied: bool = value(False, "furniture with many more designs and sizes of parts")
    defects: bool = value(False, "furniture whose surfaces have the defects of real files")
    points: int = value(1024, "reference points of each shape", least=1, most=1_000_000_000)
    sampling: str = value(
        "area",
        "how points are drawn from a surface: `area`: uniformly by area; `even`: by farthest-point sampling "
        "from five times as many; `scan`: points that ten cameras see; `sensors`: such a scan with the "
        "direction from each point to its camera",
        choices=SAMPLINGS,
    )
    noise: float = value(
        0.0,
        "standard deviation of noise on all points, as a fraction of a shape's longest side",
        least=0,
        below=1,
    )
    mixture: list[MixtureConfig] | None = value(  # noqa: RUF009 - a field
        None,
        "kinds of clouds that batches of training shapes alternate between, such as "
        "`[{sampling:even},{sampling:scan,points:3000,noise:0.005}]`; null: clouds like those of the tests",
    )
    resample: bool = value(True, "other points in every epoch; false: always the same points")
    grid: int = value(30, "points along each side of the query grid on [-1, 1]^3", least=2, most=1024)
    queries: int | None = value(
        None,
        "random query points of each training shape or sample; 0: the grid instead, or all points of a "
        "sample; null: 1024, for `target=random` 0",
        least=0,
    )
    pool: int = value(16384, "cached random points of each shape, from which queries are drawn", least=1)
    repeats: int = value(1, "`data=mixed` only: how often each real mesh occurs in an epoch", least=1)
    variants: int = value(
        0, "`mixed`, `furniture`: variants of each training mesh, with cutouts in the surface", least=0
    )
    cache: str = value("data/cache", "folder of prepared samples, named by content and settings")
    sampler: str = value(
        "auto",
        "where points of training shapes are drawn: on the `device`, where the shapes stay, or by the "
        "`loader` on the host; `auto`: on the device with CUDA, if the shapes fit",
        choices=("auto", "device", "loader"),
    )
    workers: int = value(0, "processes of the loader that sample batches ahead", least=0, most=1024)

    @property
    def has_fields(self) -> bool:
        """Whether the data are samples with fields."""
        return self.name in ("flow", "fields")

    @property
    def clouds(self) -> tuple["MixtureConfig", ...]:
        """All kinds of clouds, without nulls: first that of the tests, then those of ``mixture``."""
        own = {"sampling": self.sampling, "points": self.points, "noise": self.noise}
        given = [{}, *(vars(kind) for kind in self.mixture or [])]
        written = [{key: chosen for key, chosen in kind.items() if chosen is not None} for kind in given]
        return tuple(MixtureConfig(**own | kind) for kind in written)

    @property
    def fewest_points(self) -> int:
        """Reference points of the smallest cloud."""
        return min(cloud.points for cloud in self.clouds)

    @property
    def most_points(self) -> int:
        """Reference points of the largest cloud."""
        return max(cloud.points for cloud in self.clouds)


@dataclass
class TargetConfig:
    """The field that is learned."""

    name: str = value(MISSING, "the field to predict", choices=tuple(TARGETS))
    loss: str | None = value(
        None,
        "the loss; null: the target's own",
        choices=("absolute", "smooth", "squared", "cross_entropy", "overlap"),
    )
    eikonal: float = value(0.0, "for distances: weight of (|gradient| - 1)^2 at the query points", least=0)


@dataclass
class AugmentationConfig:
    """Random changes of training shapes, made on the device, for clouds and queries together."""

    rotate: str = value(
        "none",
        "about the vertical axis: by multiples of 90 degrees (`right`), or so for half of the shapes and by "
        "any angle for the others (`any`); `cube`: about all axes by multiples of 90 degrees",
        choices=("none", "right", "any", "cube"),
    )
    mirror: bool = value(False, "swap left and right, and front and back, each for half of the shapes")
    stretch: float = value(
        0.0, "largest change of an axis' length, as a fraction; not for distances", least=0, below=1
    )
    warp: float = value(
        0.0, "largest change of scale along an axis: some parts grow; not for distances", least=0, below=1
    )
    shrink: float = value(0.0, "largest reduction of size, as a fraction", least=0, below=1)
    noise: float = value(
        0.0, "largest standard deviation of noise on the points, in units of the query cube", least=0, below=1
    )
    drop: float = value(
        0.0, "largest fraction of the points that are missing, in one region", least=0, below=1
    )

    @property
    def moves(self) -> bool:
        """Whether shapes move, so that their query points must move too."""
        return self.rotate != "none" or any((self.mirror, self.stretch, self.warp, self.shrink))


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: str = value(MISSING, "the optimizer", choices=("adam", "adamw"))
    lr: float = value(1e-3, "learning rate after the warm-up", above=0)
    weight_decay: float = value(0.0, "weight decay", least=0)
    betas: tuple[float, ...] = value((0.9, 0.999), "decay of the two moments, each from 0 to below 1")
    warmup: float = value(0.0, "fraction of all steps in which the rate rises linearly", least=0, below=1)
    schedule: str = value("constant", "the rate after the warm-up", choices=("constant", "cosine"))
    clip: float | None = value(None, "largest gradient norm; null: no clipping", above=0)


@dataclass
class TrainingConfig:
    """The loop."""

    epochs: int = value(40, "passes over the training shapes", least=1, most=1_000_000_000)
    weights: str | None = value(
        None, "checkpoint or run with initial weights, used where shapes agree; null: random weights"
    )
    batch_size: int = value(4, "shapes of each step, in each process", least=1)
    amp: bool = value(False, "run the network under bfloat16 autocast")
    validate_every: int = value(10, "epochs between validations", least=1)
    log_every: int = value(30, "steps between progress lines", least=1)
    pictures: int = value(4, "test shapes drawn at the end, with the losses; 0: no pictures", least=0)
    checkpoint_every: int = value(1, "epochs between writes of `last.pt`", least=1)
    on_nan: str = value(
        "stop", "stop at a step whose loss or gradient is not finite, or skip it", choices=("stop", "skip")
    )
    threads: int | None = value(
        None, "threads of the CPU: one is the fastest for small networks; null: as torch chooses", least=1
    )
    time_steps: int = value(
        0, "how often forward pass and step are timed after training; 0: not timed", least=0
    )


@dataclass
class AllocatorConfig:
    """The library that allocates GPU memory."""

    name: str = value(MISSING, "the allocator", choices=("torch", "rmm"))
    expandable_segments: bool = value(False, "`allocator=torch` only: reserved blocks can grow")
    resource: str | None = value(
        None, "`allocator=rmm` only: its memory resource", choices=("pool", "async", "arena", "managed")
    )
    initial_gib: float | None = value(
        None, "`allocator=rmm` only: GiB taken at the start; null: 1 (pool, async)", above=0
    )
    maximum_gib: float | None = value(
        None, "`allocator=rmm` only: most GiB; null: the whole memory (arena: half of it)", above=0
    )


@dataclass
class ProfilerConfig:
    """PhysicsNeMo's profilers, or ranges for Nsight Systems, for a limited number of steps."""

    name: str = value(MISSING, "the profiler", choices=("none", "torch", "line_profile", "nvtx"))
    skip: int = value(3, "steps before recording starts", least=0)
    steps: int = value(5, "steps recorded", least=1)
    shapes: bool = value(True, "`torch`, `nvtx`: record shapes of inputs; `torch` makes a table by shape")
    memory: bool = value(True, "`torch`: record the memory that each operation allocates")
    flops: bool = value(True, "`torch`: count floating-point operations of matrix products and convolutions")
    stack: bool = value(False, "`torch`: record the lines of Python behind each operation")
    lines: bool = value(False, "`torch`: record what `line_profile` does as well")

    @property
    def times_lines(self) -> bool:
        """Whether lines of Python are timed."""
        return self.name == "line_profile" or (self.name == "torch" and self.lines)


@dataclass
class LoggerConfig:
    """Where metrics are written in addition to ``metrics.jsonl``."""

    name: str = value(MISSING, "the logger", choices=("none", "tensorboard", "mlflow", "wandb"))


@dataclass
class Config:
    """The whole run."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = value("auto", "`auto`: CUDA if there is a GPU, else CPU", choices=("auto", "cpu", "cuda"))
    compile: bool = value(False, "compile the network and, on CUDA, capture the whole step in one CUDA graph")
    seed: int = value(0, "seed of weights, samples, order and augmentation", least=0, most=LARGEST_WHOLE)
    resume: str | None = value(None, "checkpoint or run to continue; `auto`: the newest of this config")
