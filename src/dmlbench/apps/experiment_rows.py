"""Rows of experiments that are tables: lists of Hydra overrides, with the paper's score if it has one.

An experiment that reproduces a table or a figure of a paper is called ``<paper>/<table>`` and has a part ``reproduce``:

    rows:             overrides by the paper's label of the row, separated by blanks or as a list, or
                      {needs: what is missing}, or {overrides: ..., doubt: why the row may be another config}
    settings:         overrides by ``PaperScore.setting``, in the same forms (optional)
    datasets:         the same by ``PaperScore.dataset`` (optional)
    embedding_sizes:  the same by ``PaperScore.embedding_size`` (optional)
    metrics:          labels of our metrics by the paper's, where they differ, such as {"R@{k}": "R@{k} (raw)"}
                      (optional)
    needs:            instead of rows: why nothing can be run; beside commands: what these leave out
    commands:         instead of rows: the commands that make it, which ``dmlbench reproduce`` runs
    also:             beside a grid: further configs, as a list of overrides
    search:           option of conf/search that makes the recipe of this name, for rows with it (optional)
    references:       labels of own rows that all others are compared with (optional)

Scores that the paper took from others are *quoted*. Experiments without a paper's scores are tables of their own
``rows``, or of their grid (``hydra.sweeper.params``).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dmlbench import papers
from dmlbench.config import key_of
from dmlbench.external_files import Schema, load_yaml, validated
from dmlbench.papers import PaperScore, load_table, why_quoted
from dmlbench.types import ConfigError, closest, counted

QUOTED = "quoted"
COORDINATES = ("fold", "repeat")
NARROWING = ("dataset", "protocol", "backbone")
"""Groups that select among the scores of a paper's table."""
_FIELDS = {"datasets": "dataset", "embedding_sizes": "embedding_size", "rows": "row", "settings": "setting"}
"""Parts that have overrides by a field of ``PaperScore``; later ones win."""


@dataclass(frozen=True)
class Row:
    """A row of a table, for one score of a paper if the table has any."""

    label: str  # empty in a grid
    overrides: tuple[str, ...]  # of ``dmlbench train``, without fold and repeat
    score: PaperScore | None = None
    blocker: str = ""  # verdict (``QUOTED``, "needs") and reason if nothing can be run
    doubt: str = ""  # why the paper's row may be another config
    metric: str = ""  # label of our metric that the score is compared with
    setting: str = ""  # key of the experiment's ``settings``

    @property
    def name(self) -> str:
        return f"{self.label} ({self.setting})" if self.setting else self.label


def experiments(folders: Sequence[Path]) -> dict[str, Path]:
    """Files of all experiments by name, those of the first folder that has them."""
    found: dict[str, Path] = {}
    for folder in folders:
        root = folder / "experiment"
        for path in sorted(root.glob("**/*.yaml")):
            found.setdefault(str(path.relative_to(root).with_suffix("")), path)
    return found


def paper_tables(folders: Sequence[Path]) -> list[str]:
    """Names of the papers' tables and figures, paper by paper, those with printed scores first."""
    known = papers.tables()
    drawn = [name for name in experiments(folders) if name.partition("/")[2].startswith(("table", "figure"))]
    of_papers = list(dict.fromkeys(name.partition("/")[0] for name in known))
    found = [name for name in dict.fromkeys([*known, *drawn]) if name.partition("/")[0] in of_papers]
    return sorted(found, key=lambda name: of_papers.index(name.partition("/")[0]))


class _Part(Schema):
    overrides: str | list[str] | None = None
    needs: str | None = None
    doubt: str | None = None


_Parts = dict[str, str | list[str] | _Part | None] | None


class _Reproduce(Schema):
    """The part ``reproduce`` of an experiment, as the header of this module describes it."""

    rows: _Parts = None
    settings: _Parts = None
    datasets: _Parts = None
    embedding_sizes: _Parts = None
    metrics: dict[str, str] | None = None
    needs: str | None = None
    commands: list[str] | None = None
    also: list[str | list[str]] | None = None
    search: str | None = None
    references: list[str] | None = None


