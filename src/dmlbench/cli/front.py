"""What every Hydra sub-command shares: configuration folder, error messages with a remedy, exit codes."""

import argparse
import contextlib
import errno
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dmlbench.cli.targets import with_new_arguments
from dmlbench.config import register_schemas
from dmlbench.recipes import register_recipes, settle_recipe
from dmlbench.training.signals import EXIT_INTERRUPTED
from dmlbench.types import ConfigError, DmlbenchError, closest

# Groups that no run can do without.
_REQUIRED = (
    *("dataset", "transform", "sampler", "protocol", "backbone", "pooling", "head", "loss", "optim", "fit"),
    *("evaluation", "paths"),
)

EXIT_FAILED, EXIT_BAD_CONFIGURATION = 1, 2
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
"""What a disk refuses a write with."""


def config_folder() -> Path:
    """``conf`` inside the installed package, or at the top of the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"there is no configuration folder for {package}; install dmlbench again")


def run_hydra(name: str, task: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Compose the configuration ``name`` with the command line's overrides and run ``task`` on it."""
    _register(arguments)
    flags = [a for a in arguments if a in ("-m", "--multirun")]  # wherever they stand; argparse wants them together
    others = with_new_arguments([_rewritten(_checked(a)) for a in arguments if a not in flags])
    sys.argv = [f"dmlbench {name}", *flags, *(_of_each_job(others) if flags else others)]
    # Hydra then raises instead of printing its own report and exiting; guarded() prints ours.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @functools.wraps(task)
    def checked(cfg: DictConfig) -> Any:
        if "paths" in cfg and not str(cfg.paths.output_dir).strip():
            raise ConfigError("paths.output_dir is empty; name a folder, such as paths.output_dir=outputs")
        if name == "train":
            settle_recipe(cfg)
        return task(cfg)

    hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=name)(checked)()


def _register(arguments: Sequence[str] = ()) -> None:
    """Make schemas and recipes known to Hydra, with those of the folder that ``--config-dir`` names."""
    register_schemas()
    named = _flags.parse_known_args(list(arguments))[0].config_dir
    register_recipes([*([Path(named).resolve()] if named else []), config_folder()])


_flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_flags.add_argument("--config-dir", "-cd")


def _rewritten(argument: str) -> str:
    """An argument of the command line in Hydra's words."""
    key, equals, value = argument.partition("=")
    if key == "recipe.side" and equals:
        return f"recipe/side={value}"
    return _without_null(argument)


def _checked(argument: str) -> str:
    """An argument of the command line that Hydra would refuse in words of its own inner workings."""
    key, equals, value = argument.partition("=")
    if argument.startswith("-"):
        return argument
    if not key.strip("+~ "):
        raise ConfigError(f"'{argument}' names no key; write key=value, such as fit.max_steps=100")
    group = key.lstrip("+~")
    if group == "hydra":
        raise ConfigError(
            f"'{argument}': hydra is no group of this configuration; its own keys are hydra.<key>=<value>"
        )
    if key.startswith("~") and group in _REQUIRED:
        raise ConfigError(f"{argument}: every run needs a {group}; choose one of conf/{group}")
    if equals and (config_folder() / group).is_dir() and not re.fullmatch(r"[\w./,+@:\-\s'\"()]*", value):
        raise ConfigError(f"{argument}: an option of {group} is chosen by its name, such as {group}={_some(group)}")
    return argument


def _some(group: str) -> str:
    return min(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _without_null(argument: str) -> str:
    """``group=null`` as Hydra understands it: by the group's option ``none``, or by leaving out its default."""
    key, equals, value = argument.partition("=")
    folder = config_folder() / key
    if not equals or not key or not folder.is_dir() or "null" not in value.split(","):
        return argument
    if (folder / "none.yaml").is_file():
        return f"{key}={','.join('none' if option == 'null' else option for option in value.split(','))}"
    if value == "null" and key in _REQUIRED:
        raise ConfigError(f"{key}=null: every run needs a {key}; choose one of conf/{key}")
    return f"~{key}" if value == "null" else argument


def _of_each_job(arguments: Sequence[str]) -> list[str]:
    """Values inside of a group that is swept over, as sweeps over one value.

    Hydra applies what is not swept to the configuration before the sweep, too, where the group has its default option,
    which need not know the key.
    """
    parser = OverridesParser.create()
    try:
        parsed = [parser.parse_override(a) if "=" in a and not a.startswith("-") else None for a in arguments]
    except HydraException:
        return list(arguments)  # Hydra says what is wrong with them
    swept = {override.key_or_group for override in parsed if override is not None and override.is_sweep_override()}
    return [
        f"{override.get_key_element()}=choice({override.get_value_element_as_str()})"
        if override is not None
        and not override.is_sweep_override()
        and not override.is_delete()
        and override.value() not in (None, "")  # Hydra's sweeps know no null
        and any(override.key_or_group.startswith(f"{group}.") for group in swept)
        else argument
        for argument, override in zip(arguments, parsed, strict=True)
    ]


def compose(name: str, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration ``name`` with overrides, for commands that are not Hydra's own, for notebooks and for tests."""
    with composing(overrides) as rewritten:
        cfg = hydra.compose(name, overrides=rewritten, return_hydra_config=with_hydra)
    if name == "train":
        settle_recipe(cfg)
    return cfg


@contextlib.contextmanager
def composing(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Hydra made ready to compose; gives the overrides in its words."""
    _register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        yield [_rewritten(override) for override in overrides]


def guarded(action: Callable[[], None]) -> int:
    """Run ``action``; what a user can fix becomes one message and an exit code, a defect keeps its traceback."""
    try:
        action()
    except ConfigError as error:
        return _report(error, EXIT_BAD_CONFIGURATION)
    except DmlbenchError as error:
        return _report(error, EXIT_FAILED)
    except yaml.YAMLError as error:
        return _report(f"a configuration file is no YAML: {' '.join(str(error).split())}", EXIT_BAD_CONFIGURATION)
    except (HydraException, OmegaConfBaseException) as error:
        cause = _root(error)
        if isinstance(cause, DmlbenchError):
            return _report(cause, EXIT_BAD_CONFIGURATION if isinstance(cause, ConfigError) else EXIT_FAILED)
        if not isinstance(cause, (HydraException, OmegaConfBaseException)):
            raise
        return _report(explain(error), EXIT_BAD_CONFIGURATION)
    except ValueError as error:
        if "Config group override" not in str(error):
            raise
        return _report(f"the command line cannot be read: {error}", EXIT_BAD_CONFIGURATION)
    except KeyboardInterrupt:
        return _report("interrupted; nothing that was finished is lost, start the same command again", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in _DISK or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        place = f" {error.filename}" if error.filename else ""
        return _report(f"cannot write{place}: {error.strerror}; make room, or choose another folder", EXIT_FAILED)
    return 0


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
        return f"{key}{' '.join(str(cause.msg or cause).split())}"
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
