"""``dmlbench aggregate``: the runs of each cell to one summary."""

import sys

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.trained import distance_of_run
    from dmlbench.build import component
    from dmlbench.results.aggregate import aggregate_cell
    from dmlbench.results.cautions import cautions
    from dmlbench.results.store import cells_of, find_runs
    from dmlbench.types import DmlbenchError, RunError

    spec = component(cfg.evaluation)
    cells = cells_of(find_runs(cfg.paths.output_dir, cfg.cells))
    if not cells:
        raise RunError(
            f"no run under {cfg.paths.output_dir} matches '{cfg.cells}'; `dmlbench status` lists what there is"
        )
    failures = []
    for number, (path, runs) in enumerate(cells.items(), start=1):
        print(f"[{number}/{len(cells)}] {path}")
        try:
            summary = aggregate_cell(
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
    if failures:  # every cell that can be summarized is
        count = f"{len(failures)} of {len(cells)} cells could not be summarized: " if len(cells) > 1 else ""
        raise type(failures[0])(
            f"{count}{failures[0]}" + (" (the others are named above)" if len(failures) > 1 else "")
        )
