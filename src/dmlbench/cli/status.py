"""``dmlbench status``: which runs are done, running, failed or stale."""

from collections import Counter

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.results.store import STATES, find_runs, last_error, runs_by_config, states_of

    wanted = states_of(cfg.state, STATES)
    found = {run: run.state for run in find_runs(cfg.paths.output_dir, cfg.configs)}
    runs = [run for run, state in found.items() if state in wanted]
    if not runs:
        in_state = f" in state {' or '.join(wanted)}" if found else ""
        print(f"no run under {cfg.paths.output_dir} matches '{cfg.configs}'{in_state}")
        return
    for path, members in runs_by_config(runs).items():
        counts = Counter(found[run] for run in members)
        print(f"{path}: " + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)))
        for run in members:
            if found[run] != "done":
                error = last_error(run.path) if found[run] == "failed" else ""
                reason = f": {error}" if error else ""
                print(f"  {found[run]:<8} {run.path.name}{reason}")
    total = Counter[str](found[run] for run in runs)
    print(f"{len(runs)} runs: " + ", ".join(f"{total[state]} {state}" for state in STATES))