class _Experiment(BaseModel, extra="ignore", strict=True):
    reproduce: _Reproduce | None = None


def reproduce_of(path: Path | None) -> dict[str, Any]:
    """The part ``reproduce`` of an experiment's file; may be empty."""
    if path is None:
        return {}
    try:
        content = load_yaml(path) or {}
        validated(content, _Experiment)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from error
    reproduce: dict[str, Any] = content.get("reproduce") or {}
    for part in ("rows", "settings", "datasets"):
        for key in reproduce.get(part) or {}:
            if not isinstance(key, str):
                raise ConfigError(f"{path}: reproduce.{part}: got the name {key}, expected text. Write it in quotes.")
    if reproduce.get("references") and len(reproduce.get("settings") or {}) > 1:
        raise ConfigError(f"{path}: references: got several settings, expected one. Make rows of them.")
    rows = list(reproduce.get("rows") or {})
    for reference in reproduce.get("references") or ():
        if reference not in rows:
            raise ConfigError(f"{path}: references: got {reference}, expected a row: {closest(reference, rows)}")
    return reproduce


def check_reproduce(reproduce: Any, where: str) -> None:
    """Check the composed part ``reproduce`` of an experiment."""
    try:
        validated(reproduce, _Reproduce)
    except ValueError as error:
        raise ConfigError(f"{where}: reproduce.{error}.") from error


def words(overrides: Any) -> list[str]:
    """Overrides in a text, separated by blanks, or in a list."""
    return overrides.split() if isinstance(overrides, str) else [str(override) for override in overrides or ()]


def rows_of_paper(name: str, reproduce: Mapping[str, Any], composed: Mapping[str, str]) -> list[Row]:
    """A row for every score of the paper's table ``name``; ``composed`` are its experiment's options."""
    scores = load_table(name)
    for part, field in _FIELDS.items():
        known = [getattr(score, field) for score in scores]
        for label in reproduce.get(part) or {}:
            if label not in known:
                listed = list(dict.fromkeys(map(str, known)))
                nearest = closest(str(label), listed)
                raise ConfigError(
                    f"experiment={name}: {part}: got '{label}', expected a value in the paper's table: {nearest}"
                )
    return [_row_of(name, score, reproduce, composed) for score in scores]


def _row_of(name: str, score: PaperScore, reproduce: Mapping[str, Any], composed: Mapping[str, str]) -> Row:
    if score.origin == QUOTED:  # also of a row that others' and own scores share
        return Row(score.row, (), score, f"{QUOTED} {why_quoted(name, score.row, score.dataset)}")
    if score.row not in (reproduce.get("rows") or {}):
        blocker = instead_of_rows(reproduce) or "needs a command: its experiment does not name this row"
        return Row(score.row, (), score, blocker)
    parts = [(reproduce.get(part) or {}).get(getattr(score, field)) for part, field in _FIELDS.items()]
    base = [f"experiment={name}"]
    for group in NARROWING:
        option = getattr(score, group)
        if option and option != composed.get(group):
            base.append(f"{group}={option}")
    overrides, needs = _joined(base, parts)
    doubt = "; ".join(part["doubt"] for part in parts if isinstance(part, dict) and "doubt" in part)
    metric = _our_label(score.metric, reproduce.get("metrics") or {})
    setting = score.setting if len(reproduce.get("settings") or {}) > 1 else ""
    return Row(score.row, overrides, score, needs, doubt, metric, setting)


def instead_of_rows(reproduce: Mapping[str, Any]) -> str:
    """The commands that make a table instead of runs, and what is missing for it."""
    commands, needs = reproduce.get("commands") or (), reproduce.get("needs")
    made = [f"made by `{'; '.join(commands)}`"] if commands else []
    missing = [f"needs {needs}"] if needs else []
    return "; ".join(made + missing)


def _our_label(label: str, metrics: Mapping[str, str]) -> str:
    for theirs, ours in metrics.items():
        if match := re.fullmatch(re.escape(theirs).replace(re.escape("{k}"), "([0-9]+)"), label):
            return ours.replace("{k}", match[1] if match.groups() else "")
    return label


