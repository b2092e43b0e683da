"""Values and errors that every layer shares.

Shapes: B batch, N set, Q queries, R references, C channels, D embedding, m prototypes, L levels.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a misspelt configuration key must not wait for torch to be imported
    from torch import Tensor

IntArray = NDArray[np.int64]

ROLES = ("train", "test", "query", "gallery")


class DmlbenchError(Exception):
    """Base class of errors that a user can fix. The command line prints only the message, without a traceback."""

    # A message is one or more whole sentences, so that callers can put another sentence after it.


class ConfigError(DmlbenchError):
    """The configuration is wrong. Most such errors are raised before any data is read."""


class DataError(DmlbenchError):
    """The data set on disk is missing, incomplete or unreadable."""


class RunError(DmlbenchError):
    """A run directory, checkpoint or result cannot be used."""


class IncompleteConfig(RunError):
    """A config lacks runs."""


class RunInUse(RunError):
    """Another process has the run."""


class Diverged(RunError):
    """A loss, a gradient or an embedding is not finite; starting again ends alike."""


class Pruned(RunError):
    """A training was ended at a validation, after ``step`` optimizer steps; it can be resumed."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Originals:
    """Properties of the published images of a data set, to recognize changed ones."""

    format: str = "JPEG"  # Pillow's name
    size: tuple[int, int] | None = None  # width and height of all of them; None where sizes differ
    boxes: NDArray[np.float64] | None = None  # [N, 4] left, top, right, bottom in pixels of the whole image, or NaN
    boxes_from: str = ""  # name of the list of boxes
    full_color: bool = False  # whether most of their JPEGs are 4:4:4, which encoders rarely are unasked


@dataclass(frozen=True)
class ImageTable:
    """All images of a data set, with their labels. Row i of the table is image i, for i from 0 to N - 1.

    Attributes:
        name: name of the data set.
        root: the folder that ``paths`` are relative to. Empty if ``pixels`` holds the images.
        paths: path of each image [N], unique.
        labels: class id of each image [N], in [0, num_classes). Ids follow the published order of the classes.
        class_names: name of each class, in the order of the class ids.
        role: role of each image [N]: "train", "test", "query" or "gallery". The gallery of a "test" image is all other
            "test" images; the gallery of a "query" image is all "gallery" images.
        super_labels: id of the super-class of each image [N], if the data set has super-classes.
        pixels: all images in one array, [N, H, W] (grey) or [N, H, W, 3] (RGB), if the data set is held in memory.
        fingerprint: digest of the images' paths, sizes, labels and roles. It stays the same if you move the data set.
        layout: the folder layout that was found on disk, if the data set has several known layouts.
        originals: known properties of the published images, such as their size. dmlbench uses them to detect changed
            images.
        notes: differences from the published data, such as another number of images, or changes found in a check of
            some images. The notes are printed with every result.
        published_queries: number of queries in the published test set; None if unknown.
    """

    name: str
    root: str
    paths: NDArray[np.str_]
    labels: IntArray
    class_names: tuple[str, ...]
    role: NDArray[np.str_]
    super_labels: IntArray | None = None
    pixels: NDArray[np.uint8] | None = None
    fingerprint: str = ""
    layout: str = ""
    originals: Originals | None = None
    notes: tuple[str, ...] = ()
    published_queries: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True)
class RetrievalSet:
    """The query and gallery images of a search, as row numbers of an ``ImageTable``.

    Attributes:
        query: row numbers of the queries.
        gallery: row numbers of the gallery. None: the gallery of a query is all other queries.
    """

    query: IntArray
    gallery: IntArray | None = None

    @property
    def rows(self) -> IntArray:
        """Row numbers of all images that must be embedded: the queries, then the gallery."""
        return self.query if self.gallery is None else np.concatenate([self.query, self.gallery])


