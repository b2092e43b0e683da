"""``dmlbench report``: a picture of aggregated cells."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from dmlbench.cli.front import run_hydra


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


def main(arguments: Sequence[str]) -> None:
    """Takes ``key=value`` as every command; a word without = is ``cells``, ``--queries 2`` is ``queries=2``."""
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        flag = word.removeprefix("--").replace("-", "_")
        if flag in ("queries", "output_dir") and word.startswith("--"):
            overrides.append(f"{'paths.' if flag == 'output_dir' else ''}{flag}={next(words, '')}")
        elif word == "--allow-partial":
            overrides.append("allow_partial=true")
        else:
            overrides.append(word if "=" in word or word.startswith("-") else f"cells='{word}'")
    run_hydra("report", task, overrides)
