"""Check a composed configuration before any data is read."""

import dataclasses
import logging
from importlib.util import find_spec
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from pytorch_metric_learning.distances import BaseDistance
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dmlbench.build import build_distance, build_rerank, needs_map_size, takes_directions, takes_distance
from dmlbench.components import check_components, check_periods, component, declared, imported, parameters_of
from dmlbench.config import schema_of
from dmlbench.data.batches.loaders import check_workers
from dmlbench.evaluation.evaluate import check_distance_supports, check_libraries
from dmlbench.evaluation.search.rerank import check_shortlist
from dmlbench.identity import NOT_PART_OF_RUN_HASH, is_untrained
from dmlbench.models.avsl_distance import BorrowedDistance
from dmlbench.models.closed_form import ClosedForm
from dmlbench.runtime import check_device
from dmlbench.types import (
    ConfigError,
    check_at_least,
    check_choice,
    check_file_name,
    check_output_dir,
    closest,
    how_to_install,
    is_within,
    leaves,
    nodes,
)

log = logging.getLogger(__name__)

_STARTS = ("start_step", "feature_delay")
"""Steps from which a part of a loss or regularizer works."""
_TRIPLETS = ("all", "hard", "semihard", "easy")
_POSITIVE_OF_PML = {"temperature", "scale", "gamma", "alpha", "beta", "num_bins", "triplets_per_anchor"}
_BATCH_SIZES = ("classes_per_batch", "images_per_class", "batch_size")
_COMPONENTS = (
    *("dataset.table", "protocol", "backbone", "tuning", "pooling", "head", "loss", "miner", "sampler", "rerank"),
)


def check(cfg: DictConfig) -> None:
    """Run ``check_values``; errors name the recipe, which an experiment may have chosen."""
    try:
        check_values(cfg)
    except ConfigError as error:
        name = cfg.runtime.recipe.get("name")
        raise ConfigError(
            f"{error}{f' Values may come from recipe={name}; recipe=none leaves it out.' if name else ''}"
        ) from None


