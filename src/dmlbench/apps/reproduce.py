"""From the runs of a table to the table: summaries of its cells, beside the paper's numbers where there are any."""

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dmlbench import __version__
from dmlbench.apps.experiment_tables import NARROWING, Line
from dmlbench.apps.origins import Origin, are_published, origin_of
from dmlbench.apps.plan import Cell, Plan, Run
from dmlbench.apps.tables import Found, build_tables, named_cells
from dmlbench.apps.trained import distances_by_cell
from dmlbench.config import NOT_PART_OF_A_CELL, NOT_PART_OF_A_RUN
from dmlbench.evaluation.metrics.table import score_labeled
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.papers import PaperScore
from dmlbench.results.aggregate import aggregate_cell, has_scores, is_of_runs, read_aggregate
from dmlbench.results.cautions import incomparable
from dmlbench.results.run_scores import spec_of_run
from dmlbench.results.store import CONFIG, RunInfo, preferred
from dmlbench.results.tables import Table
from dmlbench.results.verdicts import NOT_RUN, Comparison, compare, kind_of
from dmlbench.runtime import git_commit
from dmlbench.types import DmlbenchError, RunError, RunInUse

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_MOVES_NOTHING = (
    *(*NOT_PART_OF_A_CELL, *NOT_PART_OF_A_RUN, "dataset.table.root", "hydra"),
    *(f"evaluation.{key}" for key in ("metrics", "recall_at", "back_end", "device", "tile_bytes")),
)
_WEIGHTS = "backbone.weights_file"


_UNKNOWN = Origin()


@dataclass(frozen=True)
class Summary:
    """What became of a cell's runs.

    Attributes:
        found: its folder, runs and summary; None where it has no complete run, or where they cannot be summarized.
        problem: why they cannot.
        origin: what the runs say of their weights and of their width.
    """

    found: Found | None
    problem: str = ""
    origin: Origin = _UNKNOWN


def summarize(plan: Plan, spec: EvaluationSpec | Mapping[str, EvaluationSpec]) -> dict[str, Summary]:
    """A summary of each cell of a plan by its ``sha256``, of all its complete runs that can be used.

    Summaries of the very same runs are used as they are; one that another process makes is waited for.

    Args:
        plan: with the runs as they are now.
        spec: the scores to sum up, for all cells or by ``sha256``.
    """
    bar = tqdm(plan.cells, "summing up", unit="cell", disable=not sys.stderr.isatty() or len(plan.cells) < 3)
    runs: dict[str, list[Run]] = {cell.sha256: [] for cell in plan.cells}
    for run in plan.runs:
        runs[run.cell.sha256].append(run)
    return {
        cell.sha256: _summary(runs[cell.sha256], spec if isinstance(spec, EvaluationSpec) else spec[cell.sha256])
        for cell in bar
    }


def _summary(runs: Sequence[Run], spec: EvaluationSpec) -> Summary:
    done = [run.path.parent for run in runs if run.state == "done"]
    if not done:
        return Summary(None)
    folder = preferred(list(dict.fromkeys(done)))
    unusable = {run.path for run in runs if run.state == "unusable"}
    found = [run for run in _runs_in(folder, runs[0].cell) if run.path not in unusable]
    try:
        while True:
            try:
                made = _aggregate(folder, found, spec)
                return Summary((folder, found, made), origin=_origin(runs, str(made["choices"].get("backbone", ""))))
            except RunInUse:
                time.sleep(_PAUSE_S)
    except DmlbenchError as error:
        return Summary(None, str(error))


def _origin(runs: Sequence[Run], backbone: str) -> Origin:
    done = [run for run in runs if run.state == "done"]
    return origin_of(done[0].path / CONFIG, backbone, [run.weights for run in done])


def _aggregate(folder: Path, runs: list[RunInfo], spec: EvaluationSpec) -> dict[str, Any]:
    complete = [run for run in runs if run.state == "done"]
    known = read_aggregate(folder)
    if known is not None:
        is_current = is_of_runs(folder, known, [(run.fold, run.repeat) for run in complete])
        if is_current and has_scores(known, spec_of_run(spec, {key: known.get(key) for key in ("search", "kmeans")})):
            return known
    return aggregate_cell(
        runs, spec, allow_partial=True, distance_of=distances_by_cell(), progress=sys.stderr.isatty()
    )  # fmt: skip


def _runs_in(folder: Path, cell: Cell) -> list[RunInfo]:
    """Every run in a cell's folder."""
    found = [(path, re.fullmatch(r"fold(\d+)_rep(\d+)", path.name)) for path in sorted(folder.glob("fold*_rep*"))]
    return [
        RunInfo(path, cell.dataset, cell.protocol, folder.name, int(match[1]), int(match[2]))
        for path, match in found
        if match and path.is_dir()
    ]


def spec_for(labels: Sequence[str]) -> EvaluationSpec:
    """What has to be computed for metrics of these labels."""
    asked = [score for score in map(score_labeled, labels) if score is not None]
    return EvaluationSpec(metrics=tuple(dict.fromkeys(score.name for score in asked)) or ("p_at_1",))


def compare_lines(
    lines: Sequence[Line], cells: Mapping[tuple[str, ...], Cell | str], summaries: Mapping[str, Summary],
    reasons: Sequence[str],
) -> list[Comparison]:  # fmt: skip
    """Every score of a paper beside ours.

    Args:
        lines: of the table.
        cells: what their overrides compose to, or why they do not.
        summaries: of these cells.
        reasons: why nothing that was asked for so can be compared with the paper.
    """
    return [_compared(line, cells, summaries, reasons) for line in lines]


