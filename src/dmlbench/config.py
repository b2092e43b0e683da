"""Compose configurations, and read those of runs; without torch, so that a misspelt key fails at once."""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from dmlbench.external_files import load_json, load_yaml
from dmlbench.recipes import record_recipe, register_recipes
from dmlbench.types import ConfigError, RunError


def config_folder() -> Path:
    """``conf`` inside the installed package, or at the top of the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"{package}: the configuration folder is missing. Install dmlbench again.")


def config_folders(folder: Path | None) -> list[Path]:
    """The user's folder, if any, and the project's; options of the first win."""
    return [*([folder] if folder else []), config_folder()]


def compose(name: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose the configuration ``name`` outside of its command."""
    with composing():
        renamed = [re.sub("^recipe[.]side=", "recipe/side=", override) for override in overrides]
        cfg = hydra.compose(name, overrides=renamed, return_hydra_config=with_hydra)
    if name == "train":
        complete_config(cfg)
    return cfg


def compose_run(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """A run's configuration outside of its command, and the option that each group has."""
    cfg = compose("train", overrides, with_hydra=True)
    choices = {**cfg.hydra.runtime.choices, **cfg.runtime.recipe.get("chosen", {})}
    named = {group: str(option) for group, option in choices.items() if "/" not in group}
    OmegaConf.update(cfg, "runtime.choices", named, force_add=True)
    return without_hydra(cfg), choices


def arguments_of(cfg: DictConfig) -> Any:
    """A command's composed configuration as plain values: a dataclass of its YAML's keys (see ``schema_of``)."""
    return OmegaConf.to_object(cfg)


def table_node(dataset: str, paths: "PathsConfig") -> dict[str, Any]:
    """The node of a data set's table by the name of its option."""
    cfg = OmegaConf.merge(compose("train", [f"dataset={dataset}"]), {"paths": asdict(paths)})
    return OmegaConf.to_container(cfg.dataset.table, resolve=True)  # type: ignore[return-value]


def key_of(override: str) -> str:
    """The key of an override, without the marks that add or remove it."""
    return override.partition("=")[0].lstrip("+~")


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's own part, which is removed."""
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def complete_config(cfg: DictConfig) -> None:
    """Complete a run's composed configuration: record the recipe, drop a table's rows, hash the file of splits."""
    with open_dict(cfg):
        reproduce = cfg.pop("reproduce", None)
    if reproduce and "commands" in reproduce:
        raise ConfigError(f"this experiment is not a training run. Run instead: {'; '.join(reproduce.commands)}")
    if reproduce and "needs" in reproduce:
        raise ConfigError(f"this experiment cannot be run: it needs {reproduce['needs']}.")
    record_recipe(cfg)
    protocol = cfg.protocol
    if "splits_sha256" in protocol and protocol.splits_sha256 is None:
        given = "" if OmegaConf.is_missing(protocol, "splits") else protocol.splits
        path = Path(given if isinstance(given, str) else "").expanduser()
        if not path.is_file():
            raise ConfigError(
                f"protocol.splits: got {given or 'nothing'}, expected a file of splits. Make one with "
                "`dmlbench oodml splits dataset=...`, then set protocol.splits=<file>."
            )
        protocol.splits = str(path.absolute())  # so that commands on a run find it from anywhere
        protocol.splits_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def composing(folder: Path | None = None, name: str | None = None) -> Iterator[None]:
    """Prepare Hydra to compose ``name`` (None: any), with the user's ``folder``; restores Hydra's state."""
    register_schemas(folder, name)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def register_schemas(folder: Path | None = None, name: str | None = None) -> None:
    """Register schemas, recipes and ``${epochs:3}`` (optimizer steps of so many epochs) with Hydra.

    Each command's YAML names its schema (``schema/train``) first in its defaults. ``name`` is the one to compose, None
    stands for any. Recipes of the user's ``folder`` come first.
    """
    for path in sorted(folder.rglob("*.yaml")) if folder else ():  # checks size and depth first; Hydra does not
        try:
            content = load_yaml(path)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}.") from error
        if not isinstance(content, dict | None):
            raise ConfigError(f"{path}: got {content!r:.60}, expected keys and values.")
    OmegaConf.register_new_resolver("epochs", _steps_of_epochs, replace=True)
    register_recipes(config_folders(folder and folder.absolute()))
    store = ConfigStore.instance()
    every = [path.stem for path in config_folder().glob("*.yaml")]
    for each in every if name is None else [name]:  # building every schema is slow
        if f"{each}.yaml" not in store.repo.get("schema", {}):
            store.store(group="schema", name=each, node=schema_of(each), package="_global_")


@dataclass
class PathsConfig:
    """Folders of results, of data sets, and of images prepared once."""

    output_dir: str = MISSING
    data_dir: str = MISSING
    cache_dir: str = MISSING


