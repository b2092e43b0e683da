"""Compose configurations, and read those of runs; without torch, so that a misspelt key fails at once."""

import contextlib
import hashlib
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

from dmlbench.recipes import register_recipes, settle_recipe
from dmlbench.schemas import SCHEMAS
from dmlbench.types import ConfigError, RunError, not_a_file


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
    """A file of splits is part of a config by its content, not by its name."""
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


def load_config(path: Path) -> DictConfig:
    """``read_config`` of a run as a configuration.

    Raises:
        RunError: it is missing, or damaged.
    """
    remedy = "remove the run with `dmlbench clean` and run it again"
    try:
        present = OmegaConf.create(read_config(path))
    except OmegaConfBaseException as error:
        raise RunError(f"{path} is damaged ({' '.join(str(error).split())}); {remedy}") from error
    assert isinstance(present, DictConfig)
    return present


def read_config(path: Path) -> dict[str, Any]:
    """The composed configuration that a run has stored at ``path``; plain values, read fast.

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
