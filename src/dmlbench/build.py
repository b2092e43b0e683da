"""Build the objects of a run from its composed configuration."""

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_metric_learning.distances import BaseDistance
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dmlbench.components import check_periods, component, declared, imported, parameters_of
from dmlbench.data.batches.loaders import EvalBatches, Inputs, TrainBatches
from dmlbench.data.batches.samplers import BatchSampler, RandomBatchSampler
from dmlbench.data.batches.transforms import CropTransform
from dmlbench.data.images.feature_cache import FeatureCache, FeatureCacheSettings, FeatureView, Level, complete_cache
from dmlbench.data.images.image_cache import cached_images, stamp_of
from dmlbench.data.images.sources import DecodedImages, ImageSource, Kernel, pixel_tensor, read_image
from dmlbench.data.protocols import class_index
from dmlbench.evaluation.embeddings.embed import embed
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.evaluation.search.rerank import Reranker
from dmlbench.experiment import Data, Experiment, Images, Setup
from dmlbench.identity import config_sha256, contents, is_untrained, read_table, run_sha256, without_added
from dmlbench.losses.objective import Objective, plain_loss
from dmlbench.models.avsl_distance import BorrowedDistance
from dmlbench.models.backbones import StoredMaps
from dmlbench.models.net import MetricModel, PooledModel, make_model, pooled_channels
from dmlbench.models.projection import Head
from dmlbench.ranks import ONE, Ranks
from dmlbench.runtime import autocast, derive_seed, seed_everything, shows_progress
from dmlbench.training.fit import FitSettings, check_start
from dmlbench.training.optim import OptimizerSettings, make_optimizer, parameter_groups
from dmlbench.training.stage_plan import Plan, replayed
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable, IntArray, flatten, nodes

_LIBRARIES = ("dmlbench.", "pytorch_metric_learning.")
_CACHE_BATCH = 64
"""Images that a feature cache is built from at once; another number would move features by rounding."""

_NOT_OF_FEATURES = ("weights_file", "pretrained", "batch_norm")
"""Keys of a backbone that a feature cache does not depend on: it knows the weights themselves."""

_OF_RECIPE = ("name", "side", "overridden", "deviations")


def build_fit_settings(cfg: DictConfig, plan: Plan | None = None) -> FitSettings:
    """Settings of the training; a ``plan`` sets the length and turns early stopping off."""
    settings: FitSettings = component(cfg.fit)
    if plan is None:
        return settings
    steps = plan.steps(cfg.runtime.steps_per_epoch)
    # The best step of stage 1 may lie within its warm-up; one step of the whole network is trained all the same.
    warmup_steps = min(settings.warmup_steps, max(0, steps - 1))
    # A plan's rates count the steps of the warm-up.
    return replace(
        settings, max_steps=steps, patience=None, collapse_ratio=None, warmup_steps=warmup_steps, warmup_schedule="runs"
    )


def build_data(cfg: DictConfig) -> Data:
    """Read the data set, split it and set what ``runtime`` says about classes and images."""
    table = read_table(cfg.dataset.table)
    split = component(cfg.protocol).split(table, fold=cfg.fold)
    index = class_index(table, split.train)
    OmegaConf.update(cfg, "runtime.num_classes", int(index.max()) + 1)
    # The length of an epoch depends on the seed; all runs of a config use one value.
    sampler = build_sampler(cfg, index[table.labels[split.train]], seed=0)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", max(1, round(len(sampler) / cfg.fit.accumulate)))
    transform = component(cfg.transform.train)
    if isinstance(transform, CropTransform):
        size = [transform.crop, transform.crop]
    elif table.pixels is not None:
        size = list(table.pixels.shape[1:3])
    else:
        image = read_image(Path(table.root) / str(table.paths[0]))
        size = [image.height, image.width]
    OmegaConf.update(cfg, "runtime.image_size", size)
    return Data(table, split, index)


def build_sampler(cfg: DictConfig, labels: IntArray, *, seed: int) -> BatchSampler:
    """Make the sampler of training images with ``labels`` [N]; a placeholder if no step is taken."""
    if is_untrained(cfg):
        return RandomBatchSampler(labels, batch_size=len(labels), seed=seed)
    sampler: BatchSampler = component(cfg.sampler, labels=labels, seed=seed)
    return sampler


