"""Tiny-ImageNet and trees like it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import file_contents
from dmlbench.data.readers.tiny_imagenet import tiny_imagenet
from dmlbench.types import ConfigError, DataError

WNIDS = ("n04", "n02", "n03", "n01")  # published order, which is not the sorted one
WORDS = {"n01": "great tit, Parus major", "n02": "crane", "n03": "crane", "n04": "café", "n05": "not a class here"}


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def write(root: Path, *, inner: str = "images/", val: str = "list") -> None:
    touch(
        root, *(f"train/{wnid}/{inner}{wnid}_{i}.JPEG" for wnid in WNIDS for i in range(2)), "train/n01/n01_boxes.txt"
    )
    (root / "wnids.txt").write_bytes("".join(f"{wnid}\r\n" for wnid in WNIDS).encode())
    (root / "words.txt").write_bytes("".join(f"{wnid}\t{words}\r\n" for wnid, words in WORDS.items()).encode())
    if val == "list":
        touch(root, *(f"val/images/val_{i}.JPEG" for i in range(4)))
        lines = [f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n" for i, wnid in enumerate(WNIDS)]
        (root / "val/val_annotations.txt").write_text("".join(lines))
    elif val == "folders":
        touch(root, *(f"val/{wnid}/{inner}val_{i}.JPEG" for i, wnid in enumerate(WNIDS)))


@pytest.mark.parametrize("val", ["list", "folders"])
@pytest.mark.parametrize("inner", ["images/", ""])
@pytest.mark.parametrize("place", ["tiny-imagenet-200", "archive/tiny_imagenet/tiny-imagenet-200"])
def test_every_layout_gives_the_same_labels_classes_and_halves(
    tmp_path: Path, place: str, inner: str, val: str
) -> None:
    write(tmp_path / place, inner=inner, val=val)
    names = ("n04 café", "n02 crane", "n03 crane", "n01 great tit, Parus major")
    for root in (tmp_path, tmp_path / place):
        table = tiny_imagenet(root, parts=("val", "train"), check_counts=False)
        assert table.class_names == names
        label_of = {path.rsplit("/", 1)[1]: label for path, label in zip(table.paths, table.labels, strict=True)}
        expected = {f"{wnid}_{i}.JPEG": c for c, wnid in enumerate(WNIDS) for i in range(2)}
        assert label_of == expected | {f"val_{i}.JPEG": i for i in range(4)}
        assert table.role.tolist() == ["train" if label < 2 else "test" for label in table.labels]
        assert (file_contents(table.root, table.paths, name="tiny_imagenet") == 0).all()


def test_requested_parts_are_merged_and_unknown_ones_rejected(tmp_path: Path) -> None:
    write(tmp_path)
    sizes = {parts: len(tiny_imagenet(tmp_path, parts=parts, check_counts=False)) for parts in (("train",), ("val",))}
    assert sizes == {("train",): 8, ("val",): 4}
    assert tiny_imagenet(tmp_path, check_counts=False).paths[0] == "train/n01/images/n01_0.JPEG"
    for parts in ((), ("test",), ("train", "train"), ("train", "val", "test"), "train"):
        with pytest.raises(ConfigError, match=r"parts: got .*, expected a list of train, val or both"):
            tiny_imagenet(tmp_path, parts=parts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wnids.txt", "n04\nn02\nn03\n", r"train/n01' is not a class of '.*wnids\.txt'"),
        (
            "wnids.txt",
            "n04\nn02\nn03\nn01\nn99\n",
            r"line 5 of .*: got the wnid 'n99', expected one of the ids in words\.txt",
        ),
        (
            "val/val_annotations.txt",
            "a.JPEG n77 0 0 1 1",
            r"line 1 of .*: got the wnid 'n77', expected one of the ids in wnids",
        ),
    ],
)
def test_a_faulty_list_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        tiny_imagenet(tmp_path, parts=("train", "val"), check_counts=False)


@pytest.mark.slow
@pytest.mark.data
def test_the_subset_of_real_images_loads(shared_dir: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(shared_dir / "data/tiny_imagenet/tiny-imagenet-200_subset.zip", tmp_path)
    table = tiny_imagenet(tmp_path, check_counts=False)
    assert (len(table), table.num_classes) == (3_000, 60)
    assert np.bincount(table.labels).tolist() == [50] * 60
    assert table.class_names[0] == "n01443537 goldfish, Carassius auratus"
    assert int((table.role == "train").sum()) == 1_500
