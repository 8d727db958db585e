"""Write a trained network as a folder that ``from_pretrained`` reads and huggingface_hub can upload.

``model.safetensors`` is a checkpoint too, without the state of the run, so ``predict`` and ``evaluate`` take
the folder.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from pointproj.config import TARGETS, Config
from pointproj.geometry.meshes import LONGEST_SIDE
from pointproj.inference.trained_model import saved_config, saved_network, saved_statistics
from pointproj.nn.pretrained import ARGUMENTS, CARD, TENSORS
from pointproj.runtime import tensor_file
from pointproj.runtime.run_folder import read_json, replace_text
from pointproj.training.checkpoint import load_best
from pointproj.training.networks import network_arguments

GENERATED = ("furniture", "flow", "gaussian")  # data that this project makes, so that its licence applies
OUTPUTS = {"logit": "logits of being inside: above 0 inside", "field": "scaled fields: `predict` gives units"}


def write_folder(checkpoint: Path, folder: Path) -> list[Path]:
    """Write ``config.json``, ``model.safetensors`` and, if there is none yet, a card ``README.md``.

    ``checkpoint`` is a file or the folder of a run, whose figures the card shows. No path of this machine is
    written. Raises CheckpointError if the checkpoint cannot be used.
    """
    path, content = load_best(checkpoint)
    config = saved_config(path, content)
    saved_network(path, content, config, "torch")  # raises an error if the weights do not fit
    cache = type(config.data)(name="").cache
    data = replace(config.data, root=None, cache=cache)
    kept = asdict(replace(config, data=data, resume=None, training=replace(config.training, weights=None)))
    arguments = network_arguments(config, saved_statistics(path, content))
    arguments = {"network": _class_of(config)[1], **arguments}
    of_run = {key: content[key] for key in ("format", "model", "statistics") if key in content}
    folder.mkdir(parents=True, exist_ok=True)
    card, described, tensors = folder / CARD, folder / ARGUMENTS, folder / TENSORS
    if not card.exists():
        replace_text(card, "\n".join(_card(config, path.parent)) + "\n")
    replace_text(described, json.dumps(arguments, indent=2) + "\n")
    tensor_file.save(tensors, {**of_run, "config": kept}, bare="model")
    return [described, tensors, card]


def _class_of(config: Config) -> list[str]:
    """Module and name of the network's class."""
    return config.projector.NETWORK.split(":")


def _card(config: Config, run: Path) -> Iterator[str]:
    """The lines of a model card, in the format of huggingface_hub."""
    module, name = _class_of(config)
    target, generated = TARGETS[config.target.name], config.data.name in GENERATED
    yield from ("---", f"license: {'apache-2.0' if generated else 'other'}", "library_name: pointproj")
    yield from ("tags: [point-cloud]", "---", f"# {name}: {target.title}", "", "```python")
    yield from (f"from {module} import {name}", "", f'network = {name}.from_pretrained("FOLDER")')
    features = config.projector.normals or target.is_measured
    inputs = "query_points, reference_points" + ", features=features" * features
    inputs += ", query_features=query_features" * target.is_measured
    yield from (f"values = network({inputs})  # (Q, 3), (N, 3) -> (Q, C)", "```", "")
    if features:
        yield "Features of a point are its position, its normal if there are normals, then parameters."
    yield f"Values are {OUTPUTS.get(target.output, target.title)}. Shapes lie about 0, {LONGEST_SIDE} long."
    yield from ("`python -m pointproj predict FOLDER FILE` places files so, and back.", "")
    settings = f"{config.data.points} points, sampling {config.data.sampling}, seed {config.seed}"
    yield f"- **Data**: `data={config.data.name} target={config.target.name}`, {settings}."
    licence = "Apache-2.0: no data but those that pointproj generates"
    yield f"- **Licence**: {licence if generated else 'to be written here: that of the data decides'}."
    yield from ("- **Figures**:", "", *_figures(run))


def _figures(run: Path) -> Iterator[str]:
    """Lines on the quality, from the files of a run and of its evaluation."""
    metrics, summary = read_json(run / "metrics.json"), run / "evaluation" / "summary.md"
    if metrics is None and not summary.exists():
        yield "not measured; `python -m pointproj evaluate FOLDER` does"
    if metrics is not None:
        yield from ("| on test data | network | without training |", "|---|---:|---:|")
        for name, value in metrics["measured"].items():
            yield f"| {name.replace('_', ' ')} | {value:.4g} | {metrics['baseline_measured'][name]:.4g} |"
    if summary.exists():
        yield from ("", summary.read_text(encoding="utf-8").strip())