@dataclass(frozen=True)
class Split:
    """The training, validation and test images of a run.

    Attributes:
        name: a label of the split for messages, such as "cub200 mlrc fold 0".
        fold: number of the fold; 0 if the protocol has no folds.
        train: row numbers of the training images in the ``ImageTable``.
        val: the validation images, used to stop early and to select weights. None if the protocol fixes the number of
            steps and selects no weights.
        test: the test images. None if the protocol must not use the test half, as with ``protocol=hpo``.
        val_is_test: whether the protocol selects weights on the test half. If True, every table warns about it.
        facts: properties of the split by name, such as the distance between training and test classes. ``result.json``
            stores them, and ``dmlbench table facts=[...]`` shows them.
    """

    name: str
    fold: int
    train: IntArray
    val: RetrievalSet | None
    test: RetrievalSet | None
    val_is_test: bool = False
    facts: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A batch of images on the device, with labels and ids on the host."""

    images: Tensor  # [B, 3, H, W] uint8 or float, RGB
    labels: Tensor  # [B] in [0, num_classes); the objective copies them to the device
    ids: Tensor  # [B] table rows
    second_views: Tensor | None = None  # the same images, transformed once more, for regularizers that need keys


@dataclass(frozen=True)
class ModelOutput:
    """Output of a model for a batch: embeddings, and further tensors for regularizers, called side outputs.

    - "weights" [B, H, W]: the pooling weight of each map location.
    - "histogram" [B, m]: the share of each of m prototypes in an image; rows sum to 1.
    - "reconstruction" [B, D]: the sum of the prototypes, weighted by "histogram".
    - "pooled" [B, D]: the vector that "reconstruction" should match.
    - "features" and "features_max" [B, C]: average and maximum of the feature map that enters the pooling. Both are
      present only during training.
    - "keys" [B, D]: embeddings of a second view of each image, computed by a momentum encoder (EMA). The training loop
      adds them if a regularizer requires them.

    "histogram" and "reconstruction" are absent until the prototypes are initialized.

    Attributes:
        embedding: embeddings [B, D], not normalized.
        side: the tensor of each side output, by name.
    """

    embedding: Tensor
    side: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings of N images with their labels.

    Attributes:
        rows: one embedding per image [N, D], float32.
        labels: class of each image [N].
        ids: unique row number [N] of each image in the ``ImageTable``.
    """

    rows: Tensor
    labels: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Neighbors:
    """The nearest gallery items: index [Q, k] into the gallery, distance [Q, k] ascending, ties by gallery index."""

    index: Tensor
    distance: Tensor


_NAMES_IN_ERRORS = 40


def is_file_name(text: str) -> bool:
    """Whether a text can name a file or folder everywhere, and stays in its folder."""
    return re.fullmatch("[A-Za-z0-9_-][A-Za-z0-9._-]*", text) is not None


def duration(seconds: float) -> str:
    """A time such as "45 s", "12 min", "3 h 20 min" or "9 d 4 h"."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{max(1, round(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def counted(count: int, noun: str) -> str:
    """A number with its noun, such as "1 run", "2 runs" or "3 classes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def check_file_name(name: object, key: str = "name") -> None:
    """Raise ConfigError unless the value of ``key`` can name files."""
    if not is_file_name(str(name)):
        raise ConfigError(f"{key}: got {name!r}, expected a file name of letters, digits, '.', '_' and '-'.")


def escape_latex(text: str) -> str:
    """A text as LaTeX prints it."""
    marks: dict[str, str | int | None] = {mark: "\\" + mark for mark in "_%&#${}"}
    words = {"\\": "backslash", "^": "asciicircum", "~": "asciitilde", "<": "less", ">": "greater"}
    marks |= {mark: rf"\text{word}{{}}" for mark, word in words.items()}
    return text.translate(str.maketrans({"±": r"$\pm$", "–": "--", **marks}))


