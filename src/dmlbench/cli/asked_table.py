"""What ``dmlbench reproduce`` is asked for: which table, which of its rows, and with which values of one's own."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from dmlbench.apps.experiment_tables import (
    NARROWING,
    Line,
    cells_of_rows,
    checked,
    experiments,
    grid,
    instead_of_rows,
    last_of_each,
    lines_of,
    narrowed,
    paper_tables,
    reproduce_of,
    words,
)
from dmlbench.cli.arguments import CommandLine, for_hydra, key_of
from dmlbench.papers import tables
from dmlbench.types import ConfigError, closest


@dataclass(frozen=True)
class Table:
    """What was asked for.

    Attributes:
        name: of the experiment.
        reproduce: what it says of its rows.
        lines: the paper's scores; empty where there are none.
        wanted: overrides of all cells.
        rows: the label of the row that a cell is of, by overrides; empty for cells of a grid.
        coordinates: folds and repeats, where they are narrowed; the table has all runs that there are.
        backbone: that the experiment has.
        part: what tells these lines or cells from the whole table, as in "dataset=cub200"; empty for the whole.
    """

    name: str
    reproduce: Mapping[str, Any]
    lines: tuple[Line, ...]
    wanted: tuple[tuple[str, ...], ...]
    rows: Mapping[tuple[str, ...], str]
    coordinates: Mapping[str, Sequence[int]]
    backbone: str
    part: tuple[str, ...]


def known_name(name: str | None, folders: Sequence[Path]) -> str:
    known = experiments(folders)
    listed = list(dict.fromkeys([*paper_tables(folders), *known]))
    if name is None:
        raise ConfigError("name a table, such as dmlbench reproduce gsp/table2; dmlbench reproduce --list shows all")
    if name in known:
        return name
    if name in tables():
        raise ConfigError(f"{name} has no experiment yet: none of its rows can be run by name")
    raise ConfigError(f"no table or experiment is called '{name}': {closest(name, listed, most=len(listed))}")


def shard_of(shard: Any) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", str(shard))
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"shard ({shard}) is written i/n, with i from 1 to n, such as 2/4")
    return int(match[1]), int(match[2])


def asked_table(
    cfg: DictConfig, name: str, folders: Sequence[Path], given: Sequence[str], searching: Sequence[str]
) -> Table:
    """The lines and cells that the command line asks for."""
    from dmlbench.apps.reproduce import moving  # torch comes with it, which a mistake need not wait for

    narrowing = {key: _options_of(given, key) for key in NARROWING}
    coordinates = {key: _numbers(key, cfg[key]) for key in ("fold", "repeat") if cfg[key] is not None}
    own = reproduce_of(experiments(folders)[name])
    rows = None if cfg.rows is None else _texts(cfg.rows)
    experiment = f"experiment={name}"
    if (told := instead_of_rows(own)) and not own.get("rows"):
        raise ConfigError(
            f"{name} is no table of runs: {told}" if own.get("commands") else f"{name} cannot be run: it {told}"
        )
    choices, params = _base(experiment, searching)
    labels: dict[tuple[str, ...], str] = {}
    part: tuple[str, ...] = () if rows is None else (f"row={','.join(sorted(set(rows)))}",)
    if own.get("rows") and name in tables():
        groups = {key: options for key, options in narrowing.items() if options}
        rest = in_train([override for override in given if key_of(override) not in NARROWING])
        everything = lines_of(name, own, choices)
        kept = narrowed(everything, rows, groups)
        part = _part(kept, everything)
        lines = [
            replace(line, overrides=last_of_each([*line.overrides, *rest]) if not line.why else ()) for line in kept
        ]
        labels = _first_of_each((line.overrides, line.score.row) for line in lines if not line.why)
        wanted = [line.overrides for line in lines if not line.why]
        if not wanted:
            why = "; ".join(dict.fromkeys(f"{line.score.row}: {line.why}" for line in lines))
            raise ConfigError(f"{name}: nothing of what was asked for can be run ({why})")
    elif own.get("rows"):
        lines = []
        rest = in_train([override for override in given if key_of(override) != "dataset"])
        named_cells = cells_of_rows(name, own, rows, narrowing["dataset"])
        labels = _first_of_each((last_of_each([*cell, *rest]), label) for cell, label in named_cells.items())
        wanted = list(labels)
    else:
        if rows is not None:
            raise ConfigError(
                f"{name} has no rows by name: narrow its grid, as in pooling=gap; see conf/experiment/{name}.yaml"
            )
        lines = []
        cells, named = grid(params, in_train(given, is_grid=True))
        coordinates = {**named, **coordinates}
        also = [tuple(in_train([*words(extra), *given], is_grid=True)) for extra in own.get("also", ())]
        wanted = [last_of_each([experiment, *cell]) for cell in [*also, *cells]]
    if not lines:  # of a grid whatever is given chooses among its cells, or makes other ones
        part = (*part, *sorted(moving(given, choosing=())))
    backbone = choices.get("backbone", "")
    return Table(name, own, tuple(lines), tuple(dict.fromkeys(wanted)), labels, coordinates, backbone, part)


def _first_of_each(labeled: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for overrides, label in labeled:
        found.setdefault(overrides, label)
    return found


def _part(kept: Sequence[Line], everything: Sequence[Line]) -> tuple[str, ...]:
    """What tells lines from all of their table, the same however they were asked for."""
    found = []
    for key in (*NARROWING, "row"):
        own, known = ({str(getattr(line.score, key)) for line in lines} for lines in (kept, everything))
        if own != known:
            found.append(f"{key}={','.join(sorted(own))}")
    return tuple(found)


def _base(experiment: str, searching: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The options that an experiment composes, and its grid."""
    cfg = hydra.compose("train", [experiment, *searching], return_hydra_config=True)
    checked(OmegaConf.to_container(cfg.reproduce, resolve=False) if cfg.reproduce else None, experiment)
    params: Any = OmegaConf.to_container(cfg.hydra.sweeper.params, resolve=False) if cfg.hydra.sweeper.params else {}
    return {group: str(option) for group, option in cfg.hydra.runtime.choices.items()}, params


def in_train(given: Sequence[str], *, is_grid: bool = False) -> list[str]:
    """Overrides as Hydra takes them."""
    options = ("-m",) if is_grid else ()
    return for_hydra("train", CommandLine(options, None, (), tuple(given)))


def _options_of(given: Sequence[str], key: str) -> list[str]:
    """The options that a command line names for a group, separated by commas."""
    values = [override.partition("=")[2] for override in given if override.partition("=")[0].strip() == key]
    return [option.strip() for value in values for option in value.strip("[]").split(",") if option.strip()]


def _texts(value: Any) -> list[str]:
    """One or several texts of a configuration as a list."""
    return [str(part) for part in value] if OmegaConf.is_list(value) else [str(value)]


def _numbers(key: str, value: Any) -> list[int]:
    numbers = list(value) if OmegaConf.is_list(value) else [value]
    if not numbers or any(type(number) is not int or number < 0 for number in numbers):
        raise ConfigError(f"{key} ({value}) is a number from 0, or several of them, such as {key}=0,1")
    return numbers
