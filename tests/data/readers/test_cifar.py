"""CIFAR from the python version, packed or not, and from folders of images; real files where they lie."""

import os
import pickle
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.image_table import Published
from dmlbench.data.readers import cifar
from dmlbench.data.readers.cifar import CLASSES_10, CLASSES_100, FOLDER_10, cifar10, cifar100
from dmlbench.types import DataError


def batch_of(labels: list[int], *, coarse: list[int] | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(len(labels))
    value: dict[str, Any] = {"data": rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8)}
    return value | ({"labels": labels} if coarse is None else {"fine_labels": labels, "coarse_labels": coarse})


def write_10(folder: Path, *, per_batch: int = 10) -> dict[str, Any]:
    folder.mkdir(parents=True)
    labels = [number % 10 for number in range(per_batch)]
    members: dict[str, Any] = {name: batch_of(labels) for name in FOLDER_10.batches}
    for number, value in enumerate(members.values()):
        value["data"][:, 0] = number
    members["batches.meta"] = {"label_names": list(CLASSES_10)}
    for name, value in members.items():
        (folder / name).write_bytes(pickle.dumps(value, protocol=2))
    return members


def write_100(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        labels = list(range(100)) * (5 if name == "train" else 1)
        value = batch_of(labels, coarse=[label % 20 for label in labels])
        (folder / name).write_bytes(pickle.dumps(value, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": list(CLASSES_100)}, protocol=2))


def test_planes_become_pixels_and_halves_of_the_classes_the_split(tmp_path: Path) -> None:
    members = write_10(tmp_path / "cifar-10-batches-py")
    table = cifar10(tmp_path, cache_dir=tmp_path / "cache", check_counts=False)
    assert table.pixels is not None
    assert table.pixels.shape == (60, 32, 32, 3)
    assert table.class_names == CLASSES_10
    assert table.labels[:10].tolist() == list(range(10))
    assert table.role[:10].tolist() == ["train"] * 5 + ["test"] * 5
    assert table.super_labels is None
    assert (table.paths[0], table.paths[-1]) == ("train/00000", "test/00009")
    planes = members["data_batch_2"]["data"][3].reshape(3, 32, 32)
    np.testing.assert_array_equal(table.pixels[13], np.moveaxis(planes, 0, -1))


def test_super_classes_are_the_coarse_labels(tmp_path: Path) -> None:
    write_100(tmp_path / "CIFAR-100" / "cifar-100-python")
    with pytest.raises(DataError, match=r"train 300 images of 50 classes.*published train 30,000"):
        cifar100(tmp_path / "CIFAR-100", cache_dir=tmp_path)
    table = cifar100(tmp_path / "CIFAR-100", cache_dir=tmp_path, check_counts=False)
    assert table.class_names[3] == "bear"
    assert table.super_labels is not None
    assert (table.super_labels == table.labels % 20).all()


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.xz", "tar"])
def test_archive_folder_and_bare_files_are_the_same_data(tmp_path: Path, suffix: str) -> None:
    write_10(tmp_path / "a" / "cifar-10-batches-py")
    packed = tmp_path / "packed"
    packed.mkdir()
    mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}[suffix]
    with tarfile.open(packed / f"cifar-10-python.{suffix}", mode) as tar:
        tar.add(tmp_path / "a" / "cifar-10-batches-py", "cifar-10-batches-py")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "cifar-10-batches-py").rename(tmp_path / "b" / "cifar10")
    from_archive = cifar10(packed, cache_dir=tmp_path / "cache", check_counts=False)
    bare = cifar10(tmp_path / "b", cache_dir=tmp_path / "cache", check_counts=False)
    assert from_archive.fingerprint == bare.fingerprint
    assert "archive" in from_archive.layout
    assert "files" in bare.layout


def write_jpegs(root: Path, per_class: int = 2, side: int = 32) -> None:
    for part in ("train", "test"):
        for number, name in enumerate(CLASSES_10):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for image in range(per_class):
                Image.new("RGB", (side, side), (number, image, 0)).save(root / part / name / f"{image:04d}.png")


def test_folders_and_zips_of_images_are_the_same_data_and_other_zips_are_not_taken(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "cifar10")
    tree = cifar10(tmp_path / "cifar10", cache_dir=tmp_path / "cache", check_counts=False)
    assert len(tree) == 40
    assert tree.pixels is not None
    row = tree.paths.tolist().index("train/cat/0001.png")
    assert tree.pixels[row, 5, 5].tolist() == [3, 1, 0]
    assert tree.role[row] == "train"
    (tmp_path / "zip").mkdir()
    (tmp_path / "zip" / "cifar100.zip").touch()
    with pytest.raises(DataError, match="CIFAR-10 is not in"):
        cifar10(tmp_path / "zip", cache_dir=tmp_path / "cache")
    file = shutil.make_archive(str(tmp_path / "zip" / "cifar10_images"), "zip", tmp_path, "cifar10")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("__MACOSX/train/cat/._0000.png", b"junk")
    packed = cifar10(tmp_path / "zip", cache_dir=tmp_path / "other", check_counts=False)
    assert packed.fingerprint == tree.fingerprint


def test_an_image_that_was_edited_is_read_again(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "cifar10")
    before = cifar10(tmp_path, cache_dir=tmp_path / "cache", check_counts=False)
    file = tmp_path / "cifar10" / "train" / "cat" / "0001.png"
    status = file.stat()
    Image.new("RGB", (32, 32), (3, 2, 0)).save(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = cifar10(tmp_path, cache_dir=tmp_path / "cache", check_counts=False)
    assert before.fingerprint != after.fingerprint
    file.unlink()
    file.symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"cat/0001\.png' cannot be read"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache", check_counts=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1, 2]}, r"data \(10, 3072\) of uint8 and 2 labels"),
        ({"data": np.zeros((10, 3072), dtype=np.int64)}, "of int64"),
        ({"labels": [*range(9), 10]}, r"labels outside of \[0, 10\)"),
        ({"labels": [0.5] * 10}, r"labels outside of \[0, 10\)"),
        ({"data": None}, r"data \(\) of object"),
    ],
)
def test_a_batch_at_fault_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    members = write_10(folder)
    (folder / "test_batch").write_bytes(pickle.dumps(members["test_batch"] | change, protocol=2))
    with pytest.raises(DataError, match=rf"test_batch\)'(: got| has) .*{message}"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")
    (folder / "test_batch").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=r"test_batch.*system"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"]}))
    with pytest.raises(DataError, match=r"batches\.meta.*does not have the published class names"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")


def test_damaged_and_incomplete_archives_are_named(tmp_path: Path) -> None:
    write_10(tmp_path / "made" / "cifar-10-batches-py")
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    archive.write_bytes(archive.read_bytes()[:9000])
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz' of CIFAR-10 is damaged"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py" / "test_batch", "cifar-10-batches-py/test_batch")
    with pytest.raises(DataError, match=r"of CIFAR-10 lacks batches\.meta, data_batch_1"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.data
def test_real_cifar100_has_its_published_counts(shared_dir: Path, tmp_path: Path) -> None:
    table = cifar100(shared_dir / "data" / "cifar100", cache_dir=tmp_path)
    assert (np.bincount(table.labels) == 600).all()
    assert table.super_labels is not None
    assert (np.bincount(table.super_labels) == 3000).all()
    assert table.pixels is not None
    distinct = np.unique(np.ascontiguousarray(table.pixels).reshape(len(table), -1).view("V3072"))
    assert len(distinct) == 59_974


@pytest.mark.slow
@pytest.mark.data
def test_a_real_subset_of_cifar10_as_images(shared_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="published train 30,000 images of 5 classes"):
        cifar10(shared_dir / "data" / "cifar10", cache_dir=tmp_path)
    table = cifar10(shared_dir / "data" / "cifar10", cache_dir=tmp_path, check_counts=False)
    assert len(table) == 5_000
    assert (np.bincount(table.labels) == 500).all()


def test_classes_of_unequal_size_are_not_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    members = write_10(folder)
    kind = replace(cifar.FOLDER_10, published=Published({"train": (30, 5), "test": (30, 5)}))
    monkeypatch.setattr(cifar, "FOLDER_10", kind)
    assert len(cifar10(tmp_path, cache_dir=tmp_path / "cache")) == 60
    labels = {"labels": [0, 0, *range(2, 10)]}
    (folder / "test_batch").write_bytes(pickle.dumps(members["test_batch"] | labels, protocol=2))
    with pytest.raises(DataError, match="got 5 images of 'automobile', expected 6 of each class"):
        cifar10(tmp_path, cache_dir=tmp_path / "cache")
