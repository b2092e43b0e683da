"""Parse a command line: options, words, overrides in Hydra's grammar, and components named by ``_target_`` alone."""

import argparse
import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from dmlbench.components import imported, parameters_of
from dmlbench.config import config_folder, key_of, schema_of
from dmlbench.external_files import load_yaml
from dmlbench.types import ConfigError, is_within

_FLAGS = {
    "report": {"--picture": "picture=true"},
    "reproduce": {"--list": "list=true", "--dry-run": "dry_run=true", "--shard": "shard={}"},
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
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("paths.output_dir", "paths.data_dir", "paths.cache_dir", "dataset.table.root"), str),
    **dict.fromkeys(("evaluation.metrics", "evaluation.recall_at"), list),
}
"""What nested keys hold; schemas tell it of top-level keys."""
GROUPS = ("loss", "miner", "regularizer", "pooling")
"""Groups whose components may be exchanged without an option of their own."""


@dataclass(frozen=True)
class CommandLine:
    """What follows ``dmlbench COMMAND``; ``words`` are arguments that are neither options nor overrides."""

    words: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    is_sweep: bool = False
    help: bool = False
    why: bool = False
    dry_run: bool = False
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def parse(name: str, arguments: Sequence[str]) -> CommandLine:
    """Split the arguments of the command ``name`` into options, words and overrides, in any order."""
    if name != "reproduce" and any(argument.partition("=")[0] == "--shard" for argument in arguments):
        raise ConfigError(
            f"--shard: got dmlbench {name}, expected dmlbench reproduce. To share a sweep, start the same command in "
            "several shells."
        )
    parser = _Parser(prog=f"dmlbench {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true", dest="is_sweep")
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    if name == "train":
        parser.add_argument("--why", action="store_true")
    if name in ("train", "tune"):
        parser.add_argument("--dry-run", action="store_true")
    for flag, override in _FLAGS.get(name, {}).items():
        if "{}" in override:
            parser.add_argument(flag, action="append", type=override.format, dest="flags")
        else:
            parser.add_argument(flag, action="append_const", const=override, dest="flags")
    parser.add_argument("rest", nargs="*")
    given = vars(parser.parse_intermixed_args(list(arguments)))
    rest, flags = given.pop("rest"), given.pop("flags", None) or ()
    folder = given["config_dir"]
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir: got {folder}, expected an existing folder.")
    if given["resolve"] and not given["cfg"]:
        raise ConfigError("--resolve works only with --cfg. Add --cfg job.")
    words = tuple(word for word in rest if "=" not in word and not word.startswith("~"))
    return CommandLine(words, (*(argument for argument in rest if argument not in words), *flags), **given)


def for_hydra(name: str, line: CommandLine) -> list[str]:
    """The overrides of a command line in Hydra's grammar."""
    given = list(line.overrides)
    keys = {field.name: field.type for field in dataclasses.fields(schema_of(name))}
    if line.words:
        key = _WORDS.get(name, "configs")
        if key not in keys and not (config_folder() / key).is_dir():
            command = re.sub("^(oodml|study)_", r"\1 ", name)
            raise ConfigError(f"expected key=value, got '{line.words[0]}'. See dmlbench {command} --help.")
        if len(line.words) > 1 or any(argument.startswith(f"{key}=") for argument in given):
            raise ConfigError(f"{key}: got {', '.join(map(repr, line.words))}, expected one word, given once.")
        given.append(f"{key}={line.words[0]}")
    if name == "train":
        split = [argument.partition("=") for argument in given]
        given = [f"{_IN_TRAIN.get(key, key)}{equals}{value}" for key, equals, value in split]
        keys = {}
    given = [_expanded(argument) for argument in given]
    kinds = _KINDS | {key: kind for key, annotation in keys.items() if (kind := _kind(key, annotation)) is not None}
    given = [_option_of(_written(argument, kinds, is_sweep=line.is_sweep)) for argument in given]
    given = _with_new_keys(given, {key for key, annotation in keys.items() if annotation == dict[str, Any]})
    parsed = [_parsed(argument) for argument in given]
    for argument, override in parsed:
        is_text = override.is_delete() or override.is_sweep_override() or isinstance(override.value(), str | list)
        if not is_text and (config_folder() / override.key_or_group).is_dir():
            raise _not_an_option(argument, override.key_or_group)
    given = [argument for argument, _ in parsed]
    return _of_each_job(given, [override for _, override in parsed]) if line.is_sweep else given


def in_train(given: Sequence[str], *, is_grid: bool = False) -> list[str]:
    """Overrides of ``dmlbench train`` in Hydra's grammar."""
    return for_hydra("train", CommandLine(overrides=tuple(given), is_sweep=is_grid))


def _expanded(argument: str) -> str:
    """``paths.output_dir=~/runs`` with the home folder, which shells leave as it is after the dot of a key."""
    key, equals, value = argument.partition("=")
    return f"{key}{equals}{Path(value).expanduser()}" if key.startswith("paths.") and value[:1] == "~" else argument


def _kind(key: str, annotation: Any) -> Any:
    """``str``, ``list``, or ``Any`` (one text, or a list of them) of a key whose value needs no quotes or brackets."""
    main = typing.get_args(annotation)[0] if isinstance(annotation, types.UnionType) else annotation
    if typing.get_origin(main) is tuple:
        return list
    return main if main is str or (main is Any and not (config_folder() / key).is_dir()) else None


