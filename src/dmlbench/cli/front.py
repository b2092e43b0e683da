"""What every sub-command shares: its configuration, error messages with a remedy, exit codes."""

import errno
import functools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dmlbench.cli.arguments import CommandLine, for_hydra
from dmlbench.cli.sweeps import SweepFailed, shared
from dmlbench.config import compose as compose  # where scripts and notebooks look for it
from dmlbench.config import config_folder, register_schemas, settle
from dmlbench.training.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted
from dmlbench.types import ConfigError, DmlbenchError, closest

EXIT_FAILED, EXIT_BAD_CONFIGURATION, EXIT_BROKEN_PIPE = 1, 2, 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a disk refuses a write with, but never a read."""
_DISK = (*_FULL, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""What a disk refuses a write or a read with."""

_OF_THE_LINE = ("Config group override", "Only one of --run", "can only be used in conjunction")
"""What Hydra says of a command line, in errors of no type of its own."""
_NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory")


def first_word(
    line: CommandLine, words: Mapping[str, str], *, usage: str, unknown: str
) -> tuple[str, CommandLine] | None:
    """The first word of a command that goes on with one, and the line without it; None where help alone was asked for,
    which is printed.

    Args:
        line: behind the command's name.
        words: known ones, and what each does.
        usage: the command and what stands for its word.
        unknown: the message about another word, with {} for it.

    Raises:
        ConfigError: another word, or none.
    """
    word, *rest = line.words or ("",)
    if word in words:
        return word, replace(line, words=tuple(rest))
    if word or not {"-h", "--help"} & set(line.options):
        raise ConfigError(f"{unknown.format(word)} ({closest(word, list(words))})")
    width = max(10, *map(len, words))
    print(f"usage: dmlbench {usage} [--help] [key=value ...]\n")
    print("\n".join(f"  {name:<{width}} {text}" for name, text in words.items()))
    return None


def run_hydra(name: str, task: Callable[[DictConfig], Any], line: CommandLine) -> None:
    """Compose the configuration ``name`` with the command line's overrides and run ``task`` on it."""
    folder = line.config_dir
    options = [*line.options, *(["--config-dir", str(folder)] if folder else [])]
    sys.argv = [f"dmlbench {name}", *options, *for_hydra(name, line)]
    # Hydra then raises instead of printing its own report and exiting; guarded() prints ours.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    caught: list[Exception] = []

    @functools.wraps(task)
    def prepared(cfg: DictConfig) -> Any:
        try:
            return Prepared(name, task, folder)(cfg)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            caught.append(error)  # Hydra would print all overrides before the error

    prepare_process(folder, name)
    with shared():
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=name)(prepared)()
    if caught:
        raise caught[0]


@dataclass(frozen=True)
class Prepared:
    """The task of a command with what it needs, also in processes that a launcher starts."""

    name: str
    task: Callable[[DictConfig], Any]
    folder: Path | None

    def __call__(self, cfg: DictConfig) -> Any:
        prepare_process(self.folder, self.name)
        if "paths" in cfg:
            require_output_dir(cfg)
        if self.name == "train":
            settle(cfg)
        return self.task(cfg)


def require_output_dir(cfg: DictConfig) -> None:
    if not str(cfg.paths.output_dir).strip():
        raise ConfigError("paths.output_dir is empty; name a folder, such as paths.output_dir=outputs")


def prepare_process(folder: Path | None, name: str | None = None) -> None:
    """Make schemas (only that of ``name``, if given), recipes and the modules next to the user's configuration folder
    known, after what is installed."""
    register_schemas(folder, name)
    if folder and str(folder.absolute().parent) not in sys.path:
        sys.path.append(str(folder.absolute().parent))


def guarded(action: Callable[[], None]) -> int:
    """Run ``action``; what a user can fix becomes one message and an exit code, a defect keeps its traceback."""
    try:
        action()
    except KeyboardInterrupt:
        return _report("interrupted; nothing that was finished is lost, start the same command again", EXIT_INTERRUPTED)
    except Preempted as stop:
        how = "stopped" if stop.code == EXIT_PREEMPTED else "interrupted"
        print(f"dmlbench: {how}; start the same command again to continue", file=sys.stderr)
        return EXIT_PREEMPTED if stop.code == EXIT_PREEMPTED else EXIT_INTERRUPTED
    except SweepFailed as failed:
        return _report_sweep(failed)
    except BrokenPipeError:  # whoever reads has seen enough, such as `| head`; what is left to be said goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        described = _described(error)
        if described is None:
            raise
        return _report(*described)
    return 0