def _joined(base: Sequence[str], parts: Sequence[Any]) -> tuple[tuple[str, ...], str]:
    for part in parts:
        if isinstance(part, dict) and "overrides" not in part:
            return (), f"needs {part.get('needs', 'overrides in its experiment')}"
    plain = [part["overrides"] if isinstance(part, dict) else part for part in parts]
    return last_of_each([*base, *(word for part in plain for word in words(part))]), ""


def own_rows(
    name: str, reproduce: Mapping[str, Any], labels: Sequence[str] | None, datasets: Sequence[str]
) -> list[Row]:
    """The rows of a table without printed scores: rows by settings by data sets.

    ``labels``, or shell patterns of them, select rows; ``datasets`` replace the experiment's.
    """
    parts = {part: dict(reproduce.get(part) or {"": ""}) for part in ("datasets", "rows", "settings")}
    kept = parts["rows"].keys() if labels is None else _matching(list(parts["rows"]), labels)
    chosen = {dataset: parts["datasets"].get(dataset, "") for dataset in datasets} or parts["datasets"]
    found = []
    for (dataset, of_dataset), label, (setting, of_setting) in itertools.product(
        chosen.items(), [label for label in parts["rows"] if label in kept], parts["settings"].items()
    ):
        base = [f"experiment={name}", *([f"dataset={dataset}"] if dataset else [])]
        overrides, needs = _joined(base, [of_dataset, parts["rows"][label], of_setting])
        found.append(Row(label, overrides, blocker=needs, setting=setting if len(parts["settings"]) > 1 else ""))
    return found


def last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """The last override of each key."""
    return tuple({key_of(override): override for override in overrides}.values())


def narrowed(rows: Sequence[Row], labels: Sequence[str] | None, groups: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows with these labels (or shell patterns of them) and these options of ``NARROWING``."""
    for group, options in groups.items():
        known = list(dict.fromkeys(getattr(row.score, group) for row in rows))
        for option in options:
            if option not in known:
                raise ConfigError(f"the table has no scores for {group}={option}: {closest(option, known)}")
        rows = [row for row in rows if getattr(row.score, group) in options]
    if not rows:
        asked = ", ".join(f"{group}={','.join(options)}" for group, options in groups.items())
        raise ConfigError(f"the table has no scores for {asked} together. Leave one of them out.")
    if labels is None:
        return list(rows)
    kept = _matching(list(dict.fromkeys(row.label for row in rows)), labels)
    return [row for row in rows if row.label in kept]


def _matching(labels: Sequence[str], patterns: Sequence[str]) -> set[str]:
    found = {pattern: {x for x in labels if x == pattern or fnmatchcase(x, pattern)} for pattern in patterns}
    if unknown := [pattern for pattern in patterns if not found[pattern]]:
        nearest = closest(unknown[0], labels)
        raise ConfigError(f"rows: got '{unknown[0]}', expected a row or a pattern such as '*GSP*': {nearest}")
    return set().union(*found.values())


def title_of(file: Path) -> str:
    """What the comment on top of an experiment's file says of it, without the name of its table."""
    text = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#") or line.startswith("#   "):
            break
        text = f"{text} {line.removeprefix('#').strip()}".strip()
    return re.sub(r"^(Table|Figure|Appendix) [^:]*: ", "", text)


def state_of(name: str, reproduce: Mapping[str, Any], has_experiment: bool) -> str:
    """What can be run of a table, for ``dmlbench reproduce --list``."""
    if not has_experiment:
        return "no experiment"
    if commands := reproduce.get("commands"):
        return counted(len(commands), "command")
    if reproduce.get("needs"):
        return "cannot be run"
    if name not in papers.tables():
        return "rows without scores"
    if not reproduce:
        return "its own grid"
    labels: dict[str, set[str]] = {"": set(), QUOTED: set(), "needs": set()}
    for row in rows_of_paper(name, reproduce, {}):
        labels[row.blocker.partition(" ")[0]].add(row.label)
    rows, quoted, blocked = map(len, labels.values())
    parts = {counted(rows, "row"): rows, f"{quoted} quoted": quoted, f"{blocked} cannot be run": blocked}
    return ", ".join(part for part, count in parts.items() if count)
