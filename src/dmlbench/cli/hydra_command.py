"""Compose a command's configuration and run the command on it."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, configure_log
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dmlbench.cli.arguments import CommandLine, for_hydra
from dmlbench.cli.errors import Failure, SweepFailed
from dmlbench.cli.progress import Progress, own_overrides
from dmlbench.components import add_module_folder
from dmlbench.config import (
    arguments_of,
    complete_config,
    composing,
    config_folder,
    config_folders,
    register_schemas,
    without_hydra,
)
from dmlbench.types import ConfigError, RunInUse, check_output_dir, closest, counted

log = logging.getLogger(__name__)

_NOT_IN_HELP = {"data": ("dataset", "transform")}
"""Keys of the default data set, which say nothing of the command."""
Task = Callable[..., Any]
"""Of the command's arguments; ``train`` gets the composed configuration, and the progress of a sweep."""


def sub_command(
    line: CommandLine, words: Mapping[str, str], *, usage: str, unknown: str
) -> tuple[str, CommandLine] | None:
    """The sub-command that a line begins with, and the rest of the line; None once ``--help`` has printed them all."""
    word, *rest = line.words or ("",)
    if word in words:
        return word, replace(line, words=tuple(rest))
    if word or not line.help:
        raise ConfigError(f"{unknown.format(word)}: {closest(word, list(words))}")
    width = max(10, *map(len, words))
    print(f"usage: dmlbench {usage} [--help] [key=value ...]\n")
    print("\n".join(f"  {name:<{width}} {text}" for name, text in words.items()))
    return None


def run_command(name: str, task: Task, line: CommandLine) -> None:
    """Run ``task`` on the composed configuration ``name``, or print what ``--help`` or ``--cfg`` asks for."""
    prepare_process(line.config_dir, name)
    overrides = for_hydra(name, line)
    with composing(line.config_dir, name):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        if line.help:
            print(_help(composer, name, overrides, line.config_dir))
        elif line.cfg:
            composer.show_cfg(name, overrides, cfg_type=line.cfg, package=line.package, resolve=line.resolve)
        elif line.is_sweep or (name == "train" and is_sweep(overrides)):
            jobs = sweep_jobs(overrides) if name == "train" else []
            if jobs:
                from dmlbench.cli.preflight import warn_of_jobs

                warn_of_jobs(jobs)
            progress = Progress(own_overrides(jobs)) if jobs else None
            job = Job(name, task, line.config_dir, progress)
            done = [job for batch in composer.multirun(name, job, [*overrides, "hydra.mode=MULTIRUN"]) for job in batch]
            raise_failures(done)
            if name == "train":
                skipped = f" ({progress.skipped} skipped)" if progress and progress.skipped else ""
                print(
                    f"{counted(len(done), 'run')} ended without an error{skipped}. Compare configs with "
                    "`dmlbench table` (allow_partial=true also shows configs with missing runs)."
                )
        else:
            error = composer.run(name, Job(name, task, line.config_dir), overrides).return_value
            if isinstance(error, Exception):
                raise error


