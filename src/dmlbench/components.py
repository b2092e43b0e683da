"""Components: objects of nodes with a ``_target_``, whose arguments are checked by name and type."""

import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dmlbench.types import ConfigError, DmlbenchError, closest, leaves, missing_module, nodes

_PROVIDED = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
# Arguments that only the wiring can give.
_SET_BY_BUILD = (
    *("in_features", "in_channels", "map_sizes", "distance", "optimizer", "labels", "seed", "make_objective"),
    *("run_dir", "run_id", "configuration"),
)

_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_WRITTEN_AS: dict[type, Any] = {bool: bool, int: int, float: (int, float), str: str, Path: str}  # YAML's values


def component(node: Any, **provided: Any) -> Any:
    """Instantiate a node with a ``_target_``; None stays None. Errors come without Hydra's around them."""
    if node is None:
        return None
    try:
        return hydra.utils.instantiate(node, _convert_="all", **provided)
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, DmlbenchError):
            cause = cause.__cause__
        if isinstance(cause, DmlbenchError):
            raise cause from None
        if isinstance(cause, ImportError):
            _import_targets(node)
        if isinstance(cause, (TypeError, ValueError, AssertionError)) and not node["_target_"].startswith("dmlbench."):
            raise ConfigError(f"{node['_target_']} rejects its arguments: {cause}") from error
        raise


def _import_targets(node: Any) -> None:
    """Raise ConfigError if a ``_target_`` of a node cannot be imported."""
    place = (node._get_full_key(None) if isinstance(node, DictConfig) else "") or "component"
    plain = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else node
    require_modules({place: plain}, [place])


def check_periods(node: Any, path: str) -> None:
    """Raise ConfigError for lengths below 1 step in torch's schedules, which divide by them."""
    for key, value in nodes(node, path):
        if key.endswith((".T_max", ".T_0", ".step_size")) and isinstance(value, int | float) and value < 1:
            raise ConfigError(f"{key}: got {value}, expected at least 1 step.")


def declared(node: Any, name: str) -> Any:
    """An attribute of the class that a node names, such as ``compares_levels``; () where it has none."""
    return getattr(imported(node._target_, "loss"), name, ())


def check_components(config: Any) -> None:
    """Check the arguments of every node with a ``_target_``, and that numbers are finite."""
    for path, node in nodes(config):
        if isinstance(node, float) and not math.isfinite(node):
            raise ConfigError(f"{path}: got {node}, expected a finite number.")
        if isinstance(node, dict) and "_target_" in node:
            _check_signature(node, path)


def _check_signature(node: Mapping[str, Any], path: str) -> None:
    target = imported(node["_target_"], path)
    parameters, annotations = parameters_of(target)
    if not isinstance(node.get("_partial_", False), bool):
        raise ConfigError(f"{path}._partial_: got {node['_partial_']!r}, expected true or false.")
    for key, value in node.items():
        if key in _PROVIDED:
            continue
        if key not in parameters:
            known = closest(key, [name for name in parameters if name not in _SET_BY_BUILD])
            raise ConfigError(
                f"{path}.{key} is not an argument of {node['_target_']}: {known} If another "
                f"file sets it, leave it out with '~{path}.{key}'."
            )
        annotation = annotations[key] if key in annotations else _type_of(parameters[key].default)
        if not _fits(value, annotation):
            raise ConfigError(f"{path}.{key}: got {value!r}, expected {_describe(annotation)}.")
    if not node.get("_partial_"):
        for name in inspect.signature(target).parameters.keys() & parameters.keys():
            if parameters[name].default is inspect.Parameter.empty and name not in node and name not in _SET_BY_BUILD:
                raise ConfigError(f"{path}.{name} is missing: {node['_target_']} needs it.")


def add_module_folder(config_dir: str | os.PathLike[str] | None) -> None:
    """Let this process import modules beside a folder of options (``--config-dir``) by their names."""
    if config_dir is None:
        return
    folder = Path(config_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"config_dir: got {folder}, expected a folder of options, such as my_conf.")
    if (parent := str(folder.absolute().parent)) not in sys.path:
        sys.path.append(parent)
    importlib.invalidate_caches()  # the module may have been written a moment ago


def require_modules(config: Mapping[str, Any], parts: Iterable[str]) -> None:
    """Import what the ``parts`` of a stored configuration name; raises ConfigError with the remedy.

    The folder of options that the configuration remembers is only told in the error. Code is imported from Python's
    own path alone, because the configuration may come from elsewhere.
    """
    config_dir = (config.get("runtime") or {}).get("config_dir")
    for part in parts:
        for place, target in leaves(config.get(part), part):
            if place.endswith("._target_"):
                imported(str(target), place.removesuffix("._target_"), str(config_dir) if config_dir else None)


@functools.cache
def imported(name: str, path: str, config_dir: str | None = None) -> Any:
    """The object that a ``_target_`` at ``path`` names; ``config_dir`` is the folder of options beside its module."""
    module_name, _, attribute = str(name).rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        top = module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            raise ConfigError(missing_module(top, path.partition(".")[0], config_dir)) from error
        if top == "dmlbench" and not isinstance(error, ImportError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}._target_ is '{name}', but '{module_name}' cannot be imported: {reason}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{path}._target_ is '{name}', but {module_name} has no {attribute}: {closest(attribute, known)}"
        ) from None


def parameters_of(target: Any) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """Named parameters and their types; ``**kwargs`` of a class are followed along its bases, as PML passes them."""
    parameters: dict[str, inspect.Parameter] = {}
    annotations: dict[str, Any] = {}
    owners = [base for base in target.__mro__ if "__init__" in vars(base)] if inspect.isclass(target) else [target]
    for owner in owners:
        function = owner.__init__ if inspect.isclass(owner) else owner
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            break
        takes_more = False
        for name, parameter in list(signature.parameters.items())[1 if inspect.isclass(owner) else 0 :]:
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_more = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                parameters.setdefault(name, parameter)
        with contextlib.suppress(NameError, TypeError):  # a foreign class with odd hints is checked by name only
            annotations = typing.get_type_hints(function) | annotations
        if not takes_more:
            break
    return parameters, annotations


def _type_of(default: Any) -> Any:
    """What a parameter without an annotation takes, by its default: a number for a number. Text may stand for one."""
    kinds = {bool: bool, int: float, float: float, str: str | float}
    return kinds[type(default)] | None if type(default) in kinds else Any


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a YAML value can be an argument of that type."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return True
    if isinstance(value, dict) and "_target_" in value:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if annotation in (None, type(None)):
        return value is None
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if inspect.isclass(annotation) and annotation in _WRITTEN_AS:
        return isinstance(value, _WRITTEN_AS[annotation]) and (annotation is bool or not isinstance(value, bool))
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list):
            return False
        if origin is tuple and Ellipsis not in arguments and arguments:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(item, arguments[0]) for item in value) if arguments else True
    return True


def _describe(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe, typing.get_args(annotation)))
    if origin is Mapping:
        return f"{{name: {_describe(typing.get_args(annotation)[1])}}}"
    if origin in (tuple, list, Sequence):
        return "a list"
    if annotation in _IN_WORDS:
        return _IN_WORDS[annotation]
    if inspect.isclass(annotation) and origin is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "")
