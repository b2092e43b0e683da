"""The float32 passes of the search, none of which changes its results: faiss, numpy and torch on a device."""

import importlib.util
import logging
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.on_device import to_device
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.top_k import Found, Keys, Tile, floor_below, pack
from dmlbench.types import ConfigError, IntArray

BackEnd = Literal["auto", "torch", "faiss"]

logger = logging.getLogger(__name__)

_FAISS_EXTRA = 8  # neighbors asked beyond k, so that near ties at rank k seldom need a second search
_FAISS_GPU_LIMIT = 2048  # neighbors that faiss finds on a GPU


def resolve_back_end(back_end: BackEnd) -> Literal["torch", "faiss"]:
    """The float32 pass to use. "auto" is "torch", the fastest wherever it was measured, on the device of the rows; on
    a CPU its products are numpy's. "faiss" is a checked alternative on a CPU, and searches on the GPU of the rows.

    Raises:
        ConfigError: faiss is asked for and is not installed.
    """
    if back_end not in ("auto", "torch", "faiss"):
        raise ConfigError(f"back_end '{back_end}' is unknown; known: auto, torch, faiss")
    if back_end != "faiss":
        return "torch"
    if importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            "back_end=faiss needs the module faiss; install dmlbench[faiss-cpu] or dmlbench[faiss-gpu], "
            "or use back_end=auto, which gives the same numbers without it"
        )
    return "faiss"


def faiss_finds(k: int, num_gallery: int, device: torch.device) -> bool:
    """Whether faiss can find k neighbors on ``device``; where it cannot, the log says that torch searches."""
    if device.type == "cpu" or min(num_gallery, k + 1 + _FAISS_EXTRA) <= _FAISS_GPU_LIMIT:
        return True
    logger.info("faiss finds at most %d neighbors on a GPU and %d are needed; torch searches", _FAISS_GPU_LIMIT, k)
    return False


def faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float, device: torch.device
) -> tuple[Keys, NDArray[np.bool_]]:
    """Candidates [T, C] by faiss on ``device`` and, per query [T], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned lies below the floor. Its products on a GPU are float32's (no TF32). The way over a GPU is checked
    with a stand-in of faiss alone.
    """
    import faiss

    wanted = min(len(gallery), k + 1 + _FAISS_EXTRA)
    if device.type == "cpu":
        value, column = faiss.knn(query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT)
    else:
        value, column = faiss.knn_gpu(
            _gpu_resources(), query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT, device=device.index or 0
        )
    other = column != own_column[:, None]
    complete = np.full(len(query), wanted == len(gallery))
    if not complete.all():
        # without the query itself at least k of the k + 1 + extra neighbors are left, in descending order
        place = np.argmax(np.cumsum(other, axis=1) == k, axis=1)[:, None]
        complete |= (value[:, -1:] < floor_below(np.take_along_axis(value, place, axis=1), slack))[:, 0]
    return Found(other.sum(axis=1), pack(value[other], column[other])).padded(), complete


@lru_cache(maxsize=1)
def _gpu_resources() -> Any:
    """Working memory of faiss on GPUs, which it takes once."""
    import faiss

    return faiss.StandardGpuResources()


def exclude(similarity: Tile, own: IntArray) -> None:
    """Put -inf at column ``own`` [T] of each row of ``similarity`` [T, W] that has such a column."""
    held = np.flatnonzero((own >= 0) & (own < similarity.shape[1]))
    if isinstance(similarity, Tensor):
        row, column = to_device(similarity.device, held, own[held])
        similarity[row, column] = -torch.inf
    else:
        similarity[held, own[held]] = -np.inf


def moved_to(device: torch.device, operand: FloatRows | None) -> Tensor | None:
    """``operand`` on ``device``; None, where there is none or no memory for it: then it goes there tile by tile."""
    try:
        return None if operand is None else torch.from_numpy(operand).to(device)
    except torch.OutOfMemoryError:
        logger.warning("%s has no memory for the whole gallery; it is moved there tile by tile", device)
        return None
