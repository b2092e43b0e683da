"""Identity of configs and runs: hashes by content, names, run directories, and whether a run is complete.

Weights and user code count by SHA-256, a data set by its name and options. Paths never count.
"""

import ast
import copy
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmlbench.components import component
from dmlbench.data.image_table import identified
from dmlbench.results import store
from dmlbench.runtime import cached_sha256
from dmlbench.types import DataError, ImageTable, RunError, flatten, is_within, leaves

log = logging.getLogger(__name__)

Overrides = tuple[str, ...]

# What a config is not made of: coordinates, seed, and everything that does not move a number.
NOT_PART_OF_CONFIG_HASH = ("fold", "repeat", "base_seed")
NOT_PART_OF_RUN_HASH = (
    *("device", "num_workers", "image_cache", "eval_batch_size", "paths", "runtime", "logger", "reproduce"),
    *("fit.checkpoint_every", "fit.log_every", "fit.keep", "dataset.table.root", "dataset.table.cache_dir"),
    "protocol.splits",  # its content is: splits_sha256
)

# Keys that were added later count only where they differ from these values: runs made before keep their hashes.
_ADDED = {
    "fit.ema": None, "fit.processes": 1, "fit.sync_batch_norm": False, "loss.simix": False, "optim.layer_decay": None,
    "transform.train.augment": None, "tuning": None,
}  # fmt: skip

_SIZED_BY_PARTS = ("dmlbench.models.pooling.netvlad.NetVlad", "dmlbench.models.pooling.otp.Otp")

# Scores are computed from stored embeddings on demand, so only settings that select the weights count.
_OF_CLUSTERS = ("nmi", "ami", "raw_nmi")
_KMEANS = ("kmeans_seed", "kmeans_library", "kmeans_init", "kmeans_restarts", "kmeans_max_steps")

_WEIGHTS = "weights_file"


def is_untrained(cfg: DictConfig) -> bool:
    """Whether a run takes no step. Not resolved: the length of an epoch is not known before the data are."""
    fit: Any = OmegaConf.to_container(cfg.fit, resolve=False)
    return fit.get("max_steps") == 0


def config_id(cfg: DictConfig) -> str:
    """Name of a config: the chosen backbone, pooling and loss, and the config hash."""
    choices = cfg.runtime.choices
    pooling = "pooling" if cfg.pooling is not None else "head"  # that pools by itself
    words = [choices.get(group, group) for group in ("backbone", pooling, "loss")]
    if is_untrained(cfg):
        words.append("untrained")
    if cfg.get("rerank") is not None:
        words.append(choices.get("rerank", "rerank"))
    name = "-".join(str(word).replace("/", "_") for word in words)
    return f"{name}-{config_sha256(cfg)[:8]}"


def config_sha256(cfg: DictConfig) -> str:
    """Hash of everything that defines a config."""
    return _digest(cfg, NOT_PART_OF_CONFIG_HASH + NOT_PART_OF_RUN_HASH)


def run_sha256(cfg: DictConfig) -> str:
    """Hash of everything that decides a run's numbers: its config, fold, repeat and base seed."""
    return _digest(cfg, NOT_PART_OF_RUN_HASH)


def run_directory(
    output_dir: str | os.PathLike[str], dataset: str, protocol: str, config: str, fold: int, repeat: int
) -> Path:
    """``<output_dir>/<dataset>/<protocol>/<config>/fold<f>_rep<r>``."""
    return Path(output_dir) / dataset / protocol / config / store.run_name((fold, repeat))


def directory_of(cfg: DictConfig) -> Path:
    """The run directory of a configuration."""
    protocol = component(cfg.protocol).name
    return run_directory(cfg.paths.output_dir, cfg.dataset.name, protocol, config_id(cfg), cfg.fold, cfg.repeat)


