"""Letters and symbols of the ``glyphs`` data sets, from the twelve DejaVu text faces that matplotlib ships."""

import functools
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
import PIL
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import ImageFont, features

from dmlbench.types import ConfigError

FACE_NAMES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
)

# Symbols that stand next to a letter in a collage. All twelve faces have them; none is a letter or looks like one (so
# no 0, 1, ○, ∑, ∪, ∃), and none is too small to distract. A test checks this.
NUISANCE_SYMBOLS = (
    "#$%&+2345789<=>@£¤¥§¶±÷†‡‽€←↑→↓↔↕↯⇐⇑⇒⇓⇔⇦⇧⇨⇩∇√∞∫≈≠≡≤≥⊕⊖⊗⊞⊠⌂⌘"
    "■□▣▤▥▦▧▨▩▲△▶▷▼▽◀◁◆◇◈◉◎●◐◑◒◓◘◙☀☹☺☻☼♀♁♂♃♄♅♆♇♠♡♢♣♤♥♦♧♩♪♫♬♭♯"
)

_COMPARED_PIXELS = 96  # em size at which two letters are compared; a unit of the font (1/2048 em) is 1/21 pixel


def face_files() -> tuple[Path, ...]:
    """Files of the twelve faces, in the order of ``FACE_NAMES``."""
    return tuple(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf" for name in FACE_NAMES)


@functools.cache
def common_characters() -> tuple[int, ...]:
    """Code points, ascending, that all twelve faces have."""
    maps = [set(FT2Font(str(file)).get_charmap()) for file in face_files()]
    return tuple(sorted(set.intersection(*maps)))


@functools.lru_cache(maxsize=8)
def distinct_letters(count: int) -> tuple[int, ...]:
    """The first ``count`` letters (Unicode categories L*) by code point that all faces have and distinguish.

    Of letters whose ink, cut to its bounding box, is the same in every face (the Latin, Greek and Cyrillic A, say) only
    the first stays.
    """
    if count < 2:
        raise ConfigError(f"num_classes ({count}) is below 2; ask for at least one class to train and one to test on")
    fonts = _fonts(_COMPARED_PIXELS)
    seen: set[tuple[bytes, ...]] = set()
    chosen: list[int] = []
    for code in common_characters():
        if not unicodedata.category(chr(code)).startswith("L"):
            continue
        inks = [_ink(code, font) for font in fonts]
        look = tuple(bytes(str(ink.shape), "ascii") + ink.tobytes() for ink in inks)
        if look in seen or any(ink.size == 0 for ink in inks):
            continue
        seen.add(look)
        chosen.append(code)
        if len(chosen) == count:
            return tuple(chosen)
    raise ConfigError(f"num_classes ({count}) exceeds the {len(chosen)} letters that can be distinguished; lower it")


def letter_name(code: int) -> str:
    """Code point and Unicode name, as in "U+0041 LATIN CAPITAL LETTER A"."""
    return f"U+{code:04X} {unicodedata.name(chr(code), 'UNNAMED')}"


def master_glyphs(codes: tuple[int, ...], pixels: int) -> NDArray[np.uint8]:
    """Every character in every face at an em size of ``pixels``: ink 255 on 0.

    Returns:
        [len(codes), 12, S, S] uint8, each ink's bounding box in the middle, with a border of at least two empty pixels.
    """
    inks = [[_ink(code, font) for font in _fonts(pixels)] for code in codes]
    side = 4 + max(max(ink.shape) for faces in inks for ink in faces)
    masters = np.zeros((len(codes), len(FACE_NAMES), side, side), dtype=np.uint8)
    for c, faces in enumerate(inks):
        for f, ink in enumerate(faces):
            height, width = ink.shape
            top, left = (side - height) // 2, (side - width) // 2
            masters[c, f, top : top + height, left : left + width] = ink
    return masters


def renderer_version() -> str:
    """The versions of the fonts and the rasterizer, on which the pixels depend too."""
    return f"matplotlib {matplotlib.__version__}, pillow {PIL.__version__}, freetype {features.version('freetype2')}"


def _fonts(pixels: int) -> list[ImageFont.FreeTypeFont]:
    # The basic layout engine draws single characters alike with or without the optional raqm library.
    return [ImageFont.truetype(str(f), pixels, layout_engine=ImageFont.Layout.BASIC) for f in face_files()]


def _ink(code: int, font: ImageFont.FreeTypeFont) -> NDArray[np.uint8]:
    """[h, w] coverage of one character cut to its ink; [0, 0] when it has none."""
    mask = font.getmask(chr(code), mode="L")
    width, height = mask.size
    image = np.frombuffer(bytes(mask), dtype=np.uint8).reshape(height, width)
    rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
    if len(rows) == 0:
        return np.zeros((0, 0), dtype=np.uint8)
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
