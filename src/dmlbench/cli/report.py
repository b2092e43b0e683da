"""``dmlbench report``: a page of aggregated configs to look through, or a picture of each table."""

from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.report.page import write_page
    from dmlbench.apps.report.picture import draw_report
    from dmlbench.apps.tables import asked_columns, find_configs
    from dmlbench.components import component
    from dmlbench.runtime import remove_leftovers
    from dmlbench.types import ConfigError

    suffix = ".png" if cfg.picture else ".html"
    if cfg.output is not None and Path(cfg.output).suffix != suffix:
        raise ConfigError(f"output ({cfg.output}) must end in {suffix}")
    for key, least in (("queries", 0), ("nearest", 1), ("classes", 0)):
        if cfg[key] < least:
            raise ConfigError(f"{key} ({cfg[key]}) must be at least {least}")
    folder = Path(cfg.paths.output_dir) / "tables"
    spec = component(cfg.evaluation)
    remove_leftovers(folder)
    grouped = find_configs(cfg.paths.output_dir, cfg.configs, spec, allow_partial=cfg.allow_partial)
    if not cfg.picture:
        path = Path(cfg.output or folder / "report.html")
        write_page(
            grouped, path, spec=spec, num_queries=cfg.queries, num_nearest=cfg.nearest,
            num_classes=cfg.classes, with_overlays=cfg.overlays, device=cfg.device,
        )  # fmt: skip
        print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
        return
    if cfg.output is not None and len(grouped) > 1:
        raise ConfigError(f"output names one picture, and there are {len(grouped)} tables; narrow configs= to one")
    for (dataset, protocol), configs in grouped.items():
        path = Path(cfg.output or folder / f"{dataset}-{protocol}.png")
        title = f"{dataset} under {protocol}"
        draw_report(
            configs, path, title=title, metrics=asked_columns(spec), num_queries=cfg.queries, num_nearest=cfg.nearest
        )
        print(f"written: {path}")