def _compared(
    line: Line, cells: Mapping[tuple[str, ...], Cell | str], summaries: Mapping[str, Summary], reasons: Sequence[str]
) -> Comparison:
    if line.why:
        return Comparison(line.score, line.why.partition(" ")[0], note=line.why)
    cell = cells[line.overrides]
    if isinstance(cell, str):
        return Comparison(line.score, NOT_RUN, note=cell)
    summary = summaries[cell.sha256]
    if summary.found is None:
        return Comparison(line.score, NOT_RUN, note=summary.problem)
    made = summary.found[2]
    found = [*reasons, *others(line.score, made, summary.origin), *incomparable(made)]
    return compare(line.score, made, found, label=line.label)


def others(score: PaperScore, summary: Mapping[str, Any], origin: Origin) -> list[str]:
    """What a summary is of, where the paper's score is of something else."""
    choices = summary["choices"]
    size = summary.get("dimension", {}).get(kind_of(score, summary), origin.embedding_size)
    pairs = [("data set", summary["dataset"], score.dataset), ("protocol", summary["protocol"], score.protocol)]
    found = [f"{what} {ours} instead of {paper}" for what, ours, paper in pairs if paper and ours != paper]
    if score.backbone and not str(choices.get("backbone", "")).startswith(score.backbone):
        found.append(f"backbone {choices.get('backbone')} instead of {score.backbone}")
    if size and score.embedding_size and size != score.embedding_size:
        found.append(f"{size} dimensions instead of {score.embedding_size}")
    return [*found, *origin.other_weights]


def given_by_hand(overrides: Sequence[str]) -> list[str]:
    """Overrides of the command line that make other runs than the paper's, but for weights, which the runs tell."""
    return [f"given by hand: {override}" for override in moving(overrides) if _key_of(override) != _WEIGHTS]


def moving(overrides: Sequence[str], *, choosing: Sequence[str] = NARROWING) -> list[str]:
    """Overrides that make other cells than an experiment's own; ``choosing`` are keys that choose among these."""
    return [
        override
        for override in overrides
        if (key := _key_of(override)) not in choosing
        and not f"{key}.".startswith(tuple(f"{free}." for free in _MOVES_NOTHING))
        and not (key == _WEIGHTS and are_published(override.partition("=")[2].strip("'\"")))
    ]


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("~+")


def mixtures(runs: Sequence[Run], *, to_do: bool) -> list[str]:
    """Why complete runs do not belong side by side: made by different code, or from different data of one name.

    Args:
        runs: of a table.
        to_do: whether others are to be added by the code of now.
    """
    code = Counter(name for run in runs for name in dict.fromkeys((run.code, run.weights_code)) if name is not None)
    if to_do and code:
        code[git_commit() or __version__] += 0
    found = []
    if len(code) > 1:
        listed = ", ".join(
            f"{str(name)[:12]}{'+changes' * ('+' in str(name))} ({count} runs)" for name, count in code.items()
        )
        found.append(f"MIXED CODE: {listed}")
    data: dict[str, Counter[str]] = {}
    for run in runs:
        if run.fingerprint is not None:
            data.setdefault(run.cell.dataset, Counter())[run.fingerprint[:12]] += 1
    for dataset, prints in data.items():
        if len(prints) > 1:
            listed = ", ".join(f"{name} ({count} runs)" for name, count in prints.items())
            found.append(f"MIXED DATA: {dataset} with the fingerprints {listed}")
    return found


def grid_tables(summaries: Mapping[str, Summary], spec: EvaluationSpec) -> dict[tuple[str, str], Table]:
    """The cells of a grid as tables, one for each data set and protocol.

    Raises:
        RunError: no cell has a complete run.
    """
    grouped: dict[tuple[str, str], list[Found]] = {}
    for summary in summaries.values():
        if summary.found is not None:
            run = summary.found[1][0]
            grouped.setdefault((run.dataset, run.protocol), []).append(summary.found)
    if not grouped:
        raise RunError("no cell has a complete run yet")
    return build_tables(named_cells(grouped), spec)


def seconds_per_run(plan: Plan, hours: Mapping[str, float | None]) -> dict[str, tuple[float, str]]:
    """What a run of a cell takes and how that is known, by ``sha256``; cells of which nothing is known are absent.

    Measured on complete runs of the cell, else on those of its data set in this table, else as the experiment says.

    Args:
        plan: with the runs as they are now.
        hours: of the experiment for a run of each cell, by ``sha256``.
    """
    of_cell: dict[str, list[float]] = {}
    of_dataset: dict[str, list[float]] = {}
    for run in (*plan.preparing, *plan.runs):
        if run.wall_s is not None:
            of_cell.setdefault(run.cell.sha256, []).append(run.wall_s)
            of_dataset.setdefault(run.cell.dataset, []).append(run.wall_s)
    found = {}
    for cell in (*plan.first.values(), *plan.cells):
        stated = hours.get(cell.sha256)
        if measured := of_cell.get(cell.sha256) or of_dataset.get(cell.dataset):
            found[cell.sha256] = (sum(measured) / len(measured), "measured here")
        elif stated is not None:
            found[cell.sha256] = (3600 * stated, "as the experiment says")
    return found
