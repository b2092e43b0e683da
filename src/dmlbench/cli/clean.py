"""``dmlbench clean``: remove runs that match a pattern, after showing them."""

import sys

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.results.store import find_runs, remove_run, states_of
    from dmlbench.types import ConfigError, RunError

    if cfg.configs is None:
        raise ConfigError("say which runs: configs=<pattern>, '**' for all; `dmlbench status` lists what there is")
    wanted = states_of(cfg.state, ("done", "failed", "stale"))
    states = {run: run.state for run in find_runs(cfg.paths.output_dir, cfg.configs)}
    linked = [run for run in states if any(folder.is_symlink() for folder in list(run.path.parents)[:3])]
    chosen = [run for run, state in states.items() if state in wanted and run not in linked]
    for run, state in states.items():
        if run in linked:
            print(f"left alone, behind a link: {run.path}")
        elif state == "running":
            print(f"left alone, running: {run.path}")
    if not chosen:
        print(f"nothing under {cfg.paths.output_dir} matches '{cfg.configs}' in state {' or '.join(wanted)}")
        return
    for run in chosen:
        print(f"{states[run]:<8} {run.path}")
    if cfg.ask:
        if not sys.stdin.isatty():
            raise RunError(f"{len(chosen)} runs match; nothing was removed: confirm with ask=false")
        if input(f"remove these {len(chosen)} runs? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    for run in chosen:
        remove_run(run.path)
    print(f"removed {len(chosen)} runs")