@dataclass
class RuntimeConfig:
    """Values derived from the data set and the model; ``build`` sets them."""

    num_classes: int = MISSING
    image_size: Any = MISSING  # height and width of the images that the network gets
    num_channels: int = MISSING  # of the map that is pooled
    num_features: int = MISSING  # of the side output "features": channels of what the pooling works on
    map_size: Any = MISSING  # height and width of that map; set where the pooling asks for it
    embedding_size: int = MISSING
    steps_per_epoch: int = MISSING  # batches of the sampler's epoch (untrained: 1); ``${epochs:3}`` is three times that
    # of the recipe: its name and side, the sources of its values, and which of them something replaced
    recipe: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)  # keys of the command line
    config_dir: str | None = None  # folder of --config-dir, which error messages name; no code is read by it
    content: Any = None  # SHA-256 of weights and user code, see identity.py


# Types that cannot be inferred from a default: of null, of lists that may be one value, of keys outside of the YAML.
_NULL_TYPES: dict[str, Any] = {
    **dict.fromkeys(("num_workers", "hardest", "jobs", "per_step", "steps"), int | None),
    **dict.fromkeys(("formats", "compare"), tuple[str, ...] | None),
    **dict.fromkeys(("pair", "rows", "fold", "repeat", "state", "archives", "also", "frozen", "runs"), Any),
    **dict.fromkeys(("merge_order", "training", "gap", "gmp", "explain.run", "explain.images"), Any),
    "oodml_few_shot.run": Any,
    "reproduce.rows": tuple[str, ...] | None,
    **dict.fromkeys(("reproduce.fold", "reproduce.repeat"), tuple[int, ...] | None),
    "beta": float | None,
}
_OTHER_TYPES: dict[str, Any] = {
    "oodml_few_shot.shots": Any,
    "oodml_few_shot.weight_decay": float | None,
    **dict.fromkeys(("evaluate.fail_below", "tune.space", "study_untrained_poolings.known"), dict[str, Any]),
    **{f"study_{name}.train": Any for name in ("xml_prototypes", "zero_shot_prediction", "gsp_mu", "gsp_m_eps")},
}
_MORE_KEYS: dict[str, list[tuple[str, Any, Any]]] = {
    "train": [("reproduce", Any, None), ("runtime", RuntimeConfig, field(default_factory=RuntimeConfig))],
    "import": [("fold", int, 0), ("repeat", int, 0)],
    "oodml_transfer": [("run", str | None, None)],
    "study_object_size": [("seed", int, 0)],
}
_GLOBAL_GROUPS = ("experiment", "recipe", "search")  # their values stand at the top level


@functools.cache
def schema_of(name: str) -> Any:
    """A dataclass of the top-level keys of ``conf/<name>.yaml``, each of the type of its default."""
    content = load_yaml(config_folder() / f"{name}.yaml")
    fields: list[tuple[str, Any, Any]] = []
    for entry in content.pop("defaults"):
        ((group, option),) = entry.items() if isinstance(entry, dict) else [("/", None)]
        place = (group.partition("@")[2] or group).partition(".")[0]
        if place == "paths":
            fields.append((place, PathsConfig, field(default_factory=PathsConfig)))
        elif not group.startswith("override") and "/" not in group and place not in (*_GLOBAL_GROUPS, *content):
            fields.append((place, Any, MISSING if option is not None else None))
    for key, value in content.items():
        if key not in ("hydra", *(known for known, *_ in fields)):
            fields.append((key, _type_of(f"{name}.{key}", value), MISSING))
    return dataclasses.make_dataclass(name, [*fields, *_MORE_KEYS.get(name, [])])


def _type_of(key: str, value: Any) -> Any:
    if value is None:
        return _NULL_TYPES.get(key, _NULL_TYPES.get(key.partition(".")[2], str | None))
    if key in _OTHER_TYPES or isinstance(value, dict):
        return _OTHER_TYPES.get(key, Any)
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        kind = next((kind for kind in (str, int, float) if kinds <= {kind}), float if kinds == {int, float} else None)
        return Any if kind is None else tuple[kind, ...]  # type: ignore[valid-type]
    return type(value)


def _steps_of_epochs(epochs: Any = None, *, _root_: DictConfig) -> int:
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or epochs < 0:
        raise ConfigError(
            f"${{epochs:...}}: got {epochs}, expected a number of at least 0, such as ${{epochs:40}} or "
            "${epochs:0.5}."
        )
    return max(1, round(epochs * _root_.runtime.steps_per_epoch)) if epochs else 0


def listed(value: Any) -> list[Any]:
    """A value of a configuration as a list: none, one or several."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_config(stored: Mapping[str, Any]) -> DictConfig:
    """A stored configuration as ``build`` takes it."""
    return OmegaConf.create(dict(stored))


def to_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as the text of ``config.yaml``."""
    return OmegaConf.to_yaml(as_config(config))


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that a run has stored, as plain values."""
    remedy = "Remove the run with `dmlbench clean` and run it again."
    try:
        config = load_yaml(path)
    except FileNotFoundError:
        raise RunError(f"{path} is missing. {remedy}") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}). {remedy}") from error
    if not isinstance(config, dict) or not config:
        raise RunError(f"{path} is damaged (expected keys and values). {remedy}")
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):  # reading result.json reports these errors
        named = load_json(path.with_name("result.json")).get("config_file_sha256")
        if named != hashlib.sha256(path.read_bytes()).hexdigest():
            raise RunError(f"{path} is not the file that result.json names: it was changed or copied. Run it again.")
    return config
