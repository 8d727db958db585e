"""Predictors that need no training, which a trained network is compared with."""

import torch

from pointproj.config import Config
from pointproj.data.dataset import PreparedData
from pointproj.training.field_measures import MEAN, NEAREST, NearestSample, mean_predictor
from pointproj.training.validation import Predictor, baseline_name, untrained_predictor


def baselines(config: Config, data: PreparedData, device: torch.device, backend: str) -> dict[str, Predictor]:
    """Return the baselines of a run, by words that say what they predict."""
    if data.statistics is not None:
        return {MEAN: mean_predictor, NEAREST: NearestSample(data.train, device, backend)}
    normals = bool(config.projector.normals)
    words = baseline_name(config.target.name, normals=normals)
    return {words: untrained_predictor(config.target.name, backend, normals=normals)}
