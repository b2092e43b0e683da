"""``dmlbench train``: one run, or a sweep with ``-m``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dmlbench.cli.arguments import CommandLine, key_of
from dmlbench.cli.command import run_command
from dmlbench.cli.errors import explain, root_cause
from dmlbench.cli.target_overrides import settle_targets
from dmlbench.cli.value_sources import print_value_sources
from dmlbench.config import settle
from dmlbench.types import ConfigError, DmlbenchError


def main(line: CommandLine) -> None:
    """Train one run or a sweep; with ``--why`` print every value and where it comes from."""
    if line.why:
        print_value_sources(line)
    else:
        run_command("train", task, line)


def task(cfg: DictConfig) -> str:
    """Run the composed configuration; returns the run directory as a string for sweepers."""
    from dmlbench.runner import run  # torch is imported only once the configuration is known to compose

    settle_choices(cfg, HydraConfig.get())
    return str(run(cfg))


def composed_run(overrides: Sequence[str]) -> DictConfig:
    """A run's configuration as ``dmlbench train`` has it; inside of ``composing()``.

    Raises:
        ConfigError: it cannot be composed.
    """
    try:
        cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
        settle(cfg)
        settle_choices(cfg, cfg.hydra)
    except (HydraException, OmegaConfBaseException) as error:
        cause = root_cause(error)
        raise ConfigError(str(cause) if isinstance(cause, DmlbenchError) else explain(error)) from error
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def settle_choices(cfg: DictConfig, hydra: Any) -> None:
    """Store the chosen option of each group in ``runtime.choices``; a config's name is made of them."""
    runtime = hydra.runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    choices = {group: str(option) for group, option in runtime.choices.items() if "/" not in group}
    given: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    if cfg.regularizer and "regularizer" not in choices:  # of several options Hydra says nothing
        choices["regularizer"] = "+".join(sorted(str(name) for name in cfg.regularizer if name != "mixing"))
    choices |= cfg.runtime.recipe.get("chosen", {})
    choices |= settle_targets(cfg, given, choices, folders)
    if choices.get("backbone") == "timm":
        choices["backbone"] = str(cfg.backbone.name)
    OmegaConf.update(cfg, "runtime.choices", choices, force_add=True)
    OmegaConf.update(cfg, "runtime.given", [key_of(override) for override in given])
