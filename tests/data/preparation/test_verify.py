"""What looking at every image of a data set finds."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.preparation.verify import Report, unlisted, unusable, verdict, verify
from dmlbench.data.readers.folder import folder
from dmlbench.types import ImageTable

CLASSES = ("ant", "bee", "cat", "dog")  # the first two train


def save(
    root: Path, name: str, *, seed: int, mode: str = "RGB", size: tuple[int, int] = (24, 20), exif: int = 1
) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    tags = image.getexif()
    tags[0x0112] = exif
    image.convert(mode).save(path, exif=tags)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for k, name in enumerate(CLASSES):
        for i in range(3):
            save(tmp_path, f"{name}/{i}.jpg", seed=10 * k + i)
    return tmp_path


def report_of(root: Path) -> Report:
    return verify(folder(root), num_threads=2)


def array_table(pixels: np.ndarray, labels: Sequence[int], role: Sequence[str]) -> ImageTable:
    paths = [f"{k}.png" for k in range(len(labels))]
    return table_of(Listing("", paths, np.array(labels), "abc", np.array(role), pixels=pixels, digest="x"))


def test_a_whole_data_set_has_nothing_to_report(root: Path) -> None:
    assert report_of(root) == Report(looked_at=12)


@pytest.mark.parametrize("lets_pass", [False, True])
def test_every_broken_image_is_counted_with_its_reason(
    root: Path, lets_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lets_pass)  # as some library may have set it
    (root / "ant" / "0.jpg").write_bytes((root / "ant" / "0.jpg").read_bytes()[:-200])
    (root / "bee" / "1.jpg").write_bytes(b"")
    (root / "dog" / "2.jpg").write_text("<html>not an image</html>")
    report = report_of(root)
    assert [path for path, _ in report.broken] == ["ant/0.jpg", "bee/1.jpg", "dog/2.jpg"]
    assert "truncated" in report.broken[0][1]
    assert "cannot identify image file" in report.broken[1][1]
    assert report.looked_at == 12
    assert str(root) not in report.broken[1][1]

    def failing(image: Image.Image) -> None:  # as Pillow's decoder of AVIF fails
        raise RuntimeError("Decoding of color planes failed")

    monkeypatch.setattr(ImageFile.ImageFile, "load", failing)
    assert ("ant/1.jpg", "Decoding of color planes failed") in report_of(root).broken
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lets_pass


def test_roles_that_exclude_each_other_are_reported() -> None:
    def reason(*role: str) -> str:
        pixels = np.zeros((len(role), 2, 2, 3), dtype=np.uint8)
        return unusable(array_table(pixels, [min(k, 2) for k in range(len(role))], role))

    assert "both the role test and the roles query or gallery" in reason("train", "train", "test", "query", "gallery")
    assert "got 1 query and 0 gallery images" in reason("train", "train", "query")
    assert "train: got 1 class, expected 2 or more" in reason("train", "test")
    assert reason("train", "train", "query", "gallery") == ""


def test_modes_rotations_and_tiny_images_are_counted_and_not_broken(root: Path) -> None:
    save(root, "ant/grey.jpg", seed=1, mode="L")
    save(root, "ant/grey2.jpg", seed=2, mode="L")
    save(root, "bee/palette.png", seed=3, mode="P")
    save(root, "cat/cmyk.jpg", seed=4, mode="CMYK")
    save(root, "cat/alpha.png", seed=5, mode="RGBA")
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 100).save(root / "dog" / "deep.png")
    save(root, "dog/turned.jpg", seed=6, exif=6)
    save(root, "dog/tiny.jpg", seed=7, size=(15, 40))
    Image.new("RGB", (20, 20), (9, 99, 199)).save(root / "dog/plain.png")
    report = report_of(root)
    assert report.modes == {"CMYK": 1, "I;16": 1, "L": 2, "P": 1, "RGBA": 1}
    assert report.rotated == 1
    assert report.tiny == ("dog/tiny.jpg",)
    assert report.constant == ("dog/plain.png",)
    assert report.broken == ()


def test_identical_files_are_grouped_and_counted_across_classes_and_halves(root: Path) -> None:
    def copy(old: str, new: str) -> None:
        (root / new).write_bytes((root / old).read_bytes())

    copy("ant/0.jpg", "ant/twin.jpg")  # within a class
    copy("ant/1.jpg", "bee/twin.jpg")  # across classes of one half
    copy("bee/0.jpg", "dog/twin.jpg")  # across halves
    copy("bee/0.jpg", "dog/twin2.jpg")
    report = report_of(root)
    assert set(report.twins) == {
        ("ant/0.jpg", "ant/twin.jpg"),
        ("ant/1.jpg", "bee/twin.jpg"),
        ("bee/0.jpg", "dog/twin.jpg", "dog/twin2.jpg"),
    }
    assert (report.across_classes, report.across_halves) == (2, 1)


def test_images_that_no_list_names_are_found_in_listed_folders_or_the_whole_root(root: Path) -> None:
    (root / "list.csv").write_text("path,label\nant/0.jpg,a\nbee/0.jpg,b\n")
    (root / "ant" / "notes.txt").write_text("no image")
    save(root, "ant/deeper/x.png", seed=3)
    table = folder(root, csv="list.csv")
    expected = ["ant/1.jpg", "ant/2.jpg", "ant/deeper/x.png", "bee/1.jpg", "bee/2.jpg"]
    assert unlisted(table) == expected  # cat and dog may be another data set
    assert list(verify(table).unlisted) == expected
    others = [f"{name}/{i}.jpg" for name in ("cat", "dog") for i in range(3)]
    save(root, "x.jpg", seed=4)
    assert unlisted(table, whole_root=True) == sorted([*expected, *others, "x.jpg"])
    assert verify(table, whole_root=True).unlisted == tuple(sorted([*expected, *others, "x.jpg"]))


@pytest.mark.parametrize("channels", [(), (3,)])
def test_arrays_are_searched_for_twins_and_constant_images(channels: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, *channels), dtype=np.uint8)
    pixels[3] = pixels[0]
    pixels[5] = np.array([7, 8, 9][: max(1, len(channels) * 3)]) if channels else 7
    report = verify(array_table(pixels, [0, 0, 1, 1, 2, 2], ["train"] * 2 + ["test"] * 4))
    assert report.twins == (("0.png", "3.png"),)
    assert (report.across_classes, report.across_halves) == (1, 1)
    assert report.constant == ("5.png",)
    assert (report.looked_at, report.broken) == (6, ())


RESCALED = ("images rescaled to 8 x 8 pixels", "images re-encoded (PNG)")


@pytest.mark.parametrize(
    ("report", "counts", "num_images", "sentence"),
    [
        (Report(looked_at=6000), "published", 6000, "All 6,000 images are present and look as published."),
        (Report(), "published", 6000, "All 6,000 images are present; they were not decoded."),
        (
            Report(looked_at=6000, deviations=RESCALED), "published", 6000,
            "All 6,000 images are present; they look rescaled to 8 x 8 pixels and re-encoded (PNG), so scores may not "
            "compare with papers.",
        ),
        (
            Report(deviations=("images cut or rescaled (boxes of b.txt lie outside of 3 of 4 images)",)), "others", 40,
            "40 of 6,000 images are present; they look cut or rescaled, so scores may not compare with papers.",
        ),
        (Report(looked_at=40), "others", 40, "40 of 6,000 images are present, so scores do not compare with papers."),
        (
            Report(looked_at=6000), "others", 6000,
            "6,000 images are present, split otherwise than the 6,000 published, so scores do not compare with papers.",
        ),
        (
            Report(looked_at=50), "as asked", 50,
            "All 50 images of the requested part are present and look as published.",
        ),
        (Report(looked_at=12), "unknown", 12, "All 12 images are present and can be read."),
        (
            Report(looked_at=6000, broken=(("a.jpg", "truncated"),), deviations=RESCALED), "published", 6000,
            "1 of 6,000 images cannot be read; replace these files.",
        ),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(report: Report, counts: str, num_images: int, sentence: str) -> None:
    assert verdict(report, counts, num_images=num_images, num_published=6000) == sentence


@pytest.mark.data
def test_the_real_bird_images_are_whole(shared_dir: Path, tmp_path: Path) -> None:
    from dmlbench.data.readers.cub200 import cub200

    shutil.unpack_archive(shared_dir / "data/cub200_2011/CUB_200_2011_subset.tar", tmp_path / "cub200")
    report = verify(cub200(tmp_path / "cub200", check_counts=False), num_threads=2)
    assert report.looked_at == 51
    assert report.broken == ()
    assert (report.twins, report.unlisted) == ((), ())
