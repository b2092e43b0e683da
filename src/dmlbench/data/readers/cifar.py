"""CIFAR-10 and CIFAR-100: 60,000 images of 32 x 32, from the "python version" or from folders of images."""

import logging
import tarfile
import zlib
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.image_table import Listing, Published, table_of
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.readers.files import ORIGINAL_FILE, read_file, read_pickle
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout, read_names, resolve
from dmlbench.data.readers.stored_images import StoredImage, content_digest, decoded, file_stamp, images_by_path
from dmlbench.types import DataError, ImageTable

SIDE = 32
_WIDTH = SIDE * SIDE * 3

# Alphabetical, which is the published order of both.
CLASSES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES_100 = read_names("cifar100")
_VERSION = 1  # increment it whenever the cached rows change
_NO_SUPER_CLASS = 255
_DAMAGED = (OSError, EOFError, tarfile.TarError, LZMAError, zlib.error)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cifar(DataFolder):
    """One of the two data sets; its layouts read to the path of the python version, or to images by path.

    ``folder``, ``batches`` and ``meta`` are files of the python version, whose keys begin with ``prefix``.
    """

    classes: tuple[str, ...]
    folder: str
    batches: tuple[str, ...]
    meta: str
    prefix: Literal["", "fine_"]

    def notes(self, root: str | Path) -> tuple[str, ...]:
        """Whether there are fewer images than published, by names and sizes of files; archives are not opened."""
        folder, layout = self.find(root)
        found: Path | dict[str, StoredImage] = layout.read(folder)
        if isinstance(found, dict):
            return self.published.subset_note(len(found))
        if found.is_file():
            return ()
        most = sum((found / name).stat().st_size for name in self.batches) // _WIDTH
        return tuple(note.replace("subset:", "subset: at most") for note in self.published.subset_note(most))


