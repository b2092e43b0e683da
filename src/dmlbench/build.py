"""The only wiring: from a composed configuration to checked objects."""

import copy
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from pytorch_metric_learning.distances import BaseDistance
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dmlbench.component_arguments import check_components, component, imported, parameters_of
from dmlbench.config import schema_of
from dmlbench.data.batches.loaders import TrainBatches
from dmlbench.data.batches.transforms import CropTransform
from dmlbench.data.images.image_cache import cached_images
from dmlbench.data.images.pixels import Kernel, read_image
from dmlbench.data.images.sources import DecodedImages, ImageSource, pixel_tensor
from dmlbench.data.protocols import class_index
from dmlbench.evaluation.evaluate import check_distance_supports
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.evaluation.search.rerank import check_shortlist, ranks_lists
from dmlbench.losses.objective import Objective, plain_loss
from dmlbench.models.borrowed_distances import BorrowedDistance
from dmlbench.models.head import Head, MetricModel
from dmlbench.models.net import make_model, pooled_channels
from dmlbench.training.fit import FitSettings
from dmlbench.training.log import Logger
from dmlbench.training.optim import make_optimizer, parameter_groups
from dmlbench.training.stage_plan import Plan, replayed
from dmlbench.types import ConfigError, ImageTable, IntArray, Split, closest, is_file_name

_MOST_WORKERS = 256
_BATCH_SIZES = ("classes_per_batch", "images_per_class", "batch_size")


def check(cfg: DictConfig) -> None:
    """``check_values``, with a hint where a recipe took part, which an experiment may have chosen."""
    try:
        check_values(cfg)
    except ConfigError as error:
        name = cfg.runtime.recipe.get("name")
        raise ConfigError(
            f"{error} (recipe={name} took part: recipe=none leaves it out)" if name else str(error)
        ) from None


def check_values(cfg: DictConfig) -> None:
    """Check every component's arguments against its target's signature, and what can be known before data is read.

    Raises:
        ConfigError: names the key, the value and what is possible.
    """
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    known = [f.name for f in dataclasses.fields(schema_of("train"))]
    for key in container:
        if key not in known:
            raise ConfigError(f"the configuration has no key '{key!s}': {closest(str(key), known)}")
    check_components(container)
    if "_target_" in (container["logger"] or {}):
        raise ConfigError("logger has a _target_; write it under a name of its own, as in conf/logger/tensorboard.yaml")
    sizes = {key: value for key, value in cfg.sampler.items() if key in _BATCH_SIZES}
    for key, value in sizes.items():
        if value < 1:
            raise ConfigError(f"sampler.{key} ({value}) must be at least 1")
        # Losses with vectors of the classes know both sizes; others compare images with each other.
        plain = cfg.loss.get("loss") or cfg.loss  # what mixtures are added to
        with_classes = {"num_classes", "embedding_size"} <= plain.keys() or _declared(plain, "has_proxies")
        if value < 2 and not with_classes:
            raise ConfigError(
                f"{cfg.loss._target_} compares images with each other: sampler.{key} ({value}) must be at least 2, or "
                "choose a loss with proxies"
            )
    for part in ("train", "eval"):
        if not container["transform"].get(part):
            raise ConfigError(f"transform has no '{part}'; write both train and eval, as in conf/transform/mlrc.yaml")
    if not is_file_name(str(cfg.dataset.name)):
        raise ConfigError(f"dataset.name ({cfg.dataset.name!r}) names a folder: use letters, digits, '.', '_' and '-'")
    if not 0 <= (cfg.num_workers or 0) <= _MOST_WORKERS:
        raise ConfigError(f"num_workers ({cfg.num_workers}) must lie in [0, {_MOST_WORKERS}]; null chooses")
    if cfg.eval_batch_size < 1:
        raise ConfigError(f"eval_batch_size ({cfg.eval_batch_size}) must be at least 1")
    # What is cheap to make is made: its constructor knows the ranges of its values.
    for node in (cfg.fit, cfg.optim, cfg.evaluation, cfg.transform.train, cfg.transform.eval, cfg.pooling):
        if node is not None and not _waits_for_data(node):
            component(node)
    _check_head(cfg)
    crops = [cfg.transform[part].get("crop") for part in ("train", "eval")]
    if _asks_for_map_size(cfg) and crops[0] != crops[1]:
        raise ConfigError(
            f"{cfg.pooling._target_} is made for one size of the map, but transform.train.crop ({crops[0]}) and "
            f"transform.eval.crop ({crops[1]}) differ; set both to the same"
        )
    scores = component(cfg.evaluation).scores
    known_scores = [score.name for score in scores if score.metric.better is not None]
    if cfg.fit.monitor in [score.name for score in scores if score.metric.better is None]:
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
    plateau = cfg.schedule is None or issubclass(imported(cfg.schedule._target_, "schedule"), ReduceLROnPlateau)
    if (protocol.leaves_plan or protocol.planned_by) and not plateau:
        raise ConfigError(
            f"{cfg.schedule._target_} depends on the length of the training, which protocol={protocol.name} has yet to "
            "find; use schedule=plateau or schedule=null"
        )
    if container["fit"]["max_steps"] != 0:
        _check_periods(container["schedule"], "schedule")
    for group in ("loss", "miner"):
        _check_distances(container[group], group)
    for key, value, limit in (("fold", cfg.fold, protocol.num_folds), ("repeat", cfg.repeat, None)):
        if value < 0 or (limit is not None and value >= limit):
            possible = f"0 to {limit - 1}" if limit is not None else "0 or more"
            raise ConfigError(f"{key} ({value}) is outside of protocol '{protocol.name}', which has {key} {possible}")


