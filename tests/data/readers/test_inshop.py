"""In-shop Clothes Retrieval in every layout."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.image_table import file_contents
from dmlbench.data.readers.inshop import inshop
from dmlbench.types import DataError

HEADER = "image_name item_id evaluation_status"
ROWS = (
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000001/01_1_front.jpg", "id_00000001", "query"),
    ("img/MEN/Denim/id_00000001/01_2_séance.jpg", "id_00000001", "gallery"),
    ("img/WOMEN/Denim/id_00000007/01_1_front.jpg", "id_00000007", "query"),
    ("img/WOMEN/Denim/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
)


def write_list(file: Path, rows: tuple[tuple[str, str, str], ...] = ROWS, *, count: int | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{path:<60} {item:<12} {status}   " for path, item, status in rows]
    text = "\r\n".join([str(len(rows) if count is None else count), f"{HEADER}  ", *lines, ""])
    file.write_bytes("\ufeff".encode() + text.encode())


def write(root: Path, *, listed: str = "Eval", images: str = "Img/img") -> None:
    write_list(root / listed / "list_eval_partition.txt")
    for path, _, _ in ROWS:
        file = root / images / path.removeprefix("img/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.mark.parametrize(
    ("place", "listed", "images"),
    [
        ("", "", "img"),
        ("In-shop Clothes Retrieval Benchmark", "Eval", "Img/img"),
        ("inshop", "Eval", "img"),
        ("in_shop", "Anno", "img_highres"),
        ("In-shop", "Eval", "Img/img_highres"),
        ("DeepFashion/In-shop Clothes Retrieval Benchmark", "Eval", "Img/img_highres/img_highres"),
        ("archive/deepfashion", "", "img/img"),
        ("Inshop_Clothes", "Eval", "Img"),
    ],
)
def test_every_layout_gives_the_same_table(tmp_path: Path, place: str, listed: str, images: str) -> None:
    write(tmp_path / place, listed=listed, images=images)
    write(tmp_path / "reference")
    reference = inshop(tmp_path / "reference", check_counts=False)
    for root in (tmp_path, tmp_path / place):
        table = inshop(root, check_counts=False)
        assert table.class_names == ("id_00000001", "id_00000002", "id_00000007")
        found = zip(
            table.paths.tolist(), (table.class_names[c] for c in table.labels), table.role.tolist(), strict=True
        )
        assert {(f"img/{path}", item, role) for path, item, role in found} == set(ROWS)
        assert table.super_labels is not None
        categories = ["MEN/Denim", "WOMEN/Denim", "WOMEN/Dresses"]
        assert [categories[s] for s in table.super_labels] == ["/".join(p.split("/")[:2]) for p in table.paths]
        assert (file_contents(table.root, table.paths, name="inshop") == 0).all()
        assert table.fingerprint == reference.fingerprint


def test_images_of_the_papers_come_before_the_large_ones(tmp_path: Path) -> None:
    write(tmp_path, images="Img/img_highres")
    assert inshop(tmp_path, check_counts=False).layout.endswith("images of Img/img_highres")
    write(tmp_path, images="Img/img")
    assert inshop(tmp_path, check_counts=False).layout.endswith("images of Img/img")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("img/MEN/Denim/id_9/x.jpg", "id_9", "test"), r"line 9 of '.*': got the evaluation_status 'test', expected"),
        (("MEN/Denim/id_9/x.jpg", "id_9", "train"), r"line 9 of '.*': got the image_name 'MEN.*', expected img/<gen"),
    ],
)
def test_a_faulty_list_is_named_with_its_line(tmp_path: Path, row: tuple[str, str, str], message: str) -> None:
    write(tmp_path)
    write_list(tmp_path / "Eval/list_eval_partition.txt", (*ROWS, row))
    with pytest.raises(DataError, match=message):
        inshop(tmp_path, check_counts=False)


def test_cut_and_resized_images_are_noted(tmp_path: Path) -> None:
    write(tmp_path)
    for number, (path, _, _) in enumerate(ROWS):
        Image.new("RGB", (100 + number, 200)).save(tmp_path / "Img" / path)
    assert inshop(tmp_path, check_counts=False).notes[-1] == ("images resized from the published 256 x 256 pixels")
    lines = [f"{path} 1 2 20 30 {120 + number} 230" for number, (path, _, _) in enumerate(ROWS[1:], 1)]
    head = [str(len(lines)), "image_name clothes_type pose_type x_1 y_1 x_2 y_2"]
    (tmp_path / "Anno").mkdir()
    (tmp_path / "Anno" / "list_bbox_inshop.txt").write_text("\n".join([*head, *lines]), encoding="utf-8")
    table = inshop(tmp_path, check_counts=False)
    assert table.notes[-1] == "images cut to their boxes"
    assert table.originals is not None and table.originals.boxes is not None
    assert np.isnan(table.originals.boxes).any(axis=1).sum() == 1
