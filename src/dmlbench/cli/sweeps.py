"""Sweeps that several processes may share: a run that another one has is come back to, and all failures are named."""

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from dmlbench.types import RunInUse

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
"""Between looks at the runs of other processes."""

_COMPOSED_BEFORE = 256
"""Jobs whose configurations are held, of some MB each."""

Job = tuple[str, ...]
"""The overrides of one run of a sweep."""


class SweepFailed(Exception):
    """Jobs of a sweep have failed; the others are done.

    Attributes:
        jobs: what tells each failed one from the others, and its error.
    """

    def __init__(self, jobs: Sequence[tuple[str, Exception]], count: int) -> None:
        super().__init__(f"{len(jobs)} of {count} runs failed: {'; '.join(name for name, _ in jobs)}")
        self.jobs = tuple(jobs)


class SharingLauncher(Launcher):
    """Any of Hydra's launchers, but a failed job stops nothing, and jobs in use elsewhere wait for their end.

    The waiting is done here, in the process of the sweep, so that jobs of launchers with processes of their own
    (joblib, submitit) give their place to others meanwhile.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.jobs: list[Job] = []
        self.failed: list[tuple[Job, Exception]] = []
        self.in_use: list[tuple[Job, RunInUse]] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Launch jobs; returns those that are done."""
        jobs = [tuple(overrides) for overrides in job_overrides]
        self.jobs += jobs
        return self._launch(jobs, initial_job_idx)

    def _launch(self, jobs: Sequence[Job], first: int) -> list[JobReturn]:
        done = []
        for job, result in zip(jobs, self._launcher.launch(jobs, first), strict=True):
            error = _error_of(result)
            if error is None:
                done.append(result)
            elif isinstance(error, RunInUse):
                self.in_use.append((job, error))
            else:
                self.failed.append((job, error))
        return done

    def wait(self, may_begin: Callable[[Job], bool] = lambda job: True) -> None:
        """Wait for the runs of other processes: skip those that become complete, run those that are left.

        Args:
            may_begin: whether there is time for a job, asked again and again; one that there is none for is left.
        """
        from dmlbench.results.store import RESULT, is_locked  # torch comes with it, which a mistake need not wait for

        if self.in_use:
            names = ", ".join(str(error.run_dir) for _, error in self.in_use)
            log.info("waiting for runs of other processes: %s", names)
        while self.in_use:
            late = [(job, error) for job, error in self.in_use if not may_begin(job)]
            if late:
                self.in_use = [entry for entry in self.in_use if entry not in late]
                if names := ", ".join(str(e.run_dir) for _, e in late if not (e.run_dir / RESULT).exists()):
                    log.info("left, as there is no time to wait for them: %s", names)
            free = [job for job, error in self.in_use if not is_locked(error.run_dir)]
            if free:
                self.in_use = [(job, error) for job, error in self.in_use if job not in free]
                self._launch(free, len(self.jobs))
            elif self.in_use:
                time.sleep(_PAUSE_S)

    def finish(self) -> None:
        """``wait``, then name what has failed.

        Raises:
            SweepFailed: jobs have failed.
        """
        self.wait()
        if self.failed:
            raise SweepFailed(self.failures, len(self.jobs))

    @property
    def failures(self) -> list[tuple[str, Exception]]:
        """What tells each failed job from the others, and its error."""
        return [(self._name(job), error) for job, error in self.failed]

    @property
    def is_in_this_process(self) -> bool:
        return isinstance(self._launcher, BasicLauncher)

    def _name(self, job: Job) -> str:
        """The overrides that not all jobs have."""
        own = [override for override in job if any(override not in other for other in self.jobs)]
        return " ".join(filter_overrides(own or job))


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """What is swept over inside of this is launched by a ``SharingLauncher``, whatever launcher was chosen.

    Hydra takes launchers from packages of its own alone, and calls nobody with all results: hence not a plugin.

    Raises:
        SweepFailed: jobs have failed.
    """
    made: list[SharingLauncher] = []
    composed: dict[Job, DictConfig] = {}
    original, compose = Plugins.instantiate_launcher, ConfigLoaderImpl.load_sweep_config

    def instantiate(*arguments: Any, **named: Any) -> Launcher:
        made.append(SharingLauncher(original(*arguments, **named)))
        return made[-1]

    def compose_once(loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Hydra composes all jobs before the first begins, drops what it made, and composes each job again."""
        job = tuple(sweep_overrides)
        if job in composed:
            return composed.pop(job)
        cfg = compose(loader, master_config, sweep_overrides)
        if len(composed) < _COMPOSED_BEFORE:
            composed[job] = cfg
        return cfg

    Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign]
    ConfigLoaderImpl.load_sweep_config = compose_once  # type: ignore[assignment, method-assign]
    try:
        yield
        for launcher in made:
            launcher.finish()
    finally:
        Plugins.instantiate_launcher = original  # type: ignore[method-assign]
        ConfigLoaderImpl.load_sweep_config = compose  # type: ignore[method-assign]


def launcher_for(task: TaskFunction, overrides: Sequence[str]) -> SharingLauncher:
    """A launcher for jobs of ``dmlbench train`` that nothing but their overrides relate; inside of ``composing()``.

    Args:
        task: what runs a job's configuration.
        overrides: of Hydra's own keys, such as ``hydra/launcher=joblib``, and of what these depend on.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    config = hydra.compose_config(
        "train", ["hydra.mode=MULTIRUN", *overrides], RunMode.MULTIRUN, with_log_configuration=False, from_shell=False
    )
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    return SharingLauncher(Plugins.instance().instantiate_launcher(context, task, config))


def _error_of(result: JobReturn) -> Exception | None:
    """What a job failed of."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Hydra repeats all overrides there
            _ = result.return_value
    except Exception as error:
        return error
    return None
