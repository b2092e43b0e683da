"""Error messages of the commands, and exit codes."""

import csv
import errno
import json
import os
import pickle
import re
import shlex
import sqlite3
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from dmlbench.cli.progress import by_reason
from dmlbench.config import config_folder
from dmlbench.training.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted
from dmlbench.types import ConfigError, DmlbenchError, closest, flatten, how_to_install

EXIT_FAILED, EXIT_BAD_CONFIGURATION, EXIT_BROKEN_PIPE = 1, 2, 141
_LAUNCHERS = ("joblib", "submitit_local", "submitit_slurm")
"""Hydra's launchers of the extra ``sweeps``."""
_OTHER_FILE = "Choose another file or folder."
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room, or choose another folder."),
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or choose another folder.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n), or lower num_workers."),
}
_OF_FILES = (UnicodeError, json.JSONDecodeError, csv.Error, pickle.UnpicklingError, zipfile.BadZipFile, sqlite3.Error)
_NO_MEMORY = re.compile("out of memory|can(no|')t allocate memory|not enough memory|failed to map segment|NULL without")
"""What torch, the dynamic linker and Python (SystemError) say where memory is limited."""
_ALIASES = {
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "steps"), "fit.max_steps"),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), "fit.patience"),
    **dict.fromkeys(("amp", "mixed_precision", "fp16", "bf16"), "fit.precision"),
    **dict.fromkeys(("freeze", "freeze_backbone", "frozen"), "backbone.frozen_until"),
    "batch_size": "sampler.classes_per_batch",
    "learning_rate": "optim.lr",
    "seed": "base_seed",
}
"""Keys by their names in other frameworks."""
_EXPECTED = {
    "is not a valid bool": "true or false",
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a ListConfig": "a list, such as [a,b]",
    "to string": "text",
}
"""What a key holds, by OmegaConf's words about another value."""


@dataclass(frozen=True)
class Failure:
    """Why a job of a sweep failed. The error itself would keep the job's model in memory, by its traceback."""

    message: str
    code: int
    traceback: str = ""  # of a defect

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        if (described := _described(error)) is not None:
            return cls(*described)
        return cls(f"{type(error).__name__}: {error}", EXIT_FAILED, "".join(traceback.format_exception(error)))


class SweepFailed(Exception):
    """Jobs of a sweep have failed; ``jobs`` has each one's own overrides and its failure."""

    def __init__(self, jobs: Sequence[tuple[str, Failure]], count: int) -> None:
        super().__init__(f"{len(jobs)} of {count} runs failed: {'; '.join(name for name, _ in jobs)}")
        self.jobs = tuple(jobs)


def guarded(action: Callable[[], None]) -> int:
    """Run ``action``; errors that a user can fix become one message and an exit code, defects keep their traceback."""
    try:
        action()
    except KeyboardInterrupt:
        return _report("interrupted. Completed work is kept. Start the same command again to resume.", EXIT_INTERRUPTED)
    except Preempted as stop:
        how = "stopped" if stop.code == EXIT_PREEMPTED else "interrupted"
        print(f"dmlbench: {how}. Start the same command again to resume.", file=sys.stderr)
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
    cause = root_cause(error) if isinstance(error, (HydraException, OmegaConfBaseException)) else error
    if isinstance(cause, DmlbenchError):
        return str(cause), EXIT_BAD_CONFIGURATION if isinstance(cause, ConfigError) else EXIT_FAILED
    if isinstance(cause, (HydraException, OmegaConfBaseException, yaml.YAMLError)):
        return explain(error), EXIT_BAD_CONFIGURATION
    if isinstance(cause, MemoryError) or (
        isinstance(cause, (RuntimeError, ImportError, SystemError)) and _NO_MEMORY.search(str(cause))
    ):
        what = str(cause).partition("\n")[0]
        return f"out of memory ({what}). Lower a batch or image size, or raise the limit (ulimit -v).", EXIT_FAILED
    if isinstance(cause, OSError):
        place, remedy = cause.filename2 or cause.filename or _file_of(cause), _REMEDIES.get(cause.errno or 0)
        if place or remedy:
            return f"{f'{place}: ' if place else ''}{cause.strerror or cause}. {remedy or _OTHER_FILE}", EXIT_FAILED
    if isinstance(cause, _OF_FILES) and (place := _file_of(cause)):
        return f"{place} cannot be read: {' '.join(str(cause).split())}. {_OTHER_FILE}", EXIT_FAILED
    if isinstance(cause, RecursionError) and any("hydra." in name for name, _ in _frames(cause)):
        return "the configuration includes itself. Check its defaults list.", EXIT_BAD_CONFIGURATION
    return None


def _file_of(error: BaseException) -> str:
    """The file that the innermost function of ours was working on; empty if there is none."""
    ours = [variables for name, variables in _frames(error) if name.startswith("dmlbench.")]
    paths = [value for variables in ours for value in variables.values() if isinstance(value, Path)]
    return str(paths[-1]) if paths else ""


def _frames(error: BaseException) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Module and variables of the functions that an error came through, innermost last."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_globals.get("__name__", ""), frame.f_locals


