"""A finished run brought back: its configuration, its data and the model with its best weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dmlbench import build
from dmlbench.data.images import ImageSource
from dmlbench.evaluation.embed import load_distance
from dmlbench.models.avsl import AvslModel
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.net import MetricModel
from dmlbench.results.store import CONFIG, DISTANCE, read_result
from dmlbench.runtime import select_device
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, ImageTable, RunError, closest


@dataclass(frozen=True)
class TrainedRun:
    """What ``load_run`` returns; ``images`` are opened for the transform without augmentation."""

    config: DictConfig
    data: build.Data
    images: ImageSource | Tensor
    model: MetricModel | AvslModel
    device: torch.device


def distance_of_run(run_dir: Path) -> AvslDistance | None:
    """The distance that compares a run's embeddings, from its files alone; None is that of unit vectors.

    Raises:
        RunError: the distance has a state, and the run does not hold it.
    """
    config = OmegaConf.load(run_dir / CONFIG)
    assert isinstance(config, DictConfig)
    distance = build.build_distance(config)
    if distance is not None:
        load_distance(run_dir / DISTANCE, distance)
    return distance


def load_run(run_dir: Path, overrides: Mapping[str, Any], *, device: str) -> TrainedRun:
    """The model of a complete run with the weights of its best step, in evaluation mode.

    Args:
        run_dir: the run.
        overrides: values that replace those of the run's configuration.
        device: as in the configuration.

    Raises:
        RunError: the run is not complete or kept no weights, or the data on disk are not those of the run.
    """
    result = read_result(run_dir)
    config = OmegaConf.load(run_dir / CONFIG)
    assert isinstance(config, DictConfig)
    # What pretrained weights a run began with does not matter to one that loads its own.
    if "pretrained" in config.backbone:
        config.backbone.pretrained = False
        config.backbone.weights_file = None
    if not (run_dir / BEST).exists():
        raise RunError(f"{run_dir} has no {BEST}; it was run with fit.keep={config.fit.keep} or never trained")
    config = OmegaConf.merge(config, dict(overrides))
    assert isinstance(config, DictConfig)
    chosen = select_device(device)
    data = build.build_data(config)
    if data.table.fingerprint != result["dataset_fingerprint"]:
        raise RunError(
            f"{data.table.name} is not the data of the run: fingerprint {data.table.fingerprint[:12]} now, "
            f"{result['dataset_fingerprint'][:12]} then"
        )
    model = build.build_model(config)
    try:
        model.load_state_dict(load_checkpoint(run_dir / BEST)["model"])
    except RuntimeError as error:
        raise RunError(
            f"{run_dir / BEST} does not fit the model of this version: {' '.join(str(error).split())}; run it again"
        ) from error
    build.move(model, model, chosen, channels_last=config.fit.channels_last)
    model.eval()
    images = build.image_opener(config, data.table, chosen)(config.transform.eval)
    return TrainedRun(config, data, images, model, chosen)


def row_of(table: ImageTable, image: int | str) -> int:
    """The row of an image that is named by its row or by its path in the data set.

    Raises:
        ConfigError: the data set has no such image.
    """
    if isinstance(image, bool) or not isinstance(image, int | str):
        raise ConfigError(
            f"image {image!r} is neither a row nor a path of {table.name}; give a number such as 3, or a path"
        )
    if isinstance(image, int):
        if not 0 <= image < len(table):
            raise ConfigError(f"image {image} is not in {table.name}, which has rows 0 to {len(table) - 1}")
        return image
    found = np.flatnonzero(table.paths == image)
    if not len(found):
        raise ConfigError(f"image '{image}' is not in {table.name}; {closest(image, table.paths.tolist())}")
    return int(found[0])
