"""Trained networks in folders, in the layout of huggingface_hub: ``config.json`` and ``model.safetensors``.

``config.json`` holds the arguments of the network and, as ``network``, the name of its class. This package
brings the folders of :data:`WEIGHTS`; ``README.md`` in each tells data, licence and figures.
"""

import json
from pathlib import Path
from typing import Self

from torch import nn

WEIGHTS = Path(__file__).parent / "weights"
ARGUMENTS, TENSORS, CARD = "config.json", "model.safetensors", "README.md"


class Pretrained(nn.Module):
    """A network that can be read from a folder."""

    @classmethod
    def from_pretrained(cls, source: str | Path, *, backend: str = "auto") -> Self:
        """Make the network of a folder, on the CPU and in evaluation mode.

        Parameters
        ----------
        source : str or Path
            Name of weights that this package brings (``"furniture"``, of a visibility network), or a folder
            with ``config.json`` and ``model.safetensors``, such as ``python -m pointproj export RUN --hub
            FOLDER`` writes and ``huggingface_hub.snapshot_download`` fetches.
        backend : str
            As for the network; weights fit any.

        Raises
        ------
        FileNotFoundError
            If there are no such weights.
        ValueError
            If they are of another network, or the files do not fit each other.
        ImportError
            Without the package safetensors.
        """
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            needed = 'from_pretrained needs the package safetensors: pip install "pointproj[weights]"'
            raise ImportError(needed) from error
        folder = _folder(source)
        arguments = json.loads((folder / ARGUMENTS).read_text(encoding="utf-8"))
        name = arguments.pop("network", cls.__name__)
        if name not in (each.__name__ for each in cls.__mro__):
            raise ValueError(f"{folder} holds a {name}: call {name}.from_pretrained, not {cls.__name__}'s")
        try:
            network = cls(**arguments, backend=backend)
            network.load_state_dict(load_file(folder / TENSORS))
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{folder / TENSORS} does not fit {ARGUMENTS} beside it: take both from one source ({error})"
            ) from error
        return network.eval()


def _folder(source: str | Path) -> Path:
    named = {path.name: path for path in WEIGHTS.iterdir()}
    folder = named.get(str(source), Path(source))
    missing = [name for name in (ARGUMENTS, TENSORS) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"there are no weights {str(source)!r}: expected {' or '.join(sorted(named))}, or a folder with "
            f"{ARGUMENTS} and {TENSORS}; {folder} has no {' and no '.join(missing)}"
        )
    return folder
