"""Omniglot: handwritten characters of 50 alphabets, read from the published archives, unpacked or not."""

import hashlib
import io
import logging
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.image_table import Published, differing_counts, halved_roles, make_table, shorten
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.readers.layouts import DataFolder, Layout, file_stamp, images_in, subfolders
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, closest

ARCHIVES = (
    "images_background.zip",
    "images_background_small1.zip",
    "images_background_small2.zip",
    "images_evaluation.zip",
)
PUBLISHED = Published({"train": (19_280, 964), "test": (13_180, 659)})  # of the full background and evaluation
# Archive -> drawings and characters. For the second small one, which could not be counted, see ``_check_counts``.
_COUNTS = {
    "images_background": PUBLISHED.by_role["train"],
    "images_background_small1": (2_720, 136),
    "images_evaluation": PUBLISHED.by_role["test"],
}
FOLDER = DataFolder(
    "Omniglot",
    ("omniglot", "omniglot_py", "omniglot_master", "omniglot_main", "python"),
    (
        Layout(
            "archives",
            "images_background.zip or images_evaluation.zip, unpacked or not",
            ("|".join((*ARCHIVES, *(name.removesuffix(".zip") for name in ARCHIVES))),),
        ),
    ),
    "download images_background.zip and images_evaluation.zip from github.com/brendenlake/omniglot (folder python)",
)
_VERSION = 1  # increment it whenever the pixels change
_MEMBER = re.compile(r"^[^/]+/(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<file>[^/]+\.png)$")
_MAX_DRAWING_BYTES = 2**20  # the published ones have some 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drawing:
    """One image in an archive or a folder."""

    place: Path  # the archive, or the folder that it was unpacked to
    member: str  # name in there
    stamp: str  # identifies the contents, in archives by their checksum
    character: str  # "Alphabet/character01"
    path: str  # "Alphabet/character01/0001_01.png"
    is_evaluation: bool


def omniglot(
    root: str | Path,
    *,
    cache_dir: str | Path,
    archives: Sequence[str] | None = None,
    image_size: int = 64,
    check_counts: bool = True,
) -> ImageTable:
    """Characters as classes, alphabets as super-classes, 20 drawings each; ink is white on black.

    With background and evaluation archives, background characters train and evaluation characters test, as published
    (Lake et al. 2015). With one kind alone, the first half of its characters in sorted order trains, the rest tests;
    the notes name an alphabet that this cuts.

    Args:
        root: folder that holds the archives or what was unpacked from them, or one that holds that folder under a
            usual name.
        cache_dir: folder that keeps the resized pixels.
        archives: names among ``ARCHIVES``; None takes all that are there, the small background sets only if the
            full one is missing (they are parts of it).
        image_size: side in pixels; the originals are 105 x 105.
        check_counts: insist on the published numbers of drawings and characters of each archive. False takes a subset.

    Returns:
        a table with grey ``pixels`` [N, image_size, image_size].

    Raises:
        ConfigError: an unknown archive, or an image size out of range.
        DataError: no archive, a requested one is missing or damaged, or counts differ.

    Source: B. Lake, R. Salakhutdinov, J. Tenenbaum, "Human-level concept learning through probabilistic program
        induction", Science 350 (2015).
    """
    if not 8 <= image_size <= 105:
        raise ConfigError(f"image_size ({image_size}) must lie in [8, 105]; Omniglot's drawings are 105 x 105")
    folder, layout = FOLDER.find(root)
    drawings = _list_drawings(_find_places(folder, archives), check_counts=check_counts)
    key = {
        "version": _VERSION,
        "image_size": image_size,
        "drawings": hashlib.sha256("".join(f"{d.path}\t{d.stamp}\n" for d in drawings).encode()).hexdigest(),
    }
    cached = cached_array(cache_dir, "omniglot", key=key, build=lambda: _read_drawings(drawings, image_size))
    characters = list(dict.fromkeys(d.character for d in drawings))
    alphabets = sorted({c.split("/")[0] for c in characters})
    class_of = {c: i for i, c in enumerate(characters)}
    alphabet_of = {a: i for i, a in enumerate(alphabets)}
    labels = np.array([class_of[d.character] for d in drawings], dtype=np.int64)
    evaluation = np.array([d.is_evaluation for d in drawings])
    both = bool(evaluation.any() and not evaluation.all())
    role = np.where(evaluation, "test", "train") if both else halved_roles(labels, len(characters))
    alphabet = np.array([alphabet_of[d.character.split("/")[0]] for d in drawings], dtype=np.int64)
    return make_table(
        "omniglot",
        "",
        paths=[d.path for d in drawings],
        labels=labels,
        class_names=characters,
        role=role,
        content=cached.digest,
        super_labels=alphabet,
        pixels=cached.array,
        layout=layout.description,
        notes=(*differing_counts(labels, role, PUBLISHED), *_cut_alphabets(alphabet, role, alphabets)),
        published_queries=PUBLISHED.num_queries,
    )


def notes_of(root: str | Path) -> tuple[str, ...]:
    """Whether there are fewer drawings than published; none is read."""
    count = len(_list_drawings(_find_places(FOLDER.find(root)[0], None), check_counts=False))
    total = PUBLISHED.num_images
    return (f"a subset: {count:,} of {total:,} images",) if count < total else ()


def _cut_alphabets(alphabet: IntArray, role: NDArray[np.str_], names: Sequence[str]) -> tuple[str, ...]:
    """A note on alphabets [N] of which some characters train and others test; published halves share none."""
    shared = np.intersect1d(alphabet[role == "train"], alphabet[role == "test"])
    if not len(shared):
        return ()
    return (f"train and test half share {shorten([names[i] for i in shared])}: the split cuts an alphabet",)