def _written(argument: str, kinds: Mapping[str, Any], *, is_sweep: bool) -> str:
    """``key=a,b`` as ``key=['a','b']``, and texts in quotes; numbers stay numbers. In sweeps a comma separates jobs."""
    key, equals, value = argument.partition("=")
    kind = kinds.get(key)
    if not equals or kind is None or value == "null" or value.startswith(("[", "{", "${")):
        return argument
    if is_sweep and ("," in value or kind is not str):
        return argument
    if kind is str:
        return f"{key}={_quoted(value)}"
    parts = [part.strip() for part in value.split(",")]
    written = [part if re.fullmatch(r"-?[0-9]+", part) else _quoted(part) for part in parts]
    return f"{key}=[{','.join(written)}]" if kind is list or len(parts) > 1 else f"{key}={written[0]}"


def _quoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _option_of(argument: str) -> str:
    """An override with ``group=null`` as ``group=none``; Hydra's own messages about groups would name its internals."""
    key, equals, value = argument.partition("=")
    group = key_of(argument)
    if not group:
        raise ConfigError(f"{argument}: expected key=value, such as fit.max_steps=100.")
    folder = config_folder() / group
    has_none = (folder / "none.yaml").is_file()
    if group in _SINGLE and folder.is_dir() and (key[0] == "~" or value.startswith(("[", "{"))):
        raise _not_an_option(argument, group)
    if equals and has_none:
        return f"{key}={','.join('none' if option == 'null' else option for option in value.split(','))}"
    return argument


def _not_an_option(argument: str, group: str) -> ConfigError:
    some = min(path.stem for path in (config_folder() / group).glob("*.yaml"))
    return ConfigError(f"{argument}: expected the name of one {group}, such as {group}={some}.")


def _parsed(argument: str) -> tuple[str, Override]:
    """The override as text and parsed; its value gets quotes if Hydra's grammar lacks a character of it: é, ~."""
    parser = OverridesParser.create()
    try:
        return argument, parser.parse_override(argument)
    except HydraException:
        key, _, value = argument.partition("=")
        if value and not re.search(r"""[\s,=:()\[\]{}'"\\$]""", value):
            with contextlib.suppress(HydraException):
                return (quoted := f"{key}={_quoted(value)}"), parser.parse_override(quoted)
        raise ConfigError(
            f"cannot parse {argument}: expected key=value. Quote values that have any of ,=:()[]{{}}."
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


def _with_new_keys(arguments: Sequence[str], mappings: Collection[str]) -> list[str]:
    """Overrides with the marks that make Hydra take new keys.

    These are keys beside a ``_target_``, as in ``loss._target_=.. loss.m=0.4``, and entries of ``mappings``.
    """
    targets = tuple(key.removesuffix("_target_") for key in map(key_of, arguments) if _names_a_target(key))

    def takes_new(key: str) -> bool:
        return key.startswith(targets) or key.partition(".")[0] in mappings

    return [f"++{a}" if takes_new(key_of(a)) and a[0] not in "+~" else a for a in arguments]


def remove_former_arguments(
    cfg: DictConfig, overrides: Iterable[str], choices: Mapping[str, str], folders: Sequence[Path]
) -> dict[str, str]:
    """Remove the arguments of the chosen option's own component where ``overrides`` put another one in its place.

    What ``overrides`` give stays, and so do interpolated arguments that the new component takes, such as the number of
    classes. A subclass of the option's component keeps all.

    Returns:
        Name of the class by group, of groups whose component was exchanged.
    """
    keys = {key_of(override) for override in overrides}
    names = {}
    for key in sorted(filter(_names_a_target, keys)):
        prefix = key.removesuffix("._target_")
        node = OmegaConf.select(cfg, prefix)
        if not isinstance(node, DictConfig):
            continue
        former = _target_of_option(prefix, choices.get(prefix), folders)
        target = imported(node._target_, prefix)
        if former == node._target_:
            continue
        if "." not in prefix:
            names[prefix] = str(node._target_).rpartition(".")[2]
        if former and isinstance(target, type) and issubclass(target, imported(former, prefix)):
            continue
        taken, _ = parameters_of(target)
        for name in [str(name) for name in node if not str(name).startswith("_")]:
            by_interpolation = OmegaConf.is_interpolation(node, name) and name in taken
            if not by_interpolation and not any(is_within(key, [f"{prefix}.{name}"]) for key in keys):
                with open_dict(node):
                    del node[name]
    return names


def _names_a_target(key: str) -> bool:
    return key.endswith("._target_") and key.partition(".")[0] in GROUPS


def _target_of_option(group: str, choice: str | None, folders: Sequence[Path]) -> str:
    """The component of an option, or of the option that it begins with; empty if it has none."""
    file = next((file for folder in folders if (file := folder / group / f"{choice}.yaml").is_file()), None)
    if file is None:
        return ""
    try:
        content = load_yaml(file) or {}
    except ValueError as error:
        raise ConfigError(f"{file}: {error}.") from error
    return str(content.get("_target_", "")) or _target_of_option(group, (content.get("defaults") or [None])[0], folders)
