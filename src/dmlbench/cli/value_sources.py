"""``dmlbench train ... --why``: every value of a run's configuration, and where it comes from."""

from collections.abc import Iterator, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from dmlbench.cli.arguments import CommandLine, for_hydra
from dmlbench.config import composing, settle
from dmlbench.types import ConfigError, flatten

COMMAND_LINE = "command line"
_RECIPE = "recipe/values/"


def print_value_sources(line: CommandLine) -> None:
    """Print every key with its value and its source, and the recipe's values that something else replaced."""
    if line.is_sweep or line.help or line.cfg:
        raise ConfigError("--why explains one run: leave -m, --help and --cfg out")
    overrides = for_hydra("train", line)
    with composing(line.config_dir):
        cfg = hydra.compose("train", overrides=overrides)
        settle(cfg)
        places = _places(overrides, cfg.runtime.recipe)
    rows = [(key, str(value), place) for key, value, place in _values(cfg, places)]
    widths = [min(max(len(row[i]) for row in rows), 56) for i in (0, 1)]
    for key, value, place in rows:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {place}")
    recipe = cfg.runtime.recipe
    if recipe:
        print(f"\nrecipe={recipe.name} recipe.side={recipe.side}")
        for key, value in recipe.overridden.items():
            print(f"  replaced: {key}, which it has as {value} ({recipe.places[key]})")
        for text in recipe.deviations:
            print(f"  deviates: {text}")


def _values(cfg: Any, places: dict[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key, value in flatten(OmegaConf.to_container(cfg, resolve=False)).items():
        if key.partition(".")[0] == "runtime":
            continue
        part = key
        while part not in places and "." in part:  # a whole node was given at once
            part = part.rpartition(".")[0]
        yield key, value, places.get(part, "unknown")


def _places(overrides: Sequence[str], recipe: Any) -> dict[str, str]:
    """The last of the files, the recipe's entries and the command line that gives a key, by key."""
    places: dict[str, str] = {}
    loader: Any = GlobalHydra.instance().config_loader()
    _, repository = loader._parse_overrides_and_create_caching_repo("train", list(overrides))
    defaults = loader.compute_defaults_list("train", list(overrides), RunMode.RUN)
    for part in defaults.defaults:
        path = part.config_path
        if path is None or path.split("/")[0] == "hydra":
            continue
        content = OmegaConf.to_container(repository.load_config(path).config, resolve=False)
        for key in flatten(content, part.package or ""):
            if path.startswith(_RECIPE):
                places[key] = f"recipe {recipe.name}: {recipe.places.get(key, '')}"
            else:
                places[key] = "the schema's default" if path.startswith("schema/") else f"conf/{path}.yaml"
    for override in defaults.config_overrides:
        places[override.key_or_group] = COMMAND_LINE
    return places
