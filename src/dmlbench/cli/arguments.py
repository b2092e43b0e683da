"""The command line as Hydra takes it: options first, lists and names as people write them, mistakes in plain words."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dmlbench.cli.targets import with_new_arguments
from dmlbench.config import config_folder
from dmlbench.schemas import SCHEMAS
from dmlbench.types import ConfigError

REQUIRED = (
    *("dataset", "transform", "sampler", "protocol", "backbone", "pooling", "head", "loss", "optim", "fit"),
    *("evaluation", "paths"),
)
"""Groups that no run can do without."""

_WITH_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p", "--config-name", "-cn")
_ALONE = (
    *("--help", "-h", "--multirun", "-m", "--run", "-r", "--resolve", "--info", "-i", "--hydra-help"),
    *("--shell-completion", "-sc", "--version"),
)
_DASHED = {
    "report": {"--picture": "picture=true"},
    "reproduce": {"--list": "list=true", "--dry-run": "dry_run=true", "--max-hours": "max_hours=", "--shard": "shard="},
}
"""Options of a command that stand for one of its keys; those that end in = take a value."""
_WORDS = {"reproduce": "table", "tune": "search"}
"""The key that a bare word stands for, where it is not ``cells``."""
_SHOWN = ("--help", "--config-dir <folder>", "--cfg job", "-m")
_LISTS = (
    *("metrics", "recall_at", "evaluation.metrics", "evaluation.recall_at", "facts", "compare", "images", "pair"),
    *("archives", "state", "training"),
)
"""Keys whose values may be written with bare commas."""
_NEVER_SINGLE = ("metrics", "recall_at", "training", "formats", "modules")
"""Those of them that are lists even where there is one value."""
_OWN_LISTS = {
    "embed": ("modules",),
    "export": ("formats",),
    "explain": ("run",),
    "reproduce": ("rows", "fold", "repeat"),
    "oodml_splits": ("also",),
    "oodml_scores": ("frozen",),
    "oodml_transfer": ("runs",),
    "oodml_few_shot": ("run", "shots", "merge_order"),
    "study_object_size": ("gap", "gmp"),
}
"""The same of single commands."""
_NAMES = (
    *("cells", "rows", "run", "name", "output", "embeddings", "labels", "gallery", "gallery_labels", "official"),
    *("model", "trained", "selected", "license"),
    *(
        "per_query",
        "per_class",
        "password",
        "paths.output_dir",
        "paths.data_dir",
        "paths.cache_dir",
        "dataset.table.root",
    ),
)
"""Keys whose values are names of files or patterns of them, with whatever letters these have."""
_IN_TRAIN = {
    "metrics": "evaluation.metrics",
    "recall_at": "evaluation.recall_at",
    "recipe.side": "recipe/side",
}
_SWEPT_BY = re.compile(r"(glob|choice|sort|shuffle)\(.*\)")


@dataclass(frozen=True)
class CommandLine:
    """What stands behind ``dmlbench COMMAND``.

    Attributes:
        options: of Hydra, without ``--config-dir``.
        config_dir: folder of the user's own configuration files, or None.
        words: that are neither options nor ``key=value``.
        overrides: ``key=value``, ``+key=value``, ``~key``.
    """

    options: tuple[str, ...]
    config_dir: Path | None
    words: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def is_sweep(self) -> bool:
        return bool({"-m", "--multirun"} & set(self.options))


def parse(name: str, arguments: Sequence[str]) -> CommandLine:
    """Tell options, words and overrides of the command ``name`` apart, wherever they stand.

    Raises:
        ConfigError: an option is unknown, or lacks its value; ``--config-dir`` is no folder.
    """
    options: list[str] = []
    folders: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            rest.append(argument)
        elif option in _WITH_VALUE:
            value = value if equals else next(waiting, "")
            if not value:
                raise ConfigError(f"{option} needs a value, such as --config-dir my_conf or --cfg job")
            if option in ("--config-dir", "-cd"):
                folders.append(value)
            else:
                options += [option, value]
        elif option in _ALONE or (argument == "--why" and name == "train"):
            options.append(argument)
        elif (key := _DASHED.get(name, {}).get(option)) is not None:
            if key.endswith("="):
                value = value if equals else next(waiting, "")
                if not value or value.startswith("-"):
                    raise ConfigError(f"{option} needs a value; see dmlbench {name} --help")
                key += value
            rest.append(key)
        else:
            raise ConfigError(_unknown(name, option.lstrip("-").replace("-", "_"), argument))
    if len(folders) > 1:
        raise ConfigError(f"--config-dir is given {len(folders)} times ({', '.join(folders)}); give one folder")
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    words = [word for word in rest if "=" not in word and not word.startswith("~")]
    return CommandLine(
        tuple(options), Path(folders[0]) if folders else None, tuple(words),
        tuple(argument for argument in rest if argument not in words),
    )  # fmt: skip


def _unknown(name: str, key: str, argument: str) -> str:
    if key in _keys(name):
        return f"{argument}: values are written without dashes, {key}=<value>; see dmlbench {name} --help"
    return (
        f"unknown option {argument}: the options are {', '.join(_SHOWN)}, all else is key=value; "
        f"see dmlbench {name} --help"
    )


def _keys(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(SCHEMAS[name])] if name in SCHEMAS else []


def for_hydra(name: str, line: CommandLine) -> list[str]:
    """The overrides of a command line in Hydra's grammar.

    Raises:
        ConfigError: one that Hydra would refuse, in words of its own inner workings or after the wrong thing was done.
    """
    given = [_without_spaces(argument) for argument in line.overrides]
    if line.words:
        key = _WORDS.get(name, "cells")
        if key not in _keys(name) and not (config_folder() / key).is_dir():
            raise ConfigError(f"'{line.words[0]}' is no key=value; see dmlbench {name} --help")
        if len(line.words) > 1 or any(argument.startswith(f"{key}=") for argument in given):
            what = "cells once, in one pattern" if key == "cells" else f"{key} once"
            raise ConfigError(f"name the {what}, not in {', '.join(map(repr, line.words))}")
        given.append(f"{key}={line.words[0]}")
    if name == "train":
        given = [_renamed(argument) for argument in given]
    if not line.is_sweep:
        lists = (*_LISTS, *_OWN_LISTS.get(name, ()))
        given = [as_list(argument, lists) for argument in given]
    given = [_quoted_name(argument, is_sweep=line.is_sweep) for argument in given]
    given = [_without_null(_checked(argument)) for argument in given]
    given = with_new_arguments(given)
    parsed = [_parsed(argument) for argument in given]
    return _of_each_job(given, parsed) if line.is_sweep else given


def _without_spaces(argument: str) -> str:
    """``key =value`` as the one argument that quotes may have made of it."""
    key, equals, value = argument.partition("=")
    return f"{key.strip()}{equals}{value}" if equals else argument


def _renamed(argument: str) -> str:
    """What other commands call ``metrics`` is part of a run's evaluation, and a recipe's side is a group to Hydra."""
    key, equals, value = argument.partition("=")
    return f"{_IN_TRAIN.get(key, key)}{equals}{value}"


def as_list(argument: str, keys: Iterable[str]) -> str:
    """``key=a,b`` as Hydra reads a list; it would take the commas for a sweep.

    Numbers stay numbers; all else is quoted, so that names may hold whatever they like but a comma.
    """
    key, _, value = argument.partition("=")
    is_list = "," in value or (key.removeprefix("evaluation.") in _NEVER_SINGLE and re.fullmatch(r"[\w./=-]+", value))
    if key not in keys or value.startswith("[") or value == "null" or not is_list:
        return argument
    parts = [part.strip() for part in value.split(",")]
    return f"{key}=[{','.join(part if re.fullmatch(r'-?[0-9]+', part) else _quoted(part) for part in parts)}]"


def _quoted_name(argument: str, *, is_sweep: bool) -> str:
    """Names of files with letters that mean something to Hydra, such as parentheses, in quotes."""
    key, equals, value = argument.partition("=")
    is_name = key in _NAMES or (key in _LISTS and "," not in value)
    if not equals or not is_name or value.startswith(("[", "${", "'", '"')) or (is_sweep and "," in value):
        return argument
    is_plain = re.fullmatch(r"[\w./~*?%@:+-]*", value) and key != "password"  # which may look like a number
    return argument if is_plain else f"{key}={_quoted(value)}"


def _quoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _checked(argument: str) -> str:
    """An override that Hydra would refuse in words of its own inner workings."""
    key, equals, value = argument.partition("=")
    if not key.strip("+~ "):
        raise ConfigError(f"'{argument}' names no key; write key=value, such as fit.max_steps=100")
    group = key.lstrip("+~")
    if group == "hydra":
        raise ConfigError(
            f"'{argument}': hydra is no group of this configuration; its own keys are hydra.<key>=<value>"
        )
    if key.startswith("~") and group in REQUIRED:
        raise ConfigError(f"{argument}: every run needs a {group}; choose one of conf/{group}")
    # Several regularizers compose, and several loggers; of every other group one is chosen, or each in its turn.
    allowed = r"[\w./,+@:\-\s'\"\[\]]*" if group in ("regularizer", "logger") else r"[\w./,+@:\-\s'\"]*"
    is_group = (config_folder() / group).is_dir()
    if equals and is_group and not _SWEPT_BY.fullmatch(value) and not re.fullmatch(allowed, value):
        some = min(path.stem for path in (config_folder() / group).glob("*.yaml"))
        raise ConfigError(f"{argument}: an option of {group} is chosen by its name, such as {group}={some}")
    return argument


def _without_null(argument: str) -> str:
    """``group=null`` as Hydra understands it: by the group's option ``none``, or by leaving out its default."""
    key, equals, value = argument.partition("=")
    folder = config_folder() / key
    if not equals or not key or not folder.is_dir() or "null" not in value.split(","):
        return argument
    if (folder / "none.yaml").is_file():
        return f"{key}={','.join('none' if option == 'null' else option for option in value.split(','))}"
    if value == "null" and key in REQUIRED:
        raise ConfigError(f"{key}=null: every run needs a {key}; choose one of conf/{key}")
    return f"~{key}" if value == "null" else argument


def _parsed(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        key = argument.partition("=")[0]
        raise ConfigError(
            f"{argument} cannot be read: a value with any of , = : ( ) [ ] {{ }} or quotes in it is put into quotes of "
            f"its own, such as \"{key}='...'\"; lists are [a,b]"
        ) from None


def _of_each_job(arguments: Sequence[str], parsed: Sequence[Override]) -> list[str]:
    """Values inside of a group that is swept over, as sweeps over one value.

    Hydra applies what is not swept to the configuration before the sweep, too, where the group has its default option,
    which need not know the key.
    """
    swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
    return [
        f"{override.get_key_element()}=choice({override.get_value_element_as_str()})"
        if not override.is_sweep_override()
        and not override.is_delete()
        and override.value() not in (None, "")  # Hydra's sweeps know no null
        and any(override.key_or_group.startswith(f"{group}.") for group in swept)
        else argument
        for argument, override in zip(arguments, parsed, strict=True)
    ]


def key_of(override: str) -> str:
    """The key of an override, without the marks that add or remove it."""
    return override.partition("=")[0].lstrip("+~")
