"""Candidates of tiles that lie on an accelerator: selected there, so that they alone travel to the host.

The twins of what ``top_k`` and ``scan`` do with arrays, as tensor operations on any device. Values propose, as they do
there: what is kept here is settled in float64 on the host, so where a tile lies changes no result.

Letters: T queries of a tile, W columns, M entries, k places that matter.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import IntArray, RunError

Entries = tuple[IntArray, IntArray, NDArray[np.float32]]
"""Row [M], column [M] and value [M] of entries, on the host."""

LOWEST = float(torch.finfo(torch.float32).min)
BF16_ROUNDING = 2.0**-8  # of a number, relative, to the nearest: eight digits, the first of which is not stored

logger = logging.getLogger(__name__)


def tiles_on_host(device: torch.device) -> bool:
    """Whether tiles are arrays on the host; else they are tensors on ``device``, and stay there."""
    return device.type == "cpu"


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bf16 numbers by units made for it."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 8


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """Copies as arrays."""
    return [tensor.cpu().numpy() for tensor in tensors]


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copies as tensors on ``device``; on a CPU the arrays themselves."""
    return [torch.from_numpy(array).to(device) for array in arrays]


def halved_where_full(work: Callable[[int, int], None], start: int, stop: int, *, device: torch.device) -> None:
    """``work(start, stop)``, in halves again and again where the device has no memory for it.

    ``work`` must leave nothing behind where it fails.

    Raises:
        RunError: there is no memory for one item.
    """
    try:
        work(start, stop)
        return
    except torch.OutOfMemoryError as error:
        if stop - start <= 1:
            raise RunError(
                f"{device} has no memory left for a tile of one item; lower tile_bytes, or set evaluation.device=cpu"
            ) from error
    # here, where nothing of the failed tile is held any more
    logger.warning("%s is out of memory for a tile of %d items; halving it", device, stop - start)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    middle = (start + stop) // 2
    halved_where_full(work, start, middle, device=device)
    halved_where_full(work, middle, stop, device=device)


def group_size(width: int, k: int) -> int:
    """Columns of a group, of whose maxima the k-th largest is looked for: at least 2 k groups where there are more."""
    return next((size for size in (16, 8, 4, 2) if width // size >= 2 * k), 1)


def kth_bound(similarity: Tensor, k: int) -> Tensor:
    """As ``top_k.kth_bound``: [T, 1]."""
    width = similarity.shape[1]
    if k > width:
        return torch.full_like(similarity[:, :1], -torch.inf)
    size, maxima = group_size(width, k), similarity
    if size > 1:
        maxima = similarity[:, : width // size * size].unflatten(1, (size, width // size)).amax(dim=1)
    return torch.topk(maxima, k, dim=1).values[:, -1:]


def floor_below(kth: Tensor, slack: float) -> Tensor:
    """As ``top_k.floor_below``, of any shape, in float32."""
    kth = kth.to(torch.float32)
    return torch.nextafter(kth - slack, torch.full_like(kth, -torch.inf)).clamp_(min=LOWEST)


def entries_at_least(similarity: Tensor, floor: Tensor) -> Entries:
    """Entries of ``similarity`` [T, W] that are at least ``floor`` (> -inf), which broadcasts; row by row."""
    row, column = torch.nonzero(similarity >= floor, as_tuple=True)
    rows, columns, values = to_host(row, column, similarity[row, column])
    return rows, columns, values


def entries_of_columns(similarity: Tensor, floor: NDArray[np.float32], k: int, *, slack: float) -> Entries:
    """Entries of ``similarity`` [T, W] that may be among the k largest of their column, column by column.

    Args:
        similarity: a tile.
        floor: [W] what is known to be too little.
        k: places that matter.
        slack: values further apart than this are in the right order.
    """
    reached = to_device(similarity.device, floor[:, None])[0]
    turned = similarity.T
    if (floor == LOWEST).any() and len(similarity) >= k:
        reached = torch.maximum(reached, floor_below(kth_bound(turned, k), slack))
    column, row, value = entries_at_least(turned, reached)
    return row, column, value
