"""Composing configurations, and what identifies a cell and a run; ``schemas.py`` has what their top levels hold.

Components (data set, pooling, loss, ...) are nodes with a ``_target_``; ``build.py`` checks their arguments against the
signature of the target. Everything here works without torch, so that a misspelt key fails at once.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from dmlbench.moved import first_name, present_name, rename_targets
from dmlbench.recipes import register_recipes, settle_recipe
from dmlbench.schemas import SCHEMAS
from dmlbench.types import ConfigError, RunError, flatten, not_a_file


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
    if reproduce and "commands" in reproduce:
        raise ConfigError(f"this experiment is no run; it is made by: {'; '.join(reproduce.commands)}")
    if reproduce and "needs" in reproduce:
        raise ConfigError(f"nothing of this experiment can be run: it needs {reproduce['needs']}")
    settle_recipe(cfg)
    _settle_splits(cfg.protocol)


def _settle_splits(protocol: Any) -> None:
    """A file of splits is part of a cell by its content, not by its name."""
    if "splits_sha256" in protocol and protocol.splits_sha256 is None:
        given = "" if OmegaConf.is_missing(protocol, "splits") else protocol.splits
        path = Path(given if isinstance(given, str) else "").expanduser()
        if not path.name or not_a_file(path) or not path.exists():
            raise ConfigError(
                f"protocol.splits ({given or 'not given'}) must be a file of splits; make one with "
                "`dmlbench oodml splits dataset=...`, then protocol.splits=<file>"
            )
        protocol.splits = str(path.absolute())  # so that commands on a run find it from anywhere
        protocol.splits_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def composing(folder: Path | None = None, name: str | None = None) -> Iterator[None]:
    """Hydra made ready to compose ``name`` (None: anything), with the user's own configuration folder if there is one.

    Also within a command that Hydra itself started, which it goes back to.
    """
    register_schemas(folder, name)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def register_schemas(folder: Path | None = None, name: str | None = None) -> None:
    """Make the schemas and the recipes known to Hydra, and ``${epochs:3}``, the optimizer steps of so many epochs.

    Each primary YAML names its schema (``schema/train``) first in its defaults; ``name`` is the one that is composed,
    None stands for any. Recipes of the user's own configuration ``folder`` come before others of their name.
    """
    OmegaConf.register_new_resolver("epochs", _steps_of_epochs, replace=True)
    register_recipes([*([folder.resolve()] if folder else []), config_folder()])
    store = ConfigStore.instance()
    for each in SCHEMAS if name is None else [name]:  # making all takes as long as importing numpy
        if f"{each}.yaml" not in store.repo.get("schema", {}):
            store.store(group="schema", name=each, node=SCHEMAS[each], package="_global_")


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
    "protocol.splits",  # its content is: splits_sha256
)

# Keys and groups that came after the first results, with values that mean what was done before: these hash as absent,
# so that cells from then keep their names. Whatever is added to the configuration later gets a line here.
_SAME_AS_ABSENT: dict[str, Any] = {
    "optim.decay_biases": False,
    "optim.without_decay": [],
    "optim.lr_multipliers.distance": 1.0,
    "fit.clip_form": "plain",
    "fit.compile": False,
    "fit.reset_after_warmup": False,
    "fit.collapse_ratio": None,
    "fit.warmup_schedule": "runs",
    "fit.warmup_batch_norm": "frozen",
    "matching": None,
    "regularizer.zsr.halves": "random",
}
# The same for arguments of what a ``_target_`` names, wherever it stands.
_ARGUMENTS_SAME_AS_ABSENT: dict[str, dict[str, Any]] = {
    "dmlbench.losses.arcface.ArcFace": {"init": "normal", "init_std": 1.0, "clamp_negative": False},
    "dmlbench.losses.libc.Libc": {"init": "kaiming_uniform_a5"},
    "dmlbench.losses.proxy_anchor.ProxyAnchor": {"positive_mean": "classes", "init": "he_normal", "init_std": None},
    "dmlbench.losses.soft_triple.SoftTriple": {"init": "normal"},
    "dmlbench.models.projection.Projection": {"init": "glorot_uniform"},
    "dmlbench.models.unit_parts.UnitParts": {"init": "glorot_uniform"},
}

# Scores are computed from stored embeddings whenever they are asked for, so what is computed is no part of a cell. It
# once was: names of cells still hash what it usually was, and with it what moves the score that selects the weights.
_EVALUATION_IN_NAMES = {"_target_": "dmlbench.evaluation.evaluate.EvaluationSpec", "recall_at": [1, 2, 4, 8]}
_OF_CLUSTERS = ("nmi", "ami", "raw_nmi")
_KMEANS = {"kmeans_seed": 0, "kmeans_library": "auto", "kmeans_init": "random", "kmeans_restarts": 1,
           "kmeans_max_steps": 25}  # fmt: skip


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
    selecting = _KMEANS if monitor in _OF_CLUSTERS else {"rerank": None}
    kept = {k: evaluation[k] for k, usual in selecting.items() if evaluation.get(k, usual) != usual}
    container["evaluation"] = _EVALUATION_IN_NAMES | kept
    for key in (*excluded, *_SAME_AS_ABSENT):
        *parents, last = key.split(".")
        node: Any = container
        for parent in parents:
            node = node.get(parent) or {}
        if key in excluded or node.get(last) == _SAME_AS_ABSENT[key]:
            node.pop(last, None)
    _drop_added_arguments(container)
    return container


def _drop_added_arguments(node: Any) -> None:
    """Remove ``_ARGUMENTS_SAME_AS_ABSENT`` from nested lists and dicts."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _drop_added_arguments(child)
    if isinstance(node, dict):
        for key, value in _ARGUMENTS_SAME_AS_ABSENT.get(str(node.get("_target_")), {}).items():
            if node.get(key) == value:
                node.pop(key, None)


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
    if cfg.get("matching") is not None:
        words.append(choices.get("matching", "matching"))
    name = "-".join(str(word).replace("/", "_") for word in words)
    return f"{name}-{cell_sha256(cfg)[:8]}"


def cell_sha256(cfg: DictConfig) -> str:
    """Hash of everything that defines a cell."""
    return _digest(cfg, NOT_PART_OF_A_CELL + NOT_PART_OF_A_RUN)


def config_sha256(cfg: DictConfig) -> str:
    """Hash of everything that decides a run's numbers: its cell, its coordinates and the base seed."""
    return _digest(cfg, NOT_PART_OF_A_RUN)
