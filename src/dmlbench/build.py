"""The only wiring: from a composed configuration to checked objects."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from torch import nn
from torch.optim import Optimizer

from dmlbench.config import TrainConfig
from dmlbench.data.batches.loaders import EvalBatches, TrainBatches
from dmlbench.data.batches.transforms import CropTransform
from dmlbench.data.images.image_cache import cached_images
from dmlbench.data.images.pixels import Kernel, read_image
from dmlbench.data.images.sources import DecodedImages, ImageSource, pixel_tensor
from dmlbench.data.protocols import class_index
from dmlbench.evaluation.metrics.scores import DISTANCE_METRICS
from dmlbench.evaluation.search.by_distance import refuse_what_unit_vectors_have
from dmlbench.evaluation.search.rerank import check_rerank
from dmlbench.losses.layered import LayeredLoss, LayeredProxyAnchor
from dmlbench.losses.objective import Objective
from dmlbench.models.avsl import AvslHead, AvslModel
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.backbones import Backbone
from dmlbench.models.lent_distances import BorrowedDistance
from dmlbench.models.net import MetricModel, pooled_channels
from dmlbench.signatures import check_components, imported, parameters_of
from dmlbench.training.fit import FitSettings
from dmlbench.training.log import Logger
from dmlbench.training.optim import make_optimizer, parameter_groups
from dmlbench.training.replay import Plan, replayed
from dmlbench.types import ConfigError, DmlbenchError, ImageTable, IntArray, Split, closest

_BATCH_SIZES = ("classes_per_batch", "images_per_class", "batch_size")


def check(cfg: DictConfig) -> None:
    """``check_values``, with a hint where papers' settings took part, which the user may not know of."""
    try:
        check_values(cfg)
    except ConfigError as error:
        groups = " ".join(f"~{name.rpartition('/')[0]}" for name in cfg.runtime.tuned)
        raise ConfigError(
            f"{error} (papers' settings took part: {groups} leaves them out)" if groups else str(error)
        ) from None


def check_values(cfg: DictConfig) -> None:
    """Check every component's arguments against its target's signature, and what can be known before data is read.

    Raises:
        ConfigError: names the key, the value and what is possible.
    """
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    known = [f.name for f in dataclasses.fields(TrainConfig)]
    for key in container:
        if key not in known:
            raise ConfigError(f"the configuration has no key '{key!s}': {closest(str(key), known)}")
    check_components(container)
    sizes = {key: value for key, value in cfg.sampler.items() if key in _BATCH_SIZES}
    for key, value in sizes.items():
        if value < 1:
            raise ConfigError(f"sampler.{key} ({value}) must be at least 1")
        # Losses with vectors of the classes know both sizes; others compare images with each other.
        if value < 2 and not {"num_classes", "embedding_size"} <= container["loss"].keys() and not _is_proxied(cfg):
            raise ConfigError(
                f"{cfg.loss._target_} compares images with each other: sampler.{key} ({value}) must be at least 2, or "
                "choose a loss with proxies"
            )
    for part in ("train", "eval"):
        if not container["transform"].get(part):
            raise ConfigError(f"transform has no '{part}'; write both train and eval, as in conf/transform/mlrc.yaml")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", str(cfg.dataset.name)):
        raise ConfigError(f"dataset.name ({cfg.dataset.name!r}) names a folder: use letters, digits, '.', '_' and '-'")
    if (cfg.num_workers or 0) < 0 or cfg.eval_batch_size < 1:
        raise ConfigError(
            f"num_workers ({cfg.num_workers}) must be >= 0 and eval_batch_size ({cfg.eval_batch_size}) >= 1"
        )
    # What is cheap to make is made: its constructor knows the ranges of its values.
    for node in (cfg.fit, cfg.optim, cfg.evaluation, cfg.transform.train, cfg.transform.eval, cfg.pooling):
        if node is not None and not _waits_for_data(node):
            component(node)
    _check_head(cfg)
    asked = "" if cfg.pooling is None else OmegaConf.to_yaml(cfg.pooling, resolve=False)
    crops = [cfg.transform[part].get("crop") for part in ("train", "eval")]
    if "${runtime.map_size}" in asked and crops[0] != crops[1]:
        raise ConfigError(
            f"{cfg.pooling._target_} is made for one size of the map, but transform.train.crop ({crops[0]}) and "
            f"transform.eval.crop ({crops[1]}) differ; set both to the same"
        )
    known_scores = [name for name in component(cfg.evaluation).score_names if name not in DISTANCE_METRICS]
    if cfg.fit.monitor in DISTANCE_METRICS:
        raise ConfigError(
            f"fit.monitor ({cfg.fit.monitor}) is a distance: neither large nor small is good, a collapsed model has "
            f"small ones; choose one of {', '.join(known_scores)}"
        )
    if cfg.fit.monitor not in known_scores:
        raise ConfigError(
            f"fit.monitor ({cfg.fit.monitor}) is no score that evaluation.metrics and evaluation.recall_at ask for: "
            f"{closest(cfg.fit.monitor, known_scores)}"
        )
    protocol = component(cfg.protocol)
    plateau = cfg.schedule is None or cfg.schedule._target_.endswith(".ReduceLROnPlateau")
    if cfg.protocol.get("stage") is not None and not plateau:
        raise ConfigError(
            f"{cfg.schedule._target_} depends on the length of the training, which protocol=two_stage has yet to find; "
            "use schedule=plateau or schedule=null"
        )
    for key, value, limit in (("fold", cfg.fold, protocol.num_folds), ("repeat", cfg.repeat, None)):
        if value < 0 or (limit is not None and value >= limit):
            possible = f"0 to {limit - 1}" if limit is not None else "0 or more"
            raise ConfigError(f"{key} ({value}) is outside of protocol '{protocol.name}', which has {key} {possible}")


