"""Samples of the collages of CIFAR-100 beside the images that they are made of (GSP, figures 4 and 11).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.1 and
    supplement 2.2.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from dmlbench.apps.pictures import plt
from dmlbench.data.readers.cifar import SIDE
from dmlbench.data.readers.cifar_collage import BACKGROUND, PARTS, SUPER_CLASSES, cifar100_collage, classes_of_parts
from dmlbench.studies.record import Claim, Findings, Parts
from dmlbench.types import ConfigError, ImageTable, check_choice

Pixels = NDArray[np.uint8]

_HEADS = ("target", "", "background\n(public code)", "", "collage\n(public code)", "collage\n(paper)", "distilled")
_WIDTHS = (1, 1, 1, 1, 1.6, 1.6, 1)
_LONG = {"val": "validation"}


def quadrants_of(collages: Pixels) -> Pixels:
    """The images [N, 4, 32, 32, 3] in the quadrants of collages [N, 64, 64, 3], row by row."""
    blocks = collages.reshape(-1, 2, SIDE, 2, SIDE, 3).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(-1, 4, SIDE, SIDE, 3)


def rows_by_pixels(source: ImageTable) -> dict[bytes, list[int]]:
    """Rows of a table by the digest of their pixels, which duplicates share."""
    found: dict[bytes, list[int]] = {}
    for row, image in enumerate(_pixels(source)):
        found.setdefault(_digest(image), []).append(row)
    return found


def conduct(args: Any, parts: Parts) -> Findings:
    """Make the collages of both layouts, take them apart again, and draw some."""
    shown = [str(name) for name in args.super_classes]
    possible = [name for name in SUPER_CLASSES if name not in BACKGROUND]
    if not shown:
        raise ConfigError(f"super_classes: got an empty list, expected one or more of {', '.join(possible)}.")
    for name in shown:
        check_choice("super_classes", name, possible)
    made = partial(
        cifar100_collage, args.paths.data_dir, cache_dir=args.paths.cache_dir, images_per_class=args.images_per_class,
        seed=args.seed,
    )  # fmt: skip
    tables: dict[str, ImageTable] = {layout: made(layout=layout) for layout in PARTS}
    source, classes = classes_of_parts(args.paths.data_dir, args.paths.cache_dir, "paper")
    parts.bind(data=source.fingerprint)
    known = rows_by_pixels(source)
    found = parts.get(list(PARTS), lambda layout: _taken_apart(tables[layout], source, known), describe="layouts")
    firsts = [int(classes[part][name][0]) for name in shown for part in PARTS["paper"]]
    distilled = made(collage=False)
    return Findings(
        "Collages of CIFAR-100",
        ("layout, part", "super-classes", "target classes", "background classes", "collages",
         "of one target and three backgrounds, %", "classes that another part has, too"),
        tuple(
            (f"{layout}, {_LONG.get(part, part)}", *(f"{one[key]:,}" for key in _COUNTS),
             f"{100 * one['as_described'] / one['collages']:.1f}", str(len(_shared(of_parts, part))))
            for layout, of_parts in found.items() for part, one in of_parts.items()
        ),
        _claims(found),
        (
            f"the first {args.images_per_class} images of each class of CIFAR-100, seed {args.seed}; each collage was "
            "cut into quadrants, and these were looked up among the 60,000 images by their pixels",
            "classes: of CIFAR-100, those seen in these collages; an image of two classes counts for neither",
            "picture: of each super-class a class that trains, one that validates and one that tests in the paper's "
            "layout; a target is framed, distilled is the target alone",
            "which classes of a super-class belong to which part neither the paper nor its code says: published order",
        ),
        _figure(firsts, tables, distilled, source, known),
    )  # fmt: skip


_COUNTS = ("super_classes", "targets", "backgrounds", "collages")


def _taken_apart(table: ImageTable, source: ImageTable, known: Mapping[bytes, list[int]]) -> dict[str, Any]:
    """Count the collages of each part of a layout that are a target and three background images."""
    row_of = {path: row for row, path in enumerate(source.paths.tolist())}
    assert source.super_labels is not None
    is_background = np.isin(np.array(SUPER_CLASSES)[source.super_labels], BACKGROUND)
    seen: dict[str, dict[str, Any]] = {}
    for path, label, images in zip(table.paths, table.labels, quadrants_of(_pixels(table)), strict=True):
        name, _, part = table.class_names[label].removesuffix(")").rpartition(" (")
        one = seen.setdefault(part, {"names": set(), "target": set(), "background": set(), "all": 0, "as": 0})
        candidates = [known.get(_digest(image), []) for image in images]
        target = [row_of[path] in rows for rows in candidates]
        others = [rows for rows, is_target in zip(candidates, target, strict=True) if not is_target]
        one["all"] += 1
        one["as"] += sum(target) == 1 and all(is_background[rows].any() for rows in others)
        one["names"].add(name)
        one["target"].add(int(source.labels[row_of[path]]))
        for rows in others:
            classes = {int(source.labels[row]) for row in rows}
            one["background"] |= classes if len(classes) == 1 else set()
    return {
        part: {
            "super_classes": len(one["names"]), "targets": len(one["target"]), "backgrounds": len(one["background"]),
            "collages": one["all"], "as_described": int(one["as"]),
            "classes": sorted(one["target"] | one["background"]),
        }
        for part, one in seen.items()
    }  # fmt: skip


def _shared(of_parts: Mapping[str, Mapping[str, Any]], part: str) -> set[int]:
    """Classes of a part that are also in other parts of the layout."""
    others = (set(one["classes"]) for name, one in of_parts.items() if name != part)
    return set(of_parts[part]["classes"]) & set().union(*others)


def _claims(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[Claim, ...]:
    every = [one for of_parts in found.values() for one in of_parts.values()]
    count, right = (sum(one[key] for one in every) for key in ("collages", "as_described"))
    shared = {layout: sum(len(_shared(of_parts, part)) for part in of_parts) for layout, of_parts in found.items()}
    split = {
        layout: [one["targets"] // one["super_classes"] for one in of_parts.values()]
        for layout, of_parts in found.items()
    }
    return (
        Claim("5.1, figures 4 and 11", "an image of a class and three images of shared classes",
              f"{right:,} of {count:,} collages", right == count),
        Claim("2.2", "of the five classes of a super-class 2 train, 1 validates, 2 test",
              "; ".join(f"layout={layout}: {', '.join(map(str, counts))}" for layout, counts in split.items()),
              split["paper"] == [2, 1, 2]),
        Claim("2.2", "no class of target or background is in two parts",
              "; ".join(f"layout={layout}: {count} are" for layout, count in shared.items()), not any(shared.values())),
        Claim("5.1", "4 x 4-stitched", "2 x 2 images of 32 pixels, which one and three images fill, as the code has it",
              False),
    )  # fmt: skip


def _figure(
    classes: list[int], tables: Mapping[str, ImageTable], distilled: ImageTable, source: ImageTable,
    known: Mapping[bytes, list[int]],
) -> Figure:  # fmt: skip
    """Draw a row for the first image of each class: the target, its backgrounds, its collages, and the target alone."""
    figure, axes = plt.subplots(
        len(classes), len(_HEADS), squeeze=False, width_ratios=_WIDTHS, layout="constrained",
        figsize=(1.15 * sum(_WIDTHS), 1.75 * len(classes) + 0.5),
    )  # fmt: skip
    for head, panel in zip(_HEADS, axes[0], strict=True):
        panel.set_title(head, fontsize=9)
    places = {path: place for place, path in enumerate(distilled.paths.tolist())}
    for line, number in zip(axes, classes, strict=True):
        target = next(path for path in source.paths[source.labels == number].tolist() if path in places)
        row = source.paths.tolist().index(target)
        collages = {name: _of(table, target) for name, table in tables.items()}
        (public, _), (paper, _) = collages["public"], collages["paper"]
        images = quadrants_of(public)[0]
        origins = [known[_digest(image)] for image in images]
        others = [place for place, rows in enumerate(origins) if row not in rows]
        _show(line[0], _pixels(source)[row], _named(source, row))
        for panel, place in zip(line[1:4], others, strict=True):
            _show(panel, images[place], _named(source, origins[place][0]))
        for panel, (image, part) in zip(line[4:6], collages.values(), strict=True):
            is_same = image is paper and np.array_equal(public, paper)
            _show(panel, image, _LONG.get(part, part) + ", the same" * is_same)
            for place, quadrant in enumerate(quadrants_of(image)[0]):
                if row in known[_digest(quadrant)]:
                    corner = (SIDE * (place % 2) - 0.5, SIDE * (place // 2) - 0.5)
                    panel.add_patch(Rectangle(corner, SIDE, SIDE, fill=False, edgecolor="red", linewidth=2))
        _show(line[6], _pixels(distilled)[places[target]], f"{SIDE} x {SIDE}")
    return figure


def _show(axes: Axes, image: Pixels, label: str) -> None:
    axes.imshow(image, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(label, fontsize=7.5)


def _named(source: ImageTable, row: int) -> str:
    assert source.super_labels is not None
    wide = SUPER_CLASSES[source.super_labels[row]].replace("large_", "").replace("_outdoor", "")
    return f"{wide}:\n{source.class_names[source.labels[row]]}".replace("_", " ")


def _of(table: ImageTable, path: str) -> tuple[Pixels, str]:
    place = table.paths.tolist().index(path)
    return _pixels(table)[place], table.class_names[table.labels[place]].removesuffix(")").rpartition(" (")[2]


def _pixels(table: ImageTable) -> Pixels:
    assert table.pixels is not None
    return np.asarray(table.pixels)


def _digest(image: Pixels) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
