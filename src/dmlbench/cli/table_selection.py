"""Select the rows of an experiment's table that a command line of ``dmlbench reproduce`` asks for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from dmlbench.apps import table_rows
from dmlbench.apps.table_rows import NARROWING, Row, experiments, last_of_each, reproduce_of, words
from dmlbench.cli.arguments import in_train
from dmlbench.cli.target_overrides import key_of
from dmlbench.papers import tables
from dmlbench.types import ConfigError, closest


@dataclass(frozen=True)
class Table:
    """The selected part of a table.

    Attributes:
        name, file, reproduce: of the experiment; see ``apps.table_rows``.
        rows: the selected ones, with the command line's overrides.
        coordinates: the requested folds and repeats, where they are narrowed.
        backbone: the experiment's.
        part: which part of the whole table this is, as in "dataset=cub200"; empty for the whole.
    """

    name: str
    file: Path
    reproduce: Mapping[str, Any]
    rows: tuple[Row, ...]
    coordinates: Mapping[str, Sequence[int]]
    backbone: str
    part: tuple[str, ...]

    @property
    def has_scores(self) -> bool:
        """Whether a paper prints scores of it."""
        return any(row.score is not None for row in self.rows)

    @property
    def wanted(self) -> list[tuple[str, ...]]:
        """The overrides of all configs."""
        return list(dict.fromkeys(row.overrides for row in self.rows if not row.blocker))

    @property
    def labels(self) -> dict[tuple[str, ...], str]:
        """The label of the first row of each config."""
        return {row.overrides: row.label for row in reversed(self.rows)}


def known_name(name: str | None, folders: Sequence[Path]) -> str:
    known = experiments(folders)
    listed = list(dict.fromkeys([*table_rows.paper_tables(folders), *known]))
    if name is None:
        raise ConfigError("name a table, such as dmlbench reproduce gsp/table2; dmlbench reproduce --list shows all")
    if name in known:
        return name
    if name in tables():
        raise ConfigError(f"{name} has no experiment yet: none of its rows can be run by name")
    raise ConfigError(f"no table or experiment is called '{name}': {closest(name, listed, most=len(listed))}")


def shard_of(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", str(shard))
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"shard: got {shard}, expected i/n with i from 1 to n, such as 2/4")
    return int(match[1]), int(match[2])


def select_table(cfg: DictConfig, name: str, folders: Sequence[Path], given: Sequence[str]) -> Table:
    """The rows that a command line asks for.

    Args:
        cfg: of the command.
        name: of the experiment.
        folders: configuration folders.
        given: overrides for the runs. Those of ``NARROWING`` choose among the paper's scores.
    """
    from dmlbench.apps.table_comparison import moving  # torch comes with it, which a mistake need not wait for

    file = experiments(folders)[name]
    reproduce = reproduce_of(file)
    if (told := table_rows.instead_of_rows(reproduce)) and not reproduce.get("rows"):
        raise ConfigError(f"{name} cannot be run: it {told}")
    labels = None if cfg.rows is None else list(cfg.rows)
    coordinates = {key: list(cfg[key]) for key in ("fold", "repeat") if cfg[key]}
    choices, params = _composed(name)
    part = [] if labels is None else [f"row={','.join(sorted(set(labels)))}"]
    if reproduce.get("rows") and name in tables():
        everything = table_rows.rows_of_paper(name, reproduce, choices)
        groups = {key: options for key in NARROWING if (options := _options_of(given, key))}
        rows = table_rows.narrowed(everything, labels, groups)
        part = _part(rows, everything)
        rest = in_train([override for override in given if key_of(override) not in NARROWING])
    elif reproduce.get("rows"):
        rows = table_rows.own_rows(name, reproduce, labels, _options_of(given, "dataset"))
        rest = in_train([override for override in given if key_of(override) != "dataset"])
        part += sorted(moving(given, choosing=()))
    elif labels is None:
        configs, named = table_rows.grid(params, in_train(given, is_grid=True))
        coordinates = {**named, **coordinates}
        also = [in_train([*words(extra), *given], is_grid=True) for extra in reproduce.get("also", ())]
        rows = [Row("", last_of_each([f"experiment={name}", *config])) for config in [*also, *configs]]
        rest = []
        part = sorted(moving(given, choosing=()))
    else:
        raise ConfigError(
            f"{name} has no rows by name: narrow its grid, as in pooling=gap; see conf/experiment/{name}.yaml"
        )
    rows = [row if row.blocker else replace(row, overrides=last_of_each([*row.overrides, *rest])) for row in rows]
    if all(row.blocker for row in rows):
        why = "; ".join(dict.fromkeys(f"{row.label}: {row.blocker}" for row in rows))
        raise ConfigError(f"{name}: nothing of what was asked for can be run ({why})")
    return Table(name, file, reproduce, tuple(rows), coordinates, choices.get("backbone", ""), tuple(part))


def _part(kept: Sequence[Row], everything: Sequence[Row]) -> list[str]:
    """What the kept rows have in common, the same however they were selected."""
    found = []
    for key in (*NARROWING, "row"):
        own, known = ({str(getattr(row.score, key)) for row in rows} for rows in (kept, everything))
        if own != known:
            found.append(f"{key}={','.join(sorted(own))}")
    return found


def _composed(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The options that an experiment composes, and its grid."""
    cfg = hydra.compose("train", [f"experiment={name}"], return_hydra_config=True)
    if cfg.reproduce:
        table_rows.check_reproduce(OmegaConf.to_container(cfg.reproduce, resolve=False), f"experiment={name}")
    params: Any = OmegaConf.to_container(cfg.hydra.sweeper.params, resolve=False) if cfg.hydra.sweeper.params else {}
    return {group: str(option) for group, option in cfg.hydra.runtime.choices.items()}, params


def _options_of(given: Sequence[str], key: str) -> list[str]:
    """The options that a command line names for a group, separated by commas."""
    values = [override.partition("=")[2] for override in given if override.partition("=")[0].strip() == key]
    return [option.strip() for value in values for option in value.strip("[]").split(",") if option.strip()]