def _check_distances(node: Any, path: str) -> None:
    """Exponents of PML's distances, which PML leaves to torch to refuse, or to turn near into far.

    Raises:
        ConfigError: one is not positive.
    """
    if not isinstance(node, dict):
        return
    if str(node.get("_target_", "")).startswith("pytorch_metric_learning.distances."):
        for key in ("p", "power"):
            if isinstance(value := node.get(key, 1), int | float) and value <= 0:
                raise ConfigError(f"{path}.{key} ({value}) must be positive")
    for key, value in node.items():
        _check_distances(value, f"{path}.{key}")


def _check_periods(node: Any, path: str) -> None:
    """Lengths in steps that torch's schedules divide by, also of schedules within schedules.

    Raises:
        ConfigError: one is known, and below 1.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key in ("T_max", "T_0", "step_size") and isinstance(value, int | float) and value < 1:
            raise ConfigError(f"{path}.{key} ({value}) must be at least 1 step")
        _check_periods(value, f"{path}.{key}")


def _check_head(cfg: DictConfig) -> None:
    """The head by itself, and what its distance asks of the rest."""
    head = imported(cfg.head._target_, "head")
    if not hasattr(head, "pools"):
        raise ConfigError(f"head._target_ ({cfg.head._target_}) is not a head (see dmlbench.models.head.Head)")
    if head.pools and cfg.pooling is not None:
        raise ConfigError(
            f"{cfg.head._target_} pools by itself, in addition to {cfg.pooling._target_}; set pooling=null"
        )
    if not head.pools and cfg.pooling is None:
        raise ConfigError(f"pooling=null: {cfg.head._target_} needs a pooling; choose one of conf/pooling")
    distance = build_distance(cfg)
    if _declared(cfg.loss, "compares_levels") and not hasattr(distance, "levels"):
        raise ConfigError(f"{cfg.loss._target_} compares levels, which head=avsl has; choose another loss")
    spec = component(cfg.evaluation)
    if distance is not None:
        if cfg.regularizer is not None:
            name = type(distance).__name__
            raise ConfigError(f"regularizers work on vectors, which {name} does not compare; set regularizer=null")
        check_distance_supports(spec, distance)
        _check_comparisons(cfg, distance)
    elif spec.shortlist is not None:
        check_shortlist(spec.shortlist, None, k=0, num_gallery=0)
    if (rerank := build_rerank(cfg)) is not None:
        if distance is not None:
            name = type(distance).__name__
            raise ConfigError(
                f"rerank ranks lists of unit vectors again, which {name} does not compare; set it to null"
            )
        check_distance_supports(spec, rerank)
        protocol = component(cfg.protocol)
        if protocol.aggregation == "mean" and not protocol.leaves_plan:  # a plan is followed by runs that test
            raise ConfigError(
                f"rerank ranks the test again, and protocol '{protocol.name}' has none; set rerank=none, which has "
                "the same scores of validation"
            )


def _check_comparisons(cfg: DictConfig, distance: BaseDistance) -> None:
    """Loss and miner, and those that a loss makes for each level, must compare by the head's distance.

    Raises:
        ConfigError: one cannot.
    """
    name = type(distance).__name__
    within = {f"loss.{key}": cfg.loss.get(key) for key in _declared(cfg.loss, "made_for_each_level")}
    for key, node in {"loss": cfg.loss, "miner": cfg.miner, **within}.items():
        if node is None:
            continue
        parameters, _ = parameters_of(imported(node._target_, key))
        takes_distance = "distance" in parameters and "embedding_size" not in parameters
        if not takes_distance and key.endswith("miner"):
            raise ConfigError(f"{node._target_} compares vectors, which {name} does not; set {key}=null")
        if not takes_distance or (key in within and _declared(node, "compares_levels")):
            remedy = "loss=layered, loss=layered_proxy_anchor, or a loss of pairs or triplets such as contrastive"
            if key in within:
                remedy = "a loss of pairs or triplets, such as loss@loss.loss=triplet"
            raise ConfigError(
                f"{node._target_} as {key} does not compare by a distance that it is given, here {name}; "
                f"choose {remedy}"
            )
        if key in within and not node.get("_partial_"):
            raise ConfigError(f"{key} is made once for each level's distance; add +{key}._partial_=true")
    # These are cheap to make, too; of what the data will say, the number of classes.
    classes = {"num_classes": 2} if _declared(cfg.loss, "has_proxies") else {}
    for node, compared_by in ((cfg.miner, BorrowedDistance(distance)), (cfg.loss, distance)):
        if node is not None and (classes or not _waits_for_data(node)):
            component(node, distance=compared_by, **(classes if node is cfg.loss else {}))


def _declared(node: DictConfig, name: str) -> Any:
    """What the class that a node names says of itself, such as ``compares_levels``; () where it says nothing."""
    return getattr(imported(node._target_, "loss"), name, ())


def _waits_for_data(node: Any) -> bool:
    """Whether values of a node depend on what ``runtime`` will say once the data and the backbone are there."""
    try:
        OmegaConf.to_container(node, resolve=True)
    except InterpolationResolutionError as error:
        if "Missing mandatory value: runtime." in str(error):
            return True
        raise
    return False


def build_fit_settings(cfg: DictConfig, plan: Plan | None = None) -> FitSettings:
    """Length, selection and numerics of the training; with a ``plan``, of the plan's length and without selection."""
    settings: FitSettings = component(cfg.fit)
    if plan is None:
        return settings
    steps = plan.steps(cfg.runtime.steps_per_epoch)
    # The best step of stage 1 may lie within its warm-up; one step of the whole network is trained all the same.
    warmup_steps = min(settings.warmup_steps, max(0, steps - 1))
    # A plan's rates count the steps of the warm-up.
    return dataclasses.replace(
        settings, max_steps=steps, patience=None, collapse_ratio=None, warmup_steps=warmup_steps, warmup_schedule="runs"
    )


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
    # Epochs of other seeds may be a batch longer or shorter; one length for all runs of a config.
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


