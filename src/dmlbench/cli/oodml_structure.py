"""``dmlbench oodml structure``: measures of training embeddings, and whether they go along with test scores."""

import sys
from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from tqdm import tqdm

    from dmlbench.components import component
    from dmlbench.oodml import correlation
    from dmlbench.oodml.split_runs import chosen_runs, named_runs
    from dmlbench.oodml.structure import structure_of_run
    from dmlbench.results.run_scores import scores_of_run
    from dmlbench.runtime import atomic_write, set_strict_float32
    from dmlbench.types import ConfigError, is_file_name

    if not is_file_name(cfg.name):
        raise ConfigError(f"name ({cfg.name!r}) names files: use letters, digits, '.', '_' and '-'")
    spec = component(cfg.evaluation)
    set_strict_float32()
    grouped = named_runs(chosen_runs([], cfg.configs, cfg.paths.output_dir))
    folder = Path(cfg.paths.output_dir) / "tables"
    for (dataset, protocol), runs in grouped.items():
        measured = []
        for run in tqdm(runs, desc="structure", disable=not sys.stderr.isatty(), unit="run"):
            # first: it refuses runs whose embeddings are not compared as unit vectors
            found = structure_of_run(run.path, device=cfg.device, num_workers=cfg.num_workers)
            known = scores_of_run(run.path, run.result, spec, distance_of=lambda run_dir: None)
            scores = {name: known[name] for name in spec.score_names}
            measured.append(correlation.Measured(run, found, scores))
        title = f"{dataset} under {protocol}"
        text = correlation.to_markdown(title, measured, spec.score_names)
        print(text)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{cfg.name}-{dataset}-{protocol}"
        atomic_write(folder / f"{name}.md", text.encode())
        atomic_write(folder / f"{name}.csv", correlation.correlations_to_csv(measured, spec.score_names).encode())
        atomic_write(folder / f"{name}-runs.csv", correlation.points_to_csv(measured).encode())
        correlation.draw(title, measured, folder / f"{name}.png", scores=spec.score_names)
        print(f"written: {folder / name}.md, .csv, -runs.csv, .png\n")
