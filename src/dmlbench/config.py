"""The schema of the top level of every configuration, and what identifies a cell and a run.

Components (data set, pooling, loss, ...) are nodes with a ``_target_``; ``build.py`` checks their arguments against the
signature of the target. Everything here works without torch, so that a misspelt key fails at once.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from dmlbench.moved import first_name, present_name, rename_targets
from dmlbench.recipes import register_recipes, settle_recipe
from dmlbench.types import ConfigError, RunError, flatten, not_a_file


@dataclass
class PathsConfig:
    """Where files lie: results, data sets of the user, and images prepared once."""

    output_dir: str = MISSING
    data_dir: str = MISSING
    cache_dir: str = MISSING


@dataclass
class RuntimeConfig:
    """Values known only once the data set and the model are there; ``build.py`` sets them, nobody else."""

    num_classes: int = MISSING
    image_size: Any = MISSING  # height and width of the images that the network gets
    num_channels: int = MISSING  # of the map that is pooled
    map_size: Any = MISSING  # height and width of that map; set where the pooling asks for it
    embedding_size: int = MISSING
    steps_per_epoch: int = MISSING  # batches of the sampler's epoch; ``${epochs:3}`` is three times that
    # of the recipe that took part: its name and side, where its values stand, and which of them something replaced
    recipe: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)  # keys of the command line


@dataclass
class TrainConfig:
    """Top level of ``dmlbench train``: one run is one cell at its coordinates (fold, repeat)."""

    dataset: Any = MISSING
    transform: Any = MISSING
    sampler: Any = MISSING
    protocol: Any = MISSING
    backbone: Any = MISSING
    pooling: Any = MISSING
    head: Any = MISSING
    loss: Any = MISSING
    miner: Any = None
    regularizer: Any = None
    optim: Any = MISSING
    schedule: Any = None
    fit: Any = MISSING
    evaluation: Any = MISSING
    logger: Any = None
    reproduce: Any = None  # of an experiment that is a paper's table: which row is which command, or what is missing
    fold: int = 0
    repeat: int = 0
    base_seed: int = 0
    device: str = "auto"
    num_workers: int | None = None
    image_cache: bool = True
    eval_batch_size: int = 128
    paths: PathsConfig = field(default_factory=PathsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


@dataclass
class EvaluateConfig:
    """Top level of ``dmlbench evaluate``: scores of a finished run or of a file of embeddings."""

    run: str | None = None
    embeddings: str | None = None
    labels: str | None = None
    gallery: str | None = None
    gallery_labels: str | None = None
    from_checkpoint: bool = False
    output: str | None = None
    per_query: str | None = None
    per_class: str | None = None
    hardest: int | None = None
    hardest_by: str = "map_at_r"
    metrics: tuple[str, ...] = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    device: str = "auto"
    num_workers: int | None = None


@dataclass
class ExplainConfig:
    """Top level of ``dmlbench explain``: what a trained pooling looks at, or why two images are alike to AVSL."""

    run: Any = None
    images: Any = None
    num_images: int = 6
    pair: Any = None
    num_nodes: int = 3
    reliable: int = 128
    output: str | None = None
    device: str = "auto"


@dataclass
class CellsConfig:
    """What the commands that summarize cells have in common: which cells, and by which metrics."""

    cells: str = "**"
    metrics: tuple[str, ...] = ("p_at_1", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    evaluation: Any = MISSING
    allow_partial: bool = False
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class AggregateConfig(CellsConfig):
    """Top level of ``dmlbench aggregate``: runs of cells to one summary a cell."""

    force: bool = False
    metrics: tuple[str, ...] = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")


@dataclass
class TableConfig(CellsConfig):
    """Top level of ``dmlbench table``: aggregated cells to Markdown, CSV and LaTeX."""

    facts: tuple[str, ...] = ()
    compare: tuple[str, ...] | None = None
    name: str | None = None


@dataclass
class ReportConfig(CellsConfig):
    """Top level of ``dmlbench report``: aggregated cells as a picture."""

    queries: int = 5


@dataclass
class ReproduceConfig:
    """Top level of ``dmlbench reproduce``: a paper's table from its runs, with the paper's numbers beside ours."""

    table: str | None = None
    rows: Any = None
    fold: Any = None
    repeat: Any = None
    list: bool = False
    measured: str | None = None
    dry_run: bool = False
    max_hours: float | None = None
    shard: str | None = None
    allow_mixed: bool = False
    metrics: tuple[str, ...] = ("p_at_1", "map_at_r")
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class StatusConfig:
    """Top level of ``dmlbench status``: what became of runs."""

    cells: str = "**"
    state: Any = None
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class CleanConfig:
    """Top level of ``dmlbench clean``: removing runs."""

    cells: str | None = None
    state: Any = None
    ask: bool = True
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class DataConfig:
    """Top level of ``dmlbench data``: looking at a data set, and making it ready."""

    dataset: Any = MISSING
    transform: Any = MISSING
    decode: bool = True
    jobs: int | None = None
    archives: Any = None
    password: str | None = None
    download: bool = True
    accept_other_checksum: bool = False
    paths: PathsConfig = field(default_factory=PathsConfig)


SCHEMAS = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "explain": ExplainConfig,
    "aggregate": AggregateConfig,
    "table": TableConfig,
    "report": ReportConfig,
    "reproduce": ReproduceConfig,
    "status": StatusConfig,
    "clean": CleanConfig,
    "data": DataConfig,
}


def config_folder() -> Path:
    """``conf`` inside the installed package, or at the top of the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"there is no configuration folder for {package}; install dmlbench again")