def image_opener(
    cfg: DictConfig, table: ImageTable, device: torch.device, *, check: Callable[[], None] = lambda: None
) -> Callable[[Any], ImageSource | torch.Tensor]:
    """A function from a transform's node to the images that it works on, each opened once.

    Crops read from the image cache, which is built on first use, or decode files. Transforms of batches get a tensor
    of all images on the device. ``check`` is called while the cache is built; what it raises ends that.
    """

    @functools.cache
    def opened(works_on: str, short_side: int | None, kernel: Kernel) -> ImageSource | torch.Tensor:
        source: ImageSource = DecodedImages(table, short_side=short_side, kernel=kernel)
        # Without a first resize the cache would hold whole photographs, tens of times the size of the files.
        if cfg.image_cache and table.pixels is None and (short_side is not None or works_on == "batch"):
            source = cached_images(
                table, cfg.paths.cache_dir, short_side=short_side, kernel=kernel,
                progress=shows_progress(), check=check,
            )  # fmt: skip
        return pixel_tensor(table, source, device) if works_on == "batch" else source

    def open_images(node: Any) -> ImageSource | torch.Tensor:
        transform = component(node)
        if isinstance(transform, CropTransform):
            return opened("image", transform.resize, transform.kernel)
        return opened("batch", None, "pillow")

    return open_images


def embedded(
    cfg: DictConfig,
    table: ImageTable,
    rows: IntArray,
    rows_of: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    *,
    transform: Any,
    describe: str,
) -> EmbeddingSet:
    """Embed images of a table by ``rows_of``, with the transform of a node."""
    batches = EvalBatches(
        table, rows, images=image_opener(cfg, table, device)(transform), transform=component(transform),
        batch_size=cfg.eval_batch_size, device=device, num_workers=cfg.num_workers,
    )  # fmt: skip
    progress = shows_progress()
    return embed(rows_of, batches, device=device, describe=describe, progress=progress, count=len(rows))


def build_model(cfg: DictConfig) -> MetricModel:
    """Backbone, pooling and head; sets what ``runtime`` says about the maps and embeddings."""
    backbone = component(cfg.backbone)
    if (tuning := component(cfg.get("tuning"))) is not None:
        tuning.apply(backbone)
    OmegaConf.update(cfg, "runtime.num_channels", backbone.channels[-1])
    given: dict[str, Any] = {"in_channels": list(backbone.channels)}
    if needs_map_size(cfg) or "map_sizes" in _head_parameters(cfg):
        given["map_sizes"] = backbone.map_sizes(cfg.runtime.image_size)
        OmegaConf.update(cfg, "runtime.map_size", given["map_sizes"][-1])
    pooling = component(cfg.pooling)
    given["in_features"] = pooled_channels(backbone, pooling)
    OmegaConf.update(cfg, "runtime.num_features", given["in_features"])
    if pooling is not None and cfg.head.get("out_features") is not None:
        given["out_features"] = pooling.input_width(cfg.head.out_features)
    model = make_model(backbone, pooling, _head(cfg, given))
    OmegaConf.update(cfg, "runtime.embedding_size", model.embedding_size)
    return model


