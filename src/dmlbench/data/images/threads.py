"""The same work on many images in parallel."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_SLICE = 16


def for_each(
    work: Callable[[int], None],
    count: int,
    *,
    num_threads: int,
    watch: Callable[[int], object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Call ``work(0)`` to ``work(count - 1)`` in threads; an error, ``check`` or Ctrl-C stops them soon.

    Args:
        watch: called in this thread with the number of calls that just finished.
        check: called in this thread regularly; its exceptions stop the work.
    """

    def run(start: int) -> int:
        for k in range(start, min(start + _SLICE, count)):
            work(k)
        return min(_SLICE, count - start)

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for finished in pool.map(run, range(0, count, _SLICE)):
                watch(finished)
                check()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
