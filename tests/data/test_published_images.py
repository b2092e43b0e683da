"""Cut, rescaled and re-encoded images are told from the published ones by the headers of their files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.image_table import Listing, Published, table_of
from dmlbench.data.published_images import Header, deviations, deviations_of_sample, read_header
from dmlbench.types import Originals

Size = tuple[int, int]
RNG = np.random.default_rng(0)
NUM = 40
SIZES = [(int(w), int(h)) for w, h in RNG.integers(300, 600, (NUM, 2))]  # of whole photographs
BOXES = np.array([(20, 30, w - 40 - i, h - 50 - i % 7) for i, (w, h) in enumerate(SIZES)], dtype=np.float64)
BOX_SIZES = [(int(w), int(h)) for w, h in BOXES[:, 2:] - BOXES[:, :2]]
LISTED = Originals(boxes=BOXES, boxes_from="boxes.txt")


def found(sizes: Sequence[Size], originals: Originals = LISTED, image_format: str = "JPEG") -> tuple[str, ...]:
    headers = [Header(w, h, image_format) for w, h in sizes]
    return deviations(headers, originals, np.arange(len(headers)))


def scaled(sizes: Sequence[Size], factor: Callable[[int, int], float]) -> list[Size]:
    return [(round(w * factor(w, h)), round(h * factor(w, h))) for w, h in sizes]


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        (SIZES, None),
        (BOX_SIZES, "images cut to their boxes"),
        (scaled(BOX_SIZES, lambda w, h: 200 / max(w, h)), "images cut to their boxes and rescaled"),
        (scaled(BOX_SIZES, lambda w, h: 128 / min(w, h)), "images cut to their boxes and rescaled"),
        ([(224, 224)] * NUM, "images rescaled to 224 x 224 pixels"),
        (scaled(SIZES, lambda w, h: 128 / min(w, h)), "images rescaled to a short side of 128 pixels"),
        (
            scaled(SIZES, lambda w, h: 0.5 + w % 3 / 100),
            "images cut or rescaled (boxes of boxes.txt lie outside of 40 of 40 images)",
        ),
    ],
)
def test_what_was_done_to_images_is_told_from_their_sizes(sizes: list[Size], note: str | None) -> None:
    assert found(sizes) == (() if note is None else (note,))


def test_one_size_and_one_short_side_are_found_without_boxes_unless_images_are_few() -> None:
    assert found([(224, 224)] * NUM, Originals()) == ("images rescaled to 224 x 224 pixels",)
    assert found([(256, 300 + i) for i in range(NUM)], Originals()) == (
        "images rescaled to a short side of 256 pixels",
    )
    assert found([(224, 224)] * 15, Originals()) == found(SIZES, Originals()) == ()


def test_images_of_one_published_size_are_told_from_others() -> None:
    published = Originals(size=(256, 256))
    assert found([(256, 256)] * NUM, published) == ()
    assert found([(256, 256)] * (NUM - 2) + [(255, 256), (1, 1)], published) == ()  # a few prove nothing
    assert found([(64, 64)] * NUM, published) == ("images rescaled to 64 x 64 pixels",)
    assert found(SIZES, published) == ("images resized from the published 256 x 256 pixels",)
    boxes = np.array([(10, 20, 200 + i, 250) for i in range(NUM)], dtype=np.float64)
    listed = Originals(size=(256, 256), boxes=boxes, boxes_from="boxes.txt")
    assert found([(256, 256)] * NUM, listed) == ()
    assert found([(190 + i, 230) for i in range(NUM)], listed) == ("images cut to their boxes",)
    far = Originals(size=(256, 256), boxes=boxes + 100, boxes_from="boxes.txt")
    assert found([(256, 256)] * NUM, far) == (
        f"images listed with wrong boxes (boxes of boxes.txt lie outside of {NUM} of {NUM} images)",
    )


def test_a_few_published_boxes_that_do_not_fit_prove_nothing() -> None:
    boxes = BOXES.copy()
    boxes[:3, 2] += 500  # 3 of 40
    assert found(SIZES, Originals(boxes=boxes)) == ()
    assert found(SIZES[:10], Originals(boxes=boxes)) != ()
    assert found(SIZES[1:10], Originals(boxes=boxes[1:])) == ()  # 2 of 9
    for pixels, fits in ((1, True), (2, False)):
        boxes = np.array([(0, 0, w + pixels, h) for w, h in SIZES], dtype=np.float64)
        assert (found(SIZES, Originals(boxes=boxes)) == ()) is fits


def test_images_without_a_box_are_passed_over() -> None:
    boxes = BOXES.copy()
    boxes[5:] = np.nan
    assert found(BOX_SIZES, Originals(boxes=boxes)) == ("images cut to their boxes",)
    assert found(BOX_SIZES, Originals(boxes=np.full((NUM, 4), np.nan))) == ()


def test_jpegs_of_coarser_colors_than_the_published_ones_were_reencoded(tmp_path: Path) -> None:
    published = Originals(full_color=True)
    for i, (width, height) in enumerate(SIZES):
        Image.new("RGB", (width, height)).save(tmp_path / f"{i}.jpg", subsampling="4:2:0" if i < 25 else "4:4:4")
    headers = [read_header(tmp_path / f"{i}.jpg") for i in range(NUM)]
    rows = np.arange(NUM)
    assert deviations(headers, published, rows) == ("images re-encoded (4:2:0 JPEG)",)
    assert deviations(headers[10:], published, rows[10:]) == ()  # 15 of 30
    assert deviations(headers[:15], published, rows[:15]) == ()  # too few
    assert deviations(headers, Originals(), rows) == ()


def save(root: Path, sizes: Sequence[Size]) -> list[str]:
    """Images of two classes, half of them in each."""
    paths = [f"{'ab'[2 * i // len(sizes)]}/{i:03}.jpg" for i in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(root / path)
    return paths


def listing_of(root: Path, paths: Sequence[str], originals: Originals | None) -> Listing:
    labels = np.array(["ab".index(path[0]) for path in paths])
    role = np.where(labels == 0, "train", "test")
    return Listing(root, paths, labels, ("a", "b"), role, originals=originals, name="pairs")


def test_files_that_are_no_images_are_passed_over(tmp_path: Path) -> None:
    paths = save(tmp_path, BOX_SIZES)
    (tmp_path / paths[0]).write_text("no image")
    assert read_header(tmp_path / paths[0]) is None
    assert read_header(tmp_path / "nothing.jpg") is None
    assert read_header(tmp_path / paths[1]) == Header(*BOX_SIZES[1], "JPEG", subsampling="4:2:0")
    assert deviations_of_sample(tmp_path, paths, LISTED) == ("images cut to their boxes",)
    assert deviations_of_sample(tmp_path, ["nothing.jpg"], Originals()) == ()


def test_of_many_images_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def header(path: str) -> Header:
        read.append(Path(path).name)
        return Header(224, 224, "JPEG")

    monkeypatch.setattr("dmlbench.data.published_images.read_header", header)
    assert deviations_of_sample(tmp_path, [str(i) for i in range(6_401)], Originals()) != ()
    assert len(read) == len(set(read)) == 64
    assert (read[0], read[-1]) == ("0", "6400")


def test_a_table_carries_what_was_found_and_its_fingerprint_does_not(tmp_path: Path) -> None:
    paths = save(tmp_path, BOX_SIZES)
    order = RNG.permutation(NUM)  # of the list; boxes belong to its rows
    shuffled = listing_of(tmp_path, [paths[i] for i in order], Originals(boxes=BOXES[order], boxes_from="boxes.txt"))
    table = table_of(shuffled, published=None)
    assert table.notes == ("images cut to their boxes",)
    assert table.originals is not None
    np.testing.assert_array_equal(table.originals.boxes, BOXES)
    assert table.fingerprint == table_of(listing_of(tmp_path, paths, None), published=None).fingerprint


def test_a_subset_is_noted_with_its_counts(tmp_path: Path) -> None:
    listing = listing_of(tmp_path, save(tmp_path, SIZES[:4]), None)

    def notes(train: int, test: int) -> tuple[str, ...]:
        published = Published({"train": (train, 1), "test": (test, 1)})
        return table_of(listing, published=published, check_counts=False).notes

    assert notes(2, 2) == ()
    assert notes(1_000, 500) == ("a subset: 4 of 1,500 images",)
    assert notes(1, 3) == ("other counts than published: train 2 images of 1 classes, test 2 images of 1 classes",)
    assert table_of(listing, published=None).notes == ()