def use_feature_cache(
    cfg: DictConfig,
    data: Data,
    model: MetricModel,
    open_images: Callable[[Any], Images],
    device: torch.device,
    *,
    check: Callable[[], None] = lambda: None,
    complete: Callable[..., None] = complete_cache,
) -> FeatureCache | None:
    """Let the model take records of a feature cache in place of images; ``complete`` builds it, now or before use."""
    settings: FeatureCacheSettings | None = component(cfg.feature_cache)
    if settings is None:
        return None
    backbone = model.backbone
    settings.check_frozen(backbone.frozen_until)
    if settings.level == "pooled" and not isinstance(model, PooledModel):
        raise ConfigError(
            f"feature_cache.level: got pooled, expected maps, which {cfg.head._target_} needs. Set "
            "feature_cache.level=maps."
        )
    if settings.level == "maps" and model.pooling is not None and model.pooling.needs == "native":
        raise ConfigError(
            "feature_cache.level: got maps, expected pooled, as the pooling is the backbone's own. Set "
            "feature_cache.level=pooled."
        )
    precision = cfg.fit.precision
    train_rows = np.flatnonzero(data.table.role == "train")
    if not np.isin(data.split.train, train_rows).all():
        train_rows = np.arange(len(data.table))
    spec: list[StoredMaps] = []
    stores_maps = settings.level == "maps" or (model.pooling is not None and model.pooling.needs != "native")

    @torch.no_grad()
    def maps_of(images: torch.Tensor) -> torch.Tensor:
        """What level=maps stores, in its dtype; level=pooled pools it, so that both levels train on the same maps."""
        model.eval()
        memory_format = torch.channels_last if cfg.fit.channels_last else torch.contiguous_format
        with autocast(device, precision):
            images = images.to(device).contiguous(memory_format=memory_format)
            if not stores_maps:
                return images
            outputs = backbone.frozen_outputs(images)
        stored = StoredMaps(tuple(tuple(x.shape[1:]) for x in outputs), (images.shape[2], images.shape[3]))
        if spec and stored != spec[0]:
            raise ConfigError(
                f"feature_cache: got images of {images.shape[2:]} and {spec[0].image_size} pixels, expected one size. "
                "Crop all images to the same size."
            )
        spec[:] = [stored]
        return stored.pack(outputs).to(getattr(torch, settings.dtype))

    @torch.no_grad()
    def pooled_of(maps: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, PooledModel)
        model.eval()
        backbone.stored, model.stored_pooled = spec[0] if stores_maps else None, False
        with autocast(device, precision):
            pooled = model.storable_features(maps.to(device))[:, :, None, None]
        backbone.stored, model.stored_pooled = None, True
        return pooled

    height, width = cfg.runtime.image_size
    sample = maps_of(torch.zeros(1, 3, height, width, dtype=torch.uint8))
    parts: Any = {key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("transform", "backbone")}
    parts["backbone"] = {key: value for key, value in parts["backbone"].items() if key not in _NOT_OF_FEATURES}
    digest = hashlib.sha256()
    for tensor in backbone.frozen_state():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    content = {
        "fingerprint": data.table.fingerprint,
        "files": None if data.table.pixels is not None else stamp_of(data.table),
        "weights": digest.hexdigest(),
        "pooling": None,
        **contents(parts),
        **without_added(parts),
        "feature_cache": asdict(replace(settings, level="maps")),
        "precision": precision,
        "rows": hashlib.sha256(train_rows.tobytes()).hexdigest(),
    }

    def cache_of(content: dict[str, Any], level: Level, record_size: int) -> FeatureCache:
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        name = f"{data.table.name}-{level}-{backbone.frozen_until}-{key}.features"
        return FeatureCache(
            Path(cfg.paths.cache_dir) / name, len(data.table), train_rows, settings, record_size, content
        )

    def rendered(positions: IntArray) -> Iterator[torch.Tensor]:
        views = positions >= len(data.table)
        for part, transform in ((positions[~views], cfg.transform.eval), (positions[views], cfg.transform.train)):
            if not len(part):
                continue
            rows, seeds = cache.source_of(part)
            batches = EvalBatches(
                data.table, rows, images=open_images(transform), transform=component(transform),
                batch_size=_CACHE_BATCH, device=device, num_workers=cfg.num_workers, seeds=seeds,
            )  # fmt: skip
            yield from (maps_of(batch.images) for batch in batches)

    def pooled(positions: IntArray) -> Iterator[torch.Tensor]:
        from_maps = stores_maps and maps.is_complete()
        source = maps.records(positions, _CACHE_BATCH) if from_maps else rendered(positions)
        return (pooled_of(block) for block in source)

    cache = maps = cache_of(content, "maps", sample[0].numel())
    if settings.level == "pooled":
        pooling = {"pooling": OmegaConf.to_container(cfg.pooling, resolve=True)}
        own = {**pooling, **contents(pooling), "feature_cache": asdict(settings), "pooled_from": "maps as stored"}
        cache = cache_of(content | own, "pooled", pooled_of(sample).shape[1])
    records = pooled if settings.level == "pooled" else rendered
    complete(cache, records, progress=shows_progress(), check=check, name=data.table.name)
    if settings.level == "maps":
        backbone.stored = spec[0]
    return cache


def build_rerank(cfg: DictConfig, model: MetricModel | None = None) -> BaseDistance | None:
    """The distance that reranks the first neighbors of the test; a ``model`` must expose its last map."""
    rerank: BaseDistance | None = component(cfg.get("rerank"))
    if rerank is None:
        return None
    if not isinstance(rerank, Reranker):
        raise ConfigError(f"rerank._target_: got {cfg.rerank._target_}, expected a Reranker. Set rerank=diml.")
    if (cache := cfg.get("feature_cache")) is not None and cache.level == "pooled":
        raise ConfigError("rerank: got feature_cache.level=pooled, expected maps. Set feature_cache.level=maps.")
    if (distance := build_distance(cfg)) is not None:
        raise ConfigError(
            f"rerank: got a head with {type(distance).__name__}, expected one whose embeddings are compared as unit "
            "vectors. Set rerank=null."
        )
    if model is not None:
        if not isinstance(model, PooledModel):
            head = cfg.head._target_
            raise ConfigError(f"rerank: got {head}, expected a head that projects the last map. Set head=linear.")
        model.require_cells()
    return rerank