def _described(error: Exception) -> tuple[str, int] | None:
    """Message and exit code of what a user can fix; None of a defect."""
    cause = _root(error) if isinstance(error, (HydraException, OmegaConfBaseException)) else error
    if isinstance(cause, DmlbenchError):
        return str(cause), EXIT_BAD_CONFIGURATION if isinstance(cause, ConfigError) else EXIT_FAILED
    if isinstance(cause, yaml.YAMLError):
        return f"a configuration file is no YAML: {' '.join(str(cause).split())}", EXIT_BAD_CONFIGURATION
    if isinstance(cause, (HydraException, OmegaConfBaseException)):
        return explain(error), EXIT_BAD_CONFIGURATION
    if isinstance(cause, ValueError) and any(text in str(cause) for text in _OF_THE_LINE):
        return f"the command line cannot be read: {cause}", EXIT_BAD_CONFIGURATION
    if isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and _NO_MEMORY.search(str(cause))):
        what = next(iter(str(cause).splitlines()), "")
        return f"out of memory ({what}); lower a batch, an image or an embedding size", EXIT_FAILED
    if isinstance(cause, OSError) and cause.errno in _DISK and (cause.filename or cause.errno == errno.ENOSPC):
        if _is_of_reading(cause):
            return f"cannot read {cause.filename}: {cause.strerror}; make it a readable file", EXIT_FAILED
        place = f" {cause.filename2 or cause.filename}" if cause.filename else ""
        return f"cannot write{place}: {cause.strerror}; make room, or choose another folder", EXIT_FAILED
    return None


def _is_of_reading(error: OSError) -> bool:
    """Files are written under new names: one that is there, or whose folder cannot be looked into, was being read."""
    if error.errno in _FULL or error.filename is None or error.filename2 is not None:
        return False
    folder = os.path.dirname(error.filename) or "."
    return os.path.lexists(error.filename) or (os.path.isdir(folder) and not os.access(folder, os.X_OK))


def _report_sweep(failed: SweepFailed) -> int:
    """Every failed job with its reason, then one line that names all of them."""
    codes = set()
    for name, error in failed.jobs:
        message, code = _described(error) or (f"{type(error).__name__}: {error}", EXIT_FAILED)
        codes.add(code)
        if _described(error) is None:
            traceback.print_exception(error)
        print(f"dmlbench: {name}: {message}", file=sys.stderr)
    return _report(f"{failed}; start the same command again to run these alone", min(codes))


def explain(error: Exception) -> str:
    """Hydra's message about a configuration, with the nearest valid name added."""
    message = " ".join(str(error).split())
    cause = _root(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={option} is unknown: {closest(option, list(error.options))}"
    if isinstance(cause, OmegaConfBaseException) and cause.parent_node is not None and "not in" in str(cause):
        parent = cause.parent_node
        known = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        return f"the configuration has no key '{cause.full_key}': {closest(str(cause.key), known)}"
    if isinstance(cause, OmegaConfBaseException):
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{key}{' '.join(str(cause.msg or cause).partition('full_key:')[0].split())}"
    if several := re.match(r"Ambiguous value for argument '(.+?)' 1\. To use", message):
        return f"{several[1]} gives several values: -m runs each of them; a list is written [a,b]"
    missing = re.match(r"Could not override '([^']+)'\. No match in the defaults list", message)
    if missing:
        return f"'{missing[1]}' is no configuration group: {closest(missing[1], groups())}"
    return message


def groups() -> list[str]:
    """Names of the configuration groups that ship with the project."""
    return sorted(path.name for path in config_folder().iterdir() if path.is_dir() and path.name != "hydra")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _report(error: Exception | str, code: int) -> int:
    print(f"dmlbench: error: {error}", file=sys.stderr)
    return code


class ProgressFriendlyHandler(logging.StreamHandler):
    """Log records that do not tear a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)
