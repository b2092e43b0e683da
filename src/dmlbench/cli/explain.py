"""``dmlbench explain``: pictures of what a trained pooling looks at, and of why two images are alike to AVSL."""

from pathlib import Path

from omegaconf import DictConfig

from dmlbench.config import listed


def task(cfg: DictConfig) -> None:
    from dmlbench.types import ConfigError

    if not cfg.run:
        raise ConfigError("say which run: run=<run directory>, or run=[<one>,<another>] side by side")
    if cfg.num_images < 1:
        raise ConfigError(f"num_images ({cfg.num_images}) must be at least 1")
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
    from dmlbench.apps.explain_pair import explain_pair, pair_stem
    from dmlbench.apps.explain_pair_picture import write_pair
    from dmlbench.types import ConfigError

    if len(runs) > 1:
        raise ConfigError(f"pair explains the distance of one run, not of {len(runs)}; name one")
    if cfg.images is not None:
        raise ConfigError("images and pair ask for different pictures; give one of them")
    pair = listed(cfg.pair)
    path = Path(cfg.output or runs[0] / f"{pair_stem(pair)}.png")
    explanation = explain_pair(runs[0], pair=pair, num_nodes=cfg.num_nodes, reliable=cfg.reliable, device=cfg.device)
    numbers = write_pair(explanation, path)
    print(f"distance: {explanation.distance:.6g}")
    print(f"written: {path}, {numbers}")