def num_launched() -> int:
    """Processes that torchrun started for this command; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def closest(name: str, known: Sequence[str], *, most: int = _NAMES_IN_ERRORS, prefix: str = "") -> str:
    """The end of an error message: the known name nearest to ``name``, after ``prefix``, and at most ``most`` names."""
    import difflib

    swapped = {f"{name[:i]}{name[i + 1]}{name[i]}{name[i + 2 :]}" for i in range(len(name) - 1)}
    lower = {each.lower(): each for each in known}
    near = [each for each in known if each in swapped]
    # At 0.5, "foo" is near "oodml".
    near = near or [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.55)]
    near = near or sorted((each for each in known if len(name) > 2 and name.lower() in each.lower()), key=len)  # "snr"
    if near and len(known) > _NAMES_IN_ERRORS:
        return f"did you mean '{prefix}{near[0]}'?"
    listing = ", ".join(sorted(known, key=_with_numbers)[:most])
    if len(known) > most:
        listing += f" and {len(known) - most:,} more"
    if near:
        return f"did you mean '{prefix}{near[0]}'? Known: {listing}."
    if not known:
        return "there are none."
    return f"choose {'one of ' if len(known) > 1 else ''}{listing}."


def _with_numbers(name: str) -> list[str | int]:
    """Sort "blocks.2" before "blocks.10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def shorten(names: Sequence[str] | NDArray[np.str_], *, most: int = 10) -> str:
    """The first names and how many more there are, for messages."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def how_to_install(extra: str) -> str:
    """For error messages: the command that installs an extra of the package."""
    from importlib import metadata

    elsewhere = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        named = (text.partition(";") for text in metadata.requires("dmlbench") or ())
        packages = [f"'{package.strip()}'" for package, _, marker in named if re.search(f"extra == .{extra}.$", marker)]
        elsewhere = f", or `pip install {' '.join(packages)}`" if packages else ""
    return f"Run `pip install '.[{extra}]'` in a checkout of dmlbench{elsewhere}."


def missing_module(module: str, part: str, config_dir: object = None) -> str:
    """For error messages: a module that is not found, the part that needs it, and the remedy.

    Args:
        config_dir: folder of options beside the module, if known; it may come from a run made elsewhere.
    """
    own, folder = "", f"<folder of options beside {module}.py>"
    if isinstance(config_dir, str) and config_dir.isprintable() and Path(config_dir).is_dir():
        path = Path(config_dir)
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        folder, own = shlex.quote(str(path)), repr(str(path))
    return (
        f"Cannot import `{module}` (needed by the {part}): add --config-dir {folder} "
        f"(in Python config_dir={own or '...'}) or set PYTHONPATH."
    )


def check_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Raise ConfigError if the name of the folder is empty."""
    if not str(output_dir).strip():
        raise ConfigError("paths.output_dir: got '', expected a folder, such as outputs.")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless ``value``, given as ``name``, is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{name} '{value}' is unknown: {closest(value, known)}")


def check_positive(**values: float) -> None:
    """Check that numbers are above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: got {value}, expected a positive number.")


def check_fold(fold: int, num_folds: int) -> None:
    """Raise ConfigError unless a protocol of so many folds has the fold."""
    if not 0 <= fold < num_folds:
        raise ConfigError(f"fold: got {fold}, expected 0 to {num_folds - 1}, the folds of the protocol.")


def check_at_least(least: float, **values: float) -> None:
    """Check that numbers are finite and not below a limit."""
    for name, value in values.items():
        if not least <= value < math.inf:
            raise ConfigError(f"{name}: got {value}, expected at least {least}.")


def check_share(**values: float) -> None:
    """Check that numbers are in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}: got {value}, expected a number in [0, 1).")


def not_a_file(path: str | os.PathLike[str]) -> str:
    """What is at ``path`` instead of a file, in words; "" for a file or nothing. Opening a pipe waits without end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise RunError for a pipe, a folder or a device; opening a pipe waits without end."""
    if what := not_a_file(path):
        raise RunError(f"{path} is {what}, not a file. Remove it.")


def nodes(node: Any, path: str = "", *, of_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """A node of a configuration and all nodes within, by their key, such as ``schedule.schedulers[0]._target_``."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from nodes(value, f"{path}.{key}" if path else str(key), of_lists=of_lists)
    elif isinstance(node, list) and of_lists:
        for i, value in enumerate(node):
            yield from nodes(value, f"{path}[{i}]")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values of dicts and lists by their key."""
    return ((place, value) for place, value in nodes(node, path) if not isinstance(value, dict | list))


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """``{"fit": {"max_steps": 3}}`` as ``{"fit.max_steps": 3}``; lists are values."""
    return {path: value for path, value in nodes(node, prefix, of_lists=False) if not isinstance(value, dict)}


def is_within(key: str, places: Iterable[str]) -> bool:
    """Whether a key, such as ``fit.max_steps``, is one of the places or lies within one, such as ``fit``."""
    return any(f"{key}.".startswith(f"{place}.") for place in places)