def build_model(cfg: DictConfig) -> MetricModel:
    """Backbone, pooling and head; sets what ``runtime`` says about the maps and embeddings."""
    backbone = component(cfg.backbone)
    OmegaConf.update(cfg, "runtime.num_channels", backbone.channels[-1])
    given: dict[str, Any] = {"in_channels": list(backbone.channels)}
    if _asks_for_map_size(cfg) or "map_sizes" in _head_parameters(cfg):
        given["map_sizes"] = backbone.map_sizes(cfg.runtime.image_size)
        OmegaConf.update(cfg, "runtime.map_size", given["map_sizes"][-1])
    pooling = component(cfg.pooling)
    given["in_features"] = pooled_channels(backbone, pooling)
    OmegaConf.update(cfg, "runtime.num_features", given["in_features"])
    if pooling is not None and "out_features" in cfg.head:
        given["out_features"] = pooling.input_width(cfg.head.out_features)
    model = make_model(backbone, pooling, _head(cfg, given))
    OmegaConf.update(cfg, "runtime.embedding_size", model.embedding_size)
    return model


def build_rerank(cfg: DictConfig, model: MetricModel | None = None) -> BaseDistance | None:
    """What ranks the first neighbors of the test again; None where nothing does.

    Raises:
        ConfigError: it is none of that kind, or there is no config of ``model`` to compare.
    """
    rerank: BaseDistance | None = component(cfg.get("rerank"))
    if rerank is None:
        return None
    if not ranks_lists(rerank):
        raise ConfigError(f"{cfg.rerank._target_} ranks no lists again; choose rerank=diml")
    if model is not None:
        with_configs: Any = model
        if not hasattr(model, "require_configs"):
            head = cfg.head._target_
            raise ConfigError(f"rerank projects cells of the last map, which {head} does not; choose head=linear")
        with_configs.require_configs()
    return rerank


def build_distance(cfg: DictConfig) -> BaseDistance | None:
    """The distance of a configuration's model as it starts, without the model; None is that of unit vectors."""
    levels = cfg.head.get("num_levels", 1)
    stand_ins = {"in_features": 1, "in_channels": [1] * levels, "map_sizes": [[1, 2]] * levels}
    distance = _head(cfg, stand_ins).make_distance()
    return None if ranks_like_unit_vectors(distance) else distance


def _head(cfg: DictConfig, given: dict[str, Any]) -> Head:
    """The head, with those of the values given that are arguments of it."""
    head: Head = component(cfg.head, **{key: given[key] for key in given.keys() & _head_parameters(cfg)})
    return head


