"""The mesh files of a config, real, generated, or both, and the split of each."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pointproj.config import DataConfig
from pointproj.data.errors import DataError
from pointproj.data.layout import (
    EXPECTED_LAYOUT,
    SPLITS,
    MeshFile,
    chosen_classes,
    find_meshes,
    layout_problem,
    layout_root,
)
from pointproj.geometry.files import MESH_SUFFIXES
from pointproj.runtime.helpers import HelperProcesses

log = logging.getLogger(__name__)


def mesh_files(data: DataConfig, helpers: HelperProcesses | None = None) -> list[MeshFile]:
    """List the meshes of all splits. Missing ones are generated, or downloaded if the config says so.

    Helper processes generate meshes side by side; without helpers, this process does. A mesh that an epoch
    holds several times is listed as often. A share ``data.validation`` of the training meshes is held out;
    no variant of a held-out mesh is used for training. Raises DataError if there are no meshes.
    """
    if data.name == "meshes":
        return folder_meshes(data)
    if data.name == "furniture":
        files = _furniture_files(data, data.root, data.test_meshes, helpers)
    else:
        files = _real_files(data)
    files = held_out(files, data.validation, data.split_seed)
    return files + _further_files(data, files, helpers)


def unseen_meshes(data: DataConfig, limit: int | None = None) -> list[MeshFile]:
    """List test meshes, at most ``limit`` of each class; generate none that is not listed.

    Raises DataError if there are no meshes.
    """
    if data.name == "meshes":
        files = folder_meshes(data)
    elif data.name == "furniture":
        count = data.test_meshes if limit is None else min(limit, data.test_meshes)
        files = _furniture_files(replace(data, train_meshes=0), data.root, count, None)
    else:
        files = _real_files(data)
    return first_of_classes([file for file in files if file.split == "test"], limit)


def first_of_classes(files: Sequence[MeshFile], limit: int | None) -> list[MeshFile]:
    """Return the files in their order, the first ``limit`` of each class."""
    taken: Counter[str] = Counter()
    chosen = []
    for file in files:
        taken[file.class_name] += 1
        if limit is None or taken[file.class_name] <= limit:
            chosen.append(file)
    return chosen


def _real_files(data: DataConfig) -> list[MeshFile]:
    root = Path(data.root or "data/modelnet10")
    if data.download:
        from pointproj.data.download import download_modelnet10

        root = download_modelnet10(root)
    if layout_root(root) is None:
        raise DataError(
            f"no meshes: {layout_problem(root)}. Write data.download=true to fetch ModelNet10 into it "
            f"(473 MB), or data.root=FOLDER for your own meshes, laid out as {EXPECTED_LAYOUT}; data=meshes "
            "reads other layouts. data=furniture needs no files."
        )
    files = find_meshes(root, data.classes, data.limit)
    for split in SPLITS:
        if all(file.split != split for file in files):
            raise DataError(
                f"{root} holds {len(files)} meshes, but none in <class>/{split}/: expected both splits"
            )
    return files


def _further_files(
    data: DataConfig, files: list[MeshFile], helpers: HelperProcesses | None
) -> list[MeshFile]:
    """Return more training meshes: repeats of ``files``, furniture for ``data=mixed``, cutouts of both."""
    from pointproj.data.cutouts import write_variants

    train = [file for file in files if file.split == "train"]
    made = _furniture_files(data, None, 0, helpers) if data.name == "mixed" else []
    variants = write_variants(train, "data/variants", data.variants, helpers)
    variants += write_variants(made, "data/variants", min(data.variants, 1), helpers)
    return [*train * (data.repeats - 1), *made, *variants]


def _furniture_files(
    data: DataConfig, root: str | None, test_meshes: int, helpers: HelperProcesses | None
) -> list[MeshFile]:
    from pointproj.data.furniture import CLASSES, write_furniture

    family = {"varied": data.varied, "defects": data.defects}
    folder = "-".join(["furniture", *(name for name, chosen in family.items() if chosen)])
    train, test = (min(count, data.limit or count) for count in (data.train_meshes, test_meshes))
    root, classes = root or f"data/{folder}", data.classes or CLASSES
    files = write_furniture(root, classes, train, test, **family, helpers=helpers)
    return [MeshFile(path, path.parents[1].name, path.parent.name) for path in files]


def held_out(files: Sequence[MeshFile], share: float, seed: int, split: str = "validation") -> list[MeshFile]:
    """Move a share of the training meshes to another split; the order of ``files`` stays.

    At least one mesh moves, and at least one remains. About the same share of each class moves. The choice
    depends on seed, class and name of a mesh, not on its folder.
    """
    training = [file for file in files if file.split == "train"]
    count = min(max(1, round(share * len(training))), len(training) - 1) if share and training else 0

    def chance(file: MeshFile) -> bytes:
        return hashlib.sha256(f"{seed}/{split}/{file.class_name}/{file.name}".encode()).digest()

    sizes, taken = Counter(file.class_name for file in training), Counter()
    ranked = []
    for file in sorted(training, key=chance):  # next is the class of which the smallest share has moved
        taken[file.class_name] += 1
        ranked.append(((taken[file.class_name] - 0.5) / sizes[file.class_name], chance(file), file))
    chosen = {file for *_, file in sorted(ranked, key=lambda entry: entry[:2])[:count]}
    return [replace(file, split=split) if file in chosen else file for file in files]


def folder_meshes(data: DataConfig) -> list[MeshFile]:
    """List the mesh files of any folder, and choose which are for training, for validation and for tests.

    ``data.root`` is searched with all folders in it. A mesh's class is the name of the folder directly below
    ``data.root``; files in ``data.root`` itself have its name as class. Meshes are chosen by ``data.classes``
    and ``data.limit``, and listed by class and path.

    Raises
    ------
    DataError
        If there are no mesh files, a class is not there, or the meshes are too few for three splits.
    """
    if data.root is None:
        raise DataError("data=meshes reads any folder of mesh files: write data.root=FOLDER")
    root = Path(data.root)
    classes: dict[str, list[Path]] = {}
    others: Counter[str] = Counter()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part.startswith((".", "__")) for part in parts) or not path.is_file():
            continue
        if path.suffix.lower() in MESH_SUFFIXES:
            classes.setdefault(parts[0] if len(parts) > 1 else root.resolve().name, []).append(path)
        else:
            others[path.suffix.lower() or "no suffix"] += 1
    unread = ", ".join(f"{count} of {suffix}" for suffix, count in others.most_common())
    if not classes:
        kinds, found = ", ".join(MESH_SUFFIXES), f" (found: {unread})" if others else ""
        raise DataError(f"no meshes in {root}{found}: write data.root=FOLDER, a folder with files of {kinds}")
    if others:
        log.warning("%s: files of other kinds are not read: %s", root, unread)
    files = [
        MeshFile(path, name, "train")
        for name in chosen_classes(data.classes, classes, root)
        for path in classes[name][: data.limit]
    ]
    if len(files) < 3:
        raise DataError(f"expected 3 meshes or more, for training, validation and tests; got {len(files)}")
    files = held_out(files, data.test, data.split_seed, "test")
    files = held_out(files, data.validation, data.split_seed)
    counts = Counter(file.split for file in files)
    log.info(
        f"{root}: {len(files)} meshes (classes: {', '.join(sorted({file.class_name for file in files}))}), "
        f"{counts['train']} for training, {counts['validation']} for validation, {counts['test']} for tests, "
        f"by data.validation={data.validation:g}, data.test={data.test:g}, data.split_seed={data.split_seed}"
    )
    if layout_root(root) is not None:
        log.warning("%s has train and test folders in its classes: data=modelnet10 uses them", root)
    return files
