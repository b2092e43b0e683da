"""A trained model without its data: images to embeddings, and the distance between these."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dmlbench import build
from dmlbench.apps.trained import config_with_weights, open_given, put_weights, without_pretrained
from dmlbench.components import component, imported
from dmlbench.config import load_config
from dmlbench.data.batches.loaders import EvalBatches
from dmlbench.data.batches.transforms import CropTransform, Transform
from dmlbench.data.images.given import Given
from dmlbench.evaluation.embeddings.embed import embed
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.models.backbones import Backbone
from dmlbench.models.head import Head
from dmlbench.models.net import MetricModel
from dmlbench.models.pooling.base import Pooling
from dmlbench.results.store import CONFIG, RESULT, read_result, require_own_files
from dmlbench.runtime import autocast, file_sha256, read_json, select_device, set_strict_float32
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, EmbeddingSet, RunError

WEIGHTS, PREPROCESSING, MANIFEST, CARD = "model.safetensors", "preprocessing.json", "dmlbench.json", "README.md"
"""Files of an exported folder, besides ``config.yaml`` and the graphs; the manifest is what makes it one."""
EXPORT_SCHEMA = 1

_PARTS = ("dmlbench.models.", "dmlbench.data.batches.transforms.")
"""Where the classes live that a configuration from elsewhere may name."""


@dataclass(frozen=True)
class TrainedModel:
    """A network with the weights of a run's best step and the preprocessing that the run was evaluated with.

    Attributes:
        name: the run or folder that it was loaded from.
        network: on ``device``, in evaluation mode: uint8 RGB images [B, 3, H, W] to a ``ModelOutput``; normalization is
            part of it.
        transform: what makes a photograph ready for it.
        image_size: height and width of what ``transform`` returns.
        device: where it computes.
        config: of the run.
        result: of the run, as ``result.json`` has it: scores, protocol, fingerprint of the data.
    """

    name: str
    network: MetricModel
    transform: Transform
    image_size: tuple[int, int]
    device: torch.device
    config: DictConfig
    result: Mapping[str, Any]

    @property
    def embedding_size(self) -> int:
        """D."""
        return self.network.embedding_size

    @property
    def has_own_distance(self) -> bool:
        """Whether rows are compared otherwise than as unit vectors, so that other code needs ``distance``, too."""
        return not ranks_like_unit_vectors(self.network.distance)

    def embed(
        self, images: Given | Iterable[Given], *, progress: bool = False, batch_size: int = 128, num_workers: int = 0
    ) -> Tensor:
        """Embeddings [N, D] float32 on the CPU, not normalized, of images prepared as the run's test images were.

        Args:
            images: one or many: paths, Pillow images, arrays [H, W, 3] or [H, W] and tensors [3, H, W] of uint8, or
                one array [N, H, W, 3] or [N, H, W], one tensor [N, 3, H, W].
            progress: whether to show a bar.
            batch_size: images at once; another number moves embeddings by about 1e-6.
            num_workers: processes that read ahead.

        Raises:
            ConfigError: the run's transform does not resize and images have another size than the run's.
            DataError: an image cannot be read, or is none.
            RunError: an embedding holds NaN or infinity.
        """
        return self.embed_set(images, progress=progress, batch_size=batch_size, num_workers=num_workers).rows

    def embed_set(
        self,
        images: Given | Iterable[Given],
        *,
        labels: NDArray[np.int64] | None = None,
        progress: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
    ) -> EmbeddingSet:
        """As ``embed``, with ``labels`` [N] (0 by default) and ids that count from 0, as ``evaluate`` takes them."""
        if self.network.training:
            raise ValueError("the network is in training mode; call model.network.eval() before embed(...)")
        table, source = open_given(images, self.transform, self.image_size, device=self.device, of=self.name)
        if labels is not None:
            table = replace(table, labels=labels)
        batches = EvalBatches(
            table, np.arange(len(table)), images=source, transform=self.transform, batch_size=batch_size,
            device=self.device, num_workers=num_workers,
        )  # fmt: skip
        channels_last = self.config.fit.get("channels_last", False)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format

        def rows_of(batch: Tensor) -> Tensor:
            with autocast(self.device, self.config.fit.get("precision", "float32")):
                return self.network(batch.contiguous(memory_format=memory_format)).embedding

        return embed(rows_of, batches, device=self.device, progress=progress, count=len(table), describe="images")

    @torch.no_grad()
    def distance(self, a: Any, b: Any) -> Tensor:
        """Distances [M, N], float32 on the CPU, by what the model was trained and evaluated by.

        That is the Euclidean distance of unit vectors, in [0, 2], or one of the head's own (AVSL).

        Args:
            a: rows of ``embed``, [M, D]; a single row [D] counts as one.
            b: [N, D], likewise.

        Raises:
            RunError: rows of another width.
        """
        # of unit vectors by products, whose rounding in float32 moves small distances by 1e-3
        dtype = torch.float32 if self.has_own_distance else torch.float64
        sides = [torch.atleast_2d(torch.as_tensor(x, dtype=dtype, device=self.device)) for x in (a, b)]
        for x in sides:
            if x.ndim != 2 or x.shape[1] != self.embedding_size:
                raise RunError(f"rows {tuple(x.shape)} are no embeddings of {self.name}, [N, {self.embedding_size}]")
        found: Tensor = self.network.distance(*sides)
        return found.float().cpu()


def load(path: str | Path, *, device: str = "auto", modules: Sequence[str] = ()) -> TrainedModel:
    """The model of a run directory, or of a folder of ``dmlbench export``; no data set is needed.

    Args:
        path: the folder.
        device: ``auto``, ``cpu`` or ``cuda[:N]``.
        modules: packages of your own whose classes an exported folder may name. Its configuration is data: only classes
            of networks, poolings and heads of dmlbench and of these are made. Run directories are taken as they are.

    Raises:
        RunError: it is neither, it is incomplete or damaged, or it was made by an incompatible version.
        ConfigError: an unknown device, or a class of somebody else.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; name a run directory, or a folder of `dmlbench export`")
    set_strict_float32()
    if (folder / MANIFEST).exists():
        return _exported(folder, device, tuple(modules))
    if not (folder / RESULT).exists() and not (folder / CONFIG).exists():
        raise RunError(f"{folder} is neither a run directory nor a folder of `dmlbench export`: it has no {MANIFEST}")
    result = read_result(folder)
    config = config_with_weights(folder)
    require_own_files(folder, result, (BEST,))
    return _made(folder, config, result, device, load_checkpoint(folder / BEST)["model"], folder / BEST)


