"""Collages taken apart again: what stands in their quadrants, and mistakes that this would find."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composed import arguments
from PIL import Image
from small_data_sets import cifar100_of_colors

from dmlbench.data.readers import cifar_collage
from dmlbench.data.readers.cifar_collage import BACKGROUND, SUPER_CLASSES, cifar100_collage
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


def test_wrong_quadrants_and_shared_classes_are_seen(source, tmp_path: Path) -> None:
    table = cifar100_collage("x", cache_dir=tmp_path, images_per_class=2)
    assert table.pixels is not None and source.pixels is not None and source.super_labels is not None
    pixels = np.array(table.pixels)
    is_background = np.isin(np.array(SUPER_CLASSES)[source.super_labels], BACKGROUND)
    target = table.paths[0] == source.paths
    pixels[0] = np.tile(source.pixels[target][0], (2, 2, 1))  # four times the target
    other = ~is_background & (source.paths != table.paths[1])
    pixels[1, :32, :32] = source.pixels[other][0]  # in place of its target, or beside it
    pixels[2] = np.tile(source.pixels[is_background][0], (2, 2, 1))  # no target
    known = collage_samples.rows_by_pixels(source)
    found = collage_samples._taken_apart(replace(table, pixels=pixels), source, known)
    assert (found["train"]["collages"], found["train"]["as_described"]) == (96, 93)
    assert found["test"]["as_described"] == found["test"]["collages"] == 64
    assert collage_samples._shared({"a": {"classes": [1, 2]}, "b": {"classes": [2, 3]}}, "a") == {2}
    images = collage_samples.quadrants_of(np.arange(64 * 64 * 3).reshape(1, 64, 64, 3))[0]
    assert [int(image[0, 0, 0]) // 3 for image in images] == [0, 32, 32 * 64, 32 * 64 + 32]
