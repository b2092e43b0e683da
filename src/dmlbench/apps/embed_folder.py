"""Embeddings of the images of a folder, as a file that ``dmlbench evaluate`` takes as it is."""

import json
import logging
from pathlib import Path

import numpy as np
import torch

from dmlbench.apps.loaded import TrainedModel
from dmlbench.data.readers.folder import PART_FOLDERS
from dmlbench.data.readers.layouts import images_below, images_in, subfolders
from dmlbench.evaluation.embeddings.embed import BY_ORDER, StoredEmbeddings, save_embeddings
from dmlbench.types import ConfigError, DataError, EmbeddingSet

OWN_DISTANCE = "distance"
"""Entry of a file's metadata: what compares its rows, where that is not the Euclidean distance of unit vectors."""

log = logging.getLogger(__name__)


def embed_folder(
    model: TrainedModel, folder: str | Path, output: str | Path, *, batch_size: int = 128, num_workers: int = 0,
    progress: bool = False,
) -> StoredEmbeddings:  # fmt: skip
    """Embed every image below a folder and write rows, labels and ids as safetensors.

    ``<folder>/<class>/.../<image>`` gives the labels, numbers of the sorted classes; ``query/<class>/...`` with
    ``gallery/<class>/...`` both sets. Images without class folders are each a class of its own. The ids count the
    images; the file's metadata names them (``paths``) and the classes (``classes``), as lists in JSON.
    """
    folder, output = Path(folder).expanduser(), Path(output).expanduser()
    if output.suffix != ".safetensors" or not output.parent.is_dir():
        raise ConfigError(f"output: got {output}, expected a .safetensors file in an existing folder.")
    parts = _parts(folder)
    paths = [path for part in parts for path, _ in part]
    names = [name for part in parts for _, name in part]
    classes, labels = np.unique(names, return_inverse=True)
    rows = model.embed(
        [folder / path for path in paths], progress=progress, batch_size=batch_size, num_workers=num_workers
    )
    count = len(parts[0])
    columns = (rows, torch.from_numpy(labels), torch.arange(len(rows)))
    sets = [EmbeddingSet(*(column[at] for column in columns)) for at in (slice(count), slice(count, None))]
    about = {**BY_ORDER, "model": model.name, "paths": json.dumps(paths), "classes": json.dumps(classes.tolist())}
    if model.has_own_distance:
        about[OWN_DISTANCE] = type(model.network.distance).__name__
    stored = StoredEmbeddings(sets[0], sets[1] if len(parts) > 1 else None, about)
    save_embeddings(output, stored.queries, stored.gallery, about)
    return stored


def _parts(folder: Path) -> list[list[tuple[str, str]]]:
    """Paths relative to ``folder`` and classes: of all images, or of queries and gallery."""
    if not folder.is_dir():
        raise DataError(f"images: got {folder}, expected a folder of images, or of folders of them by class.")
    prefixes = ["query/", "gallery/"] if sorted(subfolders(folder)) == ["gallery", "query"] else [""]
    if prefixes != [""] and (alone := images_in(folder)):
        raise DataError(f"'{folder / alone[0]}' lies beside query and gallery. Move it into one of them, or away.")
    found = []
    for prefix in prefixes:
        part = [(image, image.rpartition("/")[0].split("/")[0]) for image in images_below(folder / prefix)]
        if not part:
            raise DataError(f"'{folder / prefix}' holds no images.")
        nested = {top for image, top in part if image.count("/") > 1 and top.casefold() in PART_FOLDERS}
        if nested and not prefix:
            raise DataError(
                f"'{folder}' holds parts of a data set, such as '{min(nested)}', whose folders are the classes. "
                "Name one part, or a folder with query and gallery alone."
            )
        outside = [image for image, top in part if not top]
        if outside and len(outside) < len(part):
            raise DataError(f"'{folder / prefix / outside[0]}' lies beside folders of classes. Move it into one.")
        if outside:
            log.warning("'%s' has no folders of classes: each image is a class", folder / prefix)
        found.append([(prefix + image, top or prefix + image) for image, top in part])
    return found
