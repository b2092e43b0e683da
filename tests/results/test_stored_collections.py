"""Collections of stored embeddings keep their bits; ``fixtures/stored_results`` has 2 folds x 2 repeats."""

import json
import shutil
from pathlib import Path

from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import find_runs

CELL = "glyphs/mlrc/resnet20_small-gap-multi_similarity-5b7b7316"


def test_stored_collections_keep_their_bits(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).resolve().parents[1] / "fixtures" / "stored_results", tmp_path / "out")
    config = tmp_path / "out" / CELL
    before, written = json.loads((config / "aggregate.json").read_text()), (config / "collections.csv").read_bytes()
    again = aggregate_config(find_runs(tmp_path / "out", CELL), force=True, progress=False)
    assert again["scores"] == before["scores"]
    assert again["interval_95"] == before["interval_95"]
    assert (config / "collections.csv").read_bytes() == written
