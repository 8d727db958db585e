"""The pictures of one run: the loss curve, and predictions for some test shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointproj.config import Config
from pointproj.data.batches import collate
from pointproj.data.dataset import ShapeDataset
from pointproj.runtime.run_folder import RunFolder
from pointproj.training.validation import Evaluation
from pointproj.viz import plots


@torch.no_grad()
def draw_run(
    run: RunFolder,
    config: Config,
    *,
    losses: list[list[float]],
    errors: list[list[float]],
    baseline: Evaluation,
    test: ShapeDataset,
    predict: Callable[[dict[str, Any]], Tensor],
) -> list[Path]:
    """Draw the losses, and ``training.pictures`` test shapes from the first to the last.

    Parameters
    ----------
    run : RunFolder
        Where the pictures go.
    config : Config
    losses, errors : list of [step, value]
        On the training batches and on the test meshes.
    baseline : Evaluation
        Of what needs no training, on the test meshes.
    test : ShapeDataset
    predict : callable
        A batch as it comes from the data, on the CPU, to a prediction (1, Q) on any device.

    Returns
    -------
    list of Path
        The files, losses first.
    """
    paths = [run.picture_path("losses")]
    plots.draw_losses(
        paths[0],
        loss_name=f"{config.target.name} loss",
        losses=losses,
        metric_name=baseline.metric.replace("_", " "),
        errors=errors,
        baseline=baseline.error,
    )
    count = min(config.training.pictures, len(test))
    for place in range(count):
        sample = test[place * len(test) // count]
        batch = {**collate([sample]), "query_points": test.query_points}
        paths.append(run.picture_path(sample["name"]))
        plots.draw_shape(
            paths[-1],
            name=sample["name"],
            target_name=config.target.name,
            reference_points=sample["reference_points"].numpy(),
            target=sample["target"].numpy(),
            prediction=predict(batch)[0].cpu().numpy(),
        )
    return paths
