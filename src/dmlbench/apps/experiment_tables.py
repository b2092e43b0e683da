"""Experiments that are tables: which rows they have, and which overrides make each row's cell.

An experiment that stands for a table or a figure of a paper says so by its name, ``<paper>/<table>``, and has a part
``reproduce``:

    rows:             by the paper's label of the row its overrides (separated by blanks, or a list), or
                      {needs: what is missing}
    settings:         overrides by ``PaperScore.setting``, in the same forms (optional)
    datasets:         the same by ``PaperScore.dataset`` (optional)
    embedding_sizes:  the same by ``PaperScore.embedding_size`` (optional)
    metrics:          labels of our metrics by the paper's, where it means another one, such as {"R@{k}": "R@{k} (raw)"}
                      (optional)
    needs:            instead of rows: why nothing of it can be run; beside commands: what these leave out
    commands:         instead of rows: the commands that make it, where it is no table of runs
    hours_per_run:    hours by data set (under ``backbones`` by backbone before), their ``device``, how they were
                      ``measured``, and whether they are an ``upper_bound`` (optional)
    also:             in experiments of no paper: cells beside those of the experiment's grid, as a list of overrides

What the paper took from others is *quoted*, whatever its row is. Other experiments are tables of their own ``rows``,
or of their own grid (``hydra.sweeper.params``).
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from dmlbench import papers
from dmlbench.papers import PaperScore, describe_table, load_table, why_quoted
from dmlbench.types import ConfigError, closest

QUOTED = "quoted"
COORDINATES = ("fold", "repeat")
NARROWING = ("dataset", "protocol", "backbone")
"""Groups that choose among the scores of a paper's table."""
_PARTS = ("rows", "settings", "datasets", "embedding_sizes", "metrics", "needs", "commands", "hours_per_run", "also")


@dataclass(frozen=True)
class Line:
    """A score of a paper and the overrides that make its cell.

    Attributes:
        score: as the paper prints it.
        overrides: of ``dmlbench train``, without coordinates; empty where nothing can be run.
        why: why nothing can be run, beginning with its verdict (``QUOTED``, "needs"); empty where it can.
        label: of our metric that the score is one of.
    """

    score: PaperScore
    overrides: tuple[str, ...]
    why: str = ""
    label: str = ""


def experiments(folders: Sequence[Path]) -> dict[str, Path]:
    """Files of all experiments by name, those of the first folder that has them."""
    found: dict[str, Path] = {}
    for folder in folders:
        root = folder / "experiment"
        for path in sorted(root.glob("**/*.yaml")):
            found.setdefault(str(path.relative_to(root).with_suffix("")), path)
    return found


def paper_tables(folders: Sequence[Path]) -> list[str]:
    """Names of the papers' tables and figures: those with scores in the paper's text, then other experiments of its."""
    known = papers.tables()
    own = experiments(folders)
    by_paper = dict.fromkeys(name.partition("/")[0] for name in known)
    return [
        name
        for paper in by_paper
        for name in dict.fromkeys(
            [
                *(name for name in known if name.startswith(f"{paper}/")),
                *(name for name in own if name.startswith(f"{paper}/") and name.rpartition("/")[2][:5] in _DRAWN),
            ]
        )
    ]


_DRAWN = ("table", "figur")


def reproduce_of(path: Path | None) -> dict[str, Any]:
    """What an experiment's own file has under ``reproduce``; empty where it has nothing."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path else None
    return checked((content or {}).get("reproduce"), str(path))


def checked(reproduce: Any, where: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: it is not what the head of this module says.
    """
    if reproduce is None:
        return {}
    if not isinstance(reproduce, dict):
        raise ConfigError(f"{where}: reproduce is {reproduce!r}; it holds {', '.join(_PARTS)}")
    for key in reproduce:
        if key not in _PARTS:
            raise ConfigError(f"{where}: reproduce has '{key}': {closest(str(key), _PARTS)}")
    return reproduce


