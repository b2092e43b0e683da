"""``dmlbench explain``: a picture of what the pooling of a trained model looks at."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from dmlbench.cli.front import run_hydra


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.explain import explain_runs
    from dmlbench.types import ConfigError

    if cfg.run is None:
        raise ConfigError("say which run: run=<run directory>, or run=[<one>,<another>] side by side")
    if cfg.num_images < 1:
        raise ConfigError(f"num_images ({cfg.num_images}) must be at least 1")
    for name, value in (("run", cfg.run), ("images", cfg.images)):
        if isinstance(value, ListConfig) and not value:
            raise ConfigError(f"{name} is an empty list; name at least one")
    runs = [Path(run) for run in (cfg.run if isinstance(cfg.run, ListConfig) else [cfg.run])]
    images = cfg.images
    if images is not None:
        images = list(images) if isinstance(images, ListConfig) else [images]
    path = Path(cfg.output) if cfg.output is not None else runs[0] / "explain.png"
    explain_runs(runs, images=images, num_images=cfg.num_images, device=cfg.device, path=path)
    print(f"written: {path}")


def main(arguments: Sequence[str]) -> None:
    run_hydra("explain", task, arguments)
