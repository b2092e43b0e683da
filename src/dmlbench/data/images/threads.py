"""The same work on many images in parallel."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

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
        stop = min(start + _SLICE, count)
        for k in range(start, stop):
            work(k)
        return stop - start

    with ThreadPoolExecutor(num_threads) as pool:
        pending: set[Future[int]] = {pool.submit(run, start) for start in range(0, count, _SLICE)}
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    watch(future.result())
                check()
        except BaseException:
            for future in pending:
                future.cancel()
            raise
