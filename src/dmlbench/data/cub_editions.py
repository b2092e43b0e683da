"""CUB-200 of 2010 and CUB-200-2011: two data sets whose classes have the same names, told apart by their file names.

Both call an image ``<Species>_<number>_<id>.jpg``. Ids of 2010 are Flickr's, of seven digits or more (``xxx`` where it
is not known); 2011 numbers its images anew, with six digits at most. No image file has the same name in both.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmlbench.data.layouts import SPLIT_FOLDERS, Layout, images_in, locate, subfolders
from dmlbench.data.table import Listing
from dmlbench.types import DataError

CLASS_FOLDER = "[0-9][0-9][0-9].*"
_ID = re.compile(r"_[0-9]{4}_([0-9]+|xxx)\.[A-Za-z]+", re.ASCII)
_LONGEST_ID_OF_2011 = 6  # digits


@dataclass(frozen=True)
class Edition:
    """One of the two.

    Attributes:
        year: of publication.
        name: the data set's name in the configuration.
        title: in messages.
        num_images: published.
        usual_names: names that its folder has in the wild; some stand for either edition.
        remedy: how to get it, for messages.
    """

    year: int
    name: str
    title: str
    num_images: int
    usual_names: tuple[str, ...]
    remedy: str


_EITHER = ("cub200", "cub", "cub_200", "caltech_ucsd_birds")
OF_2010 = Edition(
    year=2010,
    name="cub200_2010",
    title="CUB-200-2010",
    num_images=6_033,
    usual_names=(
        *("cub200_2010", "cub_200_2010", "cub2002010", "caltech_ucsd_birds_200_2010", "caltech_ucsd_birds_200"),
        *_EITHER,
    ),
    remedy="unpack the images.tgz of 2010 there",
)
OF_2011 = Edition(
    year=2011,
    name="cub200",
    title="CUB-200-2011",
    num_images=11_788,
    usual_names=(*_EITHER, "cub_200_2011", "cub200_2011", "cub2002011", "caltech_ucsd_birds_200_2011"),
    remedy="unpack CUB_200_2011.tgz there",
)


def folder_layouts(edition: Edition) -> tuple[Layout, ...]:
    """The layouts without lists. Folders whose images are all of the other edition are passed over."""

    def is_no_other(folder: Path) -> bool:
        years = {year_of(name) for name in _image_names(folder)}
        return edition.year in years or years <= {None}

    images, split = (f"images/{CLASS_FOLDER}",), (f"train/{CLASS_FOLDER}", f"test/{CLASS_FOLDER}")
    markers = {
        "images": ("images with class folders such as 001.Black_footed_Albatross", images),
        "folders": ("class folders such as 001.Black_footed_Albatross", (CLASS_FOLDER,)),
        "split": ("class folders in train and test", split),
        "split_images": ("class folders in images/train and images/test", tuple(f"images/{part}" for part in split)),
    }
    return tuple(Layout(name, words, places, is_no_other) for name, (words, places) in markers.items())


def locate_edition(root: str | Path, edition: Edition, layouts: Sequence[Layout]) -> tuple[Path, Layout]:
    """Like ``locate``.

    Raises:
        DataError: it is not there; where the other edition is, the message says so.
    """

    def located(sought: Edition, layouts: Sequence[Layout]) -> tuple[Path, Layout]:
        names, remedy = sought.usual_names, sought.remedy
        return locate(root, title=sought.title, usual_names=names, layouts=layouts, remedy=remedy)

    try:
        return located(edition, layouts)
    except DataError:
        other = OF_2011 if edition is OF_2010 else OF_2010
        try:
            folder, _ = located(other, folder_layouts(other))
        except DataError:
            folder = None
        if folder is None or not any(year_of(name) == other.year for name in _image_names(folder)):
            raise
    raise DataError(f"'{folder}' holds {_confused(other, edition)}")


def check_edition(listing: Listing, edition: Edition) -> Listing:
    """The listing, unless its file names, or the number of its images, are those of the other edition.

    Raises:
        DataError: they are, or there are images of both.
    """
    other = OF_2011 if edition is OF_2010 else OF_2010
    names = {year: [path for path in listing.paths if year_of(path) == year] for year in (edition.year, other.year)}
    if names[edition.year] and names[other.year]:
        counts = " and ".join(f"{len(found):,} of {year} (such as {found[0]})" for year, found in names.items())
        raise DataError(
            f"'{listing.root}' mixes images of {edition.title} and {other.title}: {counts}; keep one edition there"
        )
    if names[other.year] or (not names[edition.year] and len(listing.paths) == other.num_images):
        raise DataError(f"'{listing.root}' holds {_confused(other, edition)}")
    return listing


def year_of(path: str) -> int | None:
    """The edition that the name of an image is of, or None where it is of neither."""
    match = _ID.search(path)
    if match is None:
        return None
    return 2011 if match[1].isdigit() and len(match[1]) <= _LONGEST_ID_OF_2011 else 2010


def _confused(found: Edition, wanted: Edition) -> str:
    return (
        f"{found.title} ({found.num_images:,} images), not {wanted.title} ({wanted.num_images:,}), whose classes have "
        f"the same names; choose dataset={found.name}, or {wanted.remedy}"
    )


def _image_names(folder: Path) -> list[str]:
    """Names of the images in the class folders of any layout."""
    bases = [folder, folder / "images"]
    bases += [base / part for base in bases for part in SPLIT_FOLDERS]
    return [
        name
        for base in bases
        if base.is_dir()
        for part in subfolders(base)
        if re.match(r"\d{3}\.", part, re.ASCII)
        for name in images_in(base / part)
    ]
