"""``dmlbench table``: aggregated configs side by side."""

from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.compare import compare_configs
    from dmlbench.apps.tables import build_tables, find_configs, runs_frame
    from dmlbench.components import component
    from dmlbench.runtime import atomic_write, remove_leftovers
    from dmlbench.types import check_file_name

    if cfg.name is not None:
        check_file_name(cfg.name)
    spec = component(cfg.evaluation)
    if cfg.compare is not None:
        found = compare_configs(cfg.paths.output_dir, list(cfg.compare), spec, allow_partial=cfg.allow_partial)
        print(found.to_text())
        return
    folder = Path(cfg.paths.output_dir) / "tables"
    remove_leftovers(folder)
    grouped = find_configs(cfg.paths.output_dir, cfg.configs, spec, allow_partial=cfg.allow_partial)
    tables = build_tables(grouped, spec, facts=list(cfg.facts))
    for (dataset, protocol), table in tables.items():
        print(table.to_text())
        name = cfg.name or f"{dataset}-{protocol}"
        if cfg.name and len(tables) > 1:
            name = f"{cfg.name}-{dataset}-{protocol}"
        table.write(folder / name)
        print(f"written: {folder / name}.md, .csv, .tex\n")
    atomic_write(folder / "runs.csv", runs_frame(grouped).to_csv(index=False).encode())
    print(f"written: {folder / 'runs.csv'}, a row per run")
