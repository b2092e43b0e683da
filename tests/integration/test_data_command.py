"""``dmlbench data`` as a user sees it: what is printed, and the exit code."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.cli.main import main

SUBSET = "dataset.table.check_counts=false"
Command = Callable[..., tuple[str, str]]


@pytest.fixture
def data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run ``dmlbench data`` in this process with ``tmp_path / "data"`` as data folder; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        paths = (f"paths.data_dir={tmp_path / 'data'}", f"paths.cache_dir={tmp_path / 'cache'}")
        with pytest.raises(SystemExit) as exited:
            main(["data", *arguments, *paths])
        out, error = capsys.readouterr()
        assert exited.value.code == code, out + error
        return out, error

    return run


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """A user's own images: four classes of three."""
    root = tmp_path / "data" / "folder"
    noise = np.random.default_rng(0).integers(0, 256, (12, 20, 24, 3), dtype=np.uint8)
    for k, pixels in enumerate(noise):
        path = root / f"class{k // 3}" / f"{k % 3}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def birds(tmp_path: Path) -> Path:
    """An archive like CUB's with two images each of the first five classes, where a user may have put it."""
    names = [f"{c:03}.Bird/{i}.jpg" for c in range(1, 6) for i in range(2)]
    files = {
        "images.txt": "".join(f"{k} {name}\n" for k, name in enumerate(names, 1)).encode(),
        "image_class_labels.txt": "".join(f"{k} {int(name[:3])}\n" for k, name in enumerate(names, 1)).encode(),
        "classes.txt": "".join(f"{c} {c:03}.Bird\n" for c in range(1, 6)).encode(),
    }
    for name, pixels in zip(names, np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "jpeg")
        files[f"images/{name}"] = buffer.getvalue()
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "CUB_200_2011_subset.tar", "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"CUB_200_2011/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return tmp_path / "data" / "CUB_200_2011_subset.tar"


def test_list_names_every_data_set_and_says_where_it_is(data: Command, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "cub" / "001.Black_footed_Albatross").mkdir(parents=True)
    out, _ = data("list")
    for path in (repository / "conf" / "dataset").glob("*.yaml"):
        assert f"{path.stem} " in out
    assert f"found in {tmp_path / 'data' / 'cub'}: class folders" in out
    assert f"not found in {tmp_path / 'data'}" in out
    assert "published: train 59,551 images of 11,318 classes" in out
    assert f"Looked in {tmp_path / 'data'}" in out


