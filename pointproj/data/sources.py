"""Which mesh files a config names: real ones, generated ones, or both."""

from pathlib import Path

from pointproj.config import DataConfig
from pointproj.data.modelnet import (
    EXPECTED_LAYOUT,
    SPLITS,
    DataError,
    MeshFile,
    find_meshes,
    layout_problem,
    layout_root,
)
from pointproj.data.splits import folder_meshes, held_out
from pointproj.runtime.helpers import HelperProcesses


def mesh_files(data: DataConfig, helpers: HelperProcesses | None = None) -> list[MeshFile]:
    """List the meshes of all splits. Missing ones are generated, or downloaded if the config says so.

    Helper processes generate meshes side by side; by default this process does. A mesh that an epoch holds
    several times is listed as often. ``data.validation`` of the training meshes are held out; nothing that is
    made from them is for training. A DataError that there are none says both ways forward.
    """
    if data.name == "meshes":
        return folder_meshes(data)
    if data.name == "furniture":
        files = _furniture_files(data, data.root, data.test_meshes, helpers)
    else:
        files = _real_files(data)
    files = held_out(files, data.validation, data.split_seed)
    return files + _further_files(data, files, helpers)


def _real_files(data: DataConfig) -> list[MeshFile]:
    root = Path(data.root or "data/modelnet10")
    if data.download:
        from pointproj.data.download import download_modelnet10

        root = download_modelnet10(root)
    if layout_root(root) is None:
        raise DataError(
            f"no meshes: {layout_problem(root)}. Two ways forward: write data.download=true to fetch "
            "ModelNet10 into it (473 MB), or data.root=FOLDER to read what you have, laid out as "
            f"{EXPECTED_LAYOUT}; in another layout by data=meshes. data=furniture needs none of these."
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
    """For training beside these: repeats of them, furniture beside real meshes, and cutouts of all."""
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
