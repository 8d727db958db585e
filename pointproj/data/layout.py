"""Mesh files in class folders: the layout of ModelNet10 and ModelNet40, which all sources of meshes share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pointproj.data.errors import DataError
from pointproj.geometry.files import MESH_SUFFIXES

SPLITS = ("train", "test")

# Folders of the official archives, searched for directly below the root.
ARCHIVE_FOLDERS = ("ModelNet10", "ModelNet40")

EXPECTED_LAYOUT = (
    f"FOLDER/<class>/train/*.off and FOLDER/<class>/test/*.off (or {', '.join(MESH_SUFFIXES[1:])})"
)


@dataclass(frozen=True)
class MeshFile:
    """One mesh file and its place in the layout."""

    path: Path
    class_name: str
    split: str  # train | validation | test

    @property
    def name(self) -> str:
        """File name without its suffix, such as ``chair_0001``."""
        return self.path.stem


def layout_root(root: Path | str) -> Path | None:
    """Return the folder that holds the class folders: ``root``, or an official archive's folder in it.

    Returns None if there is no ``<class>/{train,test}`` folder in any of them.
    """
    root = Path(root)
    for folder in (root, *(root / name for name in ARCHIVE_FOLDERS)):
        if _class_folders(folder):
            return folder
    return None


def layout_problem(root: Path | str) -> str:
    """Return a sentence that says what a folder without class folders holds instead."""
    root = Path(root)
    if not root.is_dir():
        return f"{root} {'is not a folder' if root.exists() else 'does not exist'}"
    own = len(_files_of(root))
    if own:
        return f"{root} holds {own} mesh files directly, and no class folders"
    flat = sorted(folder.name for folder in root.iterdir() if _files_of(folder))
    if flat:
        return f"{_listed(flat)} in {root} hold mesh files directly, not in train/ and test/"
    return f"{root} holds no class folders"


def find_meshes(
    root: Path | str, classes: Sequence[str] | None = None, limit: int | None = None
) -> list[MeshFile]:
    """List mesh files in the layout of ModelNet10, ordered by class, split (train, then test) and name.

    Parameters
    ----------
    root : Path or str
        Folder with ``<class>/{train,test}/*.off`` (or another format that
        :func:`pointproj.geometry.files.read_mesh` reads), or the folder that holds ``ModelNet10/``. Hidden
        files (``._chair_0001.off``) are no meshes.
    classes : sequence of str, optional
        Classes to read; by default all that are found.
    limit : int, optional
        Most files of each class and split, the first by name.

    Raises
    ------
    DataError
        If the folder does not have this layout, lacks a class, or holds no mesh file.
    """
    folder = layout_root(root)
    if folder is None:
        archives = " or ".join(ARCHIVE_FOLDERS)
        raise DataError(
            f"expected {EXPECTED_LAYOUT} with FOLDER={root} or its {archives}; {layout_problem(root)}"
        )
    found = _class_folders(folder)
    files = [
        MeshFile(path, name, split)
        for name in chosen_classes(classes, found, folder)
        for split in SPLITS
        for path in _files_of(found[name] / split)[:limit]
    ]
    if not files:
        raise DataError(f"expected {EXPECTED_LAYOUT}; the class folders in {folder} hold no mesh file")
    return files


def chosen_classes(classes: Sequence[str] | None, found: Collection[str], folder: Path) -> list[str]:
    """Return the classes to read, sorted, by default all; raise DataError for classes that are not found."""
    missing = [name for name in classes or () if name not in found]
    if missing:
        known = ", ".join(sorted(found))
        raise DataError(f"data.classes={_listed(missing)}: {folder} has no such class; it has {known}")
    return sorted(set(classes or found))


def _class_folders(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {
        path.name: path
        for path in folder.iterdir()
        if not path.name.startswith((".", "__")) and any((path / split).is_dir() for split in SPLITS)
    }


def _files_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in MESH_SUFFIXES and not path.name.startswith(".")
    )


def _listed(names: Sequence[str]) -> str:
    return "[" + ",".join(names) + "]"