def check_values(cfg: DictConfig) -> None:
    """Check every component's arguments against its target's signature, and what can be known before data is read."""
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    known = [f.name for f in dataclasses.fields(schema_of("train"))]
    for key in container:
        if key not in known:
            raise ConfigError(f"the configuration has no key '{key!s}': {closest(str(key), known)}")
    for key in _COMPONENTS:
        if isinstance(node := OmegaConf.select(cfg, key), DictConfig) and "_target_" not in node:
            raise ConfigError(f"{key}: got keys {list(node)}, expected {key}._target_ with a class.")
    for key, value in leaves(container):
        if "${oc.env:" in str(value) and not is_within(key, NOT_PART_OF_RUN_HASH):
            raise ConfigError(
                f"{key}: got {value}, expected a value, because the same run could have others elsewhere. Write "
                f'{key}="$NAME" on the command line, where the shell fills it in.'
            )
    check_components(container)
    if "_target_" in (container["logger"] or {}):
        raise ConfigError("logger: got _target_, expected a name for each logger, as in conf/logger/tensorboard.yaml.")
    for name, node in (container["logger"] or {}).items():
        extra = "_target_" in node and getattr(imported(node["_target_"], f"logger.{name}"), "extra", None)
        if extra and find_spec(extra) is None:
            raise ConfigError(f"logger={name}: expected the package {extra} to be installed. {how_to_install(extra)}")
    # Losses with vectors of the classes know both sizes; others compare images with each other.
    plain = cfg.loss.get("loss") or cfg.loss  # what mixtures are added to
    with_classes = {"num_classes", "embedding_size"} <= plain.keys() or declared(plain, "has_proxies")
    with_classes = with_classes and not declared(plain, "compares_images")
    is_trained = not is_untrained(cfg)
    for key in (key for key in cfg.sampler if key in _BATCH_SIZES and is_trained):
        if (value := cfg.sampler[key]) < 2 and not with_classes:
            raise ConfigError(
                f"sampler.{key}: got {value}, expected at least 2, because {cfg.loss._target_} compares images with "
                "each other. Raise it, or choose a loss with proxies."
            )
    for part in ("train", "eval"):
        if not container["transform"].get(part):
            raise ConfigError(f"transform.{part} is missing. Set both train and eval, as in conf/transform/mlrc.yaml.")
    if cfg.runtime.get("choices", {}).get("fit") == "untrained" and not is_untrained(cfg):
        raise ConfigError(
            f"fit.max_steps: got {container['fit'].get('max_steps')}, expected 0 with fit=untrained. Leave it out of "
            "the experiment."
        )
    check_file_name(cfg.dataset.name, "dataset.name")
    if cfg.tuning is not None and cfg.feature_cache is not None:
        raise ConfigError(
            f"tuning: got {cfg.tuning._target_} with a feature cache, expected features that do not change. Set "
            "feature_cache=none or tuning=none."
        )
    if cfg.feature_cache is not None and "frozen_until" in cfg.backbone:
        component(cfg.feature_cache).check_frozen(cfg.backbone.frozen_until)
    _check_head(cfg)
    if cfg.regularizer is not None:
        _waits_for_data(cfg.regularizer)  # raises if it takes a value that the pooling does not have
    if is_trained and not _waits_for_data(cfg.fit):
        _warn_of_late_starts(cfg, container)
    # What is cheap to make is made: its constructor knows the ranges of its values.
    transforms = (cfg.transform.train, cfg.transform.eval)
    for node in (cfg.fit, cfg.optim, cfg.evaluation, *transforms, cfg.pooling, cfg.tuning):
        if node is not None and not _waits_for_data(node):
            component(node)
    crops = [cfg.transform[part].get("crop") for part in ("train", "eval")]
    one_size = cfg.pooling if needs_map_size(cfg) else cfg.head if cfg.head.get("reliability") == "learned" else None
    what = None if one_size is None else one_size._target_
    # The backbone's own pooling leaves no map that could differ in size.
    if cfg.feature_cache is not None and (cfg.pooling is None or declared(cfg.pooling, "needs") != "native"):
        what = "feature_cache"
    if what and crops[0] != crops[1]:
        raise ConfigError(
            f"transform.eval.crop: got {crops[1]}, expected {crops[0]} as in transform.train.crop, because "
            f"{what} needs one size of the map. Set both to the same."
        )
    if crops[0] is not None and crops[1] is None:  # a trained model would resize images to the training's
        raise ConfigError(f"transform.eval: got no crop, expected one, as transform.train.crop={crops[0]}. Set both.")
    spec = component(cfg.evaluation)
    check_libraries(spec)
    known_scores = [score.name for score in spec.scores if score.metric.better is not None]
    if cfg.fit.monitor not in known_scores:
        raise ConfigError(
            f"fit.monitor: got {cfg.fit.monitor}, expected a score with a direction from evaluation.metrics and "
            f"evaluation.recall_at: {closest(cfg.fit.monitor, known_scores)}"
        )
    protocol = component(cfg.protocol)
    schedule = None if cfg.schedule is None else imported(cfg.schedule._target_, "schedule")
    plateau = schedule is None or (isinstance(schedule, type) and issubclass(schedule, ReduceLROnPlateau))
    if (protocol.leaves_plan or protocol.planned_by) and not plateau:
        raise ConfigError(
            f"schedule: got {cfg.schedule._target_}, which needs the number of steps, but protocol={protocol.name} "
            "still has to find it. Set schedule=plateau or schedule=null."
        )
    if is_trained:
        check_periods(container["schedule"], "schedule")
    for group in ("loss", "miner"):
        for path, node in nodes(container[group], group):
            if isinstance(node, dict) and str(node.get("_target_")).startswith("pytorch_metric_learning.distances."):
                for key in ("p", "power"):  # others than positive ones would turn near into far
                    if isinstance(value := node.get(key, 1), int | float) and value <= 0:
                        raise ConfigError(f"{path}.{key}: got {value}, expected a positive number.")
            elif isinstance(node, dict) and str(node.get("_target_")).startswith("pytorch_metric_learning."):
                _check_of_pml(path, node)
    check_at_least(1, eval_batch_size=cfg.eval_batch_size)
    check_device(cfg.device)
    check_workers(cfg.num_workers)
    check_output_dir(cfg.paths.output_dir)
    protocol.check_fold(cfg.fold)
    if cfg.repeat < 0:
        raise ConfigError(f"repeat: got {cfg.repeat}, expected 0 or more.")


def _check_of_pml(path: str, node: dict[Any, Any]) -> None:
    """Check values that PML takes as they are: it turns a misspelt type of triplets into "all"."""
    for key in _POSITIVE_OF_PML & node.keys():
        if isinstance(value := node[key], int | float) and value <= 0:
            raise ConfigError(f"{path}.{key}: got {value}, expected a positive number.")
    if "${" not in (kind := str(node.get("type_of_triplets", _TRIPLETS[0]))):
        check_choice(f"{path}.type_of_triplets", kind, _TRIPLETS)


def _warn_of_late_starts(cfg: DictConfig, container: dict[Any, Any]) -> None:
    """Warn of parts of the loss that start after the last step."""
    for group in ("loss", "regularizer"):
        for path, node in nodes(container[group], group):
            for key in (key for key in _STARTS if isinstance(node, dict) and key in node):
                start = OmegaConf.select(cfg, f"{path}.{key}")
                if isinstance(start, int) and start >= cfg.fit.max_steps:
                    log.warning(
                        "%s.%s: got %d with fit.max_steps=%d, so this part never starts. Lower it, or train longer.",
                        path, key, start, cfg.fit.max_steps,
                    )  # fmt: skip


