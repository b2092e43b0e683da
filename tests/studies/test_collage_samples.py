"""Collages taken apart again: what stands in their quadrants, and mistakes that this would find."""

from pathlib import Path

import numpy as np
import pytest
from composed import arguments
from PIL import Image
from small_data_sets import cifar100_of_colors

from dmlbench.data.readers import cifar_collage
from dmlbench.runtime import read_json
from dmlbench.studies import collage_samples
from dmlbench.studies.record import Findings, conduct_study
from dmlbench.types import ImageTable


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ImageTable:
    table = cifar100_of_colors(4)
    monkeypatch.setattr(cifar_collage, "cifar100", lambda root, *, cache_dir: table)
    return table


def conducted(tmp_path: Path, *overrides: str) -> Findings:
    places = [f"paths.output_dir={tmp_path}", f"paths.cache_dir={tmp_path}/cache"]
    args = arguments("study_collage_samples", *places, "images_per_class=3", *overrides)
    return conduct_study("collage_samples", args, collage_samples.conduct)[0]


def test_collages_are_a_target_and_three_backgrounds_of_their_part(source, tmp_path: Path) -> None:
    findings = conducted(tmp_path)
    assert [row[:-1] for row in findings.rows] == [
        ("public, train", "16", "48", "12", "144", "100.0"), ("public, test", "16", "32", "8", "96", "100.0"),
        ("paper, train", "16", "32", "8", "96", "100.0"), ("paper, validation", "16", "16", "4", "48", "100.0"),
        ("paper, test", "16", "32", "8", "96", "100.0"),
    ]  # fmt: skip
    assert [claim.holds for claim in findings.claims] == [True, True, True, False]
    assert read_json(tmp_path / "studies" / "collage_samples.json")["bound"] == {"data": source.fingerprint}
    picture = np.asarray(Image.open(tmp_path / "studies" / "collage_samples.png").convert("RGB")).astype(int)
    assert ((picture - [255, 0, 0] == 0).all(axis=2)).any()  # frames of targets
