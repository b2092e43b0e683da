"""``dmlbench train``: one run, or a sweep with ``-m``."""

from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dmlbench.cli.front import run_hydra


def task(cfg: DictConfig) -> str:
    """Run the composed configuration; returns the run directory as a string for sweepers."""
    from dmlbench.run import run  # torch is imported only once the configuration is known to compose

    with_choices(cfg)
    return str(run(cfg))


def with_choices(cfg: DictConfig) -> DictConfig:
    """Record which option of each group was chosen; the readable part of a cell's name is made of it."""
    choices = {group: str(option) for group, option in HydraConfig.get().runtime.choices.items() if "/" not in group}
    OmegaConf.update(cfg, "runtime.choices", choices, force_add=True)
    return cfg


def main(arguments: Sequence[str]) -> None:
    run_hydra("train", task, arguments)
