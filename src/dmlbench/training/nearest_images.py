"""Pictures of a few queries and their nearest images, for loggers."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.runtime import generator
from dmlbench.types import EmbeddingSet, IntArray

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

NUM_QUERIES, NUM_NEAREST = 5, 5
_SIDE = 96  # pixels of an image's longer side in the picture
_GAP, _FRAME, _DASH = 4, 5, 8  # pixels
_QUERY, _RIGHT, _WRONG = (68, 119, 170), (26, 152, 80), (215, 48, 39)


def nearest_images(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    *,
    distance: "BaseDistance | None" = None,
    tile_bytes: int = TILE_BYTES,
) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Search for the nearest images of a few queries, the same ones whenever the sets are of the same images.

    Returns:
        Table rows of the queries [Q] and of their nearest images [Q, k], and whether these are of the query's class.
    """
    total = len(queries)
    chosen = np.sort(generator("nearest images", total).permutation(total)[:NUM_QUERIES])
    part = EmbeddingSet(queries.rows[chosen], queries.labels[chosen], queries.ids[chosen])
    searched = queries if gallery is None else gallery
    k = min(NUM_NEAREST, len(searched) - int(np.isin(part.ids, searched.ids).any()))
    index = nearest(part, searched, k, distance=distance, tile_bytes=tile_bytes).index
    is_right = searched.labels[index] == part.labels[:, None]
    return part.ids.numpy(), searched.ids[index].numpy(), is_right.numpy()


def draw_nearest(
    query: IntArray, nearest: IntArray, is_right: NDArray[np.bool_], images: Callable[[IntArray], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Draw a line per query: blue frame; images of its class have a solid green frame, others a dashed red one."""
    rows = np.column_stack([query, nearest])
    tiles = [_tile(image) for image in images(rows.reshape(-1))]
    height, width = tiles[0].shape[0] + _GAP, tiles[0].shape[1] + _GAP
    page = np.full((len(rows) * height + _GAP, rows.shape[1] * width + 3 * _GAP, 3), 255, np.uint8)
    for (line, column), tile in zip(np.ndindex(rows.shape), tiles, strict=True):
        right = column == 0 or bool(is_right[line, column - 1])
        _frame(tile, _QUERY if column == 0 else _RIGHT if right else _WRONG, dashed=not right)
        top, left = _GAP + line * height, _GAP + column * width + (2 * _GAP if column else 0)
        page[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return page


def _tile(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize an image, with room for its frame."""
    scale = _SIDE / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    kernel = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
    small = np.asarray(Image.fromarray(image).resize((width, height), kernel))
    return np.pad(small, ((_FRAME, _FRAME), (_FRAME, _FRAME), (0, 0)), constant_values=255)


def _frame(tile: NDArray[np.uint8], color: tuple[int, int, int], *, dashed: bool) -> None:
    y, x = np.indices(tile.shape[:2])
    border = np.ones(tile.shape[:2], bool)
    border[_FRAME:-_FRAME, _FRAME:-_FRAME] = False
    tile[border & (((x + y) // _DASH % 2 == 0) | (not dashed))] = color