def compose(name: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration ``name`` with overrides, outside of its command: for notebooks, labels and tests."""
    with composing():
        renamed = [re.sub("^recipe[.]side=", "recipe/side=", override) for override in overrides]
        cfg = hydra.compose(name, overrides=renamed, return_hydra_config=with_hydra)
    if name == "train":
        settle(cfg)
    return cfg


def settle(cfg: DictConfig) -> None:
    """Make a run's configuration of what Hydra composed: what a recipe did is said, a table's rows are left out.

    Raises:
        ConfigError: the recipe has nothing for what was chosen, or nothing of the table can be run.
    """
    with open_dict(cfg):
        reproduce = cfg.pop("reproduce", None)
    if reproduce and "needs" in reproduce:
        raise ConfigError(f"nothing of this experiment can be run: it needs {reproduce['needs']}")
    settle_recipe(cfg)


@contextlib.contextmanager
def composing(folder: Path | None = None) -> Iterator[None]:
    """Hydra made ready to compose, with the user's own configuration folder if there is one."""
    register_schemas(folder)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        yield


def register_schemas(folder: Path | None = None) -> None:
    """Make the schemas and the recipes known to Hydra, and ``${epochs:3}``, the optimizer steps of so many epochs.

    Each primary YAML names its schema (``schema/train``) first in its defaults. Recipes of the user's own configuration
    ``folder`` come before others of their name.
    """
    OmegaConf.register_new_resolver("epochs", _steps_of_epochs, replace=True)
    register_recipes([*([folder.resolve()] if folder else []), config_folder()])
    store = ConfigStore.instance()
    if "schema" not in store.repo:  # making them takes a tenth of composing a configuration
        for name, schema in SCHEMAS.items():
            store.store(group="schema", name=name, node=schema, package="_global_")


def _steps_of_epochs(epochs: Any = None, *, _root_: DictConfig) -> int:
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or epochs < 0:
        raise ConfigError(
            f"${{epochs:{epochs}}} needs a number of at least 0, such as ${{epochs:40}} or ${{epochs:0.5}}"
        )
    return max(1, round(epochs * _root_.runtime.steps_per_epoch)) if epochs else 0


# What a cell is not made of: coordinates, seed, and everything that does not move a number.
NOT_PART_OF_A_CELL = ("fold", "repeat", "base_seed")
NOT_PART_OF_A_RUN = (
    "device",
    "num_workers",
    "image_cache",
    "eval_batch_size",
    "paths",
    "runtime",
    "logger",
    "reproduce",
    "fit.checkpoint_every",
    "fit.log_every",
    "fit.keep",
    "dataset.table.cache_dir",
)

# Keys and groups that came after the first results, with values that mean what was done before: these hash as absent,
# so that cells from then keep their names. Whatever is added to the configuration later gets a line here.
_SAME_AS_ABSENT: dict[str, Any] = {"optim.lr_multipliers.distance": 1.0, "fit.clip_form": "plain"}

# Scores are computed from stored embeddings whenever they are asked for, so what is computed is no part of a cell. It
# once was: names of cells still hash what it usually was, and with it what moves the score that selects the weights.
_EVALUATION_IN_NAMES = {"_target_": "dmlbench.evaluation.evaluate.EvaluationSpec", "recall_at": [1, 2, 4, 8]}
_OF_CLUSTERS = ("nmi", "ami", "raw_nmi")


def load_config(path: Path) -> DictConfig:
    """``read_settings`` of a run as a configuration.

    Raises:
        RunError: it is missing, or damaged.
    """
    remedy = "remove the run with `dmlbench clean` and run it again"
    try:
        present = OmegaConf.create(read_settings(path))
    except OmegaConfBaseException as error:
        raise RunError(f"{path} is damaged ({' '.join(str(error).split())}); {remedy}") from error
    assert isinstance(present, DictConfig)
    return present


def read_settings(path: Path) -> dict[str, Any]:
    """The composed configuration that a run has stored at ``path``, in the words of now; plain values read fast.

    Raises:
        RunError: it is missing, or damaged.
    """
    settings: dict[str, Any] = rename_targets(read_config(path), present_name)
    return settings


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that a run has stored at ``path``, as it stands there.

    Raises:
        RunError: it is missing, or damaged.
    """
    remedy = "remove the run with `dmlbench clean` and run it again"
    if what := not_a_file(path):
        raise RunError(f"{path} is {what}, not a file; {remedy}")
    try:
        config = yaml.load(path.read_bytes(), _Loader)
    except FileNotFoundError:
        raise RunError(f"{path} is missing, without which a run cannot be read; {remedy}") from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise RunError(f"{path} is damaged ({' '.join(str(error).split())}); {remedy}") from error
    if not isinstance(config, dict) or not config:
        raise RunError(f"{path} is damaged (no mapping of names to values); {remedy}")
    return config


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML as OmegaConf does (1e-4 is a number, a date a text, no key stands twice), in a tenth of the time."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"'{twice[0]}' stands twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _identity(container: dict[str, Any], excluded: tuple[str, ...]) -> dict[str, Any]:
    """What tells a configuration from others, in the words of the first version."""
    container = rename_targets(container, first_name)
    evaluation, monitor = container.get("evaluation") or {}, (container.get("fit") or {}).get("monitor")
    selecting = "kmeans_seed" if monitor in _OF_CLUSTERS else "rerank"
    kept = {selecting: evaluation[selecting]} if evaluation.get(selecting) else {}
    container["evaluation"] = _EVALUATION_IN_NAMES | kept
    for key in (*excluded, *_SAME_AS_ABSENT):
        *parents, last = key.split(".")
        node: Any = container
        for parent in parents:
            node = node.get(parent) or {}
        if key in excluded or node.get(last) == _SAME_AS_ABSENT[key]:
            node.pop(last, None)
    return container


def _digest(cfg: DictConfig, excluded: tuple[str, ...]) -> str:
    # Not resolved: "${paths.data_dir}/cars196" is the same cell wherever the data lies.
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    # A run's cache of drawn images was hashed with the first results, so it stays in names.
    names = tuple(key for key in excluded if key != "dataset.table.cache_dir")
    return hashlib.sha256(json.dumps(_identity(container, names), sort_keys=True).encode()).hexdigest()


def settings_of_cell(stored: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a cell what it is, flattened, of a resolved configuration (as a run stores it)."""
    return flatten(_identity(stored, NOT_PART_OF_A_CELL + NOT_PART_OF_A_RUN))


def differences(cfg: DictConfig, stored: DictConfig) -> dict[str, tuple[Any, Any]]:
    """(stored, new) values of the settings that decide a run's numbers and differ, by key.

    Args:
        cfg: a configuration before its data are read.
        stored: the resolved one of a finished or interrupted run; what only the data say is taken from it.
    """
    # what the data said; what else a run notes under runtime, or once did, is none of it
    said = {key: stored.runtime[key] for key in cfg.runtime if key in stored.runtime and key != "recipe"}
    known = OmegaConf.merge(cfg, {"runtime": said, "paths": stored.paths})
    containers: list[Any] = [OmegaConf.to_container(config, resolve=True) for config in (stored, known)]
    old, new = (flatten(_identity(container, NOT_PART_OF_A_RUN)) for container in containers)
    return {
        key: (old.get(key, "absent"), new.get(key, "absent"))
        for key in sorted(old.keys() | new.keys())
        if (old.get(key), key in old or "." not in key) != (new.get(key), key in new or "." not in key)
    }


def cell_id(cfg: DictConfig) -> str:
    """Readable and unique name of the cell: backbone, pooling and loss as chosen, and a hash of all that defines it."""
    choices = cfg.runtime.choices
    pooling = "pooling" if cfg.pooling is not None else "head"  # that pools by itself
    words = [choices.get(group, group) for group in ("backbone", pooling, "loss")]
    # Not resolved: a number of epochs is not known before the data are.
    if OmegaConf.to_container(cfg.fit, resolve=False).get("max_steps") == 0:  # type: ignore[union-attr]
        words.append("untrained")
    name = "-".join(str(word).replace("/", "_") for word in words)
    return f"{name}-{cell_sha256(cfg)[:8]}"


def cell_sha256(cfg: DictConfig) -> str:
    """Hash of everything that defines a cell."""
    return _digest(cfg, NOT_PART_OF_A_CELL + NOT_PART_OF_A_RUN)


def config_sha256(cfg: DictConfig) -> str:
    """Hash of everything that decides a run's numbers: its cell, its coordinates and the base seed."""
    return _digest(cfg, NOT_PART_OF_A_RUN)