def is_complete(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether ``run_dir`` holds the result of this run, on these data; raises RunError if it holds another result."""
    if not (run_dir / store.RESULT).exists():
        return False
    result = store.read_result(run_dir)
    require_result_of(run_dir, result, config_sha256(cfg), cfg.base_seed)
    try:
        fingerprint = _fingerprint(json.dumps(OmegaConf.to_container(cfg.dataset.table, resolve=True), sort_keys=True))
    except DataError as error:
        log.info("%s: cannot check whether its data set has changed: %s", run_dir, error)
        return True
    if fingerprint != result["dataset_fingerprint"]:
        raise RunError(
            f"{run_dir} holds the result of other data (fingerprint {result['dataset_fingerprint'][:12]}, now "
            f"{fingerprint[:12]}). Choose another paths.output_dir or dataset.name."
        )
    return True


def require_result_of(run_dir: Path, result: Mapping[str, Any], config: str, base_seed: int) -> None:
    """Raise RunError unless a result is that of a config hash and base seed, in the folder of its fold and repeat."""
    store.require_own_place(run_dir, result)
    if result.get("config_sha256", config) != config:
        raise RunError(
            f"{run_dir} holds the result of another configuration. Choose another paths.output_dir, or remove it with "
            "`dmlbench clean`."
        )
    if result["base_seed"] != base_seed:
        raise RunError(
            f"{run_dir} was made with base_seed={result['base_seed']}, not {base_seed}. Choose another "
            "paths.output_dir."
        )


@dataclass(frozen=True)
class PlannedConfig:
    """What planning needs to know of a config."""

    overrides: Overrides  # of ``dmlbench train``, without fold and repeat
    dataset: str
    protocol: str
    name: str
    sha256: str
    num_folds: int
    num_repeats: int
    base_seed: int
    cost: str  # JSON of settings that decide the time of a run, besides the data set and the protocol
    inputs: tuple[str, ...]  # JSON of the nodes of its data set and, if it has weights, of its backbone
    planned_by: Overrides | None  # overrides of the config whose runs must come first

    @property
    def place(self) -> str:
        return f"{self.dataset}/{self.protocol}/{self.name}"


def planned_config(overrides: Overrides, cfg: DictConfig) -> PlannedConfig:
    """The config that ``overrides`` compose."""
    protocol = component(cfg.protocol)
    planned_by = None
    if protocol.planned_by is not None:
        first = {f"protocol.{key}": f"protocol.{key}={value}" for key, value in protocol.planned_by.items()}
        planned_by = (*(o for o in overrides if o.partition("=")[0] not in first), *first.values())
    has_weights = any(cfg.backbone.get(key) for key in ("pretrained", "weights_file"))
    nodes = [cfg.dataset.table, *([cfg.backbone] if has_weights else [])]
    inputs = tuple(json.dumps(OmegaConf.to_container(node, resolve=True), sort_keys=True) for node in nodes)
    name, sha256, folds, repeats = config_id(cfg), config_sha256(cfg), protocol.num_folds, protocol.num_repeats
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    cost = {key: plain.get(key) for key in ("backbone", "transform", "sampler", "feature_cache", "tuning")}
    cost |= {f"fit.{key}": plain["fit"].get(key) for key in ("max_steps", "precision", "accumulate", "forward_batch")}
    return PlannedConfig(
        overrides, cfg.dataset.name, protocol.name, name, sha256, folds, repeats, cfg.base_seed,
        json.dumps(cost, sort_keys=True), inputs, planned_by,
    )  # fmt: skip


def config_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """The settings that define a config, flattened, of a stored configuration; keys added later have their defaults."""
    found = flatten(_identity(stored, NOT_PART_OF_CONFIG_HASH + NOT_PART_OF_RUN_HASH))
    for key, default in _ADDED.items():
        is_given = any(is_within(known, [key]) for known in found)
        if not is_given and not key.startswith("loss."):  # which only one loss has
            found[key] = default
    return found


def differences(cfg: DictConfig, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(stored, new) values of the settings that decide a run's numbers and differ, by key.

    What only the data say is taken from the ``stored`` configuration.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    said = {key: value for key, value in stored["runtime"].items() if key in plain["runtime"] and key != "recipe"}
    with_data = {**plain, "runtime": {**plain["runtime"], **said}, "paths": stored["paths"]}
    known: Any = OmegaConf.to_container(OmegaConf.create(with_data), resolve=True)
    known["runtime"]["content"] = contents(cfg)
    both = (without_added(each) for each in (copy.deepcopy(dict(stored)), known))
    old, new = (flatten(_identity(each, NOT_PART_OF_RUN_HASH)) for each in both)
    return {
        key: (old.get(key, "absent"), new.get(key, "absent"))
        for key in sorted(old.keys() | new.keys())
        if (old.get(key), key in old or "." not in key) != (new.get(key), key in new or "." not in key)
    }


def contents(cfg: DictConfig | dict[str, Any]) -> dict[str, str]:
    """What counts by content: SHA-256 of files of weights by their key, and of user code by ``code.<file>``.

    A run stores it as ``runtime.content``. A file that is not there counts by its name.
    """
    config = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    counted = {key: value for key, value in plain.items() if key not in NOT_PART_OF_RUN_HASH and key != "evaluation"}
    found: dict[str, str] = {}
    modules: set[str] = set()
    for key, value in leaves(counted):
        if key.rpartition(".")[2] == _WEIGHTS and value is not None:
            path = Path(str(OmegaConf.select(config, key))).expanduser()
            found[key] = cached_sha256(path) if path.is_file() else path.name
        elif key.rpartition(".")[2] == "_target_" and isinstance(value, str):
            modules.add(value.rpartition(".")[0])
    return found | {f"code.{name}": digest for name, digest in sorted(_user_code(modules).items())}


def changed_code(config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Files of user code of a run's model and data that changed since its result was written."""
    parts = ("dataset", "transform", "backbone", "tuning", "pooling", "head", "rerank")
    now = contents({key: config.get(key) for key in parts})
    then = result.get("code_sha256") or {}
    return [name for name, digest in then.items() if now.get(f"code.{name}", digest) != digest]


def _digest(cfg: DictConfig, excluded: tuple[str, ...]) -> str:
    # Not resolved: a number of epochs is not known before the data are, and "${paths.data_dir}/a.csv" names no machine.
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    if (container.get("runtime") or {}).get("content") is None:
        container["runtime"] = {"content": contents(cfg)}
    identity = _identity(without_added(container), excluded)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _identity(container: dict[str, Any], excluded: tuple[str, ...]) -> dict[str, Any]:
    """The settings that identify a configuration: all but ``excluded`` and evaluation settings that select nothing."""
    content = (container.get("runtime") or {}).get("content")
    content = contents(container) if content is None else content
    evaluation, monitor = container.get("evaluation") or {}, (container.get("fit") or {}).get("monitor")
    selecting = _KMEANS if monitor in _OF_CLUSTERS else ("shortlist",)
    container["evaluation"] = {key: evaluation.get(key) for key in selecting}
    for key in excluded:
        parent, last = _parent_of(container, key)
        parent.pop(last, None)
    pooling = container.get("pooling") or {}
    if pooling.get("_target_") in _SIZED_BY_PARTS and pooling.get("feature_size") is not None:
        pooling.pop("embedding_size", None)  # added later; it is not used then
    table = (container.get("dataset") or {}).get("table") or {}
    for key, value in table.items():
        if isinstance(value, str) and os.path.isabs(value):
            table[key] = Path(value).name  # the data's fingerprint is checked besides
    code = {key: digest for key, digest in content.items() if key.startswith("code.")}
    identity: dict[str, Any] = _by_content(container, content) | code
    return identity


def without_added(container: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the keys of ``_ADDED`` that have their defaults."""
    for key, default in _ADDED.items():
        parent, last = _parent_of(container, key)
        if parent.get(last) == default:
            parent.pop(last, None)
    return container


def _parent_of(container: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, last = key.split(".")
    node = container
    for parent in parents:
        node = node.get(parent) or {}
    return node, last


def _by_content(node: Any, content: Mapping[str, str], prefix: str = "") -> Any:
    if isinstance(node, dict):
        return {k: _by_content(v, content, f"{prefix}.{k}" if prefix else str(k)) for k, v in node.items()}
    if isinstance(node, list):
        return [_by_content(value, content, f"{prefix}[{i}]") for i, value in enumerate(node)]
    return content.get(prefix, node)


def read_table(node: Any) -> ImageTable:
    """Read the data set of a table's node."""
    return identified(component(node))


@functools.cache
def _fingerprint(table: str) -> str:
    """Fingerprint of the data set of a resolved node, given as JSON."""
    return read_table(OmegaConf.create(json.loads(table))).fingerprint


def forget_data() -> None:
    """Read data sets again: their images may have changed since this process last did."""
    _fingerprint.cache_clear()


def _user_code(modules: set[str]) -> dict[str, str]:
    """SHA-256 of the files of modules outside of dmlbench and site-packages, and of what they import beside them.

    Files are named relative to the folder that has the top-level module or package.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    modules = {Path(script).stem if name == "__main__" and script else name for name in modules}
    folders = {top: _user_folder(top) for top in {name.partition(".")[0] for name in modules}}
    waiting = [(folder, name) for name in modules if (folder := folders[name.partition(".")[0]])]
    found: dict[str, str] = {}
    while waiting:
        folder, name = waiting.pop()
        for package in itertools.accumulate(name.split("."), "{}.{}".format):
            place = folder.joinpath(*package.split("."))
            files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
            path = next(filter(Path.is_file, files), None)
            if path is None or (relative := path.relative_to(folder).as_posix()) in found:
                continue
            found[relative], imports = _source(package, path)
            waiting += [(folder, other) for other in imports]
    return found


def _user_folder(top: str) -> Path | None:
    """The folder with the top-level module or package; None of dmlbench, installed packages and Python itself."""
    if top in ("", "dmlbench", "__main__") or top in sys.stdlib_module_names:
        return None
    spec = importlib.util.find_spec(top)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    folder = next((Path(place).resolve().parent for place in places), None)
    return None if folder is None or _has_installed_packages(folder) else folder


@functools.cache
def _has_installed_packages(folder: Path) -> bool:
    return any(folder.glob("*.dist-info"))


def _source(name: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of a module's file and what it imports; of an imported module as this process first read it."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    is_imported = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path
    source: tuple[str, tuple[str, ...]] | None = getattr(spec, "source", None) if is_imported else None
    if source is None:
        content = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        try:
            imports = tuple(_imports(ast.parse(content), package))
        except SyntaxError:  # importing it says so
            imports = ()
        source = hashlib.sha256(content).hexdigest(), imports
        if spec is not None and is_imported:
            spec.source = source
    return source


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names that a module of ``package`` imports, submodules or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, parents), *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
