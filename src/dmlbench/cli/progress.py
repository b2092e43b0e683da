"""The log line that starts each run of a sweep."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hydra.core.utils import filter_overrides

from dmlbench.types import duration, shorten

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Position in a sweep. Launchers with other processes give each run a copy."""

    names: Sequence[str]  # of all runs, in the order of their job numbers
    started: float = field(default_factory=time.time)  # of the sweep, in seconds since the epoch
    skipped: int = 0  # runs that this process skipped

    def log_start(self, job: int) -> None:
        """Log the position of a job, the elapsed time, and the remaining time at the pace so far."""
        elapsed, trained = time.time() - self.started, job - self.skipped
        so_far = f" ({duration(elapsed)} elapsed)" if job else ""
        if trained > 0:
            remaining = elapsed / trained * (len(self.names) - job)
            so_far = f" ({duration(elapsed)} elapsed, about {duration(remaining)} remaining)"
        log.info("run %d of %d: %s%s", job + 1, len(self.names), self.names[job], so_far)


def by_reason(jobs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Jobs, given as name and reason, by their reason: the first one's name and how many more there are."""
    names: dict[str, list[str]] = {}
    for name, reason in jobs:
        names.setdefault(reason, []).append(name)
    return {reason: shorten(own, most=1) for reason, own in names.items()}


def own_overrides(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each job that not all jobs share, without Hydra's keys; all of them if none is left."""
    shared = set(jobs[0]).intersection(*jobs) if jobs else set()
    return [" ".join(filter_overrides([each for each in job if each not in shared] or list(job))) for job in jobs]
