"""Settings of a stored run that differ from its chosen options, by the command line or an experiment."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmlbench.config import config_folder, register_schemas
from dmlbench.types import flatten

BY_HAND = "given by hand"
_ABSENT = object()


def changed_settings(container: Mapping[str, Any], groups: Sequence[str]) -> dict[str, str]:
    """Settings in ``groups`` that differ from the chosen option, each with the option's value.

    The option's value is that of its file or of a paper's recipe; ``BY_HAND`` if there is none (an added key, a
    component by its ``_target_``). Of a user's own options, only overrides of the command line are known.

    Args:
        container: the resolved configuration of a run.
        groups: such as ``pooling``.
    """
    register_schemas()  # ${epochs:3}
    runtime = container.get("runtime") or {}
    choices = {group: str(option) for group, option in (runtime.get("choices") or {}).items()}
    if choices.get("backbone") == (container.get("backbone") or {}).get("name"):
        choices["backbone"] = "timm"  # which is called by its model
    given = runtime.get("given") or ()
    recipe = runtime.get("recipe") or {}
    if "paper" not in (_file(f"recipe/{recipe.get('name')}") or {"paper": "of the user"}):
        recipe = {}
    of_recipe, replaced = recipe.get("places", {}), recipe.get("overridden", {})
    found: dict[str, str] = {}
    own = OmegaConf.create(dict(container))
    for group in groups:
        if not isinstance(container.get(group), dict):
            continue
        several = (_option(group, each, choices) for each in choices.get(group, "").split("+"))  # zsr+xml
        option = functools.reduce(_merged, several)
        own[group] = option  # among the other values of the run, which the option's may refer to
        target = str(container[group].get("_target_"))
        is_of_the_user = not option and choices.get(group) != target.rpartition(".")[2]
        for key, value in flatten(container[group], group).items():
            is_its_name = (key == f"{group}._target_" and not option) or key == "backbone.name"
            if is_its_name or (is_of_the_user and not any(f"{key}.".startswith(f"{k}.") for k in given if k != group)):
                continue
            if key in of_recipe and key not in replaced:
                continue
            of_option = replaced[key] if key in replaced else _value(own, key)
            if of_option != value:
                found[key] = BY_HAND if of_option is _ABSENT else f"where the option has {of_option}"
        own[group] = container[group]
    return found


def _value(config: DictConfig, key: str) -> Any:
    """The value at ``key`` as plain data; ``_ABSENT`` if there is none or it cannot be resolved."""
    try:
        value = OmegaConf.select(config, key, default=_ABSENT)
    except OmegaConfBaseException:
        return _ABSENT
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _option(group: str, option: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """The node of an option with its defaults; empty if there is no such option."""
    content = copy.deepcopy(_file(f"{group}/{option}")) or {}
    node: dict[str, Any] = {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str):
            node = node if entry == "_self_" else _merged(node, _option(group, entry, choices))
            continue
        ((key, base),) = entry.items()
        if not key.startswith("override"):  # of another group
            of_group, _, place = key.lstrip("/").partition("@")
            base = choices.get(f"{of_group}@{group}.{place}", base)
            node = _merged(node, {place: _option(of_group, str(base), choices)})
    return _merged(node, content)


@functools.cache
def _file(name: str) -> Any:
    """Unresolved content of a configuration file of the project; None if there is none."""
    path = config_folder() / f"{name}.yaml"
    return OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged: Any = OmegaConf.to_container(OmegaConf.merge(dict(first), dict(second)))
    return merged
