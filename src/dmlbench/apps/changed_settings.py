"""Settings of a stored run that the command line, an experiment or a recipe set beside its chosen options."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from dmlbench.config import config_folder
from dmlbench.types import flatten

BY_HAND = "given by hand"


def changed_settings(container: Mapping[str, Any], groups: Sequence[str]) -> dict[str, str]:
    """Settings in ``groups`` that are not by their option or a paper's recipe, each with what set it.

    Of a user's own experiments and recipes, only overrides of the command line are known.

    Args:
        container: the resolved configuration of a run.
        groups: such as ``pooling``.
    """
    runtime = container.get("runtime") or {}
    experiment = (runtime.get("choices") or {}).get("experiment")
    recipe = runtime.get("recipe") or {}
    setters = dict.fromkeys(_set_by(f"experiment/{experiment}"), f"set by experiment={experiment}")
    if "paper" not in (_file(f"recipe/{recipe.get('name')}") or {"paper": "of the user"}):
        setters |= dict.fromkeys(recipe.get("places", ()), f"set by recipe={recipe['name']}")
    setters |= dict.fromkeys(runtime.get("given") or (), BY_HAND)
    names = ("backbone.name", *(f"{group}._target_" for group in groups))  # which labels say
    return {
        key: how
        for key in flatten({group: container.get(group) for group in groups})
        for setter, how in setters.items()
        if key not in names and setter not in groups and f"{key}.".startswith(f"{setter}.")
    }


def _set_by(name: str) -> list[str]:
    """Keys of an experiment, with those of the experiments that it is made of."""
    content = dict(_file(name) or {})
    bases = [entry for entry in content.pop("defaults", ()) if isinstance(entry, str) and entry != "_self_"]
    return [*flatten(content), *(key for base in bases for key in _set_by(base.lstrip("/")))]


@functools.cache
def _file(name: str) -> Any:
    """Unresolved content of a configuration file of the project; None if there is none."""
    path = config_folder() / f"{name}.yaml"
    return OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
