"""A trained model brought back: a run with its data, or the model alone, which embeds images and compares rows."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from pytorch_metric_learning.distances import BaseDistance
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dmlbench import build
from dmlbench.build import make_setup
from dmlbench.components import add_module_folder, component, imported, require_modules
from dmlbench.config import as_config, config_folder, read_config
from dmlbench.data.batches.loaders import EvalBatches
from dmlbench.data.batches.transforms import CropTransform, Transform
from dmlbench.data.images.sources import Given, GivenImages, ImageSource, resized
from dmlbench.evaluation.embeddings.embed import embed, load_distance
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.experiment import Setup
from dmlbench.external_files import Schema, load_yaml, validated
from dmlbench.identity import changed_code, read_table
from dmlbench.models.backbones import Backbone
from dmlbench.models.net import MetricModel
from dmlbench.results.store import CONFIG, DISTANCE, read_result, require_own_files
from dmlbench.runtime import file_sha256, network_pass, read_json, select_device, set_strict_float32
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, ImageTable, RunError, closest, leaves

WEIGHTS, PREPROCESSING, MANIFEST, CARD = "model.safetensors", "preprocessing.json", "dmlbench.json", "README.md"
"""Files of an exported folder, besides ``config.yaml`` and the graphs; the manifest is what makes it one."""
EXPORT_SCHEMA = 1
_OF_DISTANCE, _OF_MODEL = ("head", "rerank"), ("backbone", "tuning", "pooling", "head")
_OF_RUN = ("dataset", "protocol", "sampler", "transform", *_OF_MODEL, "rerank")
"""Parts of a configuration that the distance, the model and a run with its data are made of."""
_SHOWN_SCORES = ("p_at_1", "r_precision", "map_at_r")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedImage:
    """What an image is called: its path, and its row and class where the data set has it."""

    name: str
    row: int | None = None
    class_name: str | None = None


def distance_of_run(run_dir: Path) -> BaseDistance | None:
    """The distance that compares a run's embeddings, from its files alone; None is that of unit vectors."""
    stored = read_config(run_dir / CONFIG)
    if "imported" in stored:
        return None
    require_modules(stored, _OF_DISTANCE)
    config = as_config(stored)
    distance = build.build_rerank(config) or build.build_distance(config)
    if distance is not None and distance.state_dict():
        load_distance(run_dir / DISTANCE, distance)
    return distance


def require_unit_vectors(run_dir: Path) -> None:
    """Raise RunError unless a run's embeddings are compared as unit vectors."""
    if distance_of_run(run_dir) is not None:
        raise RunError(f"{run_dir}: got a run with its own distance, expected one that compares unit vectors.")


def load_run(run_dir: Path, overrides: Mapping[str, Any], *, device: str) -> Setup:
    """The model of a complete run, with other values by ``overrides``, by its best weights, in evaluation mode."""
    result = read_result(run_dir)
    config = without_pretrained(config_with_weights(run_dir))
    require_own_files(run_dir, result, (BEST,))
    require_modules(config, _OF_RUN)
    if changed := changed_code(config, result):
        log.warning("%s was trained with different code: %s changed since", run_dir, ", ".join(changed))

    check_data = functools.partial(_require_data_of, result)
    setup = make_setup(as_config({**config, **overrides}), select_device(device), check_data=check_data)
    put_weights(setup.model, load_checkpoint(run_dir / BEST)["model"], run_dir / BEST)
    setup.model.eval()
    return setup


def table_of_run(run_dir: Path, result: Mapping[str, Any]) -> ImageTable:
    """The data set of a run with its result, or its aggregate."""
    config = read_config(run_dir / CONFIG)
    require_modules(config, ("dataset",))
    table = read_table(config["dataset"]["table"])
    _require_data_of(result, table)
    return table


def _require_data_of(result: Mapping[str, Any], table: ImageTable) -> None:
    then = result["dataset_fingerprint"]
    if table.fingerprint != then:
        raise RunError(
            f"{table.name}: got data of the fingerprint {table.fingerprint[:9]}, expected {then[:9]} as in the run."
        )


