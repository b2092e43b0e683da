"""CUB-200-2011 and CUB-200 of 2010 (birds), as lists and images or as bare class folders.

Both have the same class names and call an image ``<Species>_<number>_<id>.jpg``. Ids of 2010 are Flickr's, of seven
digits or more (``xxx`` where unknown); 2011 renumbers its images with at most six digits.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published
from dmlbench.data.readers.files import read_list
from dmlbench.data.readers.layouts import SPLIT_FOLDERS, Archive, DataFolder, Layout, first_match, images_of_classes
from dmlbench.types import DataError, ImageTable, Originals

_NUM_CLASSES = 200
_CLASS_FOLDER = "[0-9][0-9][0-9].*"
_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")  # of 2011
_ID = re.compile(r"_[0-9]{4}_([0-9]+|xxx)\.[A-Za-z]+", re.ASCII)
_LONGEST_ID_OF_2011 = 6  # digits


@dataclass(frozen=True, kw_only=True)
class Edition(DataFolder):
    """The folder of one of the two editions, never confused with the other's."""

    year: int

    def table_of(self, listing: Listing, layout: Layout, *, check_counts: bool) -> ImageTable:
        years = Counter(map(year_of, listing.paths))
        if own := years[self.year]:
            if others := years[2011 if self.year == 2010 else 2010]:
                raise DataError(
                    f"'{listing.root}' mixes {own:,} images of {self.title} and {others:,} of the other edition, whose "
                    "classes have the same names. Keep one edition there."
                )
        elif len(listing.paths) != self.published.num_images and layout.read is not _of_lists:
            listing = replace(listing, notes=("of unknown edition, 2010 or 2011",))
        return super().table_of(listing, layout, check_counts=check_counts)