def _find_places(folder: Path, archives: Sequence[str] | None) -> list[Path]:
    """The archives to read, or the folders that they were unpacked to."""
    present = {name: place for name in ARCHIVES if (place := _place(folder, name))}
    if archives is None:
        if "images_background.zip" in present:
            present = {name: place for name, place in present.items() if "_small" not in name}
        return list(present.values())
    for name in archives:
        if name not in ARCHIVES:
            raise ConfigError(f"Omniglot has no archive '{name}'; {closest(name, ARCHIVES)}")
        if name not in present:
            raise DataError(f"Omniglot's archive '{name}' is not in '{folder}'; {FOLDER.remedy}")
    if not archives:
        raise ConfigError("archives is empty; name at least one of " + ", ".join(ARCHIVES))
    return [present[name] for name in ARCHIVES if name in archives]


def _place(folder: Path, archive: str) -> Path | None:
    if (folder / archive).is_file():
        return folder / archive
    unpacked = folder / archive.removesuffix(".zip")
    inner = unpacked / unpacked.name  # unpacked to a folder of its own
    return inner if inner.is_dir() else unpacked if unpacked.is_dir() else None


def _list_drawings(places: Sequence[Path], *, check_counts: bool) -> list[_Drawing]:
    """Every drawing once, background before evaluation, sorted by character and file within each."""
    drawings: dict[str, _Drawing] = {}
    for place in places:
        found = _drawings_of_folder(place) if place.is_dir() else _drawings_of_archive(place)
        if not found:
            raise DataError(f"'{place}' holds no drawings (Alphabet/characterNN/*.png); download the archive again")
        if check_counts:
            _check_counts(place, found)
        for drawing in found:
            other = drawings.setdefault(drawing.path, drawing)
            if other.stamp != drawing.stamp and _content(other) != _content(drawing):
                raise DataError(f"'{drawing.path}' differs between '{other.place}' and '{place}'; remove one of them")
    return sorted(drawings.values(), key=lambda d: (d.is_evaluation, d.character, d.path))


def _check_counts(place: Path, drawings: Sequence[_Drawing]) -> None:
    characters = Counter(drawing.character for drawing in drawings)
    counts = len(drawings), len(characters)
    expected = _COUNTS.get(place.name.removesuffix(".zip"))
    if expected is None:  # small sets have five alphabets, and every character has 20 drawings
        alphabets = len({character.split("/")[0] for character in characters})
        if alphabets == 5 and set(characters.values()) == {20}:
            return
        wanted = "20 of each character of 5 alphabets"
    elif counts == expected:
        return
    else:
        wanted = f"{expected[0]:,} of {expected[1]:,}"
    raise DataError(
        f"Omniglot's '{place}' has {counts[0]:,} drawings of {counts[1]:,} characters; published are {wanted}; "
        "download it again, or accept a subset with dataset.table.check_counts=false"
    )


def _drawings_of_archive(file: Path) -> list[_Drawing]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"Omniglot's archive '{file}' is damaged ({error}); download it again") from error
    found = []
    for member in members:
        match = _MEMBER.match(member.filename)
        if match is None or member.filename.startswith("__MACOSX/"):
            continue
        if member.file_size > _MAX_DRAWING_BYTES:
            raise DataError(
                f"'{member.filename}' in '{file}' claims {member.file_size:,} bytes for one drawing; download it again"
            )
        character = f"{match['alphabet']}/{match['character']}"
        is_evaluation = "evaluation" in file.name
        found.append(
            _Drawing(file, member.filename, str(member.CRC), character, f"{character}/{match['file']}", is_evaluation)
        )
    return found


def _drawings_of_folder(folder: Path) -> list[_Drawing]:
    found = []
    for alphabet in subfolders(folder):
        for name in subfolders(folder / alphabet):
            character = f"{alphabet}/{name}"
            if re.fullmatch(r"character\d+", name) is None:
                raise DataError(f"'{folder / character}' is no character (such as character01); move it away")
            for image in images_in(folder / character):
                path = f"{character}/{image}"
                stamp = file_stamp(folder / path)
                found.append(_Drawing(folder, path, stamp, character, path, "evaluation" in folder.name))
    return found


def _content(drawing: _Drawing) -> bytes:
    if drawing.place.is_dir():
        return (drawing.place / drawing.member).read_bytes()
    with zipfile.ZipFile(drawing.place) as archive:
        return archive.read(drawing.member)


def _read_drawings(drawings: Sequence[_Drawing], image_size: int) -> NDArray[np.uint8]:
    """[N, image_size, image_size] uint8, ink 255 on 0."""
    logger.info("reading %d Omniglot drawings; this happens once", len(drawings))
    pixels = np.empty((len(drawings), image_size, image_size), dtype=np.uint8)
    with ExitStack() as stack:
        places = {drawing.place for drawing in drawings}
        archives = {place: stack.enter_context(zipfile.ZipFile(place)) for place in places if place.is_file()}
        for row, drawing in enumerate(drawings):
            archive = archives.get(drawing.place)
            try:
                content = archive.read(drawing.member) if archive else _content(drawing)
                with Image.open(io.BytesIO(content)) as image:
                    grey = image.convert("L").resize((image_size, image_size), Image.Resampling.BOX)
            except (OSError, SyntaxError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                raise DataError(
                    f"'{drawing.member}' in '{drawing.place}' cannot be read ({error}); download the archive again"
                ) from error
            pixels[row] = 255 - np.asarray(grey)  # the originals have black ink on white
    return pixels
