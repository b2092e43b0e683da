"""The built-in data sets: which letters, what stays equal, and what the pixels are."""

import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from dmlbench.data.readers import glyphs as module
from dmlbench.data.readers.glyphs import glyphs, glyphs_collage
from dmlbench.types import ConfigError, ImageTable

SMALL = {"num_classes": 8, "images_per_class": 3}


def drawn(code: int, file: Path) -> bytes:
    """A character drawn by another way than the code under test: on a page, then cut to its ink."""
    font = ImageFont.truetype(str(file), 96, layout_engine=ImageFont.Layout.BASIC)
    page = Image.new("L", (400, 400))
    ImageDraw.Draw(page).text((120, 120), chr(code), font=font, fill=255)
    box = page.getbbox()
    assert box is not None, f"{code:#x} has no ink in {file.name}"
    return str(page.crop(box).size).encode() + page.crop(box).tobytes()


def test_classes_are_the_first_letters_by_code_point_that_all_faces_have() -> None:
    codes = module.distinct_letters(200)
    assert len(codes) == 200
    assert list(codes) == sorted(codes)
    assert "".join(map(chr, codes[:54])) == "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzªµ"
    assert all(unicodedata.category(chr(code)).startswith("L") for code in codes)
    for file in module.face_files():
        assert set(codes) <= set(FT2Font(str(file)).get_charmap())
    # Whatever was skipped below the last letter is a twin of a letter before it in every face.
    letters = [c for c in module.common_characters() if c <= codes[-1] and unicodedata.category(chr(c)).startswith("L")]
    skipped = sorted(set(letters) - set(codes))
    assert [chr(c) for c in skipped] == ["Đ"]  # looks like Ð
    for code in skipped:
        assert any(all(drawn(code, f) == drawn(twin, f) for f in module.face_files()) for twin in codes if twin < code)


def test_nuisance_symbols_are_common_not_letters_and_apart_for_train_and_test() -> None:
    train, test = module.nuisance_pools()
    assert not set(train) & set(test)
    assert abs(len(train) - len(test)) <= 1
    assert len(train) >= 40
    everything = train + test
    assert len(set(everything)) == len(everything)
    assert {ord(c) for c in everything} <= set(module.common_characters())
    assert not any(unicodedata.category(c).startswith("L") for c in everything)
    inks = module.master_glyphs(tuple(map(ord, everything)), 32)
    assert (inks > 127).sum(axis=(2, 3)).min() >= 25


@pytest.mark.parametrize("data_set", [glyphs, glyphs_collage])
def test_the_table_is_what_its_arguments_say(data_set: type[ImageTable], tmp_path: Path) -> None:
    table = data_set(cache_dir=tmp_path, **SMALL)
    assert table.pixels is not None
    assert table.pixels.shape == (24, 64, 64)
    assert table.pixels.dtype == np.uint8
    assert table.class_names[0] == "U+0041 LATIN CAPITAL LETTER A"
    assert table.labels.tolist() == sorted(list(range(8)) * 3)
    assert set(table.role[table.labels < 4]) == {"train"}
    assert set(table.role[table.labels >= 4]) == {"test"}
    assert all(image.std() > 5 for image in table.pixels)
    assert len({image.tobytes() for image in table.pixels}) == 24


@pytest.mark.parametrize("data_set", [glyphs, glyphs_collage])
def test_seed_and_style_decide_the_pixels_and_the_cache_does_not(data_set: type[ImageTable], tmp_path: Path) -> None:
    first = data_set(cache_dir=tmp_path / "a", **SMALL)
    again = data_set(cache_dir=tmp_path / "b", **SMALL)
    cached = data_set(cache_dir=tmp_path / "a", **SMALL)
    np.testing.assert_array_equal(first.pixels, again.pixels)
    np.testing.assert_array_equal(first.pixels, cached.pixels)
    assert first.fingerprint == again.fingerprint == cached.fingerprint
    for change in ({"seed": 1}, {"noise_range": [0.3, 0.3]}, {"rotation_degrees": 90.0}):
        other = data_set(cache_dir=tmp_path / "a", **SMALL, **change)
        assert other.fingerprint != first.fingerprint


def test_an_image_does_not_depend_on_how_many_are_asked_for_or_rendered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = glyphs(cache_dir=tmp_path, num_classes=4, images_per_class=2).pixels
    monkeypatch.setattr(module, "_CHUNK", 7)
    more = glyphs(cache_dir=tmp_path, num_classes=9, images_per_class=5).pixels
    assert few is not None
    assert more is not None
    np.testing.assert_array_equal(few.reshape(4, 2, 64, 64), more.reshape(9, 5, 64, 64)[:4, :2])


