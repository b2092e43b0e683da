"""Cars196 (Stanford Cars) in its original layout: ``car_ims/*.jpg`` and ``cars_annos.mat``."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from dmlbench.data.table import file_sizes, make_table
from dmlbench.types import DataError, ImageTable

NUM_IMAGES, NUM_CLASSES = 16_185, 196
NUM_TRAIN_CLASSES = 98
NUM_TRAIN_IMAGES, NUM_TEST_IMAGES = 8_054, 8_131

# What scipy raises on damaged files, and what follows when a field is not there.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    NotImplementedError,
    MatReadError,
    zlib.error,
)


def cars196(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Car models as classes; the first 98 of 196 train, the others test (Oh Song et al. 2016).

    The ``test`` field of the annotations is the split for classification and is not looked at.

    Args:
        root: folder with ``cars_annos.mat`` and ``car_ims``.
        check_counts: insist on the published 16,185 images, 196 classes, 8,054 for training and 8,131 for testing.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: a file or folder is missing or damaged, or counts differ from the published ones.

    Source: J. Krause et al., "3D Object Representations for Fine-Grained Categorization", 3DRR 2013; halves by
        H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    root = Path(root)
    names, paths, published = _annotations(root / "cars_annos.mat")
    if not (root / "car_ims").is_dir():
        raise DataError(
            f"Cars196 looks for its images in '{root / 'car_ims'}', which is missing; put car_ims.tgz there"
        )
    is_train = published <= NUM_TRAIN_CLASSES
    if check_counts:
        found = (len(paths), len(np.unique(published)), int(is_train.sum()), int((~is_train).sum()))
        expected = (NUM_IMAGES, NUM_CLASSES, NUM_TRAIN_IMAGES, NUM_TEST_IMAGES)
        if found != expected:
            raise DataError(
                f"Cars196 in '{root}' has {found[0]} images of {found[1]} classes ({found[2]} train, {found[3]} test), "
                f"expected {expected[0]} of {expected[1]} ({expected[2]}, {expected[3]}); complete the data, or accept "
                "a subset with check_counts=false"
            )
    present, labels = np.unique(published, return_inverse=True)
    return make_table(
        "cars196",
        root,
        paths=paths,
        labels=labels.astype(np.int64),
        class_names=[names[c - 1] for c in present],
        role=np.where(is_train, "train", "test"),
        content=file_sizes(root, paths, name="cars196"),
    )


def _annotations(file: Path) -> tuple[list[str], list[str], Any]:
    """Names of all 196 classes, relative paths [N] and published classes [N], which count from 1."""
    remedy = "put the original cars_annos.mat there"
    if not file.is_file():
        raise DataError(f"Cars196 looks for its annotations in '{file}', which is missing; {remedy}")
    try:
        content = loadmat(file, squeeze_me=True)
        rows = np.atleast_1d(content["annotations"])
        paths = [str(p) for p in rows["relative_im_path"]]
        published = np.array([int(c) for c in rows["class"]], dtype=np.int64)
        names = [str(n) for n in content["class_names"]]
    except _UNREADABLE as error:
        raise DataError(f"Cars196 cannot read its annotations '{file}' ({error!r}); {remedy}") from error
    if len(names) != NUM_CLASSES or len(published) == 0 or published.min() < 1 or published.max() > NUM_CLASSES:
        raise DataError(
            f"'{file}' names {len(names)} classes and {len(published)} images, expected classes 1 to {NUM_CLASSES}; "
            f"{remedy}"
        )
    return names, paths, published
