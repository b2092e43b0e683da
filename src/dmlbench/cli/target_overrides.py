"""Components that the command line names by their ``_target_`` alone, with arguments that no option lists."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from dmlbench.components import imported, parameters_of
from dmlbench.external import load_yaml
from dmlbench.types import ConfigError

GROUPS = ("loss", "miner", "regularizer", "pooling")
"""Groups whose components may be exchanged without an option of their own."""


def with_new_arguments(arguments: Sequence[str]) -> list[str]:
    """``loss._target_=.. loss.m=0.4`` with the marks that make Hydra take keys which the chosen option lacks."""
    named = [key.removesuffix("_target_") for key in map(key_of, arguments) if _names_a_target(key)]
    return [f"++{a}" if key_of(a).startswith(tuple(named)) and a[0] not in "+~" else a for a in arguments]


def settle_targets(
    cfg: DictConfig, overrides: Iterable[str], choices: Mapping[str, str], folders: Sequence[Path]
) -> dict[str, str]:
    """Remove the arguments of the chosen option's own component where ``overrides`` put another one in its place.

    What ``overrides`` give stays, and so do interpolated arguments that the new component takes, such as the number of
    classes. A subclass of the option's component keeps all.

    Returns:
        Name of the class by group, of groups whose component was exchanged.
    """
    keys = {key_of(override) for override in overrides}
    names = {}
    for key in sorted(filter(_names_a_target, keys)):
        prefix = key.removesuffix("._target_")
        node = OmegaConf.select(cfg, prefix)
        if not isinstance(node, DictConfig):
            continue
        former = _target_of_option(prefix, choices.get(prefix), folders)
        target = imported(node._target_, prefix)
        if former == node._target_:
            continue
        if "." not in prefix:
            names[prefix] = str(node._target_).rpartition(".")[2]
        if former and isinstance(target, type) and issubclass(target, imported(former, prefix)):
            continue
        taken, _ = parameters_of(target)
        for name in [str(name) for name in node if not str(name).startswith("_")]:
            by_interpolation = OmegaConf.is_interpolation(node, name) and name in taken
            if not by_interpolation and not any(f"{k}.".startswith(f"{prefix}.{name}.") for k in keys):
                with open_dict(node):
                    del node[name]
    return names


def _names_a_target(key: str) -> bool:
    return key.endswith("._target_") and key.partition(".")[0] in GROUPS


def key_of(override: str) -> str:
    """The key of an override, without the marks that add or remove it."""
    return override.partition("=")[0].lstrip("+~")


def _target_of_option(group: str, choice: str | None, folders: Sequence[Path]) -> str:
    """The component that an option has by itself, empty if it has none."""
    for folder in folders:
        file = folder / group / f"{choice}.yaml"
        if file.is_file():
            content = _content(file)
            return str((content or {}).get("_target_", "")) if isinstance(content, dict) else ""
    return ""


def _content(file: Path) -> Any:
    try:
        return load_yaml(file)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}.") from error
