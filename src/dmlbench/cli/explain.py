"""``dmlbench explain``: pictures of what a trained pooling looks at, and of why two images are alike to AVSL."""

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from dmlbench.config import listed


def task(cfg: DictConfig) -> None:
    from dmlbench.types import ConfigError, RunError

    if cfg.run is None:
        raise ConfigError("say which run: run=<run directory>, or run=[<one>,<another>] side by side")
    if cfg.num_images < 1:
        raise ConfigError(f"num_images ({cfg.num_images}) must be at least 1")
    for name in ("run", "images", "pair"):
        if isinstance(cfg[name], ListConfig) and not cfg[name]:
            raise ConfigError(f"{name} is an empty list; name at least one")
    if any(not isinstance(run, str) for run in listed(cfg.run)):
        raise ConfigError(f"run ({cfg.run}) must be a run directory, or several; `dmlbench status` lists them")
    runs = [Path(run) for run in listed(cfg.run)]
    if cfg.output is not None:
        folder = Path(cfg.output).parent
        if Path(cfg.output).suffix != ".png":
            raise ConfigError(f"output ({cfg.output}) must end in .png")
        if not folder.is_dir():
            raise RunError(f"cannot write {cfg.output}: there is no folder {folder}; choose another output")
    if cfg.pair is not None:
        _explain_pair(cfg, runs)
        return
    from dmlbench.apps.explain import explain_runs

    images = None if cfg.images is None else listed(cfg.images)
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
