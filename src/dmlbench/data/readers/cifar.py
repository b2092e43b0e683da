"""CIFAR-10 and CIFAR-100: 60,000 images of 32 x 32, from the "python version" or from folders of images."""

import hashlib
import io
import logging
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from lzma import LZMAError
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.image_table import Published, check_published, differing_counts, halved_roles, make_table
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.readers.layouts import DataFolder, Layout, file_stamp, read_names, resolve
from dmlbench.data.readers.safe_pickle import read_pickle
from dmlbench.types import DataError, ImageTable

SIDE = 32
PUBLISHED_10 = Published({"train": (30_000, 5), "test": (30_000, 5)})
PUBLISHED_100 = Published({"train": (30_000, 50), "test": (30_000, 50)})

# Alphabetical, which is the published order of both.
CLASSES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES_100 = read_names("cifar100")
_VERSION = 1  # increment it whenever the cached rows change
_MAX_MEMBER_BYTES = 2**28
_NO_SUPER_CLASS = 255
_DAMAGED = (OSError, EOFError, tarfile.TarError, LZMAError, zipfile.BadZipFile, zlib.error, SyntaxError, ValueError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kind:
    """What distinguishes the two data sets."""

    name: str
    title: str
    batches: tuple[str, ...]  # members of the python version, in published order
    meta: str
    labels: str
    super_labels: str | None
    names: str
    classes: tuple[str, ...]
    folder: str
    published: Published

    @property
    def archives(self) -> str:
        stem = self.folder.replace("-batches-py", "-python")
        return "|".join(f"{stem}.{suffix}" for suffix in ("tar.gz", "tar.xz", "tar.bz2", "tgz", "tar"))

    @property
    def zips(self) -> str:
        return f"{self.name}.zip|{self.name}[!0-9]*.zip"

    @property
    def place(self) -> DataFolder:
        layouts = (
            Layout("folder", f"the python version in {self.folder}", tuple(f"{self.folder}/{b}" for b in self.batches)),
            Layout("bare", "the python version's files", (*self.batches, self.meta)),
            Layout("archive", f"the python version's archive ({self.archives.split('|')[0]})", (self.archives,)),
            Layout(
                "tree", f"images in train and test, such as train/{self.classes[0]}",
                (f"train/{self.classes[0]}", f"test/{self.classes[0]}"),
            ),
            Layout("zip", f"a {self.name}*.zip of images in train and test", (self.zips,)),
        )  # fmt: skip
        usual_names = (self.name, f"{self.name}_images")
        remedy = f"put {self.archives.split('|')[0]} there, unpacked or not"
        return DataFolder(self.title, usual_names, layouts, remedy)


_CIFAR10 = _Kind(
    name="cifar10",
    title="CIFAR-10",
    batches=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    meta="batches.meta",
    labels="labels",
    super_labels=None,
    names="label_names",
    classes=CLASSES_10,
    folder="cifar-10-batches-py",
    published=PUBLISHED_10,
)
_CIFAR100 = _Kind(
    name="cifar100",
    title="CIFAR-100",
    batches=("train", "test"),
    meta="meta",
    labels="fine_labels",
    super_labels="coarse_labels",
    names="fine_label_names",
    classes=CLASSES_100,
    folder="cifar-100-python",
    published=PUBLISHED_100,
)
FOLDER_10, FOLDER_100 = _CIFAR10.place, _CIFAR100.place


def cifar10(root: str | Path, *, cache_dir: str | Path, check_counts: bool = True) -> ImageTable:
    """Ten classes of things; metric learning trains on the first five and tests on the others.

    The published training and test parts are merged: they are the split for classification.

    Args:
        root: folder of the data set, or one that holds it.
        cache_dir: folder that keeps the pixels as one array.
        check_counts: insist on 60,000 images, 6,000 a class. False takes a subset.

    Returns:
        a table with ``pixels`` [N, 32, 32, 3].

    Raises:
        DataError: the data set is missing, damaged or incomplete.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    return _read(_CIFAR10, Path(root), cache_dir, check_counts)


def cifar100(root: str | Path, *, cache_dir: str | Path, check_counts: bool = True) -> ImageTable:
    """A hundred classes in twenty super-classes; metric learning trains on the first fifty and tests on the others.

    Arguments, result and errors as for ``cifar10``; ``super_labels`` are the coarse labels (the python version has
    them, folders of images do not).
    """
    return _read(_CIFAR100, Path(root), cache_dir, check_counts)


def _read(kind: _Kind, root: Path, cache_dir: str | Path, check_counts: bool) -> ImageTable:
    folder, layout = kind.place.find(root)
    width = SIDE * SIDE * 3
    if layout.name in ("tree", "zip"):
        place = folder if layout.name == "tree" else resolve(folder, kind.zips)
        paths, rows, digest = _from_images(kind, place, cache_dir)
    else:
        place = {"folder": folder / kind.folder, "bare": folder}.get(layout.name) or resolve(folder, kind.archives)
        paths, rows, digest = _from_batches(kind, place, cache_dir)
    labels = rows[:, width].astype(np.int64)
    coarse = rows[:, width + 1].astype(np.int64)
    role = halved_roles(labels, len(kind.classes))
    if check_counts:
        check_published(kind.title, place, labels, role, kind.published)
        per_class = np.bincount(labels)
        if len(set(per_class.tolist())) > 1:
            fewest = int(per_class.argmin())
            raise DataError(
                f"{kind.title} in '{place}' has {per_class[fewest]:,} images of '{kind.classes[fewest]}', expected "
                f"{len(labels) // len(kind.classes):,} of each class; get the original"
            )
    present, compact = np.unique(labels, return_inverse=True)
    return make_table(
        kind.name,
        "",
        paths=paths,
        labels=compact.astype(np.int64),
        class_names=[kind.classes[c] for c in present],
        role=role,
        content=digest,
        super_labels=None if (coarse == _NO_SUPER_CLASS).any() else coarse,
        pixels=np.asarray(rows[:, :width]).reshape(-1, SIDE, SIDE, 3),
        layout=f"{layout.description}; its parts train and test, a split for classification, are merged",
        notes=differing_counts(labels, role, kind.published),
        published_queries=kind.published.num_queries,
    )


def _notes_of(kind: _Kind, root: str | Path) -> tuple[str, ...]:
    """Whether there are fewer images than published, by the names and sizes of files; archives are not opened."""
    folder, layout = kind.place.find(root)
    total = kind.published.num_images
    if layout.name in ("tree", "zip"):
        count = sum(1 for _ in _listed(kind, folder if layout.name == "tree" else resolve(folder, kind.zips)))
        return (f"a subset: {count:,} of {total:,} images",) if count < total else ()
    place = {"folder": folder / kind.folder, "bare": folder}.get(layout.name)
    if place is None:
        return ()
    most = sum((place / name).stat().st_size for name in kind.batches) // (3 * SIDE * SIDE)
    return (f"a subset: at most {most:,} of {total:,} images",) if most < total else ()


notes_of_10, notes_of_100 = partial(_notes_of, _CIFAR10), partial(_notes_of, _CIFAR100)

_Rows = tuple[list[str], NDArray[np.uint8], str]  # paths, [N, pixels + label + super label], digest


def _from_batches(kind: _Kind, place: Path, cache_dir: str | Path) -> _Rows:
    """The python version, from its folder or straight from its archive."""
    files = [place / name for name in (*kind.batches, kind.meta)] if place.is_dir() else [place]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{kind.title} in '{place}' lacks {', '.join(missing)}; unpack the archive again")
    key = {
        "version": _VERSION,
        "files": [[file.name, (status := file.stat()).st_size, status.st_mtime_ns] for file in files],
    }

    def build() -> NDArray[np.uint8]:
        logger.info("reading %s from %s; this happens once", kind.title, place)
        members = {file.name: file.read_bytes() for file in files} if place.is_dir() else _unpacked(kind, place)
        meta = read_pickle(members[kind.meta], name=f"{place} ({kind.meta})", encoding="latin1")
        names = meta.get(kind.names) if isinstance(meta, dict) else None
        if not isinstance(names, list) or names != list(kind.classes):
            raise DataError(f"{kind.title}'s {kind.meta} in '{place}' does not name its classes; get the original")
        parts = [_batch_rows(kind, members[name], f"{place} ({name})", name) for name in kind.batches]
        return np.concatenate(parts)

    cached = cached_array(cache_dir, kind.name, key=key, build=build)
    num_train = len(cached.array) * 5 // 6  # of the split for classification, which only names the images here
    paths = [f"train/{row:05d}" for row in range(num_train)]
    paths += [f"test/{row:05d}" for row in range(len(cached.array) - num_train)]
    return paths, cached.array, cached.digest


def _unpacked(kind: _Kind, archive: Path) -> dict[str, bytes]:
    """The members by name; nothing is written to disk."""
    wanted = {f"{kind.folder}/{name}": name for name in (*kind.batches, kind.meta)}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isfile():
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise DataError(f"'{member.name}' in '{archive}' claims {member.size:,} bytes; get the original")
                stream = tar.extractfile(member)
                assert stream is not None
                found[name] = stream.read()
    except _DAMAGED as error:
        raise DataError(f"{kind.title}'s archive '{archive}' is damaged ({error}); download it again") from error
    if lacking := set(wanted.values()) - set(found):
        raise DataError(f"{kind.title}'s archive '{archive}' lacks {', '.join(sorted(lacking))}; download it again")
    return found


def _batch_rows(kind: _Kind, content: bytes, name: str, batch: str) -> NDArray[np.uint8]:
    value = read_pickle(content, name=name, encoding="latin1")
    try:
        data = np.asarray(value["data"])
        labels = np.asarray(value[kind.labels])
        coarse = np.asarray(value[kind.super_labels]) if kind.super_labels else np.full(len(labels), _NO_SUPER_CLASS)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"'{name}' is no batch of {kind.title} ({error!r}); get the original") from error
    if data.dtype != np.uint8 or data.shape != (len(labels), 3 * SIDE * SIDE) or coarse.shape != labels.shape:
        raise DataError(
            f"'{name}' has data {data.shape} of {data.dtype} and {len(labels)} labels, expected [N, {3 * SIDE * SIDE}] "
            "of uint8 and N labels; get the original"
        )
    if len(labels) == 0:
        raise DataError(f"'{name}' has no images; get the original")
    for what, values, limit in ((kind.labels, labels, len(kind.classes)), (kind.super_labels, coarse, 256)):
        if not np.issubdtype(values.dtype, np.integer) or values.min() < 0 or values.max() >= limit:
            raise DataError(f"'{name}' has {what} outside of [0, {limit}); get the original")
    planes = data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1).reshape(len(data), -1)  # [N, HWC]
    return np.concatenate([planes, labels[:, None].astype(np.uint8), coarse[:, None].astype(np.uint8)], axis=1)


def _from_images(kind: _Kind, place: Path, cache_dir: str | Path) -> _Rows:
    """Images in ``train/<class>`` and ``test/<class>``, in a folder or in a zip."""
    listed = sorted(_listed(kind, place))
    if not listed:
        raise DataError(f"'{place}' has no images in train/<class> and test/<class> of {kind.title}; put them there")
    index = {name: number for number, name in enumerate(kind.classes)}
    text = "".join(f"{path}\t{stamp}\n" for path, _, stamp in listed)
    key = {"version": _VERSION, "images": hashlib.sha256(text.encode()).hexdigest()}

    def build() -> NDArray[np.uint8]:
        logger.info("reading %d images of %s from %s; this happens once", len(listed), kind.title, place)
        rows = np.empty((len(listed), 3 * SIDE * SIDE + 2), dtype=np.uint8)
        rows[:, -1] = _NO_SUPER_CLASS
        with zipfile.ZipFile(place) if place.is_file() else nullcontext() as archive:
            try:
                for row, (path, member, _) in enumerate(listed):
                    content = archive.read(member) if archive else (place / member).read_bytes()
                    with Image.open(io.BytesIO(content)) as image:
                        if image.size != (SIDE, SIDE):
                            raise DataError(
                                f"'{path}' in '{place}' is {image.width} x {image.height}, expected {SIDE} x {SIDE}; "
                                "get the original"
                            )
                        rows[row, :-2] = np.asarray(image.convert("RGB")).reshape(-1)
                    rows[row, -2] = index[path.split("/")[1]]
            except _DAMAGED as error:
                raise DataError(f"'{path}' in '{place}' cannot be read ({error}); replace it") from error
        return rows

    cached = cached_array(cache_dir, f"{kind.name}-images", key=key, build=build)
    return [path for path, _, _ in listed], cached.array, cached.digest


def _listed(kind: _Kind, place: Path) -> Iterator[tuple[str, str, str]]:
    """Path (part/class/image), name in the folder or zip, and what identifies the contents, of each image."""
    if place.is_dir():
        for part in ("train", "test"):
            for name in kind.classes:
                for file in (place / part / name).glob("*"):
                    if _is_image(file.name):
                        path = f"{part}/{name}/{file.name}"
                        yield path, path, file_stamp(file)
        return
    try:
        with zipfile.ZipFile(place) as archive:
            members = archive.infolist()
    except _DAMAGED as error:
        raise DataError(f"'{place}' is damaged ({error}); download it again") from error
    for member in members:
        parts: Sequence[str] = member.filename.split("/")[-3:]
        if len(parts) == 3 and parts[0] in ("train", "test") and parts[1] in kind.classes and _is_image(parts[2]):
            if member.file_size > 2**20:
                raise DataError(
                    f"'{member.filename}' in '{place}' claims {member.file_size:,} bytes for one small image; get the "
                    "original"
                )
            yield "/".join(parts), member.filename, str(member.CRC)


def _is_image(name: str) -> bool:
    return name.lower().endswith((".jpg", ".jpeg", ".png")) and not name.startswith(".")
