"""The scan of the gallery for every query, tile by tile, whatever compares them.

A scan by half, of a set within itself, uses each tile above the diagonal for its columns as queries, too. One thread
works on a tile from the matrix product to its result.

Letters: N gallery items, T queries of a tile or block, W columns of a tile, k places that matter.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from dmlbench.evaluation.embeddings.embed import own_columns
from dmlbench.evaluation.search import candidates
from dmlbench.evaluation.search.candidates import ExactSimilarity, FloatRows, Keys, Tile
from dmlbench.runtime import single_threaded_torch
from dmlbench.types import EmbeddingSet, IntArray, RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

BYTES_PER_CANDIDATE = 160  # key, its sorted copy, position, column, mark, terms of the scores
BYTES_PER_WAITING = 64  # and place, of a scan by half: keys and their sorted copies

logger = logging.getLogger(__name__)

_workspace = candidates.Workspace()


@dataclass(frozen=True)
class ScanPlan:
    """How a scan is divided."""

    rows: int  # queries of a tile or rows of a block
    columns: int  # gallery items of a tile
    threads: int  # that share the tiles
    by_half: bool = False  # each tile of a symmetric search within one set serves both sides


class Search(ABC):
    """Queries and gallery, ready to be searched; larger similarities are nearer.

    They are computed on ``device``; with ``on_host``, tiles are arrays on the host, else tensors there. ``free_bytes``
    is the memory for tiles and candidates.
    """

    slack: float  # float32 similarities further apart than this are in the right order

    def __init__(self, queries: EmbeddingSet, gallery: EmbeddingSet, device: torch.device, free_bytes: int) -> None:
        self.own_column = own_columns(queries, gallery)  # [Q] gallery index that a query must not find, or -1
        self.num_gallery = len(gallery)  # N
        self.device, self.on_host, self.free_bytes = device, tiles_on_host(device), free_bytes

    @abstractmethod
    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        """Write similarities of queries ``part`` [T] to gallery items start .. stop - 1 into ``out`` [T, W]."""

    @abstractmethod
    def bounded_similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> tuple[float, float]:
        """As ``similarities``, up to a constant per query, on a scale that adds up over models.

        Returns (error, a bound of the absolute values): two values of a row that are more than 2 errors apart are in
        the right order.
        """

    @abstractmethod
    def exact_pairs(self, queries: IntArray, columns: IntArray) -> NDArray[np.float64]:
        """The similarities [M] that decide, of the pairs (query [M], gallery item [M])."""

    @abstractmethod
    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """How to scan for the k nearest of so many queries."""

    @property
    def threads(self) -> int:
        return num_threads() if self.on_host else 1

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        """Unit rows [Q, D] and [N, D] if they are held and their inner products decide."""
        return None

    def exact(self, part: IntArray) -> ExactSimilarity:
        """``exact_pairs`` of (place in ``part``, gallery index)."""
        return lambda rows, columns: self.exact_pairs(part[rows], columns)

    def ranked(
        self, k: int, finish: Callable[[IntArray, Keys], Result], *, wanted: IntArray
    ) -> Iterator[tuple[IntArray, Result]]:
        """Apply ``finish(queries [T], candidates [T, C])`` to the k nearest, tile by tile of ``wanted``, ascending."""
        plan = self.plan(k, len(wanted))

        def work(part: IntArray) -> tuple[IntArray, Result]:
            return part, finish(part, self.candidates(part, k, columns=plan.columns))

        with single_threaded_products():
            if plan.by_half:
                yield from _by_half(self, k, finish, wanted, plan)
            else:
                yield from over_threads(work, parts_of(wanted, plan.rows), threads=plan.threads)

    def nearest(self, k: int, *, wanted: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """(queries [T], their k nearest gallery items [T, k] or -1), tile by tile in the order of ``wanted``."""

        def finish(part: IntArray, keys: Keys) -> IntArray:
            return candidates.column_of(candidates.order_exactly(keys, self.exact(part), k=k, slack=self.slack)[:, :k])

        return self.ranked(k, finish, wanted=wanted)

    def candidates(self, part: IntArray, k: int, *, columns: int) -> Keys:
        """Candidates [T, C] for the k nearest of the queries ``part`` [T], ``columns`` gallery items at a time."""
        top = candidates.TopK(len(part), k, slack=self.slack)

        def work(start: int, stop: int) -> None:
            top.add(_tile(self, part, start, stop), first_column=start)

        for start in range(0, self.num_gallery, columns):
            halved_where_full(work, start, min(start + columns, self.num_gallery), device=self.device)
        return top.keys


def _by_half(
    source: Search, k: int, finish: Callable[[IntArray, Keys], Result], wanted: IntArray, plan: ScanPlan
) -> Iterator[tuple[IntArray, Result]]:
    size, rows = source.num_gallery, plan.rows
    blocks = parts_of(np.arange(size), rows)
    tops = [candidates.TopK(len(block), k, slack=source.slack) for block in blocks]
    columns = max(1, plan.columns // rows) * rows  # of whole blocks

    def work(number: int) -> None:
        """Compare a block with itself and all blocks behind."""
        part = blocks[number]
        for start in range(part[0], size, columns):
            tile = _tile(source, part, start, min(start + columns, size))
            tops[number].add(tile, first_column=start)
            for left in range(max(start, part[0] + rows), start + tile.shape[1], rows):
                turned = tile[:, left - start : left - start + rows].T
                turned = turned.contiguous() if isinstance(turned, Tensor) else np.ascontiguousarray(turned)
                tops[left // rows].add(turned, first_column=part[0])

    for number, _ in enumerate(over_threads(work, range(len(blocks)), threads=plan.threads)):
        inside = np.isin(blocks[number], wanted, assume_unique=True)
        keys, tops[number].keys = tops[number].keys[inside], tops[number].keys[:0]
        if len(keys):
            yield blocks[number][inside], finish(blocks[number][inside], keys)


def _tile(source: Search, part: IntArray, start: int, stop: int) -> Tile:
    """Similarities [T, W] of the queries ``part`` [T] to gallery items start .. stop - 1, -inf to themselves."""
    tile = empty_tile((len(part), stop - start), source.device, on_host=source.on_host)
    source.similarities(part, start, stop, out=tile)
    exclude(tile, source.own_column[part] - start)
    return tile


def empty_tile(shape: tuple[int, ...], device: torch.device, *, on_host: bool) -> Tile:
    """An array that the next call of this thread overwrites, or a tensor on ``device``."""
    if on_host:
        return _workspace.array("similarity", shape, np.float32)
    return torch.empty(shape, dtype=torch.float32, device=device)


def exclude(similarity: Tile, own: IntArray) -> None:
    """Put -inf at column ``own`` [T] of each row of ``similarity`` [T, W] that has such a column."""
    held = np.flatnonzero((own >= 0) & (own < similarity.shape[1]))
    if isinstance(similarity, Tensor):
        row, column = candidates.to_device(similarity.device, held, own[held])
        similarity[row, column] = -torch.inf
    else:
        similarity[held, own[held]] = -np.inf


def parts_of(items: IntArray, size: int) -> list[IntArray]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def tiles_on_host(device: torch.device) -> bool:
    return device.type == "cpu"


def moved_to(device: torch.device, rows: Tensor | None) -> Tensor | None:
    """``rows`` on ``device``; None if there are none or the device lacks memory."""
    try:
        return None if rows is None else rows.to(device)
    except torch.OutOfMemoryError:
        logger.warning("%s lacks memory for the whole gallery; copying it tile by tile", device)
        return None


def halved_where_full(work: Callable[[int, int], None], start: int, stop: int, *, device: torch.device) -> None:
    """Call ``work(start, stop)``, in halves where the device is out of memory; failed calls have no effect."""
    try:
        work(start, stop)
        return
    except torch.OutOfMemoryError as error:
        if stop - start <= 1:
            raise RunError(
                f"{device} is out of memory for a tile of one item. Lower tile_bytes, or set evaluation.device=cpu."
            ) from error
    # here, where nothing of the failed tile is held any more
    logger.warning("%s is out of memory for a tile of %d items; halving the tile", device, stop - start)
    torch.cuda.empty_cache()
    middle = (start + stop) // 2
    halved_where_full(work, start, middle, device=device)
    halved_where_full(work, middle, stop, device=device)


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks at every loaded library: some milliseconds


@contextmanager
def strict_float32_products() -> Iterator[None]:
    """Matrix products of float32 tensors are float32 products inside: no TF32, no bf16."""
    back_ends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    # PyTorch has the newer interface, which keeps a precision for each of them, from 2.9 on
    held = [(back_end, back_end.fp32_precision) for back_end in back_ends if hasattr(back_end, "fp32_precision")]
    previous = None
    try:
        previous = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # set by the newer interface, with which the older one refuses to work
        for back_end, _ in held:
            back_end.fp32_precision = "ieee"
    try:
        yield
    finally:
        if previous is not None:
            torch.set_float32_matmul_precision(previous)
        for back_end, value in held:
            back_end.fp32_precision = value


@contextmanager
def single_threaded_products() -> Iterator[None]:
    """Limit numpy and torch products to the calling thread and float32; our threads share the tiles."""
    with _controller().limit(limits=1, user_api="blas"), single_threaded_torch(), strict_float32_products():
        yield


def over_threads(function: Callable[[Item], Result], items: Sequence[Item], *, threads: int) -> Iterator[Result]:
    """``function`` of every item, in order; at most ``threads`` + 1 results wait to be taken."""
    if threads == 1 or len(items) == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def num_threads() -> int:
    return torch.get_num_threads()
