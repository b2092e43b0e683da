"""How data differ from the published ones goes with the scores that they give, and names no cell."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.cli.front import compose
from dmlbench.config import cell_id
from dmlbench.run import run

OVERRIDES = [
    *("dataset=cub200", "dataset.table.check_counts=false", "backbone=resnet20_small", "fit.max_steps=1", "device=cpu"),
    *("fit.validate_every=1", "fit.keep=none", "head.out_features=8", "protocol.num_folds=2", "image_cache=false"),
    *("transform.train.crop=24", "transform.train.resize=28", "transform.eval.crop=24", "transform.eval.resize=28"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "num_workers=0", "paths.cache_dir=cache"),
]


def test_a_run_on_rescaled_images_of_a_subset_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    for k, image in enumerate(pixels):
        c = (1, 2, 3, 4, 101, 102, 103, 104)[k // 4]
        path = tmp_path / "birds" / f"{c:03}.Bird" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    cfg = compose("train", [*OVERRIDES, "paths.data_dir=birds", "paths.output_dir=out"])
    name = cell_id(cfg)
    with caplog.at_level(logging.WARNING):
        run_dir = run(cfg)
    notes = ["a subset: 32 of 11,788 images", "images rescaled to 32 x 32 pixels"]
    assert json.loads((run_dir / "result.json").read_text())["data_notes"] == notes
    assert run_dir.parent.name == name
    assert [f"cub200 is not as published: {note}" in caplog.text for note in notes] == [True, True]