def _check_head(cfg: DictConfig) -> None:
    """The head by itself, and what AVSL's asks of the rest."""
    if not _is_avsl(cfg):
        if cfg.pooling is None:
            raise ConfigError("pooling=null: every head but avsl needs a pooling; choose one of conf/pooling")
        component(cfg.head, in_features=1)
        if _is_layered(cfg.loss):
            raise ConfigError(f"{cfg.loss._target_} compares levels, which head=avsl makes; choose another loss")
        rerank = component(cfg.evaluation).rerank
        if rerank is not None:
            check_rerank(rerank, None, k=0, num_gallery=0)
        return
    distance = build_distance(cfg)
    assert distance is not None
    if cfg.pooling is not None:
        raise ConfigError(
            f"head=avsl pools by itself (average and maximum of every level), beside {cfg.pooling._target_}; set "
            "pooling=null"
        )
    if cfg.regularizer is not None:
        raise ConfigError("regularizers work on vectors, and AVSL's rows are none; set regularizer=null")
    refuse_what_unit_vectors_have(component(cfg.evaluation), distance)
    _check_comparisons(cfg, distance)


def _check_comparisons(cfg: DictConfig, distance: AvslDistance) -> None:
    """Loss and miner, and those within a layered loss, must compare by AVSL's distance.

    Raises:
        ConfigError: one cannot.
    """
    within: dict[str, DictConfig | None] = {}
    if imported(cfg.loss._target_, "loss") is LayeredLoss:
        within = {"loss.loss": cfg.loss.loss, "loss.miner": cfg.loss.get("miner")}
    for key, node in {"loss": cfg.loss, "miner": cfg.miner, **within}.items():
        if node is None:
            continue
        parameters, _ = parameters_of(imported(node._target_, key))
        takes_distance = "distance" in parameters and "embedding_size" not in parameters
        if not takes_distance and key.endswith("miner"):
            raise ConfigError(f"{node._target_} compares vectors and not AVSL's rows; set {key}=null")
        if not takes_distance or (key == "loss.loss" and _is_layered(node)):
            remedy = "loss=layered, loss=layered_proxy_anchor, or a loss of pairs or triplets such as contrastive"
            if key in within:
                remedy = "a loss of pairs or triplets, such as loss@loss.loss=triplet"
            raise ConfigError(
                f"{node._target_} as {key} does not compare by a distance that it is given, as AVSL's rows must be; "
                f"choose {remedy}"
            )
        if key in within and not node.get("_partial_"):
            raise ConfigError(f"{key} is made once for each level's distance; add +{key}._partial_=true")
    # These are cheap to make, too; of what the data will say, the number of classes.
    classes = {"num_classes": 2} if _is_proxied(cfg) else {}
    for node, compared_by in ((cfg.miner, BorrowedDistance(distance)), (cfg.loss, distance)):
        if node is not None and (classes or not _waits_for_data(node)):
            component(node, distance=compared_by, **(classes if node is cfg.loss else {}))


def _is_avsl(cfg: DictConfig) -> bool:
    return imported(cfg.head._target_, "head") is AvslHead


def _is_proxied(cfg: DictConfig) -> bool:
    return imported(cfg.loss._target_, "loss") is LayeredProxyAnchor


def _is_layered(loss: DictConfig) -> bool:
    return imported(loss._target_, "loss") in (LayeredLoss, LayeredProxyAnchor)


def _waits_for_data(node: Any) -> bool:
    """Whether values of a node depend on what ``runtime`` will say once the data and the backbone are there."""
    try:
        OmegaConf.to_container(node, resolve=True)
    except InterpolationResolutionError as error:
        if "Missing mandatory value: runtime." in str(error):
            return True
        raise
    return False


