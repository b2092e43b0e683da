#!/usr/bin/env bash
# What a GPU shows within 9 minutes: its tests, a run beside the CPU's, where a step's time goes, evaluation and AVSL against
# their floors; one table on the screen and in outputs/gpu_check.md. On a bare machine with a PyTorch for CUDA:
#   bash scripts/gpu_check.sh            # all of it
#   bash scripts/gpu_check.sh --tiny     # small sizes, also on a CPU
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
test -x .venv/bin/python && python=.venv/bin/python
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/gpu_check.py "$@"
