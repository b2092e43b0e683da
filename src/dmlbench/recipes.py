"""Papers' settings as tables: ``recipe=gsp`` puts a paper's values between an option's own and those that are given.

A recipe is one file, ``conf/recipe/<name>.yaml``, that reads like the paper's own table of settings:

    paper:     what is followed
    extends:   another recipe, whose settings come first (optional)
    defaults:  Hydra's: options of groups that all of its runs have, such as the optimizer
    covers:    what it has settings for, as lists of options by group; anything else is refused (without it, nothing is)
    settings:  entries ``{when, choose, set, paper, code, source}``, later ones above earlier ones
    deviations: entries ``{when, text, source}``: what still differs from the paper or its code; printed under tables

``when`` names the options (and the ``side``) for which an entry applies. ``set`` has values by key; ``paper`` and
``code`` have those of one side where a paper and its code differ (``recipe.side``). ``choose`` has options of groups
that a run can do without, for where nobody chose any. ``source`` is where the values stand.

Hydra asks for ``recipe/values/<recipe>,<side>,<choices>`` at the place of its defaults list where recipes stand, and
``RecipeSource`` answers with the values that apply.
"""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from dmlbench.external_files import Schema, load_yaml, read
from dmlbench.types import ConfigError, flatten

SIDES = ("code", "paper")
_Option = str | None
_Optional = Literal["miner", "regularizer", "schedule"]
"""Groups that a run can do without: a recipe chooses for them where nobody did."""
_Group = Literal["dataset", "protocol", "backbone", "pooling", "head", "loss", "sampler", _Optional]
GROUPS: tuple[str, ...] = get_args(_Group)
"""What conditions may name, in the order of ``recipe/values`` in ``conf/train.yaml``."""
_Condition = dict[Literal[_Group, "side"], _Option | list[_Option]]
NO_RECIPE = "none"
_FOLDER, _VALUES = "recipe", "recipe/values/"
_Source = Field(min_length=1)

log = logging.getLogger(__name__)

Folders = Sequence[Path]


class Setting(Schema):
    """Values for the options that ``when`` names."""

    when: _Condition = Field(default_factory=dict)
    choose: dict[_Optional, str] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, Any] = Field(default_factory=dict)
    code: dict[str, Any] = Field(default_factory=dict)
    source: str = _Source


class Deviation(Schema):
    """What differs from the paper or its code for the options that ``when`` names."""

    when: _Condition = Field(default_factory=dict)
    text: str
    source: str = _Source


class Recipe(Schema):
    """A file of ``conf/recipe``."""

    paper: str | None = None
    extends: str | None = None
    defaults: list[str | dict[str, _Option | list[str]]] = Field(default_factory=list)
    covers: list[_Condition] = Field(default_factory=list)
    settings: list[Setting] = Field(default_factory=list)
    deviations: list[Deviation] = Field(default_factory=list)


def register_recipes(folders: Sequence[Path]) -> None:
    """Register the recipes of configuration folders with Hydra; the first folder wins."""
    for side in SIDES:
        ConfigStore.instance().store(group="recipe/side", name=side, node={}, package="_global_")
    _RecipesFirst.folders = tuple(folders)
    for plugin in (RecipeSource, _RecipesFirst):
        Plugins.instance().register(plugin)


class _RecipesFirst(SearchPathPlugin):
    """Put ``RecipeSource`` before Hydra's own source of files, and the user's folder before the project's."""

    folders: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(self.folders[:-1]):
            search_path.prepend("dmlbench", f"file://{folder}")
        for i in reversed(range(len(self.folders))):
            path = os.pathsep.join(str(folder) for folder in self.folders[i:])
            search_path.prepend("dmlbench", f"{RecipeSource.scheme()}://{path}")


class RecipeSource(ConfigSource):
    """Hydra's source of the recipes of a folder; its path is that folder and those in which to look up options."""

    @property
    def folders(self) -> Folders:
        return [Path(folder) for folder in self.path.split(os.pathsep)]

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def load_config(self, config_path: str) -> ConfigResult:
        if config_path.startswith(_VALUES):
            name, side, *choices = config_path.removeprefix(_VALUES).split(",")
            chosen = {group: None if c == "None" else c for group, c in zip(GROUPS, choices, strict=True)}
            chosen["side"] = side
            config = {} if name == NO_RECIPE else _values(self.folders, name, side, chosen)
        else:
            recipe = _chain(self.folders, config_path.removeprefix(f"{_FOLDER}/"))[-1]
            config = {"defaults": [*([recipe.extends] if recipe.extends else []), *recipe.defaults]}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(config), {"package": "_global_"})

    def is_config(self, config_path: str) -> bool:
        path = config_path.removesuffix(".yaml")
        if path.startswith(_VALUES):
            path = path.split(",")[0].replace(_VALUES, f"{_FOLDER}/")
        return path.count("/") == 1 and path.startswith(f"{_FOLDER}/") and (self.folders[0] / f"{path}.yaml").is_file()

    def is_group(self, config_path: str) -> bool:
        return f"{config_path}/" == _VALUES

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # Hydra's own source lists the files


