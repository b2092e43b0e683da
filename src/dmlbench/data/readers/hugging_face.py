"""Data sets of the Hugging Face Hub and local Parquet and Arrow files, whose images are written to a folder once."""

import csv
import glob
import hashlib
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dmlbench.data.images.image_cache import build_lock
from dmlbench.data.readers.folder import PART_FOLDERS, ROLE_FOLDERS, folder
from dmlbench.data.readers.layouts import subfolders
from dmlbench.runtime import cached_sha256, reason_of, whole_folder
from dmlbench.types import ConfigError, DataError, DmlbenchError, ImageTable, check_file_name, how_to_install, shorten

_VERSION = 1  # increment it whenever the written files change
_LIST = "images.csv"
_ROWS = 64  # read at once
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(sorted(PART_FOLDERS))})(?![a-z])")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.parquet)(?<!\.arrow)", re.ASCII)

logger = logging.getLogger(__name__)


def hugging_face(
    path: str | Path,
    *,
    cache_dir: str | Path,
    image_column: str = "image",
    label_column: str = "label",
    split: str | Sequence[str] | None = None,
    subset: str | None = None,
    revision: str | None = None,
    name: str = "hf",
) -> ImageTable:
    """Read a data set of the Hugging Face Hub, or local Parquet or Arrow files.

    The first call writes the images' bytes, unchanged, to a folder of ``cache_dir`` whose name is a hash of the source.
    Splits train and test, or train, query and gallery, set the roles if train shares no class with the others. Splits
    that share classes are merged by class; then the first half of the sorted classes trains, the second tests.

    Args:
        path: a file, a folder, or ``owner/name`` on the Hub if there is no such file or folder. The split of a file is
            the first of train, test, query, gallery, val, valid and validation in its path, else train.
        image_column: of encoded images, or of pixels [H, W] or [H, W, 3] in [0, 255], which become PNG.
        label_column: of class labels, whole numbers or text.
        split: names of splits; None takes all.
        subset: configuration of a data set on the Hub.
        revision: branch, tag or commit on the Hub. With a commit, images in ``cache_dir`` need no connection.
        name: of the data set in results.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"dataset: got hf, expected the package datasets to be installed. {how_to_install('hf')}"
        ) from error
    path, columns = str(path), (image_column, label_column)
    splits = [split] if isinstance(split, str) else None if split is None else sorted(set(split))
    files = _files_of(Path(path)) if Path(path).exists() else {}
    if files and (subset or revision):
        raise ConfigError(
            f"dataset.table.subset, revision: got a value for the local '{path}', expected null. Remove it."
        )
    try:
        commit = "" if files else _commit_of(path, revision)
        content = [path, subset, commit] if commit else [(part, cached_sha256(file)) for file, part in files.items()]
        key = json.dumps([_VERSION, content, columns, splits])
        root = Path(cache_dir) / "hugging_face" / hashlib.sha256(key.encode()).hexdigest()[:16]
        if not root.is_dir():
            root.parent.mkdir(parents=True, exist_ok=True)
            with build_lock(root, lambda: None):
                if not root.is_dir():  # another process may have written it meanwhile
                    logger.info("writing the images of '%s' to '%s' once", path, root)
                    with whole_folder(root) as target:
                        scratch = target.with_name("scratch")  # removed with the folder that holds both
                        loaded = _load_hub(path, subset, commit, scratch) if commit else _load_files(files, scratch)
                        _write(target, loaded, columns, splits, scratch)
    except DmlbenchError:
        raise
    except Exception as error:  # datasets, huggingface_hub, httpx and pyarrow have their own
        raise DataError(
            f"dataset.table.path: cannot read '{path}' ({type(error).__name__}: {reason_of(error)}). Correct path, "
            "subset or revision, check the connection, replace damaged files, or free space in paths.cache_dir."
        ) from error
    table, names = folder(root, csv=_LIST, name=name), subfolders(root)
    is_merged = len(names) > 1 and not table.layout.endswith("with roles")
    if is_merged:
        logger.warning("data set '%s': the images of %s are merged by class", name, " and ".join(names))
    layout = f"{' and '.join(names)} of {path}" + ", merged by class" * is_merged
    content_of = hashlib.sha256(f"{table.fingerprint} {root.name}".encode())  # sizes of images may stay the same
    return replace(table, layout=layout, fingerprint=content_of.hexdigest())


def _files_of(path: Path) -> dict[Path, str]:
    """The Parquet or Arrow files at or below ``path``, sorted, and their splits."""
    found = {file: file.relative_to(path).as_posix() for file in sorted(path.rglob("*"))} or {path: path.name}
    splits = {
        file.absolute(): match[1] if (match := _SPLIT.search(name.lower())) else "train"
        for file, name in found.items()  # datasets keeps results of map in cache-*.arrow
        if file.suffix in (".parquet", ".arrow") and file.is_file() and not re.search(r"(^|/)(\.|cache-)", name)
    }
    if len({file.suffix for file in splits}) != 1:
        raise DataError(f"dataset.table.path: got '{path}', expected Parquet files or Arrow files there. Correct it.")
    return splits


def _commit_of(path: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    if not _HUB_ID.fullmatch(path):
        raise DataError(
            f"dataset.table.path: got '{path}', expected a file, a folder, or owner/name on the Hub. Correct it."
        )
    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return str(HfApi().dataset_info(path, revision=revision, timeout=10).sha)


def _load_hub(path: str, subset: str | None, commit: str, scratch: Path) -> Mapping[str, Any]:
    import datasets

    loaded = datasets.load_dataset(path, subset, revision=commit, cache_dir=str(scratch))
    return {str(split): rows for split, rows in loaded.items()}


def _load_files(files: Mapping[Path, str], scratch: Path) -> Mapping[str, Any]:
    # Not load_dataset, which would open a connection to count its use.
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.parquet.parquet import Parquet

    places = {split: [glob.escape(str(f)) for f in files if files[f] == split] for split in files.values()}
    options: dict[str, Any] = {"cache_dir": str(scratch), "data_files": places}
    is_parquet = next(iter(files)).suffix == ".parquet"
    loaded = (Parquet(batch_size=_ROWS, **options) if is_parquet else Arrow(**options)).as_streaming_dataset()
    return {str(split): rows for split, rows in loaded.items()}


def _write(
    target: Path, rows_of: Mapping[str, Any], columns: tuple[str, str], splits: list[str] | None, scratch: Path
) -> None:
    """Write images as ``<split>/<number>_<class>/<row>.<format>``, and the list of these."""
    if unknown := set(splits or ()) - set(rows_of):
        raise ConfigError(f"dataset.table.split: got {shorten(sorted(unknown))}, expected {shorten(list(rows_of))}.")
    images: list[tuple[str, str, str]] = []
    numbers: dict[str, int] = {}
    for split in sorted(rows_of) if splits is None else splits:
        check_file_name(split, "dataset.table.split")
        class_names = _class_names(rows_of[split], *columns)
        batches = rows_of[split].select_columns(list(columns)).with_format("arrow").iter(_ROWS)
        pairs = (pair for batch in batches for pair in zip(*(batch[c].to_pylist() for c in columns), strict=True))
        for row, (image, label) in enumerate(pairs):
            if label is not None and class_names is not None:
                label = class_names[label] if 0 <= label < len(class_names) else None
            label = "" if label is None else str(label).strip()
            if not label:
                raise DataError(f"row {row} of split {split}: got no label, expected one. Choose labeled splits.")
            try:
                content = _encoded(image, scratch)
                with Image.open(io.BytesIO(content)) as opened:
                    suffix = str(opened.format).lower()
            except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
                raise DataError(
                    f"row {row} of split {split}: got no readable image in column {columns[0]}, expected the bytes of "
                    "one, or pixels in [0, 255]. Correct it."
                ) from error
            number = numbers.setdefault(label, len(numbers))
            place = f"{split}/{number:05d}_{re.sub('[^A-Za-z0-9]+', '_', label)[:40]}"  # any label names a folder so
            (target / place).mkdir(parents=True, exist_ok=True)
            (target / place / f"{row:07d}.{suffix}").write_bytes(content)
            images.append((f"{place}/{row:07d}.{suffix}", label, split))
    _write_list(target / _LIST, images)


def _write_list(file: Path, images: Sequence[tuple[str, str, str]]) -> None:
    """Write path and class of each image; also its split as its role, if the splits can be roles."""
    classes: dict[str, set[str]] = {}
    for _, label, split in images:
        classes.setdefault(split, set()).add(label)
    if not images:
        raise DataError("dataset.table.path: got no rows, expected images. Choose another data set or split.")
    splits_of = Counter(label for found in classes.values() for label in found)
    has_roles = set(classes) in ROLE_FOLDERS and all(splits_of[label] == 1 for label in classes["train"])
    if not has_roles and len(classes) > 1 and splits_of.total() == len(splits_of):
        raise DataError(
            f"dataset.table.split: got {', '.join(classes)} with different classes, expected train and test, or train, "
            "query and gallery. Choose these, or one split."
        )
    header = ("path", "label", "role")[: 2 + has_roles]
    with open(file, "w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([header, *(image[: len(header)] for image in images)])


def _class_names(rows: Any, image_column: str, label_column: str) -> list[str] | None:
    """Names of the classes, by number, where the column has them."""
    for key, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in rows.features:
            raise ConfigError(f"dataset.table.{key}: got '{column}', expected one of {', '.join(rows.features)}.")
    feature = rows.features[label_column]
    if not re.fullmatch("u?int[0-9]+|bool|(large_)?string", getattr(feature, "dtype", "")):
        raise ConfigError(
            f"dataset.table.label_column: got '{label_column}' of {feature}, expected class labels, integers or text."
        )
    return getattr(feature, "names", None)


def _encoded(image: Any, scratch: Path) -> bytes:
    """Bytes of an image file: as stored, of a file that the Hub's library has downloaded, or of pixels as PNG."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if isinstance(image, dict):
        image, path = image.get("bytes"), image.get("path")
        if image is None and path is not None:
            file = Path(path).resolve()
            if not any(file.is_relative_to(Path(known).resolve()) for known in (scratch, HF_HUB_CACHE)):
                raise ValueError("the path is outside of the Hub's cache")
            image = file.read_bytes()
    if not isinstance(image, list):
        return image  # what is not bytes cannot be opened
    pixels = np.asarray(image)
    if pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError("pixels are not whole numbers in [0, 255]")
    buffer = io.BytesIO()
    Image.fromarray((pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
