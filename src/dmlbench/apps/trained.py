"""A finished run brought back: its configuration, its data and the model with its best weights."""

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench import build
from dmlbench.build import make_setup
from dmlbench.components import component
from dmlbench.config import load_config
from dmlbench.data.batches.transforms import CropTransform, Transform
from dmlbench.data.images.sources import Given, GivenImages, ImageSource
from dmlbench.evaluation.embeddings.embed import load_distance
from dmlbench.experiment import Setup
from dmlbench.identity import changed_code
from dmlbench.models.net import MetricModel
from dmlbench.results.store import CONFIG, DISTANCE, read_result, require_own_files
from dmlbench.runtime import select_device
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, ImageTable, RunError, closest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedImage:
    """What an image is called: its path, and its row and class where the data set has it."""

    name: str
    row: int | None = None
    class_name: str | None = None


def distance_of_run(run_dir: Path) -> BaseDistance | None:
    """The distance that compares a run's embeddings, from its files alone; None is that of unit vectors."""
    config = load_config(run_dir / CONFIG)
    if "imported" in config:
        return None
    distance = build.build_rerank(config) or build.build_distance(config)
    if distance is not None and distance.state_dict():
        load_distance(run_dir / DISTANCE, distance)
    return distance


def load_run(run_dir: Path, overrides: Mapping[str, Any], *, device: str) -> Setup:
    """The model of a complete run, with other values by ``overrides``, by its best weights, in evaluation mode."""
    result = read_result(run_dir)
    config = without_pretrained(config_with_weights(run_dir))
    require_own_files(run_dir, result, (BEST,))
    if changed := changed_code(config, result):
        log.warning("%s was trained by other code: %s changed since", run_dir, ", ".join(changed))
    config.merge_with(dict(overrides))

    setup = make_setup(config, select_device(device), check_data=lambda table: _require_data_of(result, table))
    put_weights(setup.model, load_checkpoint(run_dir / BEST)["model"], run_dir / BEST)
    setup.model.eval()
    return setup


def table_of_run(run_dir: Path, result: Mapping[str, Any]) -> ImageTable:
    """The data set of a run with its result, or its aggregate."""
    table: ImageTable = component(load_config(run_dir / CONFIG).dataset.table)
    _require_data_of(result, table)
    return table


def _require_data_of(result: Mapping[str, Any], table: ImageTable) -> None:
    then = result["dataset_fingerprint"]
    if table.fingerprint != then:
        raise RunError(
            f"{table.name} is not the data of the run: fingerprint {table.fingerprint[:12]}, not {then[:12]}"
        )


def config_with_weights(run_dir: Path) -> DictConfig:
    """The configuration of a run that kept its best weights."""
    config = load_config(run_dir / CONFIG)
    if "imported" in config:
        raise RunError(f"{run_dir} was imported: it has embeddings, but no model")
    if not (run_dir / BEST).exists():
        raise RunError(f"{run_dir} has no {BEST}; it was run with fit.keep={config.fit.keep}")
    return config


def without_pretrained(config: DictConfig) -> DictConfig:
    """A copy whose network takes images and begins with random weights, for one that gets those of a run."""
    config = copy.deepcopy(config)
    config.feature_cache = None
    for key, value in (("pretrained", False), ("weights_file", None)):
        if key in config.backbone:
            config.backbone[key] = value
    return config


def put_weights(model: MetricModel, weights: Mapping[str, Tensor], file: Path) -> None:
    """Put the weights of ``file`` into a model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(
            f"{file} does not fit the model of this version: {' '.join(str(error).split())}; run it again"
        ) from error


def row_of(table: ImageTable, image: int | str) -> int:
    """The row of an image that is named by its row or by its path in the data set."""
    if isinstance(image, int):
        if not 0 <= image < len(table):
            raise ConfigError(f"image {image} is not in {table.name}, which has rows 0 to {len(table) - 1}")
        return image
    found = np.flatnonzero(table.paths == str(image))
    if not len(found):
        raise ConfigError(f"image '{image}' is not in {table.name}; {closest(str(image), table.paths.tolist())}")
    return int(found[0])


def read_one(run: Setup, image: int | str) -> tuple[NamedImage, Tensor]:
    """An image as the run's network sees it, [1, 3, H, W] uint8: a row or a path of its data set, or any file."""
    table = run.data.table
    if isinstance(image, str) and image not in table.paths and Path(image).expanduser().is_file():
        size = run.images.shape[1:3] if isinstance(run.images, Tensor) else ()
        given, source = open_given(image, run.transform, tuple(size), device=run.device, of=table.name)
        (batch,) = replace(run, data=replace(run.data, table=given), images=source).batches(np.array([0]))
        return NamedImage(image), batch.images
    row = row_of(table, image)
    (batch,) = run.batches(np.array([row]))
    return NamedImage(str(table.paths[row]), row, table.class_names[table.labels[row]]), batch.images


def open_given(
    images: Given | Iterable[Given], transform: Transform, size: tuple[int, ...], *, device: torch.device, of: str
) -> tuple[ImageTable, ImageSource | Tensor]:
    """Images from anywhere as a table of one class, and what reads them as a run reads its own.

    Args:
        transform: of the run, for evaluation.
        size: height and width of the run's images; others are refused where the transform does not resize.
        of: what the error calls the run.
    """
    if isinstance(transform, CropTransform):
        given = GivenImages(images, short_side=transform.resize, kernel=transform.kernel)
    else:
        given = GivenImages(images)
    table = ImageTable(
        name="the images", root="", paths=np.array(given.names, dtype=np.str_),
        labels=np.zeros(len(given), dtype=np.int64), class_names=(), role=np.full(len(given), "test"),
    )  # fmt: skip
    if transform.works_on == "image":
        return table, given
    pixels = np.empty((len(given), *size, 3), dtype=np.uint8)
    for row, name in enumerate(given.names):
        image = given.read(row)
        if image.shape[:2] != size:
            height, width = image.shape[:2]
            raise ConfigError(f"image {name}: got {height} x {width} pixels, expected {size} as in {of}. Resize it.")
        pixels[row] = image
    return table, torch.from_numpy(pixels).to(device)
