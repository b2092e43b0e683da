"""Omniglot: handwritten characters of 50 alphabets, read from the published archives as they are."""

import hashlib
import io
import logging
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.cache import cached_array
from dmlbench.data.table import halved_roles, make_table
from dmlbench.types import ConfigError, DataError, ImageTable, closest

ARCHIVES = (
    "images_background.zip",
    "images_background_small1.zip",
    "images_background_small2.zip",
    "images_evaluation.zip",
)
_VERSION = 1  # raise it whenever the pixels change
_MEMBER = re.compile(r"^[^/]+/(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<file>[^/]+\.png)$")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drawing:
    """One image inside an archive."""

    archive: Path
    member: str
    crc: int
    character: str  # "Alphabet/character01"
    path: str  # "Alphabet/character01/0001_01.png"
    is_evaluation: bool


def omniglot(
    root: str | Path,
    *,
    cache_dir: str | Path,
    archives: Sequence[str] | None = None,
    image_size: int = 64,
) -> ImageTable:
    """Characters as classes, alphabets as super-classes, 20 drawings each; ink is white on black.

    With background and evaluation archives, background characters train and evaluation characters test, as published
    (Lake et al. 2015). With one kind alone, the first half of its characters in sorted order trains, the rest tests.

    Args:
        root: folder that holds the archives; nothing is extracted.
        cache_dir: folder that keeps the resized pixels.
        archives: names among ``ARCHIVES``; None takes all that lie there, the small background sets only where the
            full one is missing (they are parts of it).
        image_size: side in pixels; the originals are 105 x 105.

    Returns:
        a table with grey ``pixels`` [N, image_size, image_size].

    Raises:
        ConfigError: an unknown archive, or an image size out of range.
        DataError: no archive, one that is asked for and missing, or a damaged one.

    Source: B. Lake, R. Salakhutdinov, J. Tenenbaum, "Human-level concept learning through probabilistic program
        induction", Science 350 (2015).
    """
    if not 8 <= image_size <= 105:
        raise ConfigError(f"image_size ({image_size}) must lie in [8, 105]; Omniglot's drawings are 105 x 105")
    files = _find_archives(Path(root), archives)
    drawings = _list_drawings(files)
    key = {
        "version": _VERSION,
        "image_size": image_size,
        "drawings": hashlib.sha256("".join(f"{d.path}\t{d.crc}\n" for d in drawings).encode()).hexdigest(),
    }
    cached = cached_array(cache_dir, "omniglot", key=key, build=lambda: _read_drawings(drawings, image_size))
    characters = list(dict.fromkeys(d.character for d in drawings))
    alphabets = sorted({c.split("/")[0] for c in characters})
    class_of = {c: i for i, c in enumerate(characters)}
    alphabet_of = {a: i for i, a in enumerate(alphabets)}
    labels = np.array([class_of[d.character] for d in drawings], dtype=np.int64)
    evaluation = np.array([d.is_evaluation for d in drawings])
    both = bool(evaluation.any() and not evaluation.all())
    return make_table(
        "omniglot",
        "",
        paths=[d.path for d in drawings],
        labels=labels,
        class_names=characters,
        role=np.where(evaluation, "test", "train") if both else halved_roles(labels, len(characters)),
        content=cached.digest,
        super_labels=np.array([alphabet_of[d.character.split("/")[0]] for d in drawings], dtype=np.int64),
        pixels=cached.array,
    )


def _find_archives(root: Path, archives: Sequence[str] | None) -> list[Path]:
    remedy = "download it from github.com/brendenlake/omniglot (folder python) and put it there without extracting it"
    if archives is not None:
        for name in archives:
            if name not in ARCHIVES:
                raise ConfigError(f"Omniglot has no archive '{name}'; {closest(name, ARCHIVES)}")
            if not (root / name).is_file():
                raise DataError(f"Omniglot's archive '{name}' is not in '{root}'; {remedy}")
        found = [root / name for name in ARCHIVES if name in archives]
        if not found:
            raise ConfigError("archives is empty; name at least one of " + ", ".join(ARCHIVES))
        return found
    found = [root / name for name in ARCHIVES if (root / name).is_file()]
    if not found:
        raise DataError(f"none of Omniglot's archives ({', '.join(ARCHIVES)}) is in '{root}'; {remedy}")
    if any(file.name == "images_background.zip" for file in found):
        found = [file for file in found if "_small" not in file.name]
    return found


def _list_drawings(files: Sequence[Path]) -> list[_Drawing]:
    """Every drawing once, background before evaluation, sorted by character and file within each."""
    drawings: dict[str, _Drawing] = {}
    for file in files:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"Omniglot's archive '{file}' is damaged ({error}); download it again") from error
        for member in members:
            match = _MEMBER.match(member.filename)
            if match is None or member.filename.startswith("__MACOSX/"):
                continue
            character = f"{match['alphabet']}/{match['character']}"
            path = f"{character}/{match['file']}"
            drawing = _Drawing(file, member.filename, member.CRC, character, path, "evaluation" in file.name)
            other = drawings.setdefault(path, drawing)
            if other.crc != drawing.crc:
                raise DataError(f"'{path}' differs between '{other.archive}' and '{file}'; remove one of the archives")
    if not drawings:
        raise DataError(
            f"no drawings (folder/Alphabet/characterNN/*.png) in {', '.join(str(f) for f in files)}; "
            "download them again"
        )
    return sorted(drawings.values(), key=lambda d: (d.is_evaluation, d.character, d.path))


def _read_drawings(drawings: Sequence[_Drawing], image_size: int) -> NDArray[np.uint8]:
    """[N, image_size, image_size] uint8, ink 255 on 0."""
    logger.info("reading %d Omniglot drawings; this happens once", len(drawings))
    pixels = np.empty((len(drawings), image_size, image_size), dtype=np.uint8)
    archives = {file: zipfile.ZipFile(file) for file in {d.archive for d in drawings}}
    try:
        for row, drawing in enumerate(drawings):
            try:
                with Image.open(io.BytesIO(archives[drawing.archive].read(drawing.member))) as image:
                    grey = image.convert("L").resize((image_size, image_size), Image.Resampling.BOX)
            except (OSError, SyntaxError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                raise DataError(
                    f"'{drawing.member}' in '{drawing.archive}' cannot be read ({error}); download the archive again"
                ) from error
            pixels[row] = 255 - np.asarray(grey)  # the originals have black ink on white
    finally:
        for archive in archives.values():
            archive.close()
    return pixels