def _chain(folders: Folders, name: str) -> list[Recipe]:
    """A recipe, after those that it extends."""
    chain: dict[str, Recipe] = {}
    following: str | None = name
    while following is not None:
        if following in chain:
            raise ConfigError(f"recipe={name} extends itself: {' -> '.join([*chain, following])}. Remove one extends.")
        path = _option(folders, _FOLDER, following)
        chain[following] = _recipe(path, path.stat().st_mtime_ns)
        following = chain[following].extends
    return list(chain.values())[::-1]


def _option(folders: Folders, group: str, option: str) -> Path:
    """The file of an option, in the first folder that has it."""
    for folder in folders:
        if (path := folder / group / f"{option}.yaml").is_file():
            return path
    raise ConfigError(f"a recipe uses {group}={option}, but there is no {group}/{option}.yaml.")


def recipe_file(folders: Folders, name: str) -> Path | None:
    """The file of a recipe, in the first folder that has it."""
    return next((path for folder in folders if (path := folder / _FOLDER / f"{name}.yaml").is_file()), None)


def recipe_of(folders: Folders, name: str) -> Recipe:
    """The recipe of the first folder that has it; an empty one if no folder has."""
    path = recipe_file(folders, name)
    return Recipe() if path is None else read(path, Recipe, ConfigError)


@functools.cache
def _recipe(path: Path, changed: int) -> Recipe:
    return read(path, Recipe, ConfigError)


def applies(when: Mapping[Any, Any], chosen: Mapping[str, str | None]) -> bool:
    """Whether the options chosen are among those that a condition names; null is a group that nobody chose."""
    return not _mismatches(when, chosen)


def _mismatches(when: Mapping[Any, Any], chosen: Mapping[str, str | None]) -> list[Any]:
    return [group for group, wanted in when.items() if chosen[group] not in options_of(wanted)]


def options_of(options: Any) -> list[Any]:
    """What a condition names for a group, as a list."""
    return options if isinstance(options, list) else [options]


def _values(folders: Folders, name: str, side: str, chosen: Mapping[str, str | None]) -> dict[str, Any]:
    """A recipe's values for the chosen options, as a configuration with ``runtime.recipe``."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    options: dict[str, str] = {}
    recipes = _chain(folders, name)
    for entry in (entry for recipe in recipes for entry in recipe.settings if applies(entry.when, chosen)):
        parts = [(entry.set, entry.source), (getattr(entry, side), f"{entry.source}; {side}")]
        for group, option in entry.choose.items():
            if chosen[group] is None:
                options[group] = option
                content = load_yaml(_option(folders, group, option)) or {}
                parts.insert(0, ({group: content}, f"conf/{group}/{option}.yaml for {entry.source}"))
        for part, stands in parts:
            flat = {key: value for prefix, node in part.items() for key, value in flatten(node, prefix).items()}
            values |= flat
            places |= dict.fromkeys(flat, stands)
    known: dict[str, str | None] = {**chosen, **options}
    deviations = [entry.text for recipe in recipes for entry in recipe.deviations if applies(entry.when, known)]
    facts = {"name": name, "side": side, "chosen": options, "values": values, "places": places,
             "deviations": deviations}  # fmt: skip
    refusal = _refusal(name, recipes[-1], chosen)
    nested: dict[str, Any] = {"runtime": {"recipe": facts | ({"refusal": refusal} if refusal else {})}}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"recipe={name} sets both {parent} and {key}. Remove one of them.")
        node[last] = value
    return nested


def _refusal(name: str, recipe: Recipe, chosen: Mapping[str, str | None]) -> str:
    """Why a recipe does not cover the chosen options, and what it covers; empty if it does."""
    missing = min((_mismatches(block, chosen) for block in recipe.covers), key=len, default=[])
    if not missing:
        return ""
    near = next(block for block in recipe.covers if _mismatches(block, chosen) == missing)
    asked = " ".join(f"{group}={chosen[group] or 'null'}" for group in missing)
    others = "; ".join(
        f"{group}={'|'.join('null' if o is None else o for o in options_of(near[group]))}" for group in missing
    )
    given = " ".join(f"{group}={chosen[group]}" for group in near if group not in missing and chosen[group])
    known = f"With {given}, it" if given else "It"
    return (
        f"recipe={name} has no settings for {asked}. {known} has settings for {others}. Set recipe=none to leave it "
        "out."
    )


def record_recipe(cfg: DictConfig) -> None:
    """Store which of the recipe's values were overridden; raises ConfigError if it does not cover the options."""
    facts: Any = OmegaConf.to_container(cfg.runtime.recipe, resolve=False)
    if "values" not in facts:
        return
    if "refusal" in facts:
        raise ConfigError(facts["refusal"])
    log.info("recipe=%s recipe.side=%s", facts["name"], facts["side"])
    composed = flatten(OmegaConf.to_container(cfg, resolve=False))
    wanted = facts.pop("values")
    facts["overridden"] = {k: value for k, value in wanted.items() if k not in composed or composed[k] != value}
    for key, value in facts["overridden"].items():
        log.info("recipe %s: %s is %s, not the recipe's %s", facts["name"], key, composed.get(key, "absent"), value)
    cfg.runtime.recipe = facts
