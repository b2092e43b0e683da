#!/usr/bin/env bash
# The main job on the embedded data set, from training to the table and the picture; interrupted, it continues.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
dmlbench reproduce demo
dmlbench report 'glyphs_collage/mlrc/*'
echo "demo: $((SECONDS - started)) seconds; look at the picture that was written last"