def _exported(folder: Path, device: str, modules: tuple[str, ...]) -> TrainedModel:
    try:
        manifest = read_json(folder / MANIFEST)
    except ValueError as error:
        raise RunError(f"{folder / MANIFEST} is damaged ({error}); get the folder again") from error
    if manifest.get("schema") != EXPORT_SCHEMA:
        raise RunError(
            f"{folder / MANIFEST} has schema {manifest.get('schema')}, this version reads {EXPORT_SCHEMA}; install "
            "the version that wrote it"
        )
    for name in (CONFIG, PREPROCESSING, WEIGHTS):
        path = folder / name
        if not path.is_file():
            raise RunError(f"{path} is missing; get the folder again")
        if file_sha256(path) != manifest["files"].get(name):
            raise RunError(f"{path} is not the file that {MANIFEST} names; get the folder again")
    config = load_config(folder / CONFIG)
    _require_known_classes(config, modules)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise RunError(f"{folder / WEIGHTS} is damaged ({error}); get the folder again") from error
    model = _made(folder, config, manifest["result"], device, weights, folder / WEIGHTS)
    stored = json.loads((folder / PREPROCESSING).read_text(encoding="utf-8"))
    now, then = (each["in_the_network"] for each in (preprocessing(model), stored))
    if now != then:
        raise RunError(
            f"{folder / PREPROCESSING} names {then}, but the versions of dmlbench and timm here have {now}; install "
            f"those that {MANIFEST} names"
        )
    return model


def _made(
    folder: Path, config: DictConfig, result: Mapping[str, Any], device: str, weights: Mapping[str, Tensor], file: Path
) -> TrainedModel:
    on = select_device(device)
    network = build.build_model(without_pretrained(config))
    put_weights(network, weights, file)
    build.move(network, on, channels_last=config.fit.get("channels_last", False))
    network.eval()
    height, width = config.runtime.image_size
    transform: Transform = component(config.transform.eval)
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
    network: dict[str, Any] = {"input": ["batch", 3, *model.image_size], "dtype": "uint8", "channels": "RGB"}
    if isinstance(backbone, Backbone):
        network |= backbone.normalization()
    return {"before_the_network": before, "in_the_network": network}


def foreign_modules(config: DictConfig) -> list[str]:
    """Packages other than dmlbench whose classes a model is made of, sorted."""
    named = {target.partition(".")[0] for _, _, _, target in _parts_of(config) if not target.startswith(_PARTS)}
    return sorted(named)


def _require_known_classes(config: DictConfig, modules: tuple[str, ...]) -> None:
    """Insist that a folder from elsewhere names nothing but parts of models and transforms."""
    trusted = (*_PARTS, *(f"{module}." for module in modules))
    for key, kind, place, target in _parts_of(config):
        if not target.startswith(trusted):
            raise ConfigError(
                f"{place} is {target}, which is no part of dmlbench's models; if you trust that code, name its package "
                f"in modules, here [{target.partition('.')[0]}]"
            )
        found = imported(target, place)
        is_kind = place != f"{key}._target_" or kind is None or (isinstance(found, type) and issubclass(found, kind))
        if not is_kind or not f"{getattr(found, '__module__', '')}.".startswith(trusted):
            raise ConfigError(f"{place} is {target}, which is no {key}; get the folder again")


def _parts_of(config: DictConfig) -> Iterable[tuple[str, type | None, str, str]]:
    """Everything that a model is made of: its key, the kind that stands there, the place and the ``_target_``."""
    for key, kind in (("backbone", Backbone), ("pooling", Pooling), ("head", Head), ("transform.eval", None)):
        node: Any = OmegaConf.select(config, key)
        if node is not None:
            for place, target in _targets(OmegaConf.to_container(node, resolve=True), key):
                yield key, kind, place, target


def _targets(node: Any, path: str) -> Iterable[tuple[str, str]]:
    """Every ``_target_`` within a node, by its key."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield f"{path}._target_", str(value)
            else:
                yield from _targets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _targets(value, f"{path}[{i}]")
