"""AVSL's distances of many pairs without a graph, in parts that stay in the cache.

Letters: L levels, r nodes of each, Q and N images.
"""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dmlbench.models.avsl_distance import AvslDistance

_PAIRS = 4096  # at a time


def distance_matrix(distance: "AvslDistance", queries: Tensor, gallery: Tensor) -> Tensor:
    """Distances [Q, N] of rows [Q, 2 L r] and [N, 2 L r]."""
    result = queries.new_empty(len(queries), len(gallery))
    columns = min(len(gallery), _PAIRS)
    rows = max(1, _PAIRS // max(1, columns))
    for i in range(0, len(queries), rows):
        for j in range(0, len(gallery), columns):
            result[i : i + rows, j : j + columns] = distance._compute(
                queries[i : i + rows, None], gallery[None, j : j + columns]
            )
    return result
