"""The search space: which keys of a run are searched, and between what bounds or among which choices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.recipes import applies
from dmlbench.types import ConfigError, closest

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Value = float | int | str | bool | None

_WORDS = ("low", "high", "log", "step", "integer", "choices", "when")
_BOUNDS = "{low: 1e-6, high: 1e-3, log: true}"
_CHOICES = "{choices: [gap, gsp]}"
_DIGITS = 4
_FIXED = (*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, "dataset", "protocol", "evaluation", "fit.monitor")
"""What trials share, or they could not be compared by their scores."""


@dataclass(frozen=True)
class Dimension:
    """One key of the space.

    Attributes:
        key: of a run's configuration; a group, such as ``pooling``, where ``choices`` are options.
        low, high: bounds, both included; None where there are choices.
        log: whether the logarithm is searched.
        step: of a grid from ``low`` on, or None.
        integer: whether only whole numbers are meant.
        choices: in their order; empty where there are bounds.
    """

    key: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    integer: bool = False
    choices: tuple[Value, ...] = ()

    def draw(self, trial: "BaseTrial") -> None:
        """Make this one of the trial's values, unless it is."""
        if self.low is None or self.high is None:
            trial.suggest_categorical(self.key, self.choices)
        elif self.integer:
            trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        else:
            trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    def value(self, drawn: Value) -> Value:
        """What a run gets of a value that was drawn: numbers to four digits, so that a recipe can say them whole."""
        if not isinstance(drawn, float) or self.low is None or self.high is None:
            return drawn
        return min(max(float(f"{drawn:.{_DIGITS}g}"), float(self.low)), float(self.high))

    def is_at_edge(self, value: Value) -> bool:
        """Whether a value lies within a twentieth of the range from one of its bounds."""
        if self.low is None or self.high is None or not isinstance(value, float | int) or self.low == self.high:
            return False
        low, high, here = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return min(here - low, high - here) < 0.05 * (high - low)


def override(key: str, value: Value) -> str:
    """``key=value`` for the command line of ``dmlbench train``."""
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    else:
        text = str(value) if isinstance(value, str) else repr(value)
    return f"{key}={text}"


def make_space(node: Mapping[str, Any], chosen: Mapping[str, str | None]) -> tuple[Dimension, ...]:
    """The dimensions of a search space as YAML has it: ``{optim.lr: {low: 1e-6, high: 1e-3, log: true}}``.

    Args:
        node: keys, nested or with dots, to what is known of them: ``low`` and ``high`` with ``log``, ``step`` and
            ``integer``, or ``choices``; and ``when``, options by group for which alone the key is searched. A list
            has several of these, and the last that applies is taken.
        chosen: option of each group, of what all trials have in common.

    Raises:
        ConfigError: a key that trials have in common, or one whose values make no sense.
    """
    found: dict[str, Dimension] = {}
    groups = {key for key, _ in _entries(node)}
    for key, entry in _entries(node):
        if fixed := next((name for name in _FIXED if f"{key}.".startswith(f"{name}.")), None):
            raise ConfigError(
                f"space.{key}: {fixed} must be the same in all trials, which are compared by their scores; leave it out"
            )
        when = entry.get("when") or {}
        for group in when:
            if group in groups or group not in chosen:
                known = closest(group, sorted(set(chosen) - groups))
                raise ConfigError(f"space.{key}.when names '{group}', which is no group with one option: {known}")
        dimension = _dimension(key, entry)
        if applies(when, chosen):
            found[key] = dimension
    if not found:
        example = f"space={{optim.lr: {_BOUNDS}}}"
        raise ConfigError(f"space has nothing to search for what was chosen; name keys of a run, such as {example}")
    for key in found:
        if inner := next((other for other in found if other.startswith(f"{key}.")), None):
            raise ConfigError(
                f"space searches {key} and {inner}, which not each of its options has; search one of them"
            )
    return tuple(found.values())


def corners(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Few points with every bound and every choice in one of them."""
    ends = [dimension.choices or (dimension.low, dimension.high) for dimension in space]
    return [{d.key: end[min(i, len(end) - 1)] for d, end in zip(space, ends, strict=True)}
            for i in range(max(map(len, ends)))]  # fmt: skip


def _entries(node: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Keys with dots, and what is said of each; of the same key written in two ways both."""
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, Mapping) for v in value):
            yield from ((key, entry) for entry in value)
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"space.{key} ({value}) must be bounds, such as {_BOUNDS}, or choices, such as {_CHOICES}"
            )
        if not value or set(value) & set(_WORDS) or not any(isinstance(v, Mapping) for v in value.values()):
            yield key, value
        else:
            yield from _entries(value, key)


def _dimension(key: str, entry: Mapping[str, Any]) -> Dimension:
    for word in entry:
        if word not in _WORDS:
            raise ConfigError(f"space.{key} has '{word}': {closest(str(word), _WORDS)}")
    if "choices" in entry:
        return _choices(key, entry)
    for word in ("low", "high"):
        if not _is_number(entry.get(word)):
            raise ConfigError(
                f"space.{key}.{word} ({entry.get(word, 'missing')}) must be a number; write {_BOUNDS}, or {_CHOICES}"
            )
    for word in ("log", "integer"):
        if not isinstance(entry.get(word, False), bool):
            raise ConfigError(f"space.{key}.{word} ({entry[word]}) must be true or false")
    low, high, log, step = entry["low"], entry["high"], entry.get("log", False), entry.get("step")
    if not low < high:
        raise ConfigError(
            f"space.{key}: low ({low}) must be below high ({high}); exchange them, or give the run one value"
        )
    if log and low <= 0:
        raise ConfigError(f"space.{key}.low ({low}) must be positive with log: true; raise it, or leave log out")
    if step is not None and (not _is_number(step) or not 0 < step <= high - low):
        raise ConfigError(f"space.{key}.step ({step}) must lie in (0, {high - low}], the length of the range")
    if step is not None and log:
        raise ConfigError(f"space.{key} has step ({step}) and log: true; leave one of them out, or list choices")
    integer = entry.get("integer", False)
    for word in ("low", "high", "step") if integer else ():
        if entry.get(word) is not None and entry[word] != int(entry[word]):
            raise ConfigError(f"space.{key}.{word} ({entry[word]}) must be a whole number with integer: true")
    if step is not None:
        high = low + step * math.floor((high - low) / step + 1e-9)
    kind = int if integer else float
    return Dimension(key, kind(low), kind(high), log, None if step is None else kind(step), integer)


def _choices(key: str, entry: Mapping[str, Any]) -> Dimension:
    if other := next((word for word in entry if word not in ("choices", "when")), None):
        raise ConfigError(f"space.{key} has choices and {other}; choices stand alone")
    choices = entry["choices"]
    if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
        raise ConfigError(f"space.{key}.choices ({choices}) must be a list of at least two values, such as {_CHOICES}")
    for i, choice in enumerate(choices):
        if not isinstance(choice, float | int | str | bool | None):
            raise ConfigError(f"space.{key}.choices: {choice} must be a number, a word, true, false or null")
        if any(choice == other and type(choice) is type(other) for other in choices[:i]):
            raise ConfigError(f"space.{key}.choices names {choice} twice; name it once")
    return Dimension(key, choices=tuple(choices))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
