"""Omniglot: handwritten characters of 50 alphabets, read from the published archives, unpacked or not."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.image_table import Listing, Published, halved_roles, table_of
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout
from dmlbench.data.readers.stored_images import StoredImage, content_digest, decoded, images_by_path
from dmlbench.types import ConfigError, DataError, ImageTable, closest, shorten

ARCHIVES = (
    "images_background.zip",
    "images_background_small1.zip",
    "images_background_small2.zip",
    "images_evaluation.zip",
)
_PUBLISHED = Published({"train": (19_280, 964), "test": (13_180, 659)})  # of the full background and evaluation
# Archive -> drawings and characters; those of the second small one are not known.
_COUNTS = {
    "images_background": _PUBLISHED.by_role["train"],
    "images_background_small1": (2_720, 136),
    "images_evaluation": _PUBLISHED.by_role["test"],
}
_VERSION = 1  # increment it whenever the pixels change

logger = logging.getLogger(__name__)


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
        cache_dir: folder that keeps the ``pixels`` [N, image_size, image_size].
        archives: names among ``ARCHIVES``; None takes all that are there, the small background sets only if the
            full one is missing (they are parts of it).
        check_counts: require the published numbers of drawings and characters of each archive. False takes a subset.
    """
    if not 8 <= image_size <= 105:
        raise ConfigError(f"image_size: got {image_size}, expected 8 to 105, the size of Omniglot's drawings.")
    folder, layout = FOLDER.find(root)
    drawings = _find_drawings(_find_places(folder, archives), check_counts=check_counts)
    paths = list(drawings)

    def inverted(image: Image.Image) -> NDArray[np.uint8]:
        grey = image.convert("L").resize((image_size, image_size), Image.Resampling.BOX)
        return 255 - np.asarray(grey)  # the originals have black ink on white

    def build() -> NDArray[np.uint8]:
        logger.info("reading %d Omniglot drawings; this happens once", len(drawings))
        return decoded(drawings.values(), (image_size, image_size), inverted)

    key = {"version": _VERSION, "image_size": image_size, "drawings": content_digest(drawings)}
    pixels, digest = cached_array(cache_dir, "omniglot", key=key, build=build)
    characters = list(dict.fromkeys(map(_character, paths)))
    labels = pd.Index(characters).get_indexer(pd.Index(map(_character, paths)))
    alphabets, alphabet = np.unique([path.split("/")[0] for path in paths], return_inverse=True)
    evaluation = np.array([_is_evaluation(drawing) for drawing in drawings.values()])
    both = bool(evaluation.any() and not evaluation.all())
    role = np.where(evaluation, "test", "train") if both else halved_roles(labels, len(characters))
    cut = alphabets[np.intersect1d(alphabet[role == "train"], alphabet[role == "test"])]  # none of the published halves
    listing = Listing(
        root="",
        paths=paths,
        labels=labels,
        class_names=characters,
        role=role,
        super_labels=alphabet,
        notes=(f"train and test half share {shorten(cut)}: the split cuts an alphabet",) if len(cut) else (),
        name="omniglot",
        layout=layout.description,
        pixels=pixels,
        digest=digest,
    )
    return table_of(listing, published=_PUBLISHED, check_counts=False)


def _find_places(folder: Path, archives: Sequence[str] | None) -> list[Path]:
    """The archives to read, or their unpacked folders, which may be nested in folders of the same name."""
    present = {}
    for name in ARCHIVES:
        unpacked = folder / name.removesuffix(".zip")
        places = (folder / name, unpacked / unpacked.name, unpacked)
        if place := next((place for place in places if place.exists()), None):
            present[name] = place
    if archives is None:
        if "images_background.zip" in present:
            present = {name: place for name, place in present.items() if "_small" not in name}
        return list(present.values())
    for name in archives:
        if name not in ARCHIVES:
            raise ConfigError(f"Omniglot has no archive '{name}': {closest(name, ARCHIVES)}")
        if name not in present:
            raise DataError(f"Omniglot's archive '{name}' is not in '{folder}'. {FOLDER.remedy}.")
    if not archives:
        raise ConfigError(f"archives: got none, expected at least one of {', '.join(ARCHIVES)}.")
    return [present[name] for name in ARCHIVES if name in archives]


def _find_drawings(places: Sequence[Path], *, check_counts: bool) -> dict[str, StoredImage]:
    """Every drawing once by its path, background before evaluation, sorted within each."""
    drawings: dict[str, StoredImage] = {}
    for place in places:
        found = images_by_path(place, r"[^/]+/character\d+/[^/]+")
        if not found:
            raise DataError(f"'{place}' has no drawings (Alphabet/characterNN/*.png). Download the archive again.")
        if check_counts:
            _check_counts(place, found)
        drawings = found | drawings
    return dict(sorted(drawings.items(), key=lambda drawing: (_is_evaluation(drawing[1]), drawing[0])))


def _check_counts(place: Path, drawings: Iterable[str]) -> None:
    characters = Counter(map(_character, drawings))
    counts = characters.total(), len(characters)
    if expected := _COUNTS.get(place.name.removesuffix(".zip")):
        is_whole, wanted = counts == expected, f"{expected[0]:,} of {expected[1]:,}"
    else:
        num_alphabets = len({character.split("/")[0] for character in characters})
        is_whole = num_alphabets == 5 and set(characters.values()) == {20}
        wanted = "20 of each character of 5 alphabets"
    if not is_whole:
        raise DataError(
            f"Omniglot in '{place}': got {counts[0]:,} drawings of {counts[1]:,} characters, expected the published "
            f"{wanted}. Download it again, or accept a subset with dataset.table.check_counts=false."
        )


def _is_evaluation(drawing: StoredImage) -> bool:
    return "evaluation" in drawing.place.name


def _character(path: str) -> str:
    return path.rpartition("/")[0]


FOLDER = DataFolder(
    name="omniglot",
    title="Omniglot",
    usual_names=("omniglot", "omniglot_py", "omniglot_master", "omniglot_main", "python"),
    layouts=(
        Layout(
            "images_background.zip or images_evaluation.zip, unpacked or not",
            ("|".join((*ARCHIVES, *(name.removesuffix(".zip") for name in ARCHIVES))),),
            lambda folder: _find_drawings(_find_places(folder, None), check_counts=False),
        ),
    ),
    remedy="Download images_background.zip and images_evaluation.zip from github.com/brendenlake/omniglot (folder "
    "python)",
    published=_PUBLISHED,
    home="https://github.com/brendenlake/omniglot",
    terms="MIT licence",
    citation="B. Lake, R. Salakhutdinov, J. Tenenbaum, Human-level concept learning through probabilistic program "
    "induction, Science 350, 2015",
    alternatives=(
        (
            Archive("images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
            Archive("images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
        ),
        (Archive("images_background_small1.zip"),),
        (Archive("images_background_small2.zip"),),
    ),
    by_hand="get images_background.zip and images_evaluation.zip from github.com/brendenlake/omniglot (folder python)",
    mirrors=("https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",),
    is_read_packed=True,
)
