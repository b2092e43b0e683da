"""``dmlbench aggregate``: the runs of each config to one summary."""

import sys

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.loaded import distance_of_run
    from dmlbench.components import component
    from dmlbench.results.aggregate import aggregate_config
    from dmlbench.results.cautions import cautions
    from dmlbench.results.store import find_runs, runs_by_config
    from dmlbench.types import DmlbenchError, RunError

    spec = component(cfg.evaluation)
    configs = runs_by_config(find_runs(cfg.paths.output_dir, cfg.configs))
    if not configs:
        raise RunError(
            f"no run under {cfg.paths.output_dir} matches '{cfg.configs}'; `dmlbench status` lists what there is"
        )
    failures = []
    for number, (path, runs) in enumerate(configs.items(), start=1):
        print(f"[{number}/{len(configs)}] {path}")
        try:
            summary = aggregate_config(
                runs,
                spec,
                distance_of=distance_of_run,
                allow_partial=cfg.allow_partial,
                force=cfg.force,
                progress=sys.stderr.isatty(),
            )
        except DmlbenchError as error:
            failures.append(error)
            print(f"      FAILED: {error}")
            continue
        for caution in cautions(summary):
            print(f"      {caution}")
        for kind, scores in summary["scores"].items():
            values = ", ".join(f"{name} {score['mean']:.4f}" for name, score in scores.items())
            print(f"      {kind}: {values}")
    if failures:  # every config that can be summarized is
        count = f"{len(failures)} of {len(configs)} configs could not be summarized"
        raise type(failures[0])(f"{count}: {failures[0]}")