def words(overrides: Any) -> list[str]:
    """Overrides that are written as one text, separated by blanks, or as a list."""
    if overrides is None:
        return []
    if isinstance(overrides, str):
        return overrides.split()
    if isinstance(overrides, list | tuple):
        return [str(override) for override in overrides]
    raise ConfigError(f"{overrides!r} are no overrides; write 'loss=triplet pooling=gap', or a list of them")


def lines_of(name: str, reproduce: Mapping[str, Any], composed: Mapping[str, str]) -> list[Line]:
    """Every score of the paper's table with what makes its cell.

    Args:
        name: of the table, as in "gsp/table2".
        reproduce: of its experiment; empty where there is none.
        composed: what the experiment has for the groups ``NARROWING``.

    Raises:
        ConfigError: a row, setting or size is none of the table's.
    """
    scores = load_table(name)
    labels: dict[str, list[Any]] = {
        "rows": [score.row for score in scores],
        "settings": [score.setting for score in scores],
        "datasets": [score.dataset for score in scores],
        "embedding_sizes": [score.embedding_size for score in scores],
    }
    for part, known in labels.items():
        for label in reproduce.get(part) or {}:
            if label not in known:
                listed = list(dict.fromkeys(map(str, known)))
                raise ConfigError(f"experiment={name}: {part} has '{label}'; {closest(str(label), listed)}")
    return [_line(name, score, reproduce, composed) for score in scores]


def _line(name: str, score: PaperScore, reproduce: Mapping[str, Any], composed: Mapping[str, str]) -> Line:
    if score.origin == QUOTED:  # also of a row that others' and own scores share
        return Line(score, (), f"{QUOTED} {why_quoted(name, score.row, score.dataset)}")
    if score.row not in (reproduce.get("rows") or {}):
        return Line(score, (), instead_of_rows(reproduce) or "needs a command: its experiment does not name this row")
    asked = {
        "datasets": score.dataset,
        "embedding_sizes": score.embedding_size,
        "rows": score.row,
        "settings": score.setting,
    }
    parts = [(reproduce.get(part) or {}).get(label) for part, label in asked.items()]
    base = [f"experiment={name}"]
    for group in NARROWING:
        option = getattr(score, group)
        if option and option != composed.get(group):
            base.append(f"{group}={option}")
    overrides, needs = _joined(base, parts)
    return Line(score, overrides, needs, _our_label(score.metric, reproduce.get("metrics") or {}))


def instead_of_rows(reproduce: Mapping[str, Any]) -> str:
    """What makes a table that is none of runs, or what is missing for one; empty where neither is said."""
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
    """The overrides of all parts, or what one of them needs."""
    for part in parts:
        if isinstance(part, dict):
            return (), f"needs {part.get('needs', 'what its experiment does not say')}"
    return last_of_each([*base, *(word for part in parts for word in words(part))]), ""


def cells_of_rows(
    name: str, reproduce: Mapping[str, Any], rows: Sequence[str] | None, datasets: Sequence[str] | None
) -> dict[tuple[str, ...], str]:
    """Overrides of the cells of a table of no printed numbers, rows by settings by data sets, and the row of each.

    Raises:
        ConfigError: a row or a data set matches nothing.
    """
    parts = {part: dict(reproduce.get(part) or {"": ""}) for part in ("datasets", "rows", "settings")}
    if rows is not None:
        kept = _matching(list(parts["rows"]), rows)
        parts["rows"] = {label: overrides for label, overrides in parts["rows"].items() if label in kept}
    chosen: dict[str, Any] = {f"dataset={dataset}": parts["datasets"].get(dataset, "") for dataset in datasets or ()}
    if not datasets:
        chosen = {f"dataset={dataset}" if dataset else "": part for dataset, part in parts["datasets"].items()}
    found: dict[tuple[str, ...], str] = {}
    for (dataset, of_dataset), (label, row), setting in itertools.product(
        chosen.items(), parts["rows"].items(), parts["settings"].values()
    ):
        overrides, needs = _joined([f"experiment={name}", *([dataset] if dataset else [])], [of_dataset, row, setting])
        if not needs:
            found.setdefault(overrides, label)
    return found


