"""One pool of threads over tiles: every tile is worked on by one thread, from the matrix product to its result."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from dmlbench.evaluation.search.similarity import strict_float32_products
from dmlbench.runtime import single_threaded_torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks at every loaded library: some milliseconds


@contextmanager
def single_threaded_products() -> Iterator[None]:
    """Matrix products of numpy and torch use the calling thread alone inside, for two pools of threads would fight for
    the cores; those of float32 tensors are float32 products, whatever is set outside."""
    with _controller().limit(limits=1, user_api="blas"), single_threaded_torch(), strict_float32_products():
        yield


def over_threads(function: Callable[[Item], Result], items: Sequence[Item], *, threads: int) -> Iterator[Result]:
    """``function`` of every item, in the order of ``items``; at most ``threads`` + 1 results wait to be taken."""
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
    """Threads that the tiles are shared out to: torch's setting."""
    return torch.get_num_threads()


class Workspace(threading.local):
    """Arrays that a thread writes again and again: fresh memory would be cleared by the system page by page."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type) -> NDArray:
        """An array with any content; asking for the same ``name`` again destroys what the former holds."""
        size = int(np.prod(shape))
        held = self._arrays.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._arrays[name] = np.empty(size, dtype=dtype)
        return held[:size].reshape(shape)
