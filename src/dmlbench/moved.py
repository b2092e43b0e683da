"""Former names of what a ``_target_`` names: moving a module or class renames no cell, and stored runs stay readable.

Whoever moves something that a configuration can name adds a line here: its name of today and the first it ever had.
"""

from collections.abc import Callable
from typing import Any

_READERS = (
    *("cars196", "cifar", "cub200", "cub200_2010", "folder", "glyphs", "inshop", "omniglot", "sop"),
    "tiny_imagenet",
)
FIRST_NAMES: dict[str, str] = {
    **{f"dmlbench.data.readers.{name}": f"dmlbench.data.{name}" for name in _READERS},
    "dmlbench.data.batches.samplers": "dmlbench.data.samplers",
    "dmlbench.data.batches.transforms": "dmlbench.data.transforms",
}
"""Modules, or single classes and functions, by their present names."""

_PRESENT_NAMES = {first: present for present, first in FIRST_NAMES.items()}


def first_name(target: str) -> str:
    """What a target of today was first called: the name that identifies it."""
    return _renamed(target, FIRST_NAMES)


def present_name(target: str) -> str:
    """Where a target of a stored configuration is found today."""
    return _renamed(target, _PRESENT_NAMES)


def _renamed(target: str, names: dict[str, str]) -> str:
    module, dot, attribute = target.rpartition(".")
    return names.get(target) or f"{names.get(module, module)}{dot}{attribute}"


def rename_targets(node: Any, rename: Callable[[str], str]) -> Any:
    """A copy of nested lists and dicts with every ``_target_`` renamed."""
    if isinstance(node, list):
        return [rename_targets(item, rename) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: rename(value) if key == "_target_" and isinstance(value, str) else rename_targets(value, rename)
        for key, value in node.items()
    }