def is_sweep(overrides: Sequence[str]) -> bool:
    """Whether an experiment makes ``dmlbench train`` a sweep without ``-m``. Inside of ``composing()``."""
    composer = GlobalHydra.instance().hydra
    assert composer is not None
    return bool(composer.get_mode("train", list(overrides)) == RunMode.MULTIRUN)


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep of ``dmlbench train``, in Hydra's order. Inside of ``composing()``.

    Empty for other sweepers than Hydra's basic one, which choose their jobs as they go.
    """
    composer = GlobalHydra.instance().hydra
    assert composer is not None
    config = composer.compose_config(
        "train", [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN, with_log_configuration=False
    )
    if not config.hydra.sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
        return []
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=composer.config_loader)
    task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # such as fit.max_steps=${epochs:4}
    return list(BasicSweeper.split_arguments(parser.parse_overrides([*params, *task]), None)[0])


@contextlib.contextmanager
def composed_command(name: str, line: CommandLine, *, logs: bool = True) -> Iterator[Any]:
    """The arguments of a command that composes configurations of runs, too; ``logs`` configures the process's log."""
    prepare_process(line.config_dir)
    with composing(line.config_dir):
        cfg = hydra.compose(name, for_hydra(name, line), return_hydra_config=True)
        if logs:
            configure_log(cfg.hydra.job_logging)
        check_output_dir(cfg.paths.output_dir)
        yield arguments_of(without_hydra(cfg))


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Only warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _help(composer: Any, name: str, overrides: list[str], config_dir: Path | None) -> str:
    """``hydra.help`` and the values, with the comments of the command's YAML.

    Hydra's own way of listing the groups takes a second.
    """
    cfg = composer.compose_config(name, overrides, run_mode=RunMode.RUN, with_log_configuration=False)
    header, footer = cfg.hydra.help.header, re.sub("(?m)^dmlbench ", "  dmlbench ", cfg.hydra.help.footer)
    options: dict[str, list[str]] = {}
    for folder in config_folders(config_dir):
        for path in sorted(folder.glob("*/**/*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if not group.startswith("hydra"):
                options.setdefault(group, []).append(path.stem)
    groups = "\n".join(f"{group}: {', '.join(sorted(set(found)))}" for group, found in sorted(options.items()))
    footer = footer.replace("$APP_CONFIG_GROUPS", groups)
    left_out = ("hydra", *_NOT_IN_HELP.get(name, ()))
    shown = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in left_out])
    file = config_folder() / f"{name}.yaml"
    comments = dict(re.findall(r"(?m)^(\w+):.*?\s#\s(.+)$", file.read_text(encoding="utf-8")))
    values = re.sub(
        r"(?m)^(\w+):.*$",
        lambda line: "  # ".join(filter(None, (line[0], comments.get(line[1])))),
        OmegaConf.to_yaml(shown),
    )
    return f"{header}\n\n{footer}\n\nValues:\n\n{values}"


@dataclass(frozen=True)
class Job:
    """The task of a command, which launchers may start in other processes.

    Returns the error that it ended with, in a sweep as ``Failure``.
    """

    name: str
    task: Task
    config_dir: Path | None
    progress: Progress | None = None  # of a sweep of ``train``

    def __call__(self, cfg: DictConfig) -> Any:
        prepare_process(self.config_dir, self.name)
        try:
            if "paths" in cfg:
                check_output_dir(cfg.paths.output_dir)
            if self.name != "train":
                return self.task(arguments_of(cfg))
            complete_config(cfg)
            return self.task(cfg, self.progress)
        except RunInUse as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                return error
            log.info("skipped: %s", error)
        except Exception as error:  # Hydra would print all overrides, and stop the sweep
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                return error
            log.error("failed: %s", error)  # at once: the sweep continues and reports at its end
            return Failure.of(error)
        return None


def prepare_process(config_dir: Path | None, name: str | None = None) -> None:
    """Register schemas (only that of ``name``, if given) and recipes; make modules beside ``config_dir`` importable."""
    register_schemas(config_dir, name)
    add_module_folder(config_dir)


class ProgressFriendlyHandler(logging.StreamHandler):
    """Log records that do not tear a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def raise_failures(jobs: Sequence[JobReturn], names: Sequence[str] | None = None) -> None:
    """Raise ``SweepFailed`` if the return value of a job is a failure; ``names`` default to the jobs' own overrides."""
    names = own_overrides([list(job.overrides or ()) for job in jobs]) if names is None else names
    found = zip(names, (job.return_value for job in jobs), strict=True)
    if failed := [(name, value) for name, value in found if isinstance(value, Failure)]:
        raise SweepFailed(failed, len(jobs))


def launch(task: TaskFunction, jobs: Sequence[Sequence[str]], overrides: Sequence[str], first: int) -> list[JobReturn]:
    """Run jobs of ``dmlbench train``, given by their overrides, with the launcher that ``overrides`` choose.

    These are of Hydra's own keys and of those that they depend on. To be called inside of ``composing()``.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    config = hydra.compose_config(
        "train", ["hydra.mode=MULTIRUN", *overrides], RunMode.MULTIRUN, with_log_configuration=False, from_shell=False
    )
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    done = Plugins.instance().instantiate_launcher(context, task, config).launch(jobs, first)
    return list(done)