def build_distance(cfg: DictConfig) -> BaseDistance | None:
    """The initial distance of a configuration's model, built without it; None: Euclidean distance of unit vectors."""
    levels = cfg.head.get("num_levels", 1)
    stand_ins = {"in_features": 1, "in_channels": [1] * levels, "map_sizes": [[1, 2]] * levels}
    with torch.random.fork_rng(devices=[]):  # whose random weights change no others
        distance = _head(cfg, stand_ins).make_distance()
    return None if ranks_like_unit_vectors(distance) else distance


def _head(cfg: DictConfig, given: dict[str, Any]) -> Head:
    """Build the head from those of the given values that its constructor accepts."""
    head: Head = component(cfg.head, **{key: given[key] for key in given.keys() & _head_parameters(cfg)})
    return head


def _head_parameters(cfg: DictConfig) -> set[str]:
    return set(parameters_of(imported(cfg.head._target_, "head"))[0])


def needs_map_size(cfg: DictConfig) -> bool:
    return cfg.pooling is not None and "${runtime.map_size}" in OmegaConf.to_yaml(cfg.pooling, resolve=False)


def build_objective(cfg: DictConfig, model: MetricModel) -> Objective:
    """Loss, miner and regularizers."""
    size = model.embedding_size
    for path, node in nodes(OmegaConf.to_container(cfg.loss, resolve=True), "loss"):
        is_known = isinstance(node, dict) and str(node.get("_target_")).startswith(_LIBRARIES)
        if is_known and (given := node.get("embedding_size", size)) != size:
            raise ConfigError(
                f"{path}.embedding_size: got {given}, expected {size}, the size of the embedding. Leave it out, or set "
                "head.out_features."
            )
    regularizers, mixing = build_regularizers(cfg)
    of_pairs: dict[str, Any] = {}
    of_loss: dict[str, Any] = {}
    if not ranks_like_unit_vectors(model.distance):
        of_pairs["distance"] = BorrowedDistance(model.distance)
        of_loss["distance"] = model.distance if declared(cfg.loss, "compares_levels") else of_pairs["distance"]
        if takes_directions(cfg.loss, "loss", model.distance):
            of_loss = {}
        if cfg.miner is not None and takes_directions(cfg.miner, "miner", model.distance):
            of_pairs = {}
    finish = model.projection.finished if isinstance(model, PooledModel) else None
    objective = Objective(
        component(cfg.loss, **of_loss), component(cfg.miner, **of_pairs), regularizers, mixing=mixing, finish=finish
    )
    for name, regularizer in objective.regularizers.items():
        for key, wanted in regularizer.of_head.items():
            if (given := cfg.head.get(key)) != wanted:
                raise ConfigError(
                    f"regularizer.{name}.{key}: got {wanted}, but head.{key} is {given or 'not set'}. Set "
                    f"head=hyperbolic and head.{key}={wanted}."
                )
    for name, requires in objective.requires.items():
        for side in requires:
            if side not in (*model.provides, "keys"):  # which the training loop makes
                of = (cfg.pooling or cfg.head)._target_
                if getattr(model, "stored_pooled", False):
                    raise ConfigError(f"regularizer '{name}' needs feature maps. Set feature_cache.level=maps.")
                raise ConfigError(
                    f"regularizer '{name}' needs the pooling's side output '{side}', but {of} provides "
                    f"{', '.join(model.provides) or 'nothing'}. Set pooling=gsp or another pooling that provides it."
                )
    return objective


def takes_distance(node: DictConfig, key: str) -> bool:
    """Whether a loss or miner compares images by a distance that it is given."""
    parameters = parameters_of(imported(node._target_, key))[0]
    return "distance" in parameters and "embedding_size" not in parameters


def takes_directions(node: DictConfig, key: str, distance: BaseDistance) -> bool:
    """Whether a loss or miner compares cosines of embeddings that have another distance; not a loss that wraps one."""
    return getattr(distance, "compares_vectors", False) and not takes_distance(node, key) and "loss" not in node


