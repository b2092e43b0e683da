"""Estimate how long runs take on this machine, from complete runs or from a few timed steps."""

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.apps.plan import Plan, Run
from dmlbench.data.images.feature_cache import FeatureCache, require_space
from dmlbench.experiment import Experiment
from dmlbench.identity import PlannedConfig
from dmlbench.models.net import PooledModel
from dmlbench.training.fit import fit
from dmlbench.types import IntArray, RetrievalSet, counted, duration

_TIMED_STEPS = 2
_TIMED_RECORDS = 64
_TIMED_PASSES = 3


@dataclass(frozen=True)
class RunTime:
    """How long a run takes, and how that is known."""

    seconds: float | None  # None: unknown
    source: str  # what was timed, or why the time is unknown
    is_bound: bool = False  # the training may stop early
    caching: float = 0.0  # seconds to build the feature cache before the first run
    cache: str = ""  # its file, which runs share

    def __str__(self) -> str:
        if self.seconds is None:
            return f"time unknown: {self.source}"
        known = f"{'at most' if self.is_bound else 'about'} {duration(self.seconds)} per run ({self.source})"
        return f"{known}, plus about {duration(self.caching)} to build the feature cache" if self.caching else known


class CachingTime:
    """Times some records of a missing feature cache in place of building it; the cache then has random records."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cache = ""

    def __call__(
        self, cache: FeatureCache, records: Callable[[IntArray], Iterator[Tensor]], *, name: str, **_: Any
    ) -> None:
        if cache.is_complete():
            return
        require_space(cache, name)
        positions = np.arange(cache.num_records)[-_TIMED_RECORDS:]  # random views, if there are any

        def seconds() -> float:
            started = time.monotonic()
            deque(records(positions), maxlen=0)
            return time.monotonic() - started

        self.cache = str(cache.path)
        fastest = min(seconds() for _ in range(_TIMED_PASSES))  # the first pass also allocates
        self.seconds = fastest / len(positions) * cache.num_records
        cache.simulate()


def kind_of(config: PlannedConfig) -> tuple[str, ...]:
    """What configs whose runs take about as long share: data set, protocol, backbone and cost."""
    backbone, *rest = config.name.split("-")
    return config.dataset, config.protocol, backbone, *rest[2:-1], config.cost


def measured_times(plan: Plan) -> dict[str, RunTime]:
    """Mean time of complete runs of each config, else of its kind, by ``sha256``; absent without any."""
    seconds: dict[str | tuple[str, ...], list[float]] = {}
    for run in (*plan.preparing, *plan.runs):
        if run.state == "done":
            for key in (run.config.sha256, kind_of(run.config)):
                seconds.setdefault(key, []).append(float(run.result["wall_s"]))
    found = {}
    for config in (*plan.first.values(), *plan.configs):
        for key, whose in ((config.sha256, "complete runs"), (kind_of(config), "complete runs of this kind")):
            if key in seconds:
                found[config.sha256] = RunTime(sum(seconds[key]) / len(seconds[key]), f"mean of {whose}")
                break
    return found


class _Clock:
    """A logger that notes when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, step: int) -> None:
        self.times.append(time.monotonic())

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.times.append(time.monotonic())

    def image(self, step: int, name: str, picture: NDArray[np.uint8]) -> None: ...

    def summary(self, step: int, scores: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def timed(experiment: Experiment, label: str, caching: CachingTime | None = None) -> RunTime:
    """Time two training steps and one embedding batch; rankings and clusterings are not counted.

    Args:
        label: of the config, for ``source``.
        caching: has timed the building of the feature cache.
    """
    setup = experiment.setup
    settings, split, model = setup.settings, setup.data.split, setup.model
    seconds, parts = 0.0, []
    if settings.max_steps:
        clock = _Clock()
        few = replace(
            settings, max_steps=_TIMED_STEPS, validate_every=_TIMED_STEPS, warmup_steps=0, log_every=1,
            checkpoint_every=None,
        )  # fmt: skip
        try:
            with tempfile.TemporaryDirectory() as folder:
                fit(
                    model, experiment.objective, experiment.batches, None, experiment.optimizer, few, Path(folder),
                    device=setup.device, loggers=[clock],
                )  # fmt: skip
        finally:
            experiment.batches.close()
        seconds += settings.max_steps * float(np.diff(clock.times).min())  # the first step also allocates and compiles
        parts.append(f"{_TIMED_STEPS} training steps")
    sets = [part for part in (split.val, split.test) if part is not None]
    batch = sets[0].rows[: setup.eval_batch_size]
    started = time.monotonic()
    setup.embed(RetrievalSet(batch))
    image_s = (time.monotonic() - started) / len(batch)
    parts.append("1 embedding batch")
    validations = math.ceil(settings.max_steps / settings.validate_every)
    images = 0 if split.test is None else len(split.test.rows)
    if split.val is not None:
        is_test = split.val_is_test and setup.rerank is None  # then the test is the last validation
        images += (validations + (not is_test)) * len(split.val.rows)
    if isinstance(model, PooledModel) and model.projection.closed_form is not None:
        images += len(split.train)
    is_bound = bool(settings.patience or settings.collapse_ratio or experiment.protocol.planned_by)
    cache = (caching.seconds, caching.cache) if caching else ()
    return RunTime(seconds + images * image_s, f"{' and '.join(parts)} of {label}", is_bound, *cache)


def total_time(runs: Sequence[Run], times: Mapping[str, RunTime]) -> str:
    """Time of runs one after the other, such as "about 3 h"; empty if no run's time is known."""
    known = [times[run.config.sha256] for run in runs if run.config.sha256 in times]
    seconds = [each.seconds for each in known if each.seconds is not None]
    if not seconds:
        return ""
    all_seconds = sum(seconds) + sum({each.cache: each.caching for each in known}.values())
    total = f"{'at most' if any(each.is_bound for each in known) else 'about'} {duration(all_seconds)}"
    unknown = len(runs) - len(seconds)
    return f"{total}, plus {counted(unknown, 'run')} of unknown time" if unknown else total
