"""``dmlbench status``: which runs are done, running, failed or stale."""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dmlbench status",
        description="List runs: done (has a result), running, failed (left an error), stale (interrupted).",
        epilog="example: dmlbench status 'glyphs_collage/mlrc/*gsp*'",
    )
    parser.add_argument(
        "pattern", nargs="?", default="**", help="pattern of <dataset>/<protocol>/<cell>/<run> (default: all)"
    )
    parser.add_argument(
        "--output-dir", default=os.environ.get("DMLBENCH_OUTPUT", "outputs"), help="default: %(default)s"
    )
    options = parser.parse_args(list(arguments))

    from dmlbench.results.store import ERROR, cells_of, find_runs

    runs = find_runs(options.output_dir, options.pattern)
    if not runs:
        print(f"no run under {options.output_dir} matches '{options.pattern}'")
        return
    total: Counter[str] = Counter()
    for path, members in cells_of(runs).items():
        states = {run: run.state for run in members}
        counts = Counter(states.values())
        total += counts
        print(f"{path}: " + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)))
        for run, state in states.items():
            if state != "done":
                error = _text(run.path / ERROR) if state == "failed" else ""
                reason = "".join(f": {line}" for line in error.strip().splitlines()[-1:])
                print(f"  {state:<8} {run.path.name}{reason}")
    order = ("done", "running", "failed", "stale")
    print(f"{len(runs)} runs: " + ", ".join(f"{total[state]} {state}" for state in order))


def _text(path: Path) -> str:
    from dmlbench.types import not_a_file

    if what := not_a_file(path):
        return f"{path} is {what}, not a file"
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
