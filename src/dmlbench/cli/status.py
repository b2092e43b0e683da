"""``dmlbench status``: which runs are done, running, failed or stale."""

from collections import Counter
from pathlib import Path

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.results.store import ERROR, STATES, find_runs, runs_by_config, states_of

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
                error = _text(run.path / ERROR) if found[run] == "failed" else ""
                reason = "".join(f": {line}" for line in error.strip().splitlines()[-1:])
                print(f"  {found[run]:<8} {run.path.name}{reason}")
    total = Counter[str](found[run] for run in runs)
    print(f"{len(runs)} runs: " + ", ".join(f"{total[state]} {state}" for state in STATES))


def _text(path: Path) -> str:
    from dmlbench.types import not_a_file

    if what := not_a_file(path):
        return f"{path} is {what}, not a file"
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
