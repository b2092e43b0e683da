"""Components that the command line names by their ``_target_`` alone, with arguments that no option lists."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from dmlbench.components import imported, parameters_of

GROUPS = ("loss", "miner", "regularizer", "pooling")
"""Groups whose components may be exchanged without an option of their own."""


def with_new_arguments(arguments: Sequence[str]) -> list[str]:
    """``loss._target_=.. loss.m=0.4`` with the marks that make Hydra take keys which the chosen option lacks."""
    named = [key.removesuffix("_target_") for key in map(_key, arguments) if _names_a_target(key)]
    return [f"++{a}" if _key(a).startswith(tuple(named)) and a[0] not in "+~" else a for a in arguments]


def settle_targets(
    cfg: DictConfig, overrides: Iterable[str], choices: Mapping[str, str], folders: Sequence[Path]
) -> dict[str, str]:
    """Remove the arguments of the chosen option's own component where ``overrides`` put another one in its place.

    What ``overrides`` give stays, and so does what a component takes that is given by interpolation, such as the number
    of classes. A subclass of the option's component keeps all.

    Args:
        cfg: the composed configuration; changed.
        overrides: of the command line.
        choices: the chosen option of each group.
        folders: configuration folders, where the options are.

    Returns:
        Name of the class by group, of groups whose component was exchanged.
    """
    keys = {_key(override) for override in overrides}
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


def _key(argument: str) -> str:
    """Key of an override, empty if it is none."""
    key, equals, _ = argument.partition("=")
    return key.lstrip("+~") if equals and not argument.startswith("-") else ""


def _target_of_option(group: str, choice: str | None, folders: Sequence[Path]) -> str:
    """The component that an option has by itself, empty if it has none."""
    for folder in folders:
        file = folder / group / f"{choice}.yaml"
        if file.is_file():
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            return str((content or {}).get("_target_", "")) if isinstance(content, dict) else ""
    return ""
