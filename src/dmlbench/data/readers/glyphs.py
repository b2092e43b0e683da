"""Two data sets that need no files, from the twelve DejaVu text faces that matplotlib ships.

Pixels are computed in integers, so equal library versions give equal pixels on every machine.
"""

import dataclasses
import functools
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import ImageFont, features

from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.images.array_cache import cached_array
from dmlbench.runtime import generator
from dmlbench.types import ConfigError, ImageTable, IntArray

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
_VERSION = 1  # increment it whenever the pixels change
_CHUNK = 256  # images rendered at a time; keeps the temporaries inside the processor's caches
_FRACTION = 16  # fractional bits of source coordinates
_NOISE_SUM = 4  # bytes added up for one noise value: close to a normal distribution, and exact everywhere
_NOISE_STD = math.sqrt(_NOISE_SUM * (256**2 - 1) / 12)

Range = tuple[float, float]


@dataclass(frozen=True)
class GlyphStyle:
    """How much the images of a class differ.

    Attributes:
        size_range: em size as a share of the side of the character's cell.
        rotation_degrees: largest rotation, in either direction.
        shift: largest shift along either axis, as a share of the cell's side.
        background_range: grey level of the background, as a share of white.
        contrast_range: grey level of the ink minus the background's, as a share of white.
        noise_range: standard deviation of an image's pixel noise, as a share of white.
    """

    size_range: Range
    rotation_degrees: float
    shift: float
    background_range: Range
    contrast_range: Range
    noise_range: Range

    def __post_init__(self) -> None:
        for name in ("size_range", "background_range", "contrast_range", "noise_range"):
            least, most = (0.1, 1.5) if name == "size_range" else (0, 1)
            low, high = getattr(self, name)
            object.__setattr__(self, name, (float(low), float(high)))  # a list of a configuration becomes a tuple
            if not least <= low <= high <= most:
                raise ConfigError(f"{name}: got ({low}, {high}), expected ascending numbers in [{least}, {most}].")
        for name, most in (("rotation_degrees", 180), ("shift", 0.5)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected a number in [0, {most}].")


def glyphs(
    *,
    cache_dir: str | Path,
    num_classes: int = 200,
    images_per_class: int = 60,
    image_size: int = 64,
    seed: int = 0,
    size_range: Range = (0.45, 0.75),
    rotation_degrees: float = 20.0,
    shift: float = 0.12,
    background_range: Range = (0.05, 0.35),
    contrast_range: Range = (0.35, 0.65),
    noise_range: Range = (0.02, 0.12),
) -> ImageTable:
    """Letters as classes: the first ``num_classes`` by code point that twelve DejaVu faces share and distinguish.

    The first half of the classes trains, the second half tests. An image does not depend on the number of classes or
    images. Pixels are grey, ink lighter than ground. See ``GlyphStyle`` for the ranges.
    """
    style = GlyphStyle(size_range, rotation_degrees, shift, background_range, contrast_range, noise_range)
    return _table(
        "glyphs", num_classes, images_per_class, image_size, seed, style, cache_dir, lambda label, stream: [label]
    )


def glyphs_collage(
    *,
    cache_dir: str | Path,
    num_classes: int = 200,
    images_per_class: int = 60,
    image_size: int = 64,
    seed: int = 0,
    size_range: Range = (0.85, 1.0),
    rotation_degrees: float = 5.0,
    shift: float = 0.08,
    background_range: Range = (0.05, 0.1),
    contrast_range: Range = (0.7, 0.8),
    noise_range: Range = (0.0, 0.02),
) -> ImageTable:
    """The letters of ``glyphs``, each in one quadrant of the image, with a nuisance symbol in each of the other three.

    Train and test classes share no symbols. Sizes and shifts are shares of a quadrant's side. An image depends on
    ``num_classes`` only through the half that its class falls in.
    """
    if image_size % 2:
        raise ConfigError(
            f"image_size of glyphs_collage: got {image_size}, expected an even number, for its four quadrants."
        )
    style = GlyphStyle(size_range, rotation_degrees, shift, background_range, contrast_range, noise_range)
    train_pool, test_pool = nuisance_pools()

    def quadrants(label: int, stream: np.random.Generator) -> list[int]:
        first, pool = (0, train_pool) if label < num_classes // 2 else (len(train_pool), test_pool)
        cells = (num_classes + first + stream.permutation(len(pool))[:4]).tolist()
        cells[int(stream.integers(4))] = label
        return cells

    return _table(
        "glyphs_collage", num_classes, images_per_class, image_size, seed, style, cache_dir,
        quadrants, symbols=tuple(map(ord, train_pool + test_pool)), grid=2,
    )  # fmt: skip


def nuisance_pools() -> tuple[str, str]:
    """Symbols next to train classes and next to test classes: every other one, so that both are alike."""
    return NUISANCE_SYMBOLS[0::2], NUISANCE_SYMBOLS[1::2]


def _table(
    name: str, num_classes: int, images_per_class: int, image_size: int, seed: int, style: GlyphStyle,
    cache_dir: str | Path, cells_of: Callable[[int, np.random.Generator], list[int]],
    symbols: tuple[int, ...] = (), grid: int = 1,
) -> ImageTable:  # fmt: skip
    """The table of images of ``grid`` x ``grid`` cells with one character each.

    ``cells_of(label, stream)`` chooses the characters: indices into the letters of all classes, then ``symbols``.
    """
    if images_per_class < 1 or not 8 <= image_size <= 512:
        raise ConfigError(f"got {images_per_class=}, {image_size=}, expected 1 or more images of 8 to 512 pixels.")
    codes = distinct_letters(num_classes)
    labels = np.repeat(np.arange(num_classes, dtype=np.int64), images_per_class)

    def render() -> NDArray[np.uint8]:
        side = image_size // grid
        em = max(16, math.ceil(side * style.size_range[1]))  # the largest wanted, so that no master is enlarged
        masters = master_glyphs(codes + symbols, em)
        pixels = np.empty((len(labels), image_size, image_size), dtype=np.uint8)
        for first in range(0, len(labels), _CHUNK):
            rows = range(first, min(first + _CHUNK, len(labels)))
            streams = [generator(seed, name, *divmod(row, images_per_class)) for row in rows]
            cells, draws = [], []
            for row, stream in zip(rows, streams, strict=True):
                cells += cells_of(row // images_per_class, stream)
                draws.append(stream.random((grid * grid, 5)))
            coverage = _warp(masters, em, np.array(cells), np.concatenate(draws), style, side=side)
            coverage = coverage.reshape(-1, grid, grid, side, side)
            coverage = coverage.transpose(0, 1, 3, 2, 4).reshape(-1, image_size, image_size)  # [B, H, W]
            pixels[rows.start : rows.stop] = _shade(coverage, streams, style)
        return pixels

    libraries = f"matplotlib {matplotlib.__version__}, pillow {PIL.__version__}"
    key: dict[str, Any] = {"version": _VERSION, "renderer": f"{libraries}, freetype {features.version('freetype2')}"}
    key |= {"num_classes": num_classes, "images_per_class": images_per_class, "image_size": image_size, "seed": seed}
    pixels, digest = cached_array(cache_dir, name, key=key | dataclasses.asdict(style), build=render)
    listing = Listing(
        root="",
        paths=[f"U+{code:04X}/{image:03d}" for code in codes for image in range(images_per_class)],
        labels=labels,
        class_names=[f"U+{code:04X} {unicodedata.name(chr(code), 'UNNAMED')}" for code in codes],
        name=name,
        pixels=pixels,
        digest=digest,
    )
    return table_of(listing)


def _warp(
    masters: NDArray[np.uint8], em: int, which: IntArray, draws: NDArray[np.float64], style: GlyphStyle, *, side: int
) -> NDArray[np.uint8]:
    """Coverage [B, side, side] of the characters ``which`` [B], rotated, scaled and shifted; bilinear, in fixed point.

    Draws [B, 5] in [0, 1) choose face, size, angle and shifts. A pixel at offset p from the cell's center shows the
    master at R(-angle) (p - shift) * em / size.
    """
    edge = masters.shape[-1]
    one = 1 << _FRACTION
    face = (draws[:, 0] * len(FACE_NAMES)).astype(np.int64)
    low, high = style.size_range
    size = (low + (high - low) * draws[:, 1]) * side
    turn, right, down = (2 * draws[:, 2:] - 1).T
    angles = (math.radians(style.rotation_degrees) * turn).tolist()
    turns = np.array([(math.cos(angle), math.sin(angle)) for angle in angles]).T
    cosine, sine = np.rint(turns * em / size * one).astype(np.int64)
    # Offsets of pixel centers in half pixels: integers for even and odd sides alike.
    offset = 2 * np.arange(side, dtype=np.int64) - (side - 1)  # [side]
    x, y = (
        offset - np.rint(2 * (style.shift * at) * side).astype(np.int64)[:, None] for at in (right, down)
    )  # [B, side]
    middle = (edge - 1) * one // 2
    u = (middle + ((cosine[:, None] * x) >> 1))[:, None, :] + ((sine[:, None] * y) >> 1)[:, :, None]  # [B, side, side]
    v = (middle - ((sine[:, None] * x) >> 1))[:, None, :] + ((cosine[:, None] * y) >> 1)[:, :, None]
    # Masters have an empty border, so clamping to it reads 0 outside.
    limit = (edge - 1) * one - 1
    u, v = (np.clip(at, 0, limit).astype(np.int32) for at in (u, v))
    start = (which * len(FACE_NAMES) + face) * edge * edge
    index = start[:, None, None] + (v >> _FRACTION) * edge + (u >> _FRACTION)
    fu = (u >> (_FRACTION - 7)) & 127  # the 7 highest fractional bits
    fv = (v >> (_FRACTION - 7)) & 127
    flat = masters.reshape(-1)
    above = flat.take(index) * (128 - fu) + flat.take(index + 1) * fu
    below = flat.take(index + edge) * (128 - fu) + flat.take(index + edge + 1) * fu
    return ((above * (128 - fv) + below * fv + (1 << 13)) >> 14).astype(np.uint8)


def _shade(coverage: NDArray[np.uint8], streams: list[np.random.Generator], style: GlyphStyle) -> NDArray[np.uint8]:
    """Images [B, H, W] uint8 of background, ink and noise from coverage [B, H, W], drawing from each image's stream."""
    count, height, width = coverage.shape
    ranges = np.array([style.background_range, style.contrast_range, style.noise_range])  # [3, 2]
    scale = np.array([255.0, 256.0, 255.0 * 4096 / _NOISE_STD])  # 256: coverage 255 is full ink after >> 8, rounded
    levels = np.empty((count, 3), dtype=np.int32)
    noise = np.empty((count, _NOISE_SUM, height, width), dtype=np.uint8)
    for i, stream in enumerate(streams):
        levels[i] = np.rint((ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * stream.random(3)) * scale)
        noise[i] = np.frombuffer(stream.bytes(noise[i].size), dtype=np.uint8).reshape(_NOISE_SUM, height, width)
    ground, contrast, strength = levels.T[:, :, None, None]
    centered = noise.sum(axis=1, dtype=np.int32) - (255 * _NOISE_SUM) // 2  # [B, H, W]
    grey = ground + ((coverage * contrast + 128) >> 8) + ((centered * strength + 2048) >> 12)
    return np.clip(grey, 0, 255).astype(np.uint8)


def face_files() -> tuple[Path, ...]:
    """Files of the twelve faces, in the order of ``FACE_NAMES``."""
    return tuple(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf" for name in FACE_NAMES)


@functools.cache
def common_characters() -> list[int]:
    """Code points, ascending, that all twelve faces have."""
    return sorted(set.intersection(*(set(FT2Font(str(file)).get_charmap()) for file in face_files())))


@functools.lru_cache(maxsize=8)
def distinct_letters(count: int) -> tuple[int, ...]:
    """The first ``count`` letters (Unicode categories L*) by code point that all faces have and distinguish.

    Of letters whose ink, cut to its bounding box, is the same in every face (the Latin, Greek and Cyrillic A, say) only
    the first stays.
    """
    if count < 2:
        raise ConfigError(f"num_classes: got {count}, expected 2 or more.")
    fonts = _fonts(_COMPARED_PIXELS)
    seen: set[tuple[bytes, ...]] = set()
    chosen: list[int] = []
    for code in common_characters():
        if not unicodedata.category(chr(code)).startswith("L"):
            continue
        inks = [_ink(code, font) for font in fonts]
        look = tuple(bytes(str(ink.shape), "ascii") + ink.tobytes() for ink in inks)
        if look not in seen and all(ink.size for ink in inks):
            seen.add(look)
            chosen.append(code)
        if len(chosen) == count:
            return tuple(chosen)
    raise ConfigError(
        f"num_classes: got {count}, expected at most {len(chosen)}, the number of distinct letters. Lower it."
    )


def master_glyphs(codes: tuple[int, ...], pixels: int) -> NDArray[np.uint8]:
    """Every character in every face at an em size of ``pixels``, [len(codes), 12, S, S]: ink 255 on 0.

    Each ink's bounding box is in the middle, with a border of at least two empty pixels.
    """
    fonts = _fonts(pixels)
    inks = [[_ink(code, font) for font in fonts] for code in codes]
    side = 4 + max(max(ink.shape) for faces in inks for ink in faces)
    masters = np.zeros((len(codes), len(FACE_NAMES), side, side), dtype=np.uint8)
    for c, faces in enumerate(inks):
        for f, ink in enumerate(faces):
            height, width = ink.shape
            top, left = (side - height) // 2, (side - width) // 2
            masters[c, f, top : top + height, left : left + width] = ink
    return masters


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