def build_regularizers(cfg: DictConfig) -> tuple[dict[str, Any], Any]:
    """The regularizers by name, built in the order of their names, and how they are mixed with the loss.

    A constructor with ``make_objective`` gets a function that builds the run's loss and miner for another size.
    """
    found: dict[str, Any] = {}
    for name in sorted(cfg.regularizer or (), key=str):
        node = cfg.regularizer[name]
        if name != "mixing" and not OmegaConf.is_dict(node):
            raise ConfigError(f"regularizer.{name}: got {node}, expected a component with a _target_.")
        takes = parameters_of(imported(node._target_, f"regularizer.{name}"))[0] if "_target_" in node else {}
        given = {"make_objective": functools.partial(_objective_of_size, cfg)} if "make_objective" in takes else {}
        found[str(name)] = node if name == "mixing" else component(node, **given)
    return found, found.pop("mixing", "convex")


def _objective_of_size(cfg: DictConfig, size: int) -> Objective:
    """The loss, without a memory or mixtures, and the miner, for embeddings of a size, compared as unit vectors."""
    if (distance := build_distance(cfg)) is not None:
        raise ConfigError(
            f"regularizer: S2SD compares embeddings as unit vectors, but got a head with {type(distance).__name__}. "
            "Set head=linear, or leave s2sd out."
        )
    sized = copy.deepcopy(cfg)
    OmegaConf.update(sized, "runtime.embedding_size", size)
    return Objective(plain_loss(component(sized.loss)), component(sized.miner))


def build_optimizer(
    cfg: DictConfig, model: MetricModel, objective: Objective, plan: Plan | None = None
) -> tuple[Optimizer, Any]:
    """Optimizer over the named groups, and its schedule or None; with a ``plan``, the plan's rates instead."""
    assert isinstance(model, nn.Module)
    groups = parameter_groups(model.parameter_groups(), objective)
    settings: OptimizerSettings = component(cfg.optim)
    layers: dict[str, int] | None = None
    if settings.layer_decay is not None:
        layers = {f"backbone.{name}": layer for name, layer in model.backbone.layer_ids().items()}
    optimizer = make_optimizer(groups, settings, modules=(model, objective), layers=layers)
    if plan is not None:
        return optimizer, replayed(optimizer, plan, steps_per_epoch=cfg.runtime.steps_per_epoch)
    if cfg.schedule is not None and cfg.fit.max_steps:  # epochs are known now
        check_periods(OmegaConf.to_container(cfg.schedule, resolve=True), "schedule")
    schedule = component(cfg.schedule, optimizer=optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        # As in Keras, min_lr bounds optim.lr, and other groups keep their multiples of it.
        rates = zip(schedule.min_lrs, optimizer.param_groups, strict=True)
        schedule.min_lrs = [low * group["lr"] / settings.lr for low, group in rates]
    return optimizer, schedule


def build_train_batches(
    cfg: DictConfig, data: Data, images: Inputs, *, seed: int, device: torch.device,
    second_views: bool = False, ranks: Ranks = ONE,
) -> TrainBatches:  # fmt: skip
    """Endless training batches."""
    sampler = build_sampler(cfg, data.class_index[data.table.labels[data.split.train]], seed=seed)
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
        part=(ranks.rank, ranks.size),
    )


def move(model: MetricModel, device: torch.device, *, channels_last: bool) -> None:
    """Put a model on the device in the memory format of the images."""
    model.to(device=device)
    if channels_last:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)