def component(node: Any, **provided: Any) -> Any:
    """Instantiate a node with a ``_target_``; None stays None. An error of ours comes without Hydra's around it."""
    if node is None:
        return None
    try:
        return hydra.utils.instantiate(node, _convert_="all", **provided)
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, DmlbenchError):
            cause = cause.__cause__
        if isinstance(cause, DmlbenchError):
            raise cause from None
        if isinstance(cause, (TypeError, ValueError, AssertionError)) and not node._target_.startswith("dmlbench."):
            raise ConfigError(f"{node._target_} refuses its arguments: {cause}") from error
        raise


def build_fit_settings(cfg: DictConfig, plan: Plan | None = None) -> FitSettings:
    """Length, selection and numerics of the training; with a ``plan``, of the plan's length and without selection."""
    settings: FitSettings = component(cfg.fit)
    if plan is None:
        return settings
    steps = plan.steps(cfg.runtime.steps_per_epoch)
    # The best step of stage 1 may lie within its warm-up; one step of the whole network is trained all the same.
    warmup_steps = min(settings.warmup_steps, max(0, steps - 1))
    return dataclasses.replace(settings, max_steps=steps, patience=None, warmup_steps=warmup_steps)


@dataclass(frozen=True)
class Data:
    """A data set under a protocol: the images, who trains and who is tested, and the classes renumbered from 0."""

    table: ImageTable
    split: Split
    class_index: IntArray  # [num_classes of the table], -1 for classes that are not trained on


def build_data(cfg: DictConfig) -> Data:
    """Read the data set, split it and set what ``runtime`` says about classes and images.

    Raises:
        DataError, ConfigError: the data set is missing or broken, the protocol does not fit it, or the sampler's batch
            is larger than the training classes allow.
    """
    table: ImageTable = component(cfg.dataset.table)
    split = component(cfg.protocol).split(table, fold=cfg.fold)
    index = class_index(table, split.train)
    OmegaConf.update(cfg, "runtime.num_classes", int(index.max()) + 1)
    # Epochs of other seeds may be a batch longer or shorter; one length for all runs of a cell.
    sampler = component(cfg.sampler, labels=index[table.labels[split.train]], seed=0)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", max(1, round(len(sampler) / cfg.fit.accumulate)))
    OmegaConf.update(cfg, "runtime.image_size", _image_size(cfg, table))
    return Data(table, split, index)


def _image_size(cfg: DictConfig, table: ImageTable) -> list[int]:
    """Height and width of what the transforms return."""
    transform = component(cfg.transform.train)
    if isinstance(transform, CropTransform):
        return [transform.crop, transform.crop]
    if table.pixels is not None:
        return list(table.pixels.shape[1:3])
    image = read_image(Path(table.root) / str(table.paths[0]))
    return [image.height, image.width]


def image_opener(
    cfg: DictConfig, table: ImageTable, device: torch.device, *, check: Callable[[], None] = lambda: None
) -> Callable[[Any], ImageSource | torch.Tensor]:
    """A function from a transform's node to the images as it wants them, each opened once.

    Transforms that cut get a source: the image cache, which is built where there is none yet, or decoded files. Those
    that move whole batches get a tensor of all images on the device.

    Args:
        cfg: the configuration.
        table: the data set.
        device: where tensors of whole data sets are held.
        check: called now and then while the cache is built; what it raises ends that.

    Raises (by the function):
        DataError: an image cannot be read, the cache cannot be written, or images that must be equal in size are not.
    """

    @functools.cache
    def opened(works_on: str, short_side: int | None, kernel: Kernel) -> ImageSource | torch.Tensor:
        source: ImageSource = DecodedImages(table, short_side=short_side, kernel=kernel)
        # Without a first resize the cache would hold whole photographs, tens of times the size of the files.
        if cfg.image_cache and table.pixels is None and (short_side is not None or works_on == "batch"):
            source = cached_images(
                table, cfg.paths.cache_dir, short_side=short_side, kernel=kernel,
                progress=sys.stderr.isatty(), check=check,
            )  # fmt: skip
        return pixel_tensor(table, source, device) if works_on == "batch" else source

    def open_images(node: Any) -> ImageSource | torch.Tensor:
        transform = component(node)
        if isinstance(transform, CropTransform):
            return opened("image", transform.resize, transform.kernel)
        return opened("batch", None, "pillow")

    return open_images


