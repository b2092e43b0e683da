"""Collages of CIFAR-100: what stands where, which classes meet, and that nothing but the seed decides."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_data_sets import cifar100_of_colors

from dmlbench.data.protocols import Conventional, HeldOut
from dmlbench.data.readers import cifar_collage
from dmlbench.data.readers.cifar import CLASSES_100
from dmlbench.data.readers.cifar_collage import BACKGROUND, SUPER_CLASSES, cifar100_collage, cifar100_training_classes
from dmlbench.types import ConfigError, DataError, ImageTable

PER_CLASS = 4


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ImageTable:
    table = cifar100_of_colors(PER_CLASS)
    monkeypatch.setattr(cifar_collage, "cifar100", lambda root, *, cache_dir: table)
    return table


def rows_of(pixels: np.ndarray) -> np.ndarray:
    """Row of the source in each quadrant [N, 4]."""
    corners = pixels[:, ::32, ::32].reshape(len(pixels), 4, 3).astype(int)
    return corners[..., 0] * 256 + corners[..., 1]


@pytest.mark.parametrize(("layout", "per_part"), [("public", (3, 2)), ("paper", (2, 1, 2))])
def test_targets_and_backgrounds_of_a_part_are_of_its_own_classes(source, tmp_path: Path, layout, per_part) -> None:
    table = cifar100_collage("x", cache_dir=tmp_path, layout=layout)
    assert table.class_names[0] == "aquatic_mammals (train)" and table.num_classes == 16 * len(per_part)
    assert table.pixels is not None and table.pixels.shape[1:] == (64, 64, 3)
    found = rows_of(table.pixels)
    blocks = np.asarray(table.pixels).reshape(-1, 2, 32, 2, 32, 3)
    assert (blocks == blocks[:, :, :1, :, :1]).all()  # each quadrant is one whole image
    super_names, seen = np.array(SUPER_CLASSES)[source.super_labels[found]], []
    is_target = ~np.isin(super_names, BACKGROUND)
    assert (is_target.sum(axis=1) == 1).all()
    assert len(set(found[is_target].tolist())) == len(found)
    parts = cifar_collage.PARTS[layout]
    for number, (part, count) in enumerate(zip(parts, per_part, strict=True)):
        rows = table.labels // 16 == number
        names = [f"{name} ({part})" for name in super_names[rows][is_target[rows]]]
        assert names == [table.class_names[c] for c in table.labels[rows]]
        assert rows.sum() == 16 * count * PER_CLASS
        seen.append(set(source.labels[found[rows]].reshape(-1).tolist()))
        assert len(seen[-1]) <= 20 * count
    for a in range(len(seen)):
        for b in range(a):
            assert not seen[a] & seen[b]
    places = np.bincount(np.argmax(is_target, axis=1), minlength=4)
    assert (places > 0).all()


def test_parts_are_those_of_the_protocols(source, tmp_path: Path) -> None:
    public = Conventional().split(cifar100_collage("x", cache_dir=tmp_path), fold=0)
    assert public.val_is_test and len(public.train) == 16 * 3 * PER_CLASS
    table = cifar100_collage("x", cache_dir=tmp_path, layout="paper")
    paper = HeldOut().split(table, fold=0)
    assert paper.val is not None and paper.test is not None and not paper.val_is_test
    parts = paper.train, paper.val.query, paper.test.query
    assert [{table.class_names[c].split("(")[1] for c in table.labels[rows]} for rows in parts] == [
        {"train)"}, {"val)"}, {"test)"},
    ]  # fmt: skip
    assert [len(rows) // (16 * PER_CLASS) for rows in parts] == [2, 1, 2]


@pytest.mark.parametrize(("layout", "count"), [("public", 3), ("paper", 2)])
def test_classes_to_pretrain_on_are_those_of_the_training_collages(source, tmp_path: Path, layout, count) -> None:
    table = cifar100_training_classes("x", cache_dir=tmp_path, layout=layout)
    assert (table.num_classes, len(table.labels)) == (20 * count, 20 * count * PER_CLASS)
    collages = cifar100_collage("x", cache_dir=tmp_path, layout=layout)
    assert collages.pixels is not None
    seen = rows_of(np.asarray(collages.pixels)[collages.labels < 16]).reshape(-1)
    kept = [source.paths.tolist().index(path) for path in table.paths]
    assert set(source.labels[seen].tolist()) == set(source.labels[kept].tolist())
    names = {CLASSES_100[c] for c in source.labels[kept]}
    assert names == set(table.class_names)
    assert [table.class_names[c] for c in table.labels] == [CLASSES_100[c] for c in source.labels[kept]]


def test_a_seed_gives_its_collages_whatever_the_number_of_images(source, tmp_path: Path) -> None:
    whole = cifar100_collage("x", cache_dir=tmp_path / "a")
    again = cifar100_collage("x", cache_dir=tmp_path / "b")
    assert whole.fingerprint == again.fingerprint and whole.notes == ()
    other = cifar100_collage("x", cache_dir=tmp_path / "a", seed=1)
    assert other.fingerprint != whole.fingerprint
    few = cifar100_collage("x", cache_dir=tmp_path / "a", images_per_class=2)
    assert few.notes == ("a subset: 160 of 320 images",)
    place = {path: row for row, path in enumerate(whole.paths.tolist())}
    np.testing.assert_array_equal(few.pixels, np.asarray(whole.pixels)[[place[path] for path in few.paths.tolist()]])


def test_the_bound_has_the_targets_alone(source, tmp_path: Path) -> None:
    collages = cifar100_collage("x", cache_dir=tmp_path)
    targets = cifar100_collage("x", cache_dir=tmp_path, collage=False)
    assert (targets.name, targets.pixels.shape[1:]) == ("cifar100_collage_distilled", (32, 32, 3))
    assert targets.paths.tolist() == collages.paths.tolist()
    own = rows_of(np.repeat(np.repeat(targets.pixels, 2, axis=1), 2, axis=2))[:, :1]
    assert (rows_of(collages.pixels) == own).sum(axis=1).tolist() == [1] * len(own)


def test_what_cannot_be_is_refused(source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="layout: got 'papers', expected one of public, paper"):
        cifar100_collage("x", cache_dir=tmp_path, layout="papers")
    with pytest.raises(ConfigError, match="images_per_class: got 5, expected 2 to 4, or null for all"):
        cifar100_collage("x", cache_dir=tmp_path, images_per_class=5)
    monkeypatch.setattr(cifar_collage, "cifar100", lambda root, *, cache_dir: replace(source, super_labels=None))
    with pytest.raises(DataError, match=r"has no super-classes\. Use its python version"):
        cifar100_collage("x", cache_dir=tmp_path)
