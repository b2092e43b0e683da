"""Configurations for tests: what was composed once is copied."""

import copy
import functools
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dmlbench.config import arguments_of, compose, config_folder


def composed(*overrides: str) -> DictConfig:
    """``compose("train", overrides)``, in a tenth of the time where a test of this process asked for the same."""
    return copy.deepcopy(_composed(*overrides))


@functools.cache
def _composed(*overrides: str) -> DictConfig:
    return compose("train", list(overrides))


def with_values(*values: str, base: tuple[str, ...] = ()) -> DictConfig:
    """``composed(*base)`` with other values, without composing them."""
    cfg = composed(*base)
    cfg.merge_with_dotlist(list(values))
    return cfg


def option(group: str, name: str) -> dict[str, Any]:
    """An option of ``conf`` with those that it builds on, without composing a whole configuration."""
    own = yaml.safe_load((config_folder() / group / f"{name}.yaml").read_text("utf-8"))
    merged: dict[str, Any] = {}
    for base in own.pop("defaults", ()):
        if isinstance(base, str) and base != "_self_":
            merged |= option(group, base)
        elif isinstance(base, dict) and (key := next(iter(base))).startswith("/"):
            merged[key.partition("@")[2]] = option(group, base[key])
    return OmegaConf.to_container(OmegaConf.merge(merged, own))  # type: ignore[return-value]


def arguments(command: str, *overrides: str) -> Any:
    """Arguments of a command, as its function gets them."""
    return arguments_of(compose(command, list(overrides)))


def value(cfg: DictConfig, key: str) -> Any:
    """One value by its key, or what a paper speaks of instead of it."""
    if key == "batch":
        sampler = cfg.sampler
        return (sampler.classes_per_batch, sampler.get("images_per_class", sampler.get("batch_size")))
    if key == "rate of proxies":
        return cfg.optim.lr * cfg.optim.lr_multipliers.loss
    if key == "pooling":
        return cfg.pooling._target_.rpartition(".")[2] if cfg.pooling is not None else None
    if key == "regularizers":
        return sorted(set(cfg.regularizer or ()) - {"mixing"})
    found = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