def _check_head(cfg: DictConfig) -> None:
    """Check the head, and whether the other components work with its distance."""
    head = imported(cfg.head._target_, "head")
    if not hasattr(head, "pools"):
        raise ConfigError(
            f"head._target_: got {cfg.head._target_}, expected a head (see dmlbench.models.projection.Head)."
        )
    if head.pools and cfg.pooling is not None:
        raise ConfigError(
            f"pooling: got {cfg.pooling._target_}, but {cfg.head._target_} includes a pooling. Set pooling=null."
        )
    if not head.pools and cfg.pooling is None:
        raise ConfigError(f"pooling: got null, but {cfg.head._target_} needs a pooling. Choose one of conf/pooling.")
    if cfg.pooling is not None and cfg.pooling.get("embedding_size", 0) is None:
        taken = parameters_of(imported(cfg.pooling._target_, "pooling"))[1].get("embedding_size")
        if type(None) not in get_args(taken):
            raise ConfigError(
                f"pooling.embedding_size: got null, but {cfg.pooling._target_} needs the size of the embedding. Set "
                "head.out_features, or pooling.embedding_size to the channels of the map."
            )
    option = cfg.runtime.get("choices", {}).get("head")
    # An experiment may set the init of its trained heads, which other heads would take over.
    if option in ("identity", *get_args(ClosedForm)) and cfg.head.init != option:
        raise ConfigError(
            f"head.init: got {cfg.head.init}, expected {option} with head={option}. Add head.init={option}, or set "
            "head=linear."
        )
    distance = build_distance(cfg)
    name = type(distance).__name__
    if declared(cfg.loss, "compares_levels") and not hasattr(distance, "levels"):
        raise ConfigError(f"loss: got {cfg.loss._target_}, which needs the levels of head=avsl. Choose another loss.")
    spec = component(cfg.evaluation)
    if is_untrained(cfg) and getattr(distance, "inference", None) == "rectified":
        raise ConfigError(
            "head.inference: got rectified with fit=untrained, but AVSL estimates its edges in training. Set "
            "head.inference=reliable, top or concat."
        )
    if distance is not None:
        if cfg.regularizer is not None and not getattr(distance, "compares_vectors", False):
            raise ConfigError(
                f"regularizer: {name} does not compare vectors, which regularizers need. Set regularizer=null."
            )
        check_distance_supports(spec, distance)
        _check_comparisons(cfg, distance)
    elif spec.shortlist is not None:
        check_shortlist(spec.shortlist, None, k=0, num_gallery=0)
    if (rerank := build_rerank(cfg)) is not None:
        check_distance_supports(spec, rerank)
        protocol = component(cfg.protocol)
        if protocol.aggregation == "mean" and not protocol.leaves_plan:  # a plan is followed by runs that test
            raise ConfigError(
                f"rerank: reranking changes only test scores, and protocol '{protocol.name}' has none. Set "
                "rerank=null; the validation scores are the same."
            )


def _check_comparisons(cfg: DictConfig, distance: BaseDistance) -> None:
    """Raise ConfigError unless loss, miner and the losses of each level use the head's distance."""
    name = type(distance).__name__
    within = {f"loss.{key}": cfg.loss.get(key) for key in declared(cfg.loss, "made_for_each_level")}
    for key, node in {"loss": cfg.loss, "miner": cfg.miner, **within}.items():
        if node is None:
            continue
        if takes_directions(node, key, distance):
            continue
        given = takes_distance(node, key)
        if not given and key.endswith("miner"):
            raise ConfigError(
                f"{key}: got {node._target_}, which compares vectors, but {name} does not. Set {key}=null."
            )
        if not given or (key in within and declared(node, "compares_levels")):
            remedy = "a loss of pairs or triplets, such as contrastive"
            if hasattr(distance, "levels"):
                remedy = f"loss=layered, loss=layered_proxy_anchor, or {remedy}"
            elif getattr(distance, "compares_vectors", False):
                remedy += ", or of proxies, such as proxy_anchor"
            if key in within:
                remedy = "a loss of pairs or triplets, such as loss@loss.loss=triplet"
            raise ConfigError(
                f"{key}: got {node._target_}, which cannot use the head's distance, {name}. Choose {remedy}."
            )
        if key in within and not node.get("_partial_"):
            raise ConfigError(f"{key}: each level needs its own copy with its own distance. Add +{key}._partial_=true.")
    # These are cheap to make, too; of what the data will say, the number of classes.
    classes = {"num_classes": 2} if declared(cfg.loss, "has_proxies") else {}
    for key, compared_by in (("miner", BorrowedDistance(distance)), ("loss", distance)):
        node = cfg[key]
        if node is None or takes_directions(node, key, distance):
            continue
        if classes or not _waits_for_data(node):
            try:
                component(node, distance=compared_by, **(classes if key == "loss" else {}))
            except ConfigError as error:
                if "requires the distance metric" in str(error):  # PML's words
                    raise ConfigError(
                        f"{key}: got {node._target_}, which uses its own distance instead of {name}. Choose another, "
                        "such as loss=contrastive or miner=semihard."
                    ) from None
                raise


def _waits_for_data(node: Any) -> bool:
    """Whether values of a node refer to a part of ``runtime`` that needs data or backbone."""
    try:
        OmegaConf.to_container(node, resolve=True)
    except InterpolationResolutionError as error:
        if "Missing mandatory value: runtime." in str(error):
            return True
        raise
    return False