def config_with_weights(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run that kept its best weights."""
    config = read_config(run_dir / CONFIG)
    if "imported" in config:
        raise RunError(f"{run_dir} was imported: it has embeddings, but no model.")
    if not (run_dir / BEST).exists():
        raise RunError(
            f"{run_dir} has no {BEST}: it was run with fit.keep={config['fit']['keep']}. Remove (`dmlbench clean`) and "
            "repeat the run with fit.keep=best."
        )
    return config


def without_pretrained(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose network takes images and begins with random weights, for one that gets those of a run."""
    random = {"pretrained": False, "weights_file": None}
    backbone = {key: random.get(key, value) for key, value in config["backbone"].items()}
    return {**config, "backbone": backbone, "feature_cache": None}


def put_weights(model: MetricModel, weights: Mapping[str, Tensor], file: Path) -> None:
    """Put the weights of ``file`` into a model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{file} does not fit the model in this version: {reason}. Train the model again.") from error


def row_of(table: ImageTable, image: int | str) -> int:
    """The row of an image that is named by its row or by its path in the data set."""
    if isinstance(image, int):
        if not 0 <= image < len(table):
            raise ConfigError(f"image: got {image}, expected a row from 0 to {len(table) - 1} of {table.name}.")
        return image
    found = np.flatnonzero(table.paths == str(image))
    if not len(found):
        nearest = closest(str(image), table.paths.tolist())
        raise ConfigError(f"image: got '{image}', expected a path in {table.name}: {nearest}")
    return int(found[0])


def read_one(run: Setup, image: int | str) -> tuple[NamedImage, Tensor]:
    """An image as the run's network sees it, [1, 3, H, W] uint8: a row or a path of its data set, or any file."""
    table = run.data.table
    if isinstance(image, str) and image not in table.paths and Path(image).expanduser().is_file():
        size = run.images.shape[1:3] if isinstance(run.images, Tensor) else ()
        given, source = open_given(image, run.transform, tuple(size), device=run.device)
        (batch,) = replace(run, data=replace(run.data, table=given), images=source).batches(np.array([0]))
        return NamedImage(image), batch.images
    row = row_of(table, image)
    (batch,) = run.batches(np.array([row]))
    return NamedImage(str(table.paths[row]), row, table.class_names[table.labels[row]]), batch.images


def open_given(
    images: Given | Iterable[Given], transform: Transform, size: tuple[int, ...], *, device: torch.device
) -> tuple[ImageTable, ImageSource | Tensor]:
    """Images from anywhere as a table of one class, and what reads them as a run reads its own.

    Args:
        transform: of the run, for evaluation.
        size: height and width of the run's images. A transform of batches takes this size alone: other images are
            resized to cover it, and the middle is kept.
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
    for row in range(len(given)):
        pixels[row] = _cover(given.read(row), *size)
    return table, torch.from_numpy(pixels).to(device)


def _cover(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """The middle [height, width, 3] of an image [H, W, 3] that is resized to cover it, sides rounded down."""
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    h, w = (height, w * height // h) if height * w >= width * h else (h * width // w, width)
    top, left = (h - height) // 2, (w - width) // 2
    return resized(image, h, w, "pillow")[top : top + height, left : left + width]


class Manifest(Schema):
    """What ``dmlbench.json`` of an exported folder says."""

    version: int = Field(alias="schema")
    files: dict[str, str]
    embedding_size: int
    modules: list[str]
    left_out: dict[str, str]
    versions: dict[str, str]
    result: dict[str, Any]


class _ModelConfig(Schema, extra="allow"):
    """What the configuration of an exported folder must have."""

    backbone: dict[str, Any]
    pooling: dict[str, Any] | None
    head: dict[str, Any]
    transform: dict[str, dict[str, Any] | None]
    fit: dict[str, Any]
    dataset: dict[str, Any]
    runtime: dict[str, Any]


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained network with the weights that its run selected, and the preprocessing of the run's test images.

    ``print(model)`` shows the network, its training data and its scores.

    Attributes:
        name: the run directory or exported folder that the model was loaded from.
        network: the PyTorch module on ``device``, in evaluation mode. It takes RGB images [B, 3, H, W],
            uint8 or floating point in [0, 1], normalizes their pixel values and returns a ``ModelOutput``.
        transform: the function that resizes and crops an image before it enters the network.
        image_size: height and width of the images that ``transform`` returns.
        device: the device that the network runs on.
        config: the configuration that the run was trained with.
        result: the contents of the run's ``result.json``, such as scores, protocol and digest of the data.
    """

    name: str
    network: MetricModel
    transform: Transform
    image_size: tuple[int, int]
    device: torch.device
    config: Mapping[str, Any]
    result: Mapping[str, Any]

    def __repr__(self) -> str:
        result, choices = self.result, self.config["runtime"]["choices"]
        parts = {group: node for group in (*_OF_MODEL, "loss") if (node := self.config.get(group))}
        options = {group: choices.get(group) or node["_target_"].rpartition(".")[2] for group, node in parts.items()}
        compared = (
            type(self.network.distance).__name__ if self.has_own_distance else "Euclidean distance of unit vectors"
        )
        before, (height, width) = preprocessing(self)["before_the_network"], self.image_size
        prepared = f"images of {height} x {width}; other sizes are {before.get('other_sizes')}"
        if "center_crop" in before:
            resize = before["resize_short_side"]
            prepared = f"images of any size; short side to {resize}, center crop {height} x {width}"
        scores = []
        for part, values in result["metrics"].items():
            shown = [score_named(name) for name in _SHOWN_SCORES if name in values] or [*map(score_named, values)]
            scores.append(f"{part} " + ", ".join(f"{s.label} {s.scale * values[s.name]:.2f}" for s in shown))
        return "\n".join((
            f"dmlbench model of {self.name} ({self.device})",
            f"trained on {result['dataset']}, protocol {result['protocol']}, fold {result['fold']}, "
            f"repeat {result['repeat']}: {', '.join(' '.join(option) for option in options.items())}",
            f"embedding: {self.embedding_size} dimensions, compared by {compared}",
            f"input: {prepared}",
            f"scores: {'; '.join(scores)}",
        ))  # fmt: skip

    @property
    def embedding_size(self) -> int:
        return self.network.embedding_size

    @property
    def has_own_distance(self) -> bool:
        """Whether the model compares embeddings by a distance other than the Euclidean distance of unit vectors.

        This holds for AVSL and hyperbolic heads.
        """
        return not ranks_like_unit_vectors(self.network.distance)

    def embed(
        self,
        images: Given | Iterable[Given],
        *,
        normalize: bool = False,
        progress: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
    ) -> Tensor:
        """Preprocess images like the run's test images and embed them. Returns [N, D], float32 on the CPU.

        Images may differ in size and mode. Each image is rotated as its EXIF tag says and converted to 8-bit RGB: a
        grey image gets three equal channels, and transparency is dropped. Then the run's evaluation transform resizes
        and crops the image. If all images of the run's data set have the same small size, the run has no such
        transform. In this case, ``embed`` resizes images of other sizes to the smallest size that covers this size, and
        center-crops them.

        Args:
            images: one image, an iterable of images, or a stack. An image is a path, a Pillow image of any mode, a
                uint8 array [H, W] or [H, W, C], or a uint8 tensor [H, W] or [C, H, W]. C is 1 (grey), 3 (RGB) or 4
                (RGBA). A stack is an array [N, H, W] or [N, H, W, C], or a tensor [N, C, H, W].
            normalize: whether to L2-normalize the embeddings. ``distance`` accepts them either way.
            progress: whether to show a progress bar.
            batch_size: number of images per forward pass. If you change it, embeddings change by about 1e-6.
            num_workers: number of processes that read images in the background.

        Raises:
            ConfigError: ``normalize`` and ``has_own_distance`` are both True.
            DataError: an input cannot be read as an image.
            ValueError: the network is in training mode.
        """
        if self.network.training:
            raise ValueError("the network is in training mode. Call model.network.eval() before embed().")
        if normalize and self.has_own_distance:
            name = type(self.network.distance).__name__
            raise ConfigError(f"normalize: got True, expected False since this model compares embeddings by {name}.")
        table, source = open_given(images, self.transform, self.image_size, device=self.device)
        batches = EvalBatches(
            table, np.arange(len(table)), images=source, transform=self.transform, batch_size=batch_size,
            device=self.device, num_workers=num_workers,
        )  # fmt: skip
        rows_of = network_pass(
            lambda batch: self.network(batch).embedding, self.device, self.config["fit"].get("precision", "float32"),
            channels_last=self.config["fit"].get("channels_last", False),
        )  # fmt: skip
        found = embed(rows_of, batches, device=self.device, progress=progress, count=len(table), describe="images")
        return nn.functional.normalize(found.rows) if normalize else found.rows

    @torch.no_grad()
    def distance(self, a: Any, b: Any) -> Tensor:
        """Compute the distance of each embedding in ``a`` to each in ``b``. Returns [M, N], float32 on the CPU.

        ``a`` [M, D] and ``b`` [N, D] are outputs of ``embed``; a single embedding may have shape [D]. The distance is
        the one that ranks images when the model is validated and tested. For most models, this is the Euclidean
        distance of the normalized embeddings, in [0, 2]. Some heads, such as AVSL, define their own distance.
        """
        # of unit vectors by products, whose rounding in float32 moves small distances by 1e-3
        dtype = torch.float32 if self.has_own_distance else torch.float64
        sides = [torch.atleast_2d(torch.as_tensor(x, dtype=dtype, device=self.device)) for x in (a, b)]
        for x in sides:
            if x.ndim != 2 or x.shape[1] != self.embedding_size:
                raise RunError(
                    f"distance: got embeddings of shape {tuple(x.shape)}, expected [N, {self.embedding_size}] as from "
                    f"{self.name}."
                )
        found: Tensor = self.network.distance(*sides)
        return found.float().cpu()


def load(
    path: str | Path,
    *,
    device: str = "auto",
    modules: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> TrainedModel:
    """Load a trained model from a run directory or exported folder; no data set is needed.

    The function imports Python code only from ``sys.path`` and from the folder that contains ``config_dir``. If the
    run's configuration names other folders with code, the function imports nothing from them.

    Args:
        path: the run directory, or a folder written by ``dmlbench export``.
        device: device of the network: ``auto`` (a GPU if available), ``cpu`` or ``cuda[:N]``.
        modules: names of top-level packages or modules. An exported folder may use only classes that dmlbench's options
            name, and classes from these packages. A run directory needs no ``modules``.
        config_dir: the ``config_dir`` that the run was trained with, if any.

    Raises:
        RunError: ``path`` is neither a run directory nor an exported folder, or its files are incomplete, damaged, or
            from an incompatible version of dmlbench.
        ConfigError: the device is unknown, a module is not found, or an exported folder needs a package that is missing
            from ``modules``.
    """
    folder = Path(path).expanduser()
    add_module_folder(config_dir)
    set_strict_float32()
    if (folder / MANIFEST).exists():
        return _exported(folder, device, tuple(modules))
    if not (folder / CONFIG).exists():
        runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        inside = f" Load one of its runs, such as {runs[0]}." if runs else ""
        raise RunError(
            f"{folder} is neither a run directory nor a folder of `dmlbench export`: it has no {CONFIG}.{inside}"
        )
    result = read_result(folder)
    config = config_with_weights(folder)
    require_own_files(folder, result, (BEST,))
    require_modules({**config, "transform.eval": config["transform"]["eval"]}, (*_OF_MODEL, "transform.eval"))
    return _made(folder, config, result, device, load_checkpoint(folder / BEST)["model"], folder / BEST)


def _exported(folder: Path, device: str, modules: tuple[str, ...]) -> TrainedModel:
    content = _json_of(folder / MANIFEST)
    try:
        if content.get("schema") != EXPORT_SCHEMA:
            raise RunError(
                f"{folder / MANIFEST}: schema: got {content.get('schema')}, expected {EXPORT_SCHEMA}. Install the "
                "version of dmlbench that wrote the file."
            )
        manifest = validated(content, Manifest)
    except ValueError as error:
        raise RunError(f"{folder / MANIFEST} is damaged ({error}). Get the folder again.") from error
    for name in (CONFIG, PREPROCESSING, WEIGHTS):
        path = folder / name
        if not path.is_file() or file_sha256(path) != manifest.files.get(name):
            raise RunError(f"{path} is missing, or its SHA-256 differs from {MANIFEST}. Get the folder again.")
    config = _plain_config(folder / CONFIG, modules)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise RunError(f"{folder / WEIGHTS} is damaged ({error}). Get the folder again.") from error
    model = _made(folder, config, manifest.result, device, weights, folder / WEIGHTS)
    now, then = (each.get("in_the_network") for each in (preprocessing(model), _json_of(folder / PREPROCESSING)))
    if now != then:
        raise RunError(
            f"{folder / PREPROCESSING}: got {now} from the installed dmlbench and timm, expected {then}. Install the "
            f"versions that {MANIFEST} lists."
        )
    return model


def _json_of(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}). Get the folder again.") from error


def _made(
    folder: Path, config: Mapping[str, Any], result: Mapping[str, Any], device: str, weights: Mapping[str, Tensor],
    file: Path,
) -> TrainedModel:  # fmt: skip
    on = select_device(device)
    network = build.build_model(as_config(without_pretrained(config)))
    put_weights(network, weights, file)
    build.move(network, on, channels_last=config["fit"].get("channels_last", False))
    network.eval()
    height, width = config["runtime"]["image_size"]
    transform: Transform = component(config["transform"]["eval"])
    if isinstance(transform, CropTransform):
        height = width = transform.crop  # the evaluation's may be another than the training's
    return TrainedModel(str(folder), network, transform, (int(height), int(width)), on, config, result)


def preprocessing(model: TrainedModel) -> dict[str, Any]:
    """What is done to an image before the network's first layer, in words that other code can follow."""
    transform, backbone = model.transform, getattr(model.network, "backbone", None)
    before: dict[str, Any] = {"read": "8-bit RGB, turned as EXIF says, grey images as three equal channels"}
    if isinstance(transform, CropTransform):
        before |= {
            "resize_short_side": transform.resize,
            "resampling": "bilinear with antialiasing" + (" (Pillow)" if transform.kernel == "pillow" else " (torch)"),
            "center_crop": transform.crop,
        }
    else:
        height, width = model.image_size
        before["other_sizes"] = f"resized (bilinear with antialiasing) to cover {height} x {width} and center-cropped"
    network: dict[str, Any] = {"input": ["batch", 3, *model.image_size], "dtype": "uint8", "channels": "RGB"}
    if isinstance(backbone, Backbone):
        network |= backbone.normalization()
    return {"before_the_network": before, "in_the_network": network}


def foreign_modules(config: Mapping[str, Any]) -> list[str]:
    """Packages other than dmlbench whose classes a model is made of, sorted."""
    targets = [str(value) for place, value in _leaves_of_model(config) if place.endswith("._target_")]
    return sorted({target.partition(".")[0] for target in targets} - {"dmlbench"})


def _plain_config(path: Path, modules: tuple[str, ...]) -> dict[str, Any]:
    """A configuration from elsewhere, if it is data: no interpolation, no place in a network, and known components."""
    config = read_config(path)
    try:
        validated(config, _ModelConfig)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}). Get the folder again.") from error
    if place := next((place for place, value in leaves(config) if "${" in f"{place}{value}"), None):
        raise ConfigError(f"{path}: {place}: got an interpolation, expected a value. Get the folder again.")
    known = _components()
    for place, value in _leaves_of_model(config):
        if "_target_" in place and value not in known.get(place, ()):
            package = str(value).partition(".")[0]
            if package not in modules:
                remedy = f"If you trust the code, add modules=[{package}]"
                raise ConfigError(f"{place}: got {value}, expected a component of dmlbench. {remedy}.")
            if not f"{getattr(imported(str(value), place), '__module__', '')}.".startswith(f"{package}."):
                raise ConfigError(
                    f"{place}: got {value}, expected a class defined in the package {package}. Get the folder again."
                )
        if place == "backbone.name" and ":" in str(value):
            raise ConfigError(f"{place}: got {value}, which needs a download, expected the name of a model in timm.")
    return config


def _leaves_of_model(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by their place of everything that a loaded model is made of."""
    for part in _OF_MODEL:
        yield from leaves(config.get(part), part)
    yield from leaves((config.get("transform") or {}).get("eval"), "transform.eval")


@functools.cache
def _components() -> dict[str, set[str]]:
    """The components of dmlbench's own options, by their key."""
    found: dict[str, set[str]] = {}
    for group in ("backbone", "tuning", "pooling", "head", "transform"):
        for path in (config_folder() / group).glob("*.yaml"):
            for place, value in leaves(load_yaml(path)):
                found.setdefault(f"{group}.{place}", set()).add(value)
    return {place: values for place, values in found.items() if place.endswith("._target_")}
