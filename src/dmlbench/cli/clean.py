"""``dmlbench clean``: remove runs that match a pattern, after showing them."""

import argparse
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dmlbench clean",
        description="Show the runs that match a pattern, ask, and remove them. Running ones are left alone.",
        epilog="example: dmlbench clean 'glyphs_collage/mlrc/*gsp*' --state failed --state stale",
    )
    parser.add_argument("pattern", help="pattern of <dataset>/<protocol>/<cell>/<run>")
    parser.add_argument("--state", action="append", choices=("done", "failed", "stale"), help="only runs in this state")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--output-dir", default=os.environ.get("DMLBENCH_OUTPUT", "outputs"), help="default: %(default)s"
    )
    options = parser.parse_args(list(arguments))

    from dmlbench.results.store import find_runs, remove_run
    from dmlbench.types import RunError

    wanted = options.state or ("done", "failed", "stale")
    states = {run: run.state for run in find_runs(options.output_dir, options.pattern)}
    linked = [run for run in states if any(folder.is_symlink() for folder in list(run.path.parents)[:3])]
    chosen = [run for run, state in states.items() if state in wanted and run not in linked]
    for run, state in states.items():
        if run in linked:
            print(f"left alone, behind a link: {run.path}")
        elif state == "running":
            print(f"left alone, running: {run.path}")
    if not chosen:
        print(f"nothing under {options.output_dir} matches '{options.pattern}' in state {' or '.join(wanted)}")
        return
    for run in chosen:
        print(f"{states[run]:<8} {run.path}")
    if not options.yes:
        if not sys.stdin.isatty():
            raise RunError(f"{len(chosen)} runs match; nothing was removed: confirm with --yes")
        if input(f"remove these {len(chosen)} runs? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    for run in chosen:
        remove_run(run.path)
    print(f"removed {len(chosen)} runs")
