"""A finished run brought back: its configuration, its data and the model with its best weights."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench import build
from dmlbench.build import make_setup
from dmlbench.config import load_config
from dmlbench.data.batches.loaders import EvalBatches
from dmlbench.data.batches.transforms import CropTransform
from dmlbench.data.images.pixels import read_image
from dmlbench.data.images.sources import DecodedImages, pixel_tensor
from dmlbench.evaluation.embeddings.embed import load_distance
from dmlbench.experiment import Data, Setup
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
    """The distance that compares a run's embeddings, from its files alone; None is that of unit vectors.

    Raises:
        RunError: the distance has a state, and the run does not hold it.
    """
    config = load_config(run_dir / CONFIG)
    if "imported" in config:
        return None
    distance = build.build_rerank(config) or build.build_distance(config)
    if distance is not None and distance.state_dict():
        load_distance(run_dir / DISTANCE, distance)
    return distance


def distances_by_config() -> Callable[[Path], BaseDistance | None]:
    """``distance_of_run`` for many runs: of a config that compares unit vectors one configuration is read."""
    of_unit_vectors: set[Path] = set()

    def distance_of(run_dir: Path) -> BaseDistance | None:
        if run_dir.parent in of_unit_vectors:
            return None
        distance = distance_of_run(run_dir)
        if distance is None:
            of_unit_vectors.add(run_dir.parent)
        return distance

    return distance_of


def load_run(run_dir: Path, overrides: Mapping[str, Any], *, device: str) -> Setup:
    """The model of a complete run with the weights of its best step, in evaluation mode.

    Args:
        run_dir: the run.
        overrides: values that replace those of the run's configuration.
        device: as in the configuration.

    Raises:
        RunError: the run is not complete or kept no weights, these or the data on disk are not those of the run.
    """
    result = read_result(run_dir)
    config = without_pretrained(config_with_weights(run_dir))
    require_own_files(run_dir, result, (BEST,))
    if changed := changed_code(config, result):
        log.warning("%s was trained by other code: %s changed since", run_dir, ", ".join(changed))
    config.merge_with(dict(overrides))

    def check_data(data: Data, open_images: object) -> None:
        if data.table.fingerprint != result["dataset_fingerprint"]:
            raise RunError(
                f"{data.table.name} is not the data of the run: fingerprint {data.table.fingerprint[:12]} now, "
                f"{result['dataset_fingerprint'][:12]} then"
            )

    setup = make_setup(config, select_device(device), before_model=check_data)
    put_weights(setup.model, load_checkpoint(run_dir / BEST)["model"], run_dir / BEST)
    setup.model.eval()
    return setup


def config_with_weights(run_dir: Path) -> DictConfig:
    """The configuration of a run that kept its best weights.

    Raises:
        RunError: it kept none.
    """
    config = load_config(run_dir / CONFIG)
    if "imported" in config:
        raise RunError(f"{run_dir} was imported: it has embeddings, but no model")
    if not (run_dir / BEST).exists():
        raise RunError(f"{run_dir} has no {BEST}; it was run with fit.keep={config.fit.keep} or never trained")
    return config


def without_pretrained(config: DictConfig) -> DictConfig:
    """A copy whose network begins with random weights, for one that gets those of a run."""
    config = copy.deepcopy(config)
    for key, value in (("pretrained", False), ("weights_file", None)):
        if key in config.backbone:
            config.backbone[key] = value
    return config


def put_weights(model: MetricModel, weights: Mapping[str, Tensor], file: Path) -> None:
    """Put the weights of ``file`` into a model.

    Raises:
        RunError: they are those of another.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(
            f"{file} does not fit the model of this version: {' '.join(str(error).split())}; run it again"
        ) from error


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


def read_one(run: Setup, image: int | str) -> tuple[NamedImage, Tensor]:
    """An image as the run's network sees it in evaluation, [1, 3, H, W] uint8, and what it is called.

    Args:
        run: what applies its transform.
        image: a row of its data set, a path of it, or a file anywhere.

    Raises:
        ConfigError: there is no such image, or the transform leaves the file at a size that the data do not have.
        DataError: the file is no image.
    """
    table = run.data.table
    if isinstance(image, str) and image not in table.paths:
        if Path(image).expanduser().is_file():
            return NamedImage(image), _file(run, Path(image).expanduser())
        raise ConfigError(
            f"image '{image}' is neither a file nor a path of {table.name}; {closest(image, table.paths.tolist())}"
        )
    row = row_of(table, image)
    (batch,) = run.batches(np.array([row]))
    return NamedImage(str(table.paths[row]), row, table.class_names[table.labels[row]]), batch.images


def _file(run: Setup, path: Path) -> Tensor:
    """A file through the run's transform for evaluation, by a table of this one image; grey where the data are."""
    file, pixels = read_image(path), run.data.table.pixels
    array = np.asarray(file.convert("L") if pixels is not None and pixels.ndim == 3 else file)
    table = ImageTable(
        name=path.name, root="", paths=np.array([path.name]), labels=np.zeros(1, dtype=np.int64), class_names=("",),
        role=np.array(["test"]), pixels=array[None],
    )  # fmt: skip
    transform = run.transform
    if isinstance(transform, CropTransform):
        source: DecodedImages | Tensor = DecodedImages(table, short_side=transform.resize, kernel=transform.kernel)
    else:
        assert isinstance(run.images, Tensor)
        height, width = run.images.shape[1:3]
        if array.shape[:2] != (height, width):
            raise ConfigError(
                f"image '{path}' has {array.shape[0]} x {array.shape[1]} pixels, those of {run.data.table.name} have "
                f"{height} x {width} and the run's transform does not resize; resize the file"
            )
        source = pixel_tensor(table, DecodedImages(table, short_side=None), run.device)
    batches = EvalBatches(
        table, np.zeros(1, dtype=np.int64), images=source, transform=transform, batch_size=1, device=run.device
    )
    (batch,) = batches
    return batch.images