def cub200(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes; the first 100 of 200 train, the others test (Oh Song et al. 2016).

    The split for classification is ignored (``train_test_split.txt``) or merged (folders ``train`` and ``test``).

    Source: halves by H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    return OF_2011.table(root, check_counts=check_counts)


def year_of(path: str) -> int | None:
    """The edition that an image's name belongs to, if any."""
    match = _ID.search(path)
    if match is None:
        return None
    return 2011 if match[1].isdigit() and len(match[1]) <= _LONGEST_ID_OF_2011 else 2010


def _of_lists(folder: Path) -> Listing:
    images = read_list(folder / "images.txt", ("image_id", "path"))
    labels = read_list(folder / "image_class_labels.txt", ("image_id", "class_id"))
    classes = read_list(folder / "classes.txt", ("class_id", "name"))
    for rows, column in ((images, "image_id"), (labels, "image_id"), (classes, "class_id")):
        rows.numbers(column)
        rows.check_unique(column)
    labels.check_known("class_id", classes["class_id"], "the ids in classes.txt")
    images.check_known("image_id", labels["image_id"], f"the ids in {labels.file.name}")
    classes.check("class_id", classes.numbers("class_id") <= _NUM_CLASSES, f"1 to {_NUM_CLASSES}")
    class_by_image = dict(zip(labels["image_id"], labels.numbers("class_id"), strict=True))
    names = dict(zip(classes.numbers("class_id").tolist(), classes["name"], strict=True))
    has_images_folder = first_match(folder, f"images/{_CLASS_FOLDER}") or not first_match(folder, _CLASS_FOLDER)
    return Listing(
        root=folder / "images" if has_images_folder else folder,
        paths=images["path"],
        labels=np.array([class_by_image[image] for image in images["image_id"]]) - 1,
        class_names=[names.get(i, "") for i in range(1, _NUM_CLASSES + 1)],
        originals=_originals(folder / "bounding_boxes.txt", images["image_id"]),
    )


def _originals(file: Path, image_ids: Sequence[str]) -> Originals:
    """The boxes, if their list is there. Of 51 published images, 48 JPEGs keep colors at full resolution."""
    if not file.is_file():
        return Originals(full_color=True)
    rows = read_list(file, ("image_id", "x", "y", "width", "height"))
    corner, size = np.split(rows.decimals(("x", "y", "width", "height")), 2, axis=1)
    boxes = rows.boxes("image_id", np.concatenate([corner, corner + size], axis=1), image_ids)
    return Originals(boxes=boxes, boxes_from=file.name, full_color=True)


def _of_folders(folder: Path, *, base: str, parts: Sequence[str], title: str) -> Listing:
    root = folder / base
    names: dict[int, str] = {}

    def class_of(place: Path) -> int:
        match = re.fullmatch(r"(\d{3})\..+", place.name, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= _NUM_CLASSES:
            raise DataError(
                f"'{place}' has images but is not a class of {title}, 001 to 200. Rename it or move it away."
            )
        if names.setdefault(int(match[1]), place.name) != place.name:
            both = f"'{names[int(match[1])]}' and '{place.name}'"
            raise DataError(f"class {int(match[1])} of {title} has the folders {both} in '{root}'. Keep one.")
        return int(match[1])

    paths, classes = images_of_classes(root, class_of, parts=parts)
    for image, count in Counter(path.split("/", 1)[1] for path in paths if parts != ("",)).items():
        if count > 1:
            raise DataError(f"'{image}' is in more than one of {', '.join(parts)} in '{root}'. Keep one copy.")
    return Listing(
        root=root,
        paths=paths,
        labels=np.array(classes, dtype=np.int64) - 1,
        class_names=[names.get(i, "") for i in range(1, _NUM_CLASSES + 1)],
        originals=Originals(),
    )


def _is_meant(folder: Path, *, base: str, parts: Sequence[str], year: int) -> bool:
    """Whether class folders may belong to an edition: no incomplete lists, and not only images of the other edition."""
    if any((folder / name).is_file() for name in _LISTS):
        return False
    files = (file.name for part in parts for file in (folder / base / part).glob(f"{_CLASS_FOLDER}/*"))
    years = {year_of(name) for name in files}
    return year in years or years <= {None}


def _folder_layouts(year: int, title: str) -> tuple[Layout, ...]:
    def layout(description: str, base: str, parts: Sequence[str]) -> Layout:
        markers = tuple("/".join(filter(None, (base, part, _CLASS_FOLDER))) for part in parts[:2])
        read = partial(_of_folders, base=base, parts=parts, title=title)
        return Layout(description, markers, read, partial(_is_meant, base=base, parts=parts, year=year))

    return (
        layout("images with class folders such as 001.Black_footed_Albatross", "images", ("",)),
        layout("class folders such as 001.Black_footed_Albatross", "", ("",)),
        layout("class folders in train and test", "", SPLIT_FOLDERS),
        layout("class folders in images/train and images/test", "images", SPLIT_FOLDERS),
    )


_EITHER = ("cub200", "cub", "cub_200", "caltech_ucsd_birds")  # used for folders of either edition
OF_2010 = Edition(
    name="cub200_2010",
    title="CUB-200-2010",
    usual_names=(
        *("cub200_2010", "cub_200_2010", "cub2002010", "caltech_ucsd_birds_200_2010", "caltech_ucsd_birds_200"),
        *_EITHER,
    ),
    layouts=_folder_layouts(2010, "CUB-200-2010"),
    remedy="Unpack the images.tgz of 2010 there (dataset=cub200 reads CUB-200-2011)",
    year=2010,
    published=Published({"train": (2_990, 100), "test": (3_043, 100)}),
    home="http://www.vision.caltech.edu/visipedia/CUB-200.html",
    terms="non-commercial research and education",
    citation="P. Welinder et al., Caltech-UCSD Birds 200, CNS-TR-2010-001, Caltech 2010",
    alternatives=((Archive("images.tgz"),),),
    by_hand="get the images.tgz of 2010 from the authors or a mirror: the publisher's page has gone",
)
OF_2011 = Edition(
    name="cub200",
    title="CUB-200-2011",
    usual_names=(*_EITHER, "cub_200_2011", "cub200_2011", "cub2002011", "caltech_ucsd_birds_200_2011"),
    layouts=(
        Layout(f"CUB_200_2011 with {', '.join(_LISTS)} and images", (*_LISTS, f"images|{_CLASS_FOLDER}"), _of_lists),
        *_folder_layouts(2011, "CUB-200-2011"),
    ),
    remedy="Unpack CUB_200_2011.tgz there (dataset=cub200_2010 reads CUB-200-2010)",
    year=2011,
    published=Published({"train": (5_864, 100), "test": (5_924, 100)}),
    home="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    terms="non-commercial research and education",
    citation="C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, CNS-TR-2011-001, Caltech 2011",
    alternatives=((Archive("CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78", 1_150_585_339),),),
    by_hand="get CUB_200_2011.tgz from data.caltech.edu/records/65de6-vp158",
    mirrors=("https://data.caltech.edu/records/65de6-vp158/files/",),
)
