"""Collages of CIFAR-100: a super-class in one quadrant, shared background classes in the other three."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dmlbench.data.image_table import Listing, rows_of_classes, table_of
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.readers.cifar import SIDE, cifar100
from dmlbench.runtime import generator
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray

Layout = Literal["public", "paper"]

SUPER_CLASSES = (  # in the published order, which is that of their ids
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices",
    "household_furniture", "insects", "large_carnivores", "large_man-made_outdoor_things",
    "large_natural_outdoor_scenes", "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates",
    "people", "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)  # fmt: skip
BACKGROUND = ("flowers", "large_man-made_outdoor_things", "large_natural_outdoor_scenes", "trees")
PARTS: dict[Layout, dict[str, slice]] = {
    "public": {"train": slice(0, 3), "test": slice(3, 5)},
    "paper": {"train": slice(0, 2), "val": slice(2, 3), "test": slice(3, 5)},
}
"""Which of the five classes of a super-class, in published order, belong to which part."""
_VERSION = 1  # increment it whenever the pixels change


def cifar100_collage(
    root: str | Path,
    *,
    cache_dir: str | Path,
    layout: Layout = "public",
    collage: bool = True,
    images_per_class: int | None = None,
    seed: int = 0,
) -> ImageTable:
    """Sixteen super-classes among shared background classes: the Cifar Collage of the GSP study, [N, 64, 64, 3].

    A label is a super-class in a part. Training, validation and test have different classes of CIFAR-100, both as
    targets and as background (``BACKGROUND``, three quadrants). Each image of CIFAR-100 is the target of one fixed
    collage; its own random stream draws quadrant and background. Labels of ``layout="paper"`` train in their first half
    and validate in their second (``protocol=held_out``).

    Args:
        root: folder of the complete python version of CIFAR-100, or one that holds it.
        layout: of the five classes of a super-class in published order, "public" (code) takes three to train and two to
            test, "paper" two to train, one to validate and two to test.
        collage: False takes the targets alone, [N, 32, 32, 3]: the bound that the study calls distilled.
        images_per_class: targets of each class of CIFAR-100; None: all 600.

    Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.1
        and supplement 2.2.
    """
    source, classes_of = classes_of_parts(root, cache_dir, layout)
    most = len(source.labels) // source.num_classes
    if images_per_class is not None and not 2 <= images_per_class <= most:
        raise ConfigError(f"images_per_class: got {images_per_class}, expected 2 to {most}, or null for all.")
    originals = source.pixels
    assert source.super_labels is not None and originals is not None
    by_class = np.argsort(source.labels, kind="stable").reshape(source.num_classes, -1)  # rows, in their order
    targets: dict[str, IntArray] = {}
    pools: list[IntArray] = []  # rows that the background of each class's targets is drawn from
    for part, classes in classes_of.items():
        pool = by_class[np.concatenate([classes[name] for name in BACKGROUND])].reshape(-1)
        for name in (name for name in SUPER_CLASSES if name not in BACKGROUND):
            targets[f"{name} ({part})"] = by_class[classes[name], :images_per_class].reshape(-1)
            pools.append(pool)
    names, rows = list(targets), np.concatenate(list(targets.values()))
    label = np.repeat(np.arange(len(names)), [len(of_class) for of_class in targets.values()])

    def build() -> NDArray[np.uint8]:
        collages = np.empty((len(rows), 2, SIDE, 2, SIDE, 3), dtype=np.uint8)
        for image, target, which in zip(collages, rows.tolist(), label.tolist(), strict=True):
            stream = generator(seed, "cifar100_collage", target)
            quadrants = pools[which][stream.choice(len(pools[which]), 4, replace=False)]
            quadrants[stream.integers(4)] = target
            for place, row in enumerate(quadrants.tolist()):
                image[place // 2, :, place % 2] = originals[row]
        return collages.reshape(-1, 2 * SIDE, 2 * SIDE, 3)

    if collage:
        key = {"version": _VERSION, "of": source.fingerprint, "layout": layout, "images": images_per_class}
        pixels, digest = cached_array(cache_dir, "cifar100_collage", key={**key, "seed": seed}, build=build)
    else:
        pixels, digest = originals[rows], source.fingerprint
    whole = most * len(label) // (images_per_class or most)
    listing = Listing(
        root="",
        paths=source.paths[rows],
        labels=label,
        class_names=names,
        role=np.where(np.char.endswith(np.array(names), "(test)")[label], "test", "train"),
        super_labels=source.super_labels[rows],
        notes=() if len(label) == whole else (f"a subset: {len(label):,} of {whole:,} images",),
        name="cifar100_collage" if collage else "cifar100_collage_distilled",
        layout=f"classes for training and test as in the {'published code' if layout == 'public' else 'paper'}",
        pixels=pixels,
        digest=digest,
    )
    return table_of(listing)


def cifar100_training_classes(root: str | Path, *, cache_dir: str | Path, layout: Layout = "public") -> ImageTable:
    """The classes of CIFAR-100 that the collages train on, targets and background, to pretrain a backbone on.

    Such a backbone has seen no class of the test; the public code's has. All classes train (``protocol=same_classes``).
    """
    source, classes_of = classes_of_parts(root, cache_dir, layout)
    assert source.super_labels is not None and source.pixels is not None
    kept = np.sort(np.concatenate(list(classes_of["train"].values())))
    rows = rows_of_classes(source, kept)
    listing = Listing(
        root="",
        paths=source.paths[rows],
        labels=np.searchsorted(kept, source.labels[rows]),
        class_names=[source.class_names[c] for c in kept],
        role=np.full(len(rows), "train"),
        super_labels=source.super_labels[rows],
        name="cifar100_training_classes",
        layout="the classes that collages train on",
        pixels=source.pixels[rows],
        digest=source.fingerprint,
    )
    return table_of(listing)


def classes_of_parts(
    root: str | Path, cache_dir: str | Path, layout: Layout
) -> tuple[ImageTable, dict[str, dict[str, IntArray]]]:
    """CIFAR-100, and its classes by part and super-class."""
    if layout not in PARTS:
        raise ConfigError(f"layout: got '{layout}', expected one of {', '.join(get_args(Layout))}.")
    source = cifar100(root, cache_dir=cache_dir)
    if source.super_labels is None:
        raise DataError(f"CIFAR-100 in '{root}' has no super-classes. Use its python version for the collages.")
    super_of = source.super_labels[np.unique(source.labels, return_index=True)[1]]
    of_super = {name: np.flatnonzero(super_of == number) for number, name in enumerate(SUPER_CLASSES)}
    return source, {
        part: {name: classes[which] for name, classes in of_super.items()} for part, which in PARTS[layout].items()
    }