def make_setup(
    cfg: DictConfig,
    device: torch.device,
    *,
    seed: int | None = None,
    check_data: Callable[[ImageTable], None] = lambda table: None,
    check: Callable[[], None] = lambda: None,
    complete: Callable[..., None] = complete_cache,
    ranks: Ranks = ONE,
) -> Setup:
    """Build a ``Setup`` with initial weights, and set ``cfg.runtime``.

    Args:
        seed: of the initial weights, for a training: its images are opened, too; None leaves the random state.
        check_data: called before the model is built.
        check: called regularly while images are prepared; exceptions propagate.
        complete: builds a feature cache if it is missing.
    """
    data = build_data(cfg)
    open_images = image_opener(cfg, data.table, device, check=check)
    if cfg.feature_cache is None:  # an image cache that has to be filled must not move the initial weights
        for part in ("eval",) if seed is None else ("eval", "train"):
            open_images(cfg.transform[part])
    check_data(data.table)
    if seed is not None:
        seed_everything(seed)
    model = build_model(cfg)
    rerank = build_rerank(cfg, model)
    settings = component(cfg.fit)
    if settings.sync_batch_norm and ranks.size > 1:
        if device.type == "cpu":
            raise ConfigError(
                "fit.sync_batch_norm: got true, expected false on a CPU. PyTorch supports it on GPUs only."
            )
        from timm.layers import convert_sync_batchnorm  # keeps activations; here, as it takes seconds to import

        model = convert_sync_batchnorm(model)
    move(model, device, channels_last=settings.channels_last)
    cache = use_feature_cache(cfg, data, model, open_images, device, check=check, complete=complete)
    choices: Any = OmegaConf.to_container(cfg.runtime.choices)
    return Setup(
        data=data,
        images=open_images(cfg.transform.eval) if cache is None else FeatureView(cache, random=False),
        open_images=lambda part: open_images(cfg.transform[part]),
        transform=component(cfg.transform.eval),
        model=model,
        rerank=rerank,
        settings=settings,
        spec=component(cfg.evaluation),
        choices=choices,
        device=device,
        eval_batch_size=cfg.eval_batch_size,
        num_workers=cfg.num_workers,
        ranks=ranks,
    )


def make_experiment(
    cfg: DictConfig,
    run_dir: Path,
    device: torch.device,
    *,
    plan: Plan | None = None,
    check: Callable[[], None] = lambda: None,
    complete: Callable[..., None] = complete_cache,
    ranks: Ranks = ONE,
) -> Experiment:
    """Build an ``Experiment`` of a checked configuration; a plan replaces the training's length and schedule."""
    cfg = copy.deepcopy(cfg)
    content = contents(cfg)
    OmegaConf.update(cfg, "runtime.content", content, force_add=True)
    seed = derive_seed(cfg.base_seed, cfg.fold, cfg.repeat)  # without the config, so that configs are compared in pairs
    caching: list[Callable[[], None]] = []

    def later(*arguments: Any, **options: Any) -> None:
        caching.append(functools.partial(complete, *arguments, **options))

    setup = make_setup(cfg, device, seed=seed, check=check, complete=later, ranks=ranks)
    images = setup.images
    images = replace(images, random=True) if isinstance(images, FeatureView) else setup.open_images("train")
    objective = build_objective(cfg, setup.model).to(device)
    objective.check_labels(setup.data.class_index[setup.data.table.labels[setup.data.split.train]])
    optimizer, schedule = build_optimizer(cfg, setup.model, objective, plan)
    settings = build_fit_settings(cfg, plan)
    check_start(settings, schedule, setup.model, objective)
    batches = build_train_batches(
        cfg,
        setup.data,
        images,
        seed=seed,
        device=device,
        second_views=objective.key_momentum is not None,
        ranks=ranks,
    )
    for build in caching:  # takes up to hours: errors of the configuration come before
        build()
    recipe: Any = OmegaConf.to_container(cfg.runtime.recipe, resolve=False)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    identity, configuration = run_sha256(cfg), OmegaConf.to_yaml(cfg, resolve=True)
    run_id = hashlib.sha256("/".join([*run_dir.resolve().parts[-4:], identity]).encode()).hexdigest()[:16]
    of_logger = {"run_dir": run_dir, "run_id": run_id, "configuration": configuration}
    provenance = {
        "config_sha256": config_sha256(cfg),
        **{key: cfg[key] for key in ("fold", "repeat", "base_seed")},
        "seed": seed,
        "run_sha256": identity,
    }
    if_any = {
        "recipe": {key: recipe[key] for key in _OF_RECIPE if key in recipe},
        "variants": {key: value for key, value in flatten(resolved).items() if key.endswith(".variant")},
        "weights_sha256": content.get("backbone.weights_file"),
        "code_sha256": {key.removeprefix("code."): sha for key, sha in content.items() if key.startswith("code.")},
    }
    return Experiment(
        setup=replace(setup, settings=settings),
        protocol=component(cfg.protocol),
        plan=plan,
        batches=batches,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        loggers=[component(node, **of_logger) for node in (cfg.logger or {}).values()] if ranks.is_first else [],
        image_size=tuple(cfg.runtime.image_size),
        steps_per_epoch=cfg.runtime.steps_per_epoch,
        provenance=provenance | {key: value for key, value in if_any.items() if value},
        configuration=configuration,
    )
