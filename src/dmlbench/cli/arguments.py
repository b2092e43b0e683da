"""Parse a command line: options, words, and overrides in Hydra's grammar."""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING

from dmlbench.cli.target_overrides import with_new_arguments
from dmlbench.config import command_names, config_folder, schema_of
from dmlbench.types import ConfigError

_FLAGS: dict[str, dict[str, str | None]] = {
    "train": {"--why": None},
    "report": {"--picture": "picture=true"},
    "reproduce": {"--list": "list=true", "--dry-run": "dry_run=true"},
}
"""Options of single commands, with the override that they stand for."""
_WORDS = {"reproduce": "table", "tune": "search"}
"""The key that a bare word stands for, where it is not ``configs``."""
_IN_TRAIN = {"metrics": "evaluation.metrics", "recall_at": "evaluation.recall_at", "recipe.side": "recipe/side"}
"""Keys of other commands by what ``train`` calls them."""
_SINGLE = tuple(
    field.name for field in dataclasses.fields(schema_of("train")) if (field.type, field.default) == (Any, MISSING)
)
"""Groups of which every run has one option."""
_TEXT, _LIST, _ANY = "text", "list", "any"
_KINDS = {
    **dict.fromkeys(("paths.output_dir", "paths.data_dir", "paths.cache_dir", "dataset.table.root"), _TEXT),
    **dict.fromkeys(("evaluation.metrics", "evaluation.recall_at"), _LIST),
}
"""What nested keys hold; a schema tells it of the others."""


@dataclass(frozen=True)
class CommandLine:
    """What follows ``dmlbench COMMAND``.

    Attributes:
        words: arguments that are neither options nor overrides.
        overrides: ``key=value``, ``+key=value``, ``~key``.
        config_dir: folder of the user's own configuration files.
        is_sweep: ``-m``.
        help: ``--help``.
        why: ``--why``, of ``train`` only.
        cfg: which part of the configuration ``--cfg`` prints: job, hydra or all.
        package: the node that ``--cfg`` prints.
        resolve: whether ``--cfg`` resolves interpolations.
    """

    words: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    is_sweep: bool = False
    help: bool = False
    why: bool = False
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse(name: str, arguments: Sequence[str]) -> CommandLine:
    """Split the arguments of the command ``name`` into options, words and overrides, in any order.

    Raises:
        ConfigError: an option is unknown or lacks its value, or ``--config-dir`` is no folder.
    """
    for argument in arguments:
        key = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and key in _keys(name) and argument not in _FLAGS.get(name, ()) and key != "shard":
            raise ConfigError(f"{argument}: write values without dashes, {key}=<value>; see dmlbench {name} --help")
    parser = _Parser(prog=f"dmlbench {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true", dest="is_sweep")
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    for flag, override in _FLAGS.get(name, {}).items():
        if override is None:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, action="append_const", const=override, dest="flags")
    if name == "reproduce":
        parser.add_argument("--shard")
    parser.add_argument("rest", nargs="*")
    given = vars(parser.parse_intermixed_args(list(arguments)))
    rest, flags, shard = given.pop("rest"), given.pop("flags", None) or (), given.pop("shard", None)
    folder = given["config_dir"]
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder")
    if given["resolve"] and not given["cfg"]:
        raise ConfigError("--resolve goes with --cfg only")
    words = tuple(word for word in rest if "=" not in word and not word.startswith("~"))
    overrides = [argument for argument in rest if argument not in words]
    return CommandLine(words, (*overrides, *flags, *([f"shard={shard}"] if shard else [])), **given)


def _keys(name: str) -> dict[str, Any]:
    """Types of the top-level keys of a command."""
    return {field.name: field.type for field in dataclasses.fields(schema_of(name))} if name in command_names() else {}