def test_a_data_set_that_is_not_there_is_one_message_with_places_and_remedy(data: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for command in ("stats", "verify"):
        _, error = data(command, "cub200", code=1)
        assert str(tmp_path / "data") in error
        assert "`dmlbench data prepare cub200` downloads it" in error
        assert "CUB_200_2011.tgz from data.caltech.edu" in error
        assert "Terms: non-commercial research" in error
    _, error = data("stats", "inshop", code=1)
    assert "follow the agreement" in error
    assert "downloads it" not in error
    shutil.rmtree(tmp_path / "data")
    assert "DMLBENCH_DATA" in data("stats", "sop", code=1)[1]


def test_verify_names_what_is_broken_and_fails(data: Command, animals: Path) -> None:
    (animals / "class0" / "0.jpg").write_bytes((animals / "class0" / "0.jpg").read_bytes()[:300])
    shutil.copy(animals / "class1" / "1.jpg", animals / "class3" / "twin.jpg")
    Image.new("L", (8, 30)).save(animals / "class2" / "grey.png")
    out, _ = data("verify", "folder", code=1)
    assert "  cannot be read: 1\n    class0/0.jpg: " in out
    assert "identical images: 1 group of 2 images in all; 1 across classes, 1 across training and test half" in out
    assert "class1/1.jpg = class3/twin.jpg" in out
    assert "converted to RGB when read: 1 L" in out
    assert "smaller than 16 pixels: 1\n    class2/grey.png" in out
    assert out.splitlines()[-1] == "1 of 14 images cannot be read; replace these files."


def test_verify_fails_where_nothing_can_be_trained(data: Command, animals: Path) -> None:
    (animals / "list.csv").write_text("path,label\nclass0/0.jpg,a\nclass0/1.jpg,a\n")
    out, _ = data("verify", "folder", "dataset.table.csv=list.csv", code=1)
    assert "folder: 2 images of 1 class\n" in out
    assert "on disk but not listed: 10\n" in out
    assert out.splitlines()[-1] == (
        "train: got 0 classes, expected 2 or more. `dmlbench train` cannot use this data set."
    )


def test_prepare_extracts_archives_and_verify_recognizes_a_subset(data: Command, tmp_path: Path) -> None:
    archive = birds(tmp_path)
    _, error = data("prepare", "cub200", f"archives={archive}", code=1)
    assert "expected the published 97eceeb196236b17998738112f37df78 of CUB_200_2011.tgz (1150585339 bytes)" in error
    out, _ = data("prepare", "cub200", f"archives={archive}", "accept_other_checksum=true", SUBSET)
    assert "accepted_other_checksum" in (tmp_path / "data" / "cub200" / ".prepared-by-dmlbench.json").read_text()
    assert "extracting CUB_200_2011_subset.tar" in out
    assert "cub200: 10 images of 5 classes" in out
    assert f"made: {tmp_path / 'data' / 'cub200' / 'CUB_200_2011'}" in out
    assert "already prepared" in data("prepare", "cub200", SUBSET)[0]
    out, _ = data("verify", "cub200", SUBSET)
    assert "looked at: 10 images" in out
    assert out.splitlines()[-1] == "10 of 11,788 images are present, so scores do not compare with papers."
    _, error = data("verify", "cub200", code=1)
    assert "train 10 images of 5 classes" in error
    assert "expected the published train 5,864 images" in error


@pytest.mark.slow
def test_verify_calls_the_benchmark_by_its_name(data: Command, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "CUB_200_2011"
    (folder / "images").mkdir(parents=True)
    per_class = [59] * 64 + [58] * 36 + [60] * 24 + [59] * 76  # 5,864 and 5,924
    images = [(c, i) for c, count in enumerate(per_class, 1) for i in range(count)]
    (folder / "classes.txt").write_text("".join(f"{c} {c:03}.Bird\n" for c in range(1, 201)))
    (folder / "images.txt").write_text("".join(f"{k} {c:03}.Bird/{i}.jpg\n" for k, (c, i) in enumerate(images, 1)))
    (folder / "image_class_labels.txt").write_text("".join(f"{k} {c}\n" for k, (c, _) in enumerate(images, 1)))
    (tmp_path / "one").write_bytes(b"")
    for c, i in images:
        path = folder / "images" / f"{c:03}.Bird" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        os.link(tmp_path / "one", path)
    out, _ = data("verify", "cub200", "decode=false")
    assert out.splitlines()[-1] == "All 11,788 images are present; they were not decoded."
    Image.new("RGB", (8, 8)).save(tmp_path / "one", "png")  # all of them
    found = "images rescaled to 8 x 8 pixels; images re-encoded (PNG)"
    for command in (("verify", "cub200", "decode=false"), ("stats", "cub200")):
        out, _ = data(*command)
        assert f"  not as published: {found}\n" in out
    out, _ = data("verify", "cub200", "decode=false")
    assert out.splitlines()[-1] == (
        "All 11,788 images are present; they look rescaled to 8 x 8 pixels and re-encoded (PNG), so scores may not "
        "compare with papers."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stats cub20", "did you mean 'cub200'?"),
        ("prepare glyphs", "dmlbench data prepare: got glyphs, expected one of"),
        ("look glyphs", "dmlbench data: got 'look', expected one of list, stats"),
        ("verify glyphs decod=false", "did you mean 'decode'?"),
    ],
)
def test_wrong_words_are_answered_by_the_right_ones(data: Command, words: str, message: str) -> None:
    assert message in data(*words.split(), code=2)[1]
