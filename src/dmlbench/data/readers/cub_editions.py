"""CUB-200 of 2010 and CUB-200-2011: two data sets whose classes have the same names, distinguished by their file names.

Both call an image ``<Species>_<number>_<id>.jpg``. Ids of 2010 are Flickr's, of seven digits or more (``xxx`` where
unknown); 2011 renumbers its images with at most six digits. No image file has the same name in both.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, table_of_files
from dmlbench.data.readers.layouts import SPLIT_FOLDERS, DataFolder, Layout, images_by_folder, images_in, subfolders
from dmlbench.types import DataError, ImageTable, Originals

NUM_TRAIN_CLASSES = 100
NUM_CLASSES = 200
CLASS_FOLDER = "[0-9][0-9][0-9].*"
LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")  # of 2011
_ID = re.compile(r"_[0-9]{4}_([0-9]+|xxx)\.[A-Za-z]+", re.ASCII)
_LONGEST_ID_OF_2011 = 6  # digits


@dataclass(frozen=True)
class Listed:
    """What lists or folders name: paths below ``root``, the published class of each, and the name of each class."""

    root: Path
    paths: list[str]
    class_of: list[int]
    names: dict[int, str]
    originals: Originals = field(default_factory=Originals)


@dataclass(frozen=True)
class Edition(DataFolder):
    """The folder of one of the two editions, never confused with the other's.

    Attributes:
        year: of publication.
        name: the data set's name in the configuration.
        published: its counts.
    """

    year: int
    name: str
    published: Published

    def find(self, root: str | Path) -> tuple[Path, Layout]:
        """The folder and its layout, as for any data set.

        Raises:
            DataError: it is not there; if the other edition is, the message says so.
        """
        try:
            return super().find(root)
        except DataError:
            other = _other(self)
            try:
                folder, _ = DataFolder.find(other, root)
            except DataError:
                folder = None
            if folder is None or not any(year_of(name) == other.year for name in _image_names(folder)):
                raise
        raise DataError(f"'{folder}' holds {_confused(other, self)}")

    def table(self, listed: Listed, layout: Layout, *, check_counts: bool) -> ImageTable:
        """The table of what lists or folders name; the first 100 of 200 classes train, the others test.

        Raises:
            DataError: file names, or the number of images, are those of the other edition, there are images of both,
                images are missing, or counts differ from the published ones and ``check_counts`` insists on these.
        """
        is_known = self._check(listed.root, listed.paths) or layout.name == "lists"  # which only 2011 has
        ids = sorted(listed.names)
        listing = Listing(
            name=self.name,
            root=listed.root,
            layout=layout.description,
            paths=listed.paths,
            labels=np.searchsorted(ids, listed.class_of).astype(np.int64),
            class_names=[listed.names[i] for i in ids],
            role=np.where(np.array(listed.class_of) <= NUM_TRAIN_CLASSES, "train", "test"),
            originals=listed.originals,
            notes=() if is_known else ("of unknown edition, 2010 or 2011",),
        )
        return table_of_files(listing, published=self.published, check_counts=check_counts)

    def _check(self, root: Path, paths: list[str]) -> bool:
        """Refuse the other edition; whether the images are known to be of this one."""
        other = _other(self)
        of_year = {year: [path for path in paths if year_of(path) == year] for year in (self.year, other.year)}
        if all(of_year.values()):
            counts = " and ".join(f"{len(found):,} of {year} (such as {found[0]})" for year, found in of_year.items())
            raise DataError(
                f"'{root}' mixes images of {self.title} and {other.title}: {counts}; keep one edition there"
            )
        if of_year[other.year] or (not of_year[self.year] and len(paths) == other.published.num_images):
            raise DataError(f"'{root}' holds {_confused(other, self)}")
        return bool(of_year[self.year]) or len(paths) == self.published.num_images


def listed_in_folders(folder: Path, layout: Layout, edition: Edition) -> Listed:
    """What the class folders of either edition hold.

    Raises:
        DataError: a folder is no class, a class has two folders, or an image is in two parts of a split.
    """
    root = folder / "images" if layout.name in ("images", "split_images") else folder
    parts = [f"{part}/" for part in SPLIT_FOLDERS if (root / part).is_dir()] if "split" in layout.name else [""]
    names: dict[int, str] = {}
    place_of: dict[str, str] = {}
    paths, class_of = [], []
    for part in parts:
        for name, images in images_by_folder(root / part).items():
            class_id = _class_id(root / part / name, edition)
            if names.setdefault(class_id, name) != name:
                raise DataError(
                    f"class {class_id} of {edition.title} has the folders '{names[class_id]}' and '{name}' in "
                    f"'{root}'; keep the one of the original"
                )
            for image in images:
                path = f"{part}{name}/{image}"
                if (other := place_of.setdefault(f"{name}/{image}", path)) != path:
                    raise DataError(f"'{path}' lies in '{root}' a second time as '{other}'; keep one of them")
                paths.append(path)
                class_of.append(class_id)
    return Listed(root, paths, class_of, names)


def year_of(path: str) -> int | None:
    """The edition that an image's name belongs to, or None if it is neither."""
    match = _ID.search(path)
    if match is None:
        return None
    return 2011 if match[1].isdigit() and len(match[1]) <= _LONGEST_ID_OF_2011 else 2010