def build_model(cfg: DictConfig) -> MetricModel | AvslModel:
    """Backbone, pooling and head; sets what ``runtime`` says about the maps and embeddings."""
    backbone = component(cfg.backbone)
    OmegaConf.update(cfg, "runtime.num_channels", backbone.channels[-1])
    if _is_avsl(cfg):
        sizes = _map_sizes(backbone, cfg.runtime.image_size) if cfg.head.reliability == "learned" else None
        levels = AvslModel(backbone, component(cfg.head, in_channels=list(backbone.channels), map_sizes=sizes))
        OmegaConf.update(cfg, "runtime.embedding_size", levels.embedding_size)
        return levels
    if "${runtime.map_size}" in OmegaConf.to_yaml(cfg.pooling, resolve=False):
        OmegaConf.update(cfg, "runtime.map_size", _map_sizes(backbone, cfg.runtime.image_size)[-1])
    pooling = component(cfg.pooling)
    width = pooling.input_width(cfg.head.out_features)
    head = component(cfg.head, in_features=pooled_channels(backbone, pooling), out_features=width)
    model = MetricModel(backbone, pooling, head)
    OmegaConf.update(cfg, "runtime.embedding_size", model.embedding_size)
    return model


def build_distance(cfg: DictConfig) -> AvslDistance | None:
    """The distance of a configuration's model as it starts, without the model; None is that of unit vectors."""
    if not _is_avsl(cfg):
        return None
    levels = cfg.head.num_levels
    head: AvslHead = component(cfg.head, in_channels=[1] * levels, map_sizes=[[1, 2]] * levels)
    return head.make_distance()


def _map_sizes(backbone: Backbone, image_size: Sequence[int]) -> list[list[int]]:
    """Height and width of every map."""
    was_training = backbone.training
    backbone.eval()
    with torch.no_grad():
        image = torch.zeros(1, 3, *image_size, dtype=torch.uint8)
        maps = backbone(backbone.preprocess(image))
    backbone.train(was_training)
    return [list(x.shape[2:]) for x in maps]


def build_objective(cfg: DictConfig, model: MetricModel | AvslModel) -> Objective:
    """Loss, miner and regularizers, with the numbers of classes and dimensions now known.

    Raises:
        ConfigError: a regularizer reads what the pooling never provides.
    """
    regularizers = component(cfg.regularizer) or {}
    mixing = regularizers.pop("mixing", "convex")
    of_pairs: dict[str, Any] = {}
    of_loss: dict[str, Any] = {}
    if isinstance(model, AvslModel):
        of_pairs["distance"] = BorrowedDistance(model.distance)
        of_loss["distance"] = model.distance if _is_layered(cfg.loss) else of_pairs["distance"]
    objective = Objective(component(cfg.loss, **of_loss), component(cfg.miner, **of_pairs), regularizers, mixing=mixing)
    for name, requires in objective.requires.items():
        for side in requires:
            if side not in model.provides:
                raise ConfigError(
                    f"regularizer '{name}' needs '{side}' of the pooling, which {cfg.pooling._target_} does not "
                    f"provide (it provides: {', '.join(model.provides) or 'nothing'}); choose pooling=gsp or "
                    "another that does"
                )
    return objective


def build_optimizer(
    cfg: DictConfig, model: MetricModel | AvslModel, objective: Objective, plan: Plan | None = None
) -> tuple[Optimizer, Any]:
    """Optimizer over the named groups, and its schedule or None; with a ``plan``, the plan's rates instead."""
    optimizer = make_optimizer(parameter_groups(model.parameter_groups(), objective), component(cfg.optim))
    if plan is not None:
        return optimizer, replayed(optimizer, plan, steps_per_epoch=cfg.runtime.steps_per_epoch)
    return optimizer, component(cfg.schedule, optimizer=optimizer)


def build_train_batches(
    cfg: DictConfig, data: Data, images: ImageSource | torch.Tensor, *, seed: int, device: torch.device
) -> TrainBatches:
    """The endless training batches of a run."""
    sampler = component(cfg.sampler, labels=data.class_index[data.table.labels[data.split.train]], seed=seed)
    return TrainBatches(
        data.table,
        data.split.train,
        images=images,
        class_index=data.class_index,
        sampler=sampler,
        transform=component(cfg.transform.train),
        seed=seed,
        device=device,
        num_workers=cfg.num_workers,
    )


def build_eval_batches(
    cfg: DictConfig, data: Data, images: ImageSource | torch.Tensor, *, device: torch.device
) -> Callable[[IntArray], EvalBatches]:
    """A function from table rows to their batches, without augmentation."""
    transform = component(cfg.transform.eval)
    return lambda rows: EvalBatches(
        data.table,
        rows,
        images=images,
        transform=transform,
        batch_size=cfg.eval_batch_size,
        device=device,
        num_workers=cfg.num_workers,
    )


def build_loggers(cfg: DictConfig, run_dir: Path) -> list[Logger]:
    logger = component(cfg.logger, run_dir=run_dir) if cfg.logger is not None else None
    return [] if logger is None else [logger]


def move(model: nn.Module, objective: nn.Module, device: torch.device, *, channels_last: bool) -> None:
    """Put model and objective on the device in the memory format of the images."""
    model.to(device=device)
    if channels_last:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)
    objective.to(device)
