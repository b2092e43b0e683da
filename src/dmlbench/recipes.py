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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from dmlbench.types import ConfigError, closest, flatten

SIDES = ("code", "paper")
GROUPS = ("dataset", "protocol", "backbone", "pooling", "head", "loss", "sampler", "miner", "regularizer", "schedule")
"""What conditions may name, in the order of ``recipe/values`` in ``conf/train.yaml``."""
OPTIONAL = ("miner", "regularizer", "schedule")
"""Groups that a run can do without: a recipe chooses for them where nobody did."""
NO_RECIPE = "none"
_FOLDER, _VALUES = "recipe", "recipe/values/"
_PARTS = {"paper", "extends", "defaults", "covers", "settings", "deviations"}
_OF_ENTRY = {"settings": {"when", "choose", "set", *SIDES, "source"}, "deviations": {"when", "text", "source"}}

log = logging.getLogger(__name__)

Entry = Mapping[str, Any]
Folders = Sequence[Path]


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
            recipe = _load(self.folders, config_path.removeprefix(f"{_FOLDER}/"))
            config = {"defaults": [*([recipe["extends"]] if "extends" in recipe else []), *recipe.get("defaults", [])]}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(config), {"package": "_global_"})

    def is_config(self, config_path: str) -> bool:
        path = config_path.removesuffix(".yaml")
        name = (
            path.removeprefix(_VALUES).split(",")[0] if path.startswith(_VALUES) else path.removeprefix(f"{_FOLDER}/")
        )
        return (
            path.startswith(f"{_FOLDER}/")
            and "/" not in name
            and (self.folders[0] / _FOLDER / f"{name}.yaml").is_file()
        )

    def is_group(self, config_path: str) -> bool:
        return f"{config_path}/" == _VALUES

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # Hydra's own source lists the files


def _load(folders: Folders, name: str) -> dict[str, Any]:
    path = _option(folders, _FOLDER, name)
    return _recipe(path, path.stat().st_mtime_ns)


def _option(folders: Folders, group: str, option: str) -> Path:
    """The file of an option, in the first folder that has it."""
    for folder in folders:
        if (path := folder / group / f"{option}.yaml").is_file():
            return path
    raise ConfigError(f"a recipe names {group}={option}, which is unknown; there is no {group}/{option}.yaml")


@functools.cache
def _recipe(path: Path, changed: int) -> dict[str, Any]:
    """The content of a recipe's file, checked."""
    recipe = _read(path)
    for key in recipe.keys() - _PARTS:
        raise ConfigError(f"{path} has '{key}', which is no part of a recipe: {closest(key, sorted(_PARTS))}")
    for part, known in _OF_ENTRY.items():
        for entry in recipe.get(part, []):
            for key in entry.keys() - known:
                raise ConfigError(f"{path}: an entry of {part} has '{key}': {closest(key, sorted(known))}")
            if not entry.get("source"):
                raise ConfigError(f"{path}: {entry} names no source; say where its values stand")
            for group in entry.get("when", {}).keys() - {*GROUPS, "side"}:
                raise ConfigError(f"{path}: when names the group '{group}': {closest(group, [*GROUPS, 'side'])}")
    return recipe


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def entries_of(folders: Folders, name: str, part: str = "settings") -> Iterator[Entry]:
    """The ``settings`` or ``deviations`` of a recipe, those that it extends first."""
    recipe = _load(folders, name)
    if "extends" in recipe:
        yield from entries_of(folders, recipe["extends"], part)
    yield from recipe.get(part, [])


def applies(when: Mapping[str, Any], chosen: Mapping[str, str | None]) -> bool:
    """Whether the options chosen are among those that a condition names; null is a group that nobody chose."""
    return not _mismatches(when, chosen)


def _mismatches(when: Mapping[str, Any], chosen: Mapping[str, str | None]) -> list[str]:
    return [group for group, wanted in when.items() if chosen[group] not in _listed(wanted)]


def _listed(options: Any) -> list[Any]:
    return options if isinstance(options, list) else [options]


def _values(folders: Folders, name: str, side: str, chosen: Mapping[str, str | None]) -> dict[str, Any]:
    """A recipe's values for the chosen options, as a configuration with ``runtime.recipe``."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    options: dict[str, str] = {}
    for entry in entries_of(folders, name):
        if not applies(entry.get("when", {}), chosen):
            continue
        place = str(entry["source"])
        parts = [(entry.get("set", {}), place), (entry.get(side, {}), f"{place}; {side}")]
        for group, option in entry.get("choose", {}).items():
            if group not in OPTIONAL:
                raise ConfigError(
                    f"recipe={name} chooses {group}={option}; entries choose of {', '.join(OPTIONAL)} only"
                )
            if chosen[group] is None:
                options[group] = option
                content = _read(_option(folders, group, option))
                parts.insert(0, ({group: content}, f"conf/{group}/{option}.yaml for {place}"))
        for part, stands in parts:
            flat = {key: value for prefix, node in part.items() for key, value in flatten(node, prefix).items()}
            values |= flat
            places |= dict.fromkeys(flat, stands)
    known: dict[str, str | None] = {**chosen, **options}
    deviations = [e["text"] for e in entries_of(folders, name, "deviations") if applies(e.get("when", {}), known)]
    facts = {"name": name, "side": side, "chosen": options, "values": values, "places": places,
             "deviations": deviations}  # fmt: skip
    refusal = _refusal(folders, name, chosen)
    nested: dict[str, Any] = {"runtime": {"recipe": facts | ({"refusal": refusal} if refusal else {})}}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def _refusal(folders: Folders, name: str, chosen: Mapping[str, str | None]) -> str:
    """Why a recipe does not cover the chosen options, and what it covers; empty if it does."""
    covers = _load(folders, name).get("covers", [])
    missing = min((_mismatches(block, chosen) for block in covers), key=len, default=[])
    if not missing:
        return ""
    near = next(block for block in covers if _mismatches(block, chosen) == missing)
    asked = " ".join(f"{group}={chosen[group] or 'null'}" for group in missing)
    others = "; ".join(
        f"{group}={'|'.join('null' if o is None else o for o in _listed(near[group]))}" for group in missing
    )
    given = " ".join(f"{group}={chosen[group]}" for group in near if group not in missing and chosen[group])
    return f"recipe={name} has nothing for {asked}; with {given} it has {others} (recipe=none leaves it out)"


def settle_recipe(cfg: DictConfig) -> None:
    """Store in ``runtime.recipe`` which of the recipe's values were overridden.

    Raises:
        ConfigError: the recipe does not cover the chosen options.
    """
    facts: Any = OmegaConf.to_container(cfg.runtime.recipe, resolve=False)
    if "values" not in facts:
        return
    if "refusal" in facts:
        raise ConfigError(facts["refusal"])
    log.info("recipe %s, side %s", facts["name"], facts["side"])
    composed = flatten(OmegaConf.to_container(cfg, resolve=False))
    wanted = facts.pop("values")
    facts["overridden"] = {
        key: value for key, value in wanted.items() if composed.get(key) != value or key not in composed
    }
    for key, value in facts["overridden"].items():
        log.info("recipe %s: %s is %s, not the recipe's %s", facts["name"], key, composed.get(key, "absent"), value)
    cfg.runtime.recipe = facts
