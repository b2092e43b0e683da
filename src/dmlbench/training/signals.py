"""Stopping on SIGTERM and Ctrl-C where a run resumes exactly."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"; schedulers requeue on it
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells use


class Preempted(SystemExit):
    """A stopped run that has saved its state; the exit code tells SIGTERM from Ctrl-C."""


class StopSignal:
    """Turn SIGTERM and SIGINT into ``Preempted``: at once, or inside ``with stop:`` at the end of the block.

    Only the main thread can receive signals; elsewhere (a launcher's worker thread) nothing is installed.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._deferred = False

    @contextlib.contextmanager
    def installed(self) -> "Iterator[StopSignal]":
        """Handle the signals within the block."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise ``Preempted`` if a signal has come."""
        if self.requested:
            raise Preempted(EXIT_PREEMPTED if self.requested == signal.SIGTERM else EXIT_INTERRUPTED)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.requested and number == signal.SIGINT  # a second Ctrl-C does not wait
        self.requested = self.requested or number  # the first one decides the exit code
        if again or not self._deferred:
            self.check()

    def __enter__(self) -> "StopSignal":
        self._deferred = True
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._deferred = False
        if kind is None:
            self.check()