def _head_parameters(cfg: DictConfig) -> set[str]:
    return set(parameters_of(imported(cfg.head._target_, "head"))[0])


def _asks_for_map_size(cfg: DictConfig) -> bool:
    return cfg.pooling is not None and "${runtime.map_size}" in OmegaConf.to_yaml(cfg.pooling, resolve=False)


def build_objective(cfg: DictConfig, model: MetricModel) -> Objective:
    """Loss, miner and regularizers, with the numbers of classes and dimensions now known.

    Raises:
        ConfigError: a regularizer reads what the pooling never provides.
    """
    regularizers, mixing = build_regularizers(cfg)
    of_pairs: dict[str, Any] = {}
    of_loss: dict[str, Any] = {}
    if not ranks_like_unit_vectors(model.distance):
        of_pairs["distance"] = BorrowedDistance(model.distance)
        of_loss["distance"] = model.distance if _declared(cfg.loss, "compares_levels") else of_pairs["distance"]
    objective = Objective(component(cfg.loss, **of_loss), component(cfg.miner, **of_pairs), regularizers, mixing=mixing)
    for name, requires in objective.requires.items():
        for side in requires:
            if side not in (*model.provides, "keys"):  # which the training loop makes
                of = (cfg.pooling or cfg.head)._target_
                raise ConfigError(
                    f"regularizer '{name}' needs '{side}' of the pooling, which {of} does not provide (it provides: "
                    f"{', '.join(model.provides) or 'nothing'}); choose pooling=gsp or another that does"
                )
    return objective


def build_regularizers(cfg: DictConfig) -> tuple[dict[str, Any], Any]:
    """The regularizers by name, and how they are mixed with the loss.

    They are made in the order of their names: a config is the same whichever was asked for first, so its draws must be.
    One whose constructor has ``make_objective`` is given a function that makes the run's loss and miner anew, with
    parameters of their own, for embeddings of another size.
    """
    found: dict[str, Any] = {}
    for name in sorted(cfg.regularizer or (), key=str):
        node = cfg.regularizer[name]
        takes = parameters_of(imported(node._target_, f"regularizer.{name}"))[0] if "_target_" in (node or ()) else {}
        given = {"make_objective": functools.partial(_objective_of_size, cfg)} if "make_objective" in takes else {}
        found[str(name)] = node if name == "mixing" else component(node, **given)
    return found, found.pop("mixing", "convex")


def _objective_of_size(cfg: DictConfig, size: int) -> Objective:
    """The loss, without a memory or mixtures, and the miner, for embeddings of a size."""
    sized = copy.deepcopy(cfg)
    OmegaConf.update(sized, "runtime.embedding_size", size)
    return Objective(plain_loss(component(sized.loss)), component(sized.miner))


def build_optimizer(
    cfg: DictConfig, model: MetricModel, objective: Objective, plan: Plan | None = None
) -> tuple[Optimizer, Any]:
    """Optimizer over the named groups, and its schedule or None; with a ``plan``, the plan's rates instead."""
    assert isinstance(model, nn.Module)
    groups = parameter_groups(model.parameter_groups(), objective)
    optimizer = make_optimizer(groups, component(cfg.optim), modules=(model, objective))
    if plan is not None:
        return optimizer, replayed(optimizer, plan, steps_per_epoch=cfg.runtime.steps_per_epoch)
    if cfg.schedule is not None and cfg.fit.max_steps:  # epochs are known now
        _check_periods(OmegaConf.to_container(cfg.schedule, resolve=True), "schedule")
    return optimizer, component(cfg.schedule, optimizer=optimizer)


def build_train_batches(
    cfg: DictConfig, data: Data, images: ImageSource | torch.Tensor, *, seed: int, device: torch.device,
    second_views: bool = False,
) -> TrainBatches:  # fmt: skip
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
        second_views=second_views,
    )


def build_loggers(cfg: DictConfig, run_dir: Path, identity: str, configuration: str) -> list[Logger]:
    """The loggers of a run, none of them started.

    Args:
        cfg: the configuration.
        run_dir: the run directory, whose last folders name the run.
        identity: of the run's settings and coordinates.
        configuration: all settings, as YAML.
    """
    run_id = hashlib.sha256("/".join([*run_dir.resolve().parts[-4:], identity]).encode()).hexdigest()[:16]
    given = {"run_dir": run_dir, "run_id": run_id, "configuration": configuration}
    return [component(node, **given) for node in (cfg.logger or {}).values()]


def move(model: MetricModel, device: torch.device, *, channels_last: bool) -> None:
    """Put a model on the device in the memory format of the images."""
    model.to(device=device)
    if channels_last:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)
