"""Launch many runs with Hydra's launchers, and collect their failures."""

from collections.abc import Sequence

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides
from hydra.types import HydraContext, RunMode, TaskFunction


class SweepFailed(Exception):
    """Jobs of a sweep have failed; ``jobs`` has each one's own overrides and its error."""

    def __init__(self, jobs: Sequence[tuple[str, Exception]], count: int) -> None:
        super().__init__(f"{len(jobs)} of {count} runs failed: {'; '.join(name for name, _ in jobs)}")
        self.jobs = tuple(jobs)


def raise_failures(jobs: Sequence[JobReturn]) -> None:
    """Raise ``SweepFailed`` if the return value of a job is an error."""
    failed = [job for job in jobs if isinstance(job.return_value, Exception)]
    if failed:
        overrides = [list(job.overrides or ()) for job in jobs]
        raise SweepFailed(
            [(_name(list(job.overrides or ()), overrides), job.return_value) for job in failed], len(jobs)
        )


def _name(job: list[str], jobs: Sequence[list[str]]) -> str:
    """The overrides of a job that not all jobs have."""
    own = [override for override in job if any(override not in other for other in jobs)]
    return " ".join(filter_overrides(own or job))


def launch(task: TaskFunction, jobs: Sequence[Sequence[str]], overrides: Sequence[str], first: int) -> list[JobReturn]:
    """Run jobs of ``dmlbench train`` with the launcher that overrides choose; inside of ``composing()``.

    Args:
        task: runs a job's configuration.
        jobs: overrides of each job.
        overrides: of Hydra's own keys, such as ``hydra/launcher=joblib``, and of keys that these depend on.
        first: number of the first job.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    config = hydra.compose_config(
        "train", ["hydra.mode=MULTIRUN", *overrides], RunMode.MULTIRUN, with_log_configuration=False, from_shell=False
    )
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    done = Plugins.instance().instantiate_launcher(context, task, config).launch(jobs, first)
    return list(done)
