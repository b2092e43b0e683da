"""``dmlbench train``: one run, or a sweep with ``-m``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dmlbench.cli.front import run_hydra
from dmlbench.cli.targets import settle_targets
from dmlbench.cli.why import print_reasons


def main(arguments: Sequence[str]) -> None:
    """One run or a sweep; with ``--why`` a list of all values and where they come from instead."""
    if "--why" in arguments:
        print_reasons([argument for argument in arguments if argument != "--why"])
    else:
        run_hydra("train", task, arguments)


def task(cfg: DictConfig) -> str:
    """Run the composed configuration; returns the run directory as a string for sweepers."""
    from dmlbench.run import run  # torch is imported only once the configuration is known to compose

    # Which option of each group was chosen: a cell's name is made of it.
    hydra = HydraConfig.get()
    runtime = hydra.runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    choices = {group: str(option) for group, option in runtime.choices.items() if "/" not in group}
    given: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    choices |= cfg.runtime.recipe.get("chosen", {})
    choices |= settle_targets(cfg, given, choices, folders)
    if choices.get("backbone") == "timm":
        choices["backbone"] = str(cfg.backbone.name)
    OmegaConf.update(cfg, "runtime.choices", choices, force_add=True)
    return str(run(cfg))
