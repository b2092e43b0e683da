"""``dmlbench report``: a picture of aggregated cells."""

from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.report import draw_report
    from dmlbench.apps.tables import asked_columns, find_cells
    from dmlbench.build import component
    from dmlbench.runtime import remove_leftovers

    spec = component(cfg.evaluation)
    remove_leftovers(Path(cfg.paths.output_dir) / "tables")
    cells_by_group = find_cells(cfg.paths.output_dir, cfg.cells, spec, allow_partial=cfg.allow_partial)
    for (dataset, protocol), cells in cells_by_group.items():
        path = Path(cfg.paths.output_dir) / "tables" / f"{dataset}-{protocol}.png"
        title = f"{dataset} under {protocol}"
        draw_report(cells, path, title=title, metrics=asked_columns(spec), num_queries=cfg.queries)
        print(f"written: {path}")
