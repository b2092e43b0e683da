"""Run directories with results that no training made, for tests of what reads results."""

from pathlib import Path
from typing import Any

from dmlbench.results.store import CONFIG, coordinates_of, make_directory, write_result
from dmlbench.runtime import derive_seed


def write_run(run_dir: Path, config: str = "fit: {}\n", **changes: Any) -> Path:
    """Write ``config.yaml`` and a complete result, with ``changes``, into ``<config>/fold<f>_rep<r>``."""
    coordinates = coordinates_of(run_dir.name)
    assert coordinates is not None
    fold, repeat = coordinates
    make_directory(run_dir)
    (run_dir / CONFIG).write_text(config)
    result = {
        "config_id": run_dir.parent.name, "dataset": "glyphs", "dataset_fingerprint": "f", "protocol": "mlrc",
        "aggregation": "collections", "num_folds": 4, "num_repeats": 3, "fold": fold, "repeat": repeat, "base_seed": 0,
        "seed": derive_seed(0, fold, repeat), "choices": {}, "val_is_test": False, "search": "exact", "n_query": 12,
        "n_gallery": 12, "n_skipped_queries": 0, "metrics": {"test": {"p_at_1": 0.5}}, "steps": 1, "wall_s": 1.0,
        "monitor": "p_at_1", "pooling_started": True,
    }  # fmt: skip
    write_result(run_dir, result | changes)
    return run_dir
