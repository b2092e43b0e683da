#!/usr/bin/env bash
# The main job on the embedded data set, from training to the table and the picture; interrupted, it continues.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
dmlbench train experiment=demo pooling=gap fit=untrained
dmlbench train experiment=demo
dmlbench aggregate 'cells=glyphs_collage/mlrc/*'
dmlbench table 'cells=glyphs_collage/mlrc/*'
dmlbench report 'glyphs_collage/mlrc/*'
echo "demo: $((SECONDS - started)) seconds; look at the picture that was written last"
