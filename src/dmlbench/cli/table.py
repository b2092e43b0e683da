"""``dmlbench table``: aggregated configs side by side."""

from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps import compare
    from dmlbench.apps.tables import build_tables, find_configs, runs_to_csv
    from dmlbench.components import component
    from dmlbench.results.tables import to_csv, to_latex, to_markdown, to_text
    from dmlbench.runtime import atomic_write, remove_leftovers
    from dmlbench.types import ConfigError, is_file_name

    if cfg.name is not None and not is_file_name(str(cfg.name)):
        raise ConfigError(f"name ({cfg.name!r}) names files: use letters, digits, '.', '_' and '-'")
    spec = component(cfg.evaluation)
    if cfg.compare is not None:
        found = compare.compare_configs(cfg.paths.output_dir, list(cfg.compare), spec, allow_partial=cfg.allow_partial)
        print(compare.to_text(found))
        return
    folder = Path(cfg.paths.output_dir) / "tables"
    remove_leftovers(folder)
    grouped = find_configs(cfg.paths.output_dir, cfg.configs, spec, allow_partial=cfg.allow_partial)
    tables = build_tables(grouped, spec, facts=list(cfg.facts))
    for (dataset, protocol), table in tables.items():
        print(to_text(table))
        name = cfg.name or f"{dataset}-{protocol}"
        if cfg.name and len(tables) > 1:
            name = f"{cfg.name}-{dataset}-{protocol}"
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, render in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            atomic_write(folder / f"{name}.{suffix}", render(table).encode())
        print(f"written: {folder / name}.md, .csv, .tex\n")
    atomic_write(folder / "runs.csv", runs_to_csv(grouped).encode())
    print(f"written: {folder / 'runs.csv'}, a row per run")