def _report_sweep(failed: SweepFailed) -> int:
    """Every failed job with its reason, then one line that names all of them."""
    for _, failure in failed.jobs:
        print(failure.traceback, end="", file=sys.stderr)
    codes = {failure.code for _, failure in failed.jobs}
    for message, names in by_reason([(name, failure.message) for name, failure in failed.jobs]).items():
        print(f"dmlbench: {names}: {message}", file=sys.stderr)
    remedy = (
        "Correct these overrides."
        if codes == {EXIT_BAD_CONFIGURATION}
        else "Start the same command again to repeat only these."
    )
    return _report(f"{failed}. {remedy}", min(codes))


def explain(error: Exception) -> str:
    """Hydra's message about a configuration, with the nearest valid name added."""
    message = " ".join(str(error).split())
    cause = root_cause(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and option in _LAUNCHERS:
            return f"hydra/launcher={option}: expected Hydra's plugin to be installed. {how_to_install('sweeps')}"
        return _unknown_option(group, option, list(error.options))
    if isinstance(cause, OmegaConfBaseException) and cause.parent_node is not None and "not in" in str(cause):
        key, parent = str(cause.key), cause.parent_node
        known = [str(each) for each in parent] if isinstance(parent, DictConfig) else []
        prefix = str(cause.full_key).removesuffix(key)
        if not known and prefix:
            return f"the configuration has no key '{cause.full_key}'. To add it, write +{cause.full_key}=<value>."
        return f"the configuration has no key '{cause.full_key}': {closest_key(key, known, parent, prefix)}"
    if isinstance(cause, InterpolationKeyError) and cause.parent_node is not None:
        wrong = re.search(r"Interpolation key '([^']+)' not found", str(cause))
        prefix, _, name = wrong[1].rpartition(".") if wrong else ("", "", "")
        node = OmegaConf.select(cause.parent_node._get_root(), prefix) if prefix else None
        if wrong and isinstance(node, DictConfig):
            nearest = closest(name, [str(each) for each in node], prefix=f"{prefix}.")
            if "_target_" in node and not nearest.startswith("did you mean"):
                nearest = f"{node['_target_']} has no {name}. Choose another {prefix}, or write a value."
            return f"{cause.full_key}: got ${{{wrong[1]}}}, which has no value: {nearest}"
    if isinstance(cause, UnsupportedInterpolationType) and isinstance(cause.parent_node, DictConfig):
        given: Any = OmegaConf.to_container(cause.parent_node, resolve=False)
        return f"{cause.full_key}: got {given[cause.key]}, expected a value, ${{<key>}} or ${{epochs:<number>}}."
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} is missing: expected {cause.full_key}=<value>."
    expected = next((kind for said, kind in _EXPECTED.items() if said in str(cause)), None)
    if isinstance(cause, ValidationError) and expected:
        return f"{cause.full_key}: got {shlex.quote(str(cause.value))}, expected {expected}."
    if isinstance(cause, OmegaConfBaseException):
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{key}{' '.join(str(cause.msg or cause).partition('full_key:')[0].split())}"
    if several := re.match(r"Ambiguous value for argument '(.+?)' 1\. To use", message):
        return f"{several[1]}: got several values, expected one. Add -m to run each of them, or write a list as [a,b]."
    if missing := re.match(r"Could not override '([^']+)'\. No match in the defaults list", message):
        return f"configuration group '{missing[1]}' is unknown: {closest(missing[1], groups())}"
    if (wrong := re.search(r"Could not load '(\w+)/([^']+)'", message)) and wrong[1] in groups():  # of a list
        options = sorted(path.stem for path in (config_folder() / wrong[1]).glob("*.yaml"))
        return _unknown_option(wrong[1], wrong[2], options)
    return message


def _unknown_option(group: str, option: str, options: Sequence[str]) -> str:
    nearest = closest(option, options)
    remedy = " Every run writes history.csv." if group == "logger" else ""
    if not (remedy or nearest.startswith("did you mean")):
        remedy = " Options of your own need --config-dir=<folder>."
    return f"{group}={option} is unknown: {nearest}{remedy}"


def closest_key(name: str, known: Sequence[str], config: Any, prefix: str = "") -> str:
    """As ``closest``, but a key further down, such as ``optim.lr`` for ``lr``, if the composed ``config`` has one.

    Args:
        prefix: of the keys of ``config``.
    """
    wanted = _ALIASES.get(name, name).removeprefix(prefix)
    keys = flatten(OmegaConf.to_container(config, resolve=False))
    nested = [key for key in keys if f".{key}".endswith(f".{wanted}") and not key.startswith(("hydra.", "runtime."))]
    if nested:
        return f"did you mean '{prefix}{min(nested, key=len)}'?"
    return closest(name, [key for key in known if key != "_target_"], prefix=prefix)


def groups() -> list[str]:
    """Names of the configuration groups that ship with the project."""
    return sorted(path.name for path in config_folder().iterdir() if path.is_dir() and path.name != "hydra")


def root_cause(error: BaseException) -> BaseException:
    """The error that caused all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _report(error: Exception | str, code: int) -> int:
    print(f"dmlbench: error: {error}", file=sys.stderr)
    return code