def _class_id(folder: Path, edition: Edition) -> int:
    match = re.fullmatch(r"(\d{3})\..+", folder.name, re.ASCII)
    if match is None:
        raise DataError(
            f"'{folder}' holds images but is no class of {edition.title} (such as 001.Black_footed_Albatross); rename "
            "it as the original or move it away"
        )
    class_id = int(match[1])
    if not 1 <= class_id <= NUM_CLASSES:
        raise DataError(
            f"'{folder}' is class {class_id}, but those of {edition.title} count from 1 to {NUM_CLASSES}; use the "
            "original names"
        )
    return class_id


def _folder_layouts(year: int) -> tuple[Layout, ...]:
    """The layouts without lists. Folders whose images are all of the other edition are skipped."""

    def is_meant(folder: Path) -> bool:
        # Where some of the lists are present, the layout with lists is meant, and the others are missing.
        if any((folder / name).is_file() for name in LISTS):
            return False
        years = {year_of(name) for name in _image_names(folder)}
        return year in years or years <= {None}

    images, split = (f"images/{CLASS_FOLDER}",), (f"train/{CLASS_FOLDER}", f"test/{CLASS_FOLDER}")
    markers = {
        "images": ("images with class folders such as 001.Black_footed_Albatross", images),
        "folders": ("class folders such as 001.Black_footed_Albatross", (CLASS_FOLDER,)),
        "split": ("class folders in train and test", split),
        "split_images": ("class folders in images/train and images/test", tuple(f"images/{part}" for part in split)),
    }
    return tuple(Layout(name, words, places, is_meant) for name, (words, places) in markers.items())


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


def _confused(found: Edition, wanted: Edition) -> str:
    counts = [edition.published.num_images for edition in (found, wanted)]
    return (
        f"{found.title} ({counts[0]:,} images), not {wanted.title} ({counts[1]:,}), whose classes have the same names; "
        f"choose dataset={found.name}, or {wanted.remedy}"
    )


_EITHER = ("cub200", "cub", "cub_200", "caltech_ucsd_birds")  # used for folders of either edition
OF_2010 = Edition(
    title="CUB-200-2010",
    usual_names=(
        *("cub200_2010", "cub_200_2010", "cub2002010", "caltech_ucsd_birds_200_2010", "caltech_ucsd_birds_200"),
        *_EITHER,
    ),
    layouts=_folder_layouts(2010),
    remedy="unpack the images.tgz of 2010 there",
    year=2010,
    name="cub200_2010",
    published=Published({"train": (2_990, 100), "test": (3_043, 100)}),
)
OF_2011 = Edition(
    title="CUB-200-2011",
    usual_names=(*_EITHER, "cub_200_2011", "cub200_2011", "cub2002011", "caltech_ucsd_birds_200_2011"),
    layouts=(
        Layout("lists", f"CUB_200_2011 with {', '.join(LISTS)} and images", (*LISTS, f"images|{CLASS_FOLDER}")),
        *_folder_layouts(2011),
    ),
    remedy="unpack CUB_200_2011.tgz there",
    year=2011,
    name="cub200",
    published=Published({"train": (5_864, 100), "test": (5_924, 100)}),
)


def _other(edition: Edition) -> Edition:
    return OF_2011 if edition is OF_2010 else OF_2010
