"""``dmlbench train``: one run, or a sweep with ``-m``."""

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dmlbench.cli.arguments import CommandLine, key_of
from dmlbench.cli.front import run_hydra
from dmlbench.cli.targets import settle_targets
from dmlbench.cli.why import print_reasons
from dmlbench.types import RunInUse

log = logging.getLogger(__name__)


def main(line: CommandLine) -> None:
    """One run or a sweep; with ``--why`` a list of all values and where they come from instead."""
    if "--why" in line.options:
        print_reasons(line)
    else:
        run_hydra("train", task, line)


def task(cfg: DictConfig) -> str:
    """Run the composed configuration; returns the run directory as a string for sweepers.

    Raises:
        RunInUse: another process has the run; a sweep comes back to it.
    """
    from dmlbench.one_run import run  # torch is imported only once the configuration is known to compose

    hydra = HydraConfig.get()
    settle_choices(cfg, hydra)
    try:
        return str(run(cfg))
    except RunInUse as error:
        if hydra.mode == RunMode.MULTIRUN:
            log.info("%s is in use by another process: left for the end of this sweep", error.run_dir)
        raise


def settle_choices(cfg: DictConfig, hydra: Any) -> None:
    """Say in the configuration which option of each group was chosen: a cell's name is made of it."""
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
