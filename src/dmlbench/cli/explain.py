"""``dmlbench explain``: pictures of what a trained pooling looks at, and of why two images are alike to AVSL."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.types import ConfigError

    if cfg.run is None:
        raise ConfigError("say which run: run=<run directory>, or run=[<one>,<another>] side by side")
    if cfg.num_images < 1:
        raise ConfigError(f"num_images ({cfg.num_images}) must be at least 1")
    for name, value in (("run", cfg.run), ("images", cfg.images), ("pair", cfg.pair)):
        if isinstance(value, ListConfig) and not value:
            raise ConfigError(f"{name} is an empty list; name at least one")
    named = _listed(cfg.run)
    if any(not isinstance(run, str) for run in named):
        raise ConfigError(f"run ({cfg.run}) must be a run directory, or several; `dmlbench status` lists them")
    runs = [Path(run) for run in named]
    if cfg.pair is not None:
        _explain_pair(cfg, runs)
        return
    from dmlbench.apps.explain import explain_runs

    images = None if cfg.images is None else _listed(cfg.images)
    path = _output(cfg) or runs[0] / "explain.png"
    explain_runs(runs, images=images, num_images=cfg.num_images, device=cfg.device, path=path)
    print(f"written: {path}")


def _explain_pair(cfg: DictConfig, runs: Sequence[Path]) -> None:
    from dmlbench.apps.explain_pair import explain_pair, pair_stem
    from dmlbench.apps.explain_pair_picture import check_output, write_pair
    from dmlbench.types import ConfigError

    if len(runs) > 1:
        raise ConfigError(f"pair explains the distance of one run, not of {len(runs)}; name one")
    if cfg.images is not None:
        raise ConfigError("images and pair ask for different pictures; give one of them")
    pair = _listed(cfg.pair)
    path = _output(cfg) or runs[0] / f"{pair_stem(pair)}.png"
    check_output(path)  # before the work rather than after it
    explanation = explain_pair(runs[0], pair=pair, num_nodes=cfg.num_nodes, reliable=cfg.reliable, device=cfg.device)
    numbers = write_pair(explanation, path)
    print(f"distance: {explanation.distance:.6g}")
    print(f"written: {path}, {numbers}")


def _output(cfg: DictConfig) -> Path | None:
    from dmlbench.types import RunError

    if cfg.output is None:
        return None
    path = Path(cfg.output)
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path}: there is no folder {path.parent}; choose another output")
    return path


def _listed(value: object) -> list:
    return list(value) if isinstance(value, ListConfig) else [value]
