"""Figures 9 and 10 of AVSL from runs: how edges changed in training, and histograms of reliabilities and coefficients.

python scripts/avsl_figures.py <run directory> [<another> ...] [--output avsl.png] [--pairs 2000]

Edges are drawn of every run, so that momenta can be compared, at the steps that were logged (fit.log_every=1: at each).
Histograms are of the first run.
"""

import argparse
import sys
from pathlib import Path

from dmlbench.apps.avsl_figures import draw_avsl_figures
from dmlbench.types import DmlbenchError


def main() -> None:
    """Draw the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("avsl.png"))
    parser.add_argument("--pairs", type=int, default=2000)
    arguments = parser.parse_args()
    try:
        draw_avsl_figures(arguments.runs, arguments.output, num_pairs=arguments.pairs)
    except DmlbenchError as error:
        sys.exit(f"avsl_figures: error: {error}")
    print(arguments.output)


if __name__ == "__main__":
    main()
