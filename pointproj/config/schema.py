"""Every value that a run can be told, with its meaning and default."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class BackendConfig:
    """Which implementation of the operators runs (``conf/backend/``)."""

    name: str = MISSING  # a module of pointproj.backends, or auto
    algorithm: str | None = None  # cuml only: auto | brute | rbc, how it searches


@dataclass
class ProjectorConfig:
    """How features travel from reference points to query points (``conf/projector/``)."""

    kind: str = MISSING  # knn | radius
    k: int | None = None  # neighbours, for kind=knn
    radius: float | None = None  # cut-off in units of the query cube, for kind=radius
    sigma: float = 0.1  # softmax temperature, in units of the query cube
    keep_neighbors: bool = False  # knn only: search each training shape once; needs data.resample=false
    context: bool | None = (
        None  # give the second MLP displacement and soft distance; null: unless target=random
    )


@dataclass
class ModelConfig:
    """Size of the network (``conf/model/``)."""

    name: str = MISSING  # projector | multiscale
    hidden_channels: int = 25
    grid_channels: int = 16  # multiscale only: width of the finest grid
    side: int = 32  # multiscale only: cells a side of the finest grid
    levels: int = 3  # multiscale only: grids of halving sides
    neighbors: int = 12  # multiscale only: reference points that a point attends to, itself among them
    normals: bool | None = None  # show face normals; null: to the projector, where they tell in from out


@dataclass
class DataConfig:
    """Where shapes come from and how they are sampled (``conf/data/``)."""

    name: str = MISSING  # furniture | modelnet10 | mixed | gaussian
    root: str | None = None  # folder with <class>/{train,test}/*.off; null: data/<name>
    download: bool = False  # modelnet10 only: fetch the official archive into root
    strict: bool = False  # stop at the first unusable mesh instead of leaving it out
    classes: list[str] | None = None  # null: all that are found
    limit: int | None = None  # at most this many meshes a class and split
    train_meshes: int = 6  # furniture only: meshes made a class
    test_meshes: int = 2
    varied: bool = False  # furniture only: many more builds, in any proportions
    defects: bool = False  # furniture only: surfaces with the defects of real files
    points: int = 2048  # reference points a shape
    resample: bool = True  # fresh points every epoch; false: the same points
    grid: int = 30  # query points a side, on [-1, 1]^3
    queries: int | None = None  # random query points a shape in training; 0: the grid; null: by model
    pool: int = 16384  # random points a shape that these are drawn from
    repeats: int = 1  # mixed only: how often an epoch holds each real mesh, beside furniture once
    variants: int = (
        0  # mixed only: opened variants of each real training mesh; above 0, one of each made piece
    )
    cache: str = "data/cache"  # prepared samples, by content and settings
    workers: int = 0  # processes that sample batches ahead


@dataclass
class TargetConfig:
    """What is learned on the query points (``conf/target/``)."""

    name: str = MISSING  # udf | sdf | occupancy | random
    loss: str | None = None  # absolute | smooth | squared | cross_entropy | overlap; null: the target's own
    eikonal: float = 0.0  # weight of (|gradient| - 1)^2 at the query points, for distances


@dataclass
class AugmentationConfig:
    """How training shapes are changed on the device, clouds and queries alike (section ``augmentation``)."""

    rotate: str = (
        "none"  # about the vertical: none | right (quarter turns) | any (half of the shapes by any angle)
    )
    mirror: bool = False  # left and right, front and back, each for half of the shapes
    stretch: float = 0.0  # largest change of an axis' length, as a fraction; not for distances
    warp: float = 0.0  # largest change of scale within an axis: parts grow; not for distances
    shrink: float = 0.0  # largest loss of size, as a fraction
    noise: float = 0.0  # largest standard deviation of noise on the points, in units of the query cube
    drop: float = 0.0  # largest share of the points that is missing, in one region

    @property
    def moves(self) -> bool:
        """Whether shapes move, so that their query points must too."""
        changes = self.mirror, self.stretch, self.warp, self.shrink
        return self.rotate != "none" or any(changes)


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule (``conf/optimizer/``)."""

    name: str = MISSING  # adam | adamw
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: float = 0.0  # fraction of all steps with a linearly rising rate
    schedule: str = "constant"  # constant | cosine
    clip: float | None = None  # largest gradient norm; null: no clipping


@dataclass
class TrainingConfig:
    """The loop (section ``training``)."""

    epochs: int = 30
    batch_size: int = 4  # shapes a step
    amp: bool = False  # bf16 autocast
    validate_every: int = 5  # epochs between validations
    log_every: int = 10  # steps between progress lines
    pictures: int = 4  # test shapes drawn at the end
    checkpoint_every: int = 1  # epochs between writes of last.pt
    on_nan: str = "stop"  # a step whose loss or gradient is not finite: stop there, or skip it and go on
    time_steps: int = 0  # repetitions when forward pass and step are timed after training; 0: not timed


@dataclass
class AllocatorConfig:
    """Who owns GPU memory (``conf/allocator/``)."""

    name: str = MISSING  # torch | rmm
    expandable_segments: bool = False  # torch only: reserved blocks grow
    resource: str | None = None  # rmm only: pool | async | arena | managed
    initial_gib: float | None = None  # rmm only: taken at the start; null: 1 (pool, async)
    maximum_gib: float | None = None  # rmm only: never more; null: all there is (arena: half of it)


@dataclass
class ProfilerConfig:
    """PhysicsNeMo's profiler around a bounded number of steps (``conf/profiler/``)."""

    name: str = MISSING  # none | torch | line_profile
    skip: int = 3  # steps before recording starts
    steps: int = 5  # steps recorded


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl (``conf/logger/``)."""

    name: str = MISSING  # none | tensorboard | mlflow


@dataclass
class Config:
    """Everything a run can be told."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = "auto"  # auto | cpu | cuda
    compile: bool = False
    seed: int = 0
    resume: str | None = None  # auto: newest checkpoint of this config; or a path