def for_hydra(name: str, line: CommandLine) -> list[str]:
    """The overrides of a command line in Hydra's grammar.

    Raises:
        ConfigError: Hydra cannot parse one of them.
    """
    given = [_without_spaces(argument) for argument in line.overrides]
    if line.words:
        key = _WORDS.get(name, "configs")
        if key not in _keys(name) and not (config_folder() / key).is_dir():
            raise ConfigError(f"expected key=value, got '{line.words[0]}'; see dmlbench {name} --help")
        if len(line.words) > 1 or any(argument.startswith(f"{key}=") for argument in given):
            raise ConfigError(f"name the {key} once, in one word, not in {', '.join(map(repr, line.words))}")
        given.append(f"{key}={line.words[0]}")
    if name == "train":
        given = [_renamed(argument) for argument in given]
    kinds = _kinds(name)
    given = [_written(argument, kinds, is_sweep=line.is_sweep) for argument in given]
    given = with_new_arguments([_checked(_without_null(argument)) for argument in given])
    parsed = [_parsed(argument) for argument in given]
    return _of_each_job(given, parsed) if line.is_sweep else given


def _without_spaces(argument: str) -> str:
    key, equals, value = argument.partition("=")
    return f"{key.strip()}{equals}{value}" if equals else argument


def _renamed(argument: str) -> str:
    key, equals, value = argument.partition("=")
    return f"{_IN_TRAIN.get(key, key)}{equals}{value}"


def _kinds(name: str) -> dict[str, str]:
    """What keys hold whose values may be written without Hydra's quotes and brackets."""
    kinds = dict(_KINDS)
    for key, annotation in _keys(name).items():
        is_union = typing.get_origin(annotation) is types.UnionType
        main = typing.get_args(annotation)[0] if is_union else annotation
        if main is str:
            kinds[key] = _TEXT
        elif typing.get_origin(main) is tuple:
            kinds[key] = _LIST
        elif main is Any and name != "train" and not (config_folder() / key).is_dir():
            kinds[key] = _ANY
    return kinds


def _written(argument: str, kinds: dict[str, str], *, is_sweep: bool) -> str:
    """``key=a,b`` as ``key=['a','b']``, and texts in quotes; numbers stay numbers.

    In sweeps a comma separates jobs.
    """
    key, equals, value = argument.partition("=")
    kind = kinds.get(key)
    if not equals or kind is None or value == "null" or value.startswith(("[", "{", "${")):
        return argument
    if is_sweep and ("," in value or kind != _TEXT):
        return argument
    if kind == _TEXT:
        return f"{key}={_quoted(value)}"
    parts = [part.strip() for part in value.split(",")]
    written = [part if re.fullmatch(r"-?[0-9]+", part) else _quoted(part) for part in parts]
    return f"{key}=[{','.join(written)}]" if kind == _LIST or len(parts) > 1 else f"{key}={written[0]}"


def _quoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _checked(argument: str) -> str:
    """An override, unless Hydra's message about it would be about its own internals."""
    key, _, value = argument.partition("=")
    group = key.lstrip("+~").strip()
    if not group:
        raise ConfigError(f"{argument}: expected key=value, such as fit.max_steps=100")
    folder = config_folder() / group
    if group in _SINGLE and (key.startswith("~") or value.startswith(("[", "{"))) and folder.is_dir():
        some = min(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(f"{argument}: every run has one {group}; choose it by its name, such as {group}={some}")
    return argument


def _without_null(argument: str) -> str:
    """``group=null`` as the group's option ``none``, or as ``~group`` where it has no such option."""
    key, equals, value = argument.partition("=")
    folder = config_folder() / key
    if not equals or not key or not folder.is_dir() or "null" not in value.split(","):
        return argument
    if (folder / "none.yaml").is_file():
        return f"{key}={','.join('none' if option == 'null' else option for option in value.split(','))}"
    return f"~{key}" if value == "null" else argument


def _parsed(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        key = argument.partition("=")[0]
        raise ConfigError(
            f"cannot parse {argument}: expected key=value. Put a value with any of , = : ( ) [ ] {{ }} or quotes into "
            f"quotes, \"{key}='...'\"; lists are [a,b]"
        ) from None


def _of_each_job(arguments: Sequence[str], parsed: Sequence[Override]) -> list[str]:
    """Values inside of a group that is swept over, as sweeps over one value.

    Hydra applies all other overrides to the configuration before the sweep, too, where the group has its default
    option, which may lack the key.
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
