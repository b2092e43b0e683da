"""``dmlbench explain``: pictures of what a trained pooling looks at, and of why two images are alike to AVSL."""

import re
from pathlib import Path

from omegaconf import DictConfig

from dmlbench.config import listed
from dmlbench.types import ConfigError, check_at_least


def task(cfg: DictConfig) -> None:
    if not cfg.run:
        raise ConfigError("say which run: run=<run directory>, or run=[<one>,<another>] side by side")
    check_at_least(1, num_images=cfg.num_images)
    runs = [Path(str(run)) for run in listed(cfg.run)]
    if cfg.output is not None and Path(cfg.output).suffix != ".png":
        raise ConfigError(f"output ({cfg.output}) must end in .png")
    if cfg.pair is not None:
        _explain_pair(cfg, runs)
        return
    from dmlbench.apps.explain import explain_runs

    images = listed(cfg.images) or None
    path = Path(cfg.output or runs[0] / "explain.png")
    explain_runs(runs, images=images, num_images=cfg.num_images, device=cfg.device, path=path)
    print(f"written: {path}")


def _explain_pair(cfg: DictConfig, runs: list[Path]) -> None:
    from dmlbench.apps.explain_pair import explain_pair, write_pair

    if len(runs) > 1 or cfg.images is not None:
        raise ConfigError("pair explains the distance of two images by one run: give one run, and no images")
    pair = listed(cfg.pair)
    names = [re.sub(r"[^\w.+-]+", "-", str(image) if isinstance(image, int) else Path(image).stem) for image in pair]
    path = Path(cfg.output or runs[0] / f"{'_'.join(['explain', *names])}.png")
    explanation = explain_pair(runs[0], pair=pair, num_nodes=cfg.num_nodes, reliable=cfg.reliable, device=cfg.device)
    numbers = write_pair(explanation, path)
    print(f"distance: {explanation.distance:.6g}")
    print(f"written: {path}, {numbers}")