def test_warping_equals_a_naive_loop_over_pixels() -> None:
    masters = module.master_glyphs((ord("R"), ord("g")), 40)
    edge, side = masters.shape[-1], 32
    style = module.GlyphStyle((0.9, 1.3), 150.0, 0.2, (0, 0), (0, 0), (0, 0))
    draws = np.array([[0.3, 0.1, 0.6, 0.75, 0.4], [0.8, 0.9, 0.1, 0.5, 1.0 - 1e-9]])
    warped = module._warp(masters, 40, np.arange(2), draws, style, side=side)
    for which, (u, image) in enumerate(zip(draws.tolist(), warped, strict=True)):
        master = masters[which, int(u[0] * 12)].astype(float)
        angle = math.radians(150 * (2 * u[2] - 1))
        right, down = (0.2 * (2 * at - 1) for at in u[3:])
        scale = 40 / ((0.9 + 0.4 * u[1]) * side)
        expected = np.zeros((side, side))
        for row in range(side):
            for column in range(side):
                x = column - (side - 1) / 2 - round(2 * right * side) / 2
                y = row - (side - 1) / 2 - round(2 * down * side) / 2
                u = (edge - 1) / 2 + scale * (math.cos(angle) * x + math.sin(angle) * y)
                v = (edge - 1) / 2 + scale * (-math.sin(angle) * x + math.cos(angle) * y)
                i, j = math.floor(v), math.floor(u)
                if 0 <= i < edge - 1 and 0 <= j < edge - 1:
                    a, b = v - i, u - j
                    patch = master[i : i + 2, j : j + 2]
                    expected[row, column] = [1 - a, a] @ patch @ [1 - b, b]
        assert expected.max() > 200
        assert np.abs(image - expected).max() <= 4  # weights have 7 bits


def test_without_variation_the_ink_stands_in_the_middle_and_the_levels_are_exact(tmp_path: Path) -> None:
    still = {"size_range": (0.7, 0.7), "rotation_degrees": 0, "shift": 0, "noise_range": (0, 0)}
    levels = {"background_range": (0.2, 0.2), "contrast_range": (0.6, 0.6)}
    table = glyphs(cache_dir=tmp_path, num_classes=2, images_per_class=4, **still, **levels)
    assert table.pixels is not None
    for image in table.pixels:
        assert (image.min(), image.max()) == (51, 51 + 153)
        rows, columns = np.nonzero(image > 51)
        assert abs(rows.min() + rows.max() - 63) <= 2
        assert abs(columns.min() + columns.max() - 63) <= 2


def test_noise_has_the_standard_deviation_that_was_asked_for(tmp_path: Path) -> None:
    levels = {"contrast_range": (0, 0), "background_range": (0.5, 0.5), "noise_range": (0.1, 0.1)}
    noise = glyphs(cache_dir=tmp_path, num_classes=2, images_per_class=2, **levels).pixels
    assert noise is not None
    assert np.std(noise) == pytest.approx(25.5, rel=0.03)
    assert np.mean(noise) == pytest.approx(127.5, abs=1)


def test_a_collage_holds_its_letter_once_and_symbols_of_its_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    warp = module._warp

    def spy(masters: np.ndarray, em: int, which: np.ndarray, *more: object, side: int) -> np.ndarray:
        seen.extend(map(tuple, which.reshape(-1, 4).tolist()))
        return warp(masters, em, which, *more, side=side)

    monkeypatch.setattr(module, "_warp", spy)
    glyphs_collage(cache_dir=tmp_path, num_classes=6, images_per_class=20)
    train, test = module.nuisance_pools()
    quadrants = set()
    for i, cells in enumerate(seen):
        label = i // 20
        assert cells.count(label) == 1
        quadrants.add(cells.index(label))
        symbols = [c - 6 for c in cells if c != label]
        assert len(set(symbols)) == 3
        in_train = [0 <= s < len(train) for s in symbols]
        assert all(in_train) if label < 3 else not any(in_train)
        assert max(symbols) < len(train) + len(test)
    assert quadrants == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_classes", 1), ("images_per_class", 0), ("image_size", 63), ("size_range", (0.9, 0.5)), ("shift", 0.7)],
)
def test_arguments_out_of_range_are_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        glyphs_collage(cache_dir=tmp_path, **{name: value})