def _cifar(
    name: str, title: str, classes: tuple[str, ...], archive: Archive, *, folder: str, batches: tuple[str, ...],
    **keys: Any,
) -> Cifar:  # fmt: skip
    stem = archive.name.removesuffix(".tar.gz")
    archives = "|".join(f"{stem}.{suffix}" for suffix in ("tar.gz", "tar.xz", "tar.bz2", "tgz", "tar"))
    zips = f"{name}.zip|{name}[!0-9]*.zip"
    tree = f"train/{classes[0]}", f"test/{classes[0]}"

    def images(place: Path) -> dict[str, StoredImage]:
        found = images_by_path(place, rf"(?:train|test)/(?:{'|'.join(classes)})/[^/]+")
        if not found:
            raise DataError(f"'{place}' has no images of {title} in train/<class> and test/<class>. Put them there.")
        return dict(sorted(found.items()))

    return Cifar(
        name=name,
        title=title,
        usual_names=(name, f"{name}_images"),
        layouts=(
            Layout(f"the python version in {folder}", tuple(f"{folder}/{b}" for b in batches), lambda at: at / folder),
            Layout("the python version's files", (*batches, keys["meta"]), lambda at: at),
            Layout(f"the python version's archive ({archive.name})", (archives,), lambda at: resolve(at, archives)),
            Layout(f"images in train and test, such as {tree[0]}", tree, images),
            Layout(f"a {name}*.zip of images in train and test", (zips,), lambda at: images(resolve(at, zips))),
        ),
        remedy=f"Put {archive.name} there, unpacked or not",
        published=Published({role: (30_000, len(classes) // 2) for role in ("train", "test")}),
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        terms="none stated; cite the report",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        alternatives=((archive,),),
        by_hand=f"get {archive.name} (the python version) from www.cs.toronto.edu/~kriz/cifar.html",
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        is_read_packed=True,
        classes=classes,
        folder=folder,
        batches=batches,
        **keys,
    )


FOLDER_10 = _cifar(
    "cifar10",
    "CIFAR-10",
    CLASSES_10,
    Archive("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071),
    folder="cifar-10-batches-py",
    batches=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    meta="batches.meta",
    prefix="",
)
FOLDER_100 = _cifar(
    "cifar100",
    "CIFAR-100",
    CLASSES_100,
    Archive("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
    folder="cifar-100-python",
    batches=("train", "test"),
    meta="meta",
    prefix="fine_",
)


def cifar10(root: str | Path, *, cache_dir: str | Path, check_counts: bool = True) -> ImageTable:
    """Ten classes of things; metric learning trains on the first five and tests on the others.

    The published training and test parts are merged: they are the split for classification. The table has ``pixels``
    [N, 32, 32, 3], kept in ``cache_dir``.
    """
    return _table(FOLDER_10, root, cache_dir, check_counts)


def cifar100(root: str | Path, *, cache_dir: str | Path, check_counts: bool = True) -> ImageTable:
    """A hundred classes in twenty super-classes; the first fifty train, the others test. Otherwise as ``cifar10``.

    ``super_labels`` are the coarse labels (the python version has them, folders of images do not).
    """
    return _table(FOLDER_100, root, cache_dir, check_counts)


def _table(data: Cifar, root: str | Path, cache_dir: str | Path, check_counts: bool) -> ImageTable:
    folder, layout = data.find(root)
    found: Path | dict[str, StoredImage] = layout.read(folder)
    key: dict[str, Any]
    if isinstance(found, dict):
        name, key = f"{data.name}-images", {"images": content_digest(found)}
    else:
        files = [found / name for name in (*data.batches, data.meta)] if found.is_dir() else [found]
        name, key = data.name, {"files": [[file.name, file_stamp(file)] for file in files]}

    def build() -> NDArray[np.uint8]:
        logger.info("reading %s from %s; this happens once", data.title, folder)
        return _rows_of_images(data, found) if isinstance(found, dict) else _rows_of_batches(data, found)

    rows, digest = cached_array(cache_dir, name, key={"version": _VERSION, **key}, build=build)
    num_train = len(rows) * 5 // 6  # of the split for classification, which only names the images here
    numbered = [f"train/{row:05d}" for row in range(num_train)]
    numbered += [f"test/{row:05d}" for row in range(len(rows) - num_train)]
    coarse = rows[:, _WIDTH + 1].astype(np.int64)
    listing = Listing(
        root="",
        paths=list(found) if isinstance(found, dict) else numbered,
        labels=rows[:, _WIDTH].astype(np.int64),
        class_names=data.classes,
        super_labels=None if (coarse == _NO_SUPER_CLASS).any() else coarse,
        name=data.name,
        layout=f"{layout.description}; its parts train and test, a split for classification, are merged",
        pixels=np.asarray(rows[:, :_WIDTH]).reshape(-1, SIDE, SIDE, 3),
        digest=digest,
    )
    table = table_of(listing, published=data.published, check_counts=check_counts, place=folder)
    per_class = np.bincount(table.labels)
    if check_counts and len(set(per_class.tolist())) > 1:
        fewest = int(per_class.argmin())
        raise DataError(
            f"{data.title} in '{folder}': got {per_class[fewest]:,} images of '{data.classes[fewest]}', expected "
            f"{len(table) // len(data.classes):,} of each class. Get the original."
        )
    return table


def _rows_of_batches(data: Cifar, place: Path) -> NDArray[np.uint8]:
    """Rows [N, pixels + label + super label] of the python version in a folder or archive."""
    names = (*data.batches, data.meta)
    members = {name: read_file(place / name) for name in names} if place.is_dir() else _unpacked(data, place)
    meta = read_pickle(members[data.meta], name=f"{place} ({data.meta})", encoding="latin1")
    classes = meta.get(f"{data.prefix}label_names") if isinstance(meta, dict) else None
    if not isinstance(classes, list) or classes != list(data.classes):
        raise DataError(
            f"{data.meta} of {data.title} in '{place}' does not have the published class names. {ORIGINAL_FILE}."
        )
    return np.concatenate([_batch_rows(data, members[name], f"{place} ({name})") for name in data.batches])


def _unpacked(data: Cifar, archive: Path) -> dict[str, bytes]:
    """The members by name; nothing is written to disk."""
    wanted = {f"{data.folder}/{name}": name for name in (*data.batches, data.meta)}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is not None and (stream := tar.extractfile(member)) is not None:
                    found[name] = stream.read()
    except _DAMAGED as error:
        raise DataError(f"archive '{archive}' of {data.title} is damaged ({error}). Download it again.") from error
    if lacking := set(wanted.values()) - set(found):
        raise DataError(f"archive '{archive}' of {data.title} lacks {', '.join(sorted(lacking))}. Download it again.")
    return found


def _batch_rows(data: Cifar, content: bytes, name: str) -> NDArray[np.uint8]:
    value = read_pickle(content, name=name, encoding="latin1")
    try:
        pixels = np.asarray(value["data"])
        labels = np.asarray(value[f"{data.prefix}labels"])
        coarse = np.asarray(value["coarse_labels"]) if data.prefix else np.full(len(labels), _NO_SUPER_CLASS)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"'{name}' is not a batch of {data.title} ({error!r}). {ORIGINAL_FILE}.") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _WIDTH) or coarse.shape != labels.shape:
        raise DataError(
            f"'{name}': got data {pixels.shape} of {pixels.dtype} and {len(labels)} labels, expected [N, {_WIDTH}] "
            f"of uint8 and N labels. {ORIGINAL_FILE}."
        )
    for what, values, limit in (("labels", labels, len(data.classes)), ("coarse labels", coarse, 256)):
        if not np.issubdtype(values.dtype, np.integer) or values.min(initial=0) < 0 or values.max(initial=0) >= limit:
            raise DataError(f"'{name}' has {what} outside of [0, {limit}). {ORIGINAL_FILE}.")
    planes = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1).reshape(len(pixels), -1)  # [N, HWC]
    return np.column_stack([planes, labels.astype(np.uint8), coarse.astype(np.uint8)])


def _rows_of_images(data: Cifar, images: dict[str, StoredImage]) -> NDArray[np.uint8]:
    """Rows, as ``_rows_of_batches``, of images in ``train/<class>`` and ``test/<class>``, in a folder or in a zip."""

    def rgb(image: Image.Image) -> NDArray[np.uint8]:
        if image.size != (SIDE, SIDE):
            raise ValueError(f"got {image.width} x {image.height} pixels, expected {SIDE} x {SIDE}")
        return np.asarray(image.convert("RGB")).reshape(-1)

    labels = np.array([data.classes.index(path.split("/")[1]) for path in images], dtype=np.uint8)
    return np.column_stack([decoded(images.values(), (_WIDTH,), rgb), labels, np.full_like(labels, _NO_SUPER_CLASS)])