def hours_per_run(reproduce: Mapping[str, Any], dataset: str, backbone: str) -> float | None:
    """What one run takes by the experiment's own account; None where it does not say."""
    given = reproduce.get("hours_per_run") or {}
    hours = ((given.get("backbones") or {}).get(backbone) or given).get(dataset)
    return float(hours) if isinstance(hours, int | float) else None


def last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides without those whose key a later one has."""
    latest = {override.partition("=")[0].lstrip("~+"): override for override in overrides}
    return tuple(dict.fromkeys(latest[override.partition("=")[0].lstrip("~+")] for override in overrides))


def narrowed(lines: Sequence[Line], rows: Sequence[str] | None, groups: Mapping[str, Sequence[str]]) -> list[Line]:
    """The lines of these rows (labels, or shell patterns of them) and of these options of ``NARROWING``.

    Raises:
        ConfigError: a row or an option matches nothing.
    """
    for group, options in groups.items():
        known = list(dict.fromkeys(getattr(line.score, group) for line in lines))
        for option in options:
            if option not in known:
                raise ConfigError(f"the table has no scores for {group}={option}; {closest(option, known)}")
        lines = [line for line in lines if getattr(line.score, group) in options]
    if not lines:
        asked = ", ".join(f"{group}={','.join(options)}" for group, options in groups.items())
        raise ConfigError(f"the table has no scores for {asked} together; leave one of them out")
    if rows is None:
        return list(lines)
    kept = _matching(list(dict.fromkeys(line.score.row for line in lines)), rows)
    return [line for line in lines if line.score.row in kept]


def _matching(labels: Sequence[str], rows: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for row in rows:
        matching = {label for label in labels if row == label or fnmatchcase(label, row)}
        if not matching:
            raise ConfigError(
                f"rows: '{row}' matches no row; {closest(row, labels)} (patterns such as '*GSP*' work, too)"
            )
        found |= matching
    return found


def grid(params: Mapping[str, Any], given: Sequence[str]) -> tuple[list[tuple[str, ...]], dict[str, list[int]]]:
    """The cells of a grid as overrides, the first key varying slowest, and the coordinates that it names.

    Args:
        params: ``hydra.sweeper.params`` of an experiment: values, several of them separated by commas.
        given: overrides of the command line, which replace those of their keys; they may be sweeps, too.
    """
    texts = last_of_each([*(f"{key}={value}" for key, value in params.items()), *given])
    parsed = OverridesParser.create().parse_overrides(list(texts))
    axes, coordinates = [], {}
    for text, override in zip(texts, parsed, strict=True):
        values = [text]
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.key_or_group in COORDINATES:
            coordinates[override.key_or_group] = [_number(value) for value in values]
        else:
            axes.append(values)
    return [tuple(cell) for cell in itertools.product(*axes)], coordinates


def _number(override: str) -> int:
    key, _, value = override.partition("=")
    if not value.isdecimal():
        raise ConfigError(f"{override}: {key} is a number from 0, or several of them, such as {key}=0,1")
    return int(value)


def states(name: str, reproduce: Mapping[str, Any], has_experiment: bool) -> Iterator[str]:
    """What ``dmlbench reproduce --list`` says of a table: its rows by what can be done with them."""
    if not has_experiment:
        yield "no experiment"
        return
    if name not in papers.tables():
        yield instead_of_rows(reproduce) or "runnable, without numbers in the paper's text"
        return
    kinds: dict[str, set[str]] = {"runnable": set(), "quoted": set(), "made": set(), "needs": set()}
    if not reproduce:
        yield "runnable by its own grid, not row by row"
        return
    for line in lines_of(name, reproduce, {}):
        kinds[line.why.partition(" ")[0] or "runnable"].add(line.score.row)
    kinds["made by a command"] = kinds.pop("made")
    yield ", ".join(f"{len(rows)} {kind}" for kind, rows in kinds.items() if rows)
    if told := instead_of_rows(reproduce):
        yield told


def about(name: str) -> str:
    """What a table is, in words; empty where only its experiment knows."""
    if name not in papers.tables():
        return ""
    table = describe_table(name)
    return f"{table.about} ({table.place})"
