"""Numbers that papers print for the choices of a cell, beside the cell's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from dmlbench import papers
from dmlbench.apps.experiment_tables import Line, experiments, lines_of, reproduce_of
from dmlbench.apps.origins import origin_of
from dmlbench.apps.reproduce import others
from dmlbench.apps.tables import Cell
from dmlbench.config import compose, config_folder
from dmlbench.results.cautions import incomparable
from dmlbench.results.store import CONFIG, read_result
from dmlbench.results.verdicts import NEEDS, compare

_GROUPS = ("recipe", "pooling", "head", "loss", "miner", "regularizer")
"""Options by which a row of a paper is known."""


def paper_scores(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every printed score of the rows whose recipe, pooling, head, loss, miner and regularizer a cell has.

    What else differs (backbone, size, weights, values that the recipe did not set, data that are not as published) is
    said with each; a score of which anything differs has no verdict but "not comparable".

    Args:
        cells: of one data set and protocol, trained with a recipe; others have no paper.
    """
    with_recipe = [cell for cell in cells if cell.summary["choices"].get("recipe", "none") not in ("none", "small")]
    if not with_recipe:
        return []
    known = experiments([config_folder()])
    found = []
    chosen: dict[tuple[str, ...], Mapping[str, str]] = {}
    for name in papers.tables():
        if name not in known:
            continue
        for line in lines_of(name, reproduce_of(known[name]), {}):
            for cell in with_recipe:
                if line.overrides and _may_be(line, cell) and _is(line, cell, chosen):
                    found.append(_beside(name, line, cell, cells.index(cell)))
    return [one for one in found if one["verdict"] != NEEDS]


def _may_be(line: Line, cell: Cell) -> bool:
    """Whether what the line says by itself is as in the cell."""
    summary, score = cell.summary, line.score
    given = dict(override.partition("=")[::2] for override in line.overrides)
    here = [(summary["dataset"], score.dataset), (summary["protocol"], score.protocol)]
    choices = summary["choices"]
    return all(not paper or ours == paper for ours, paper in here) and all(
        given[group] == choices.get(group) for group in _GROUPS if group in given
    )


def _is(line: Line, cell: Cell, chosen: dict[tuple[str, ...], Mapping[str, str]]) -> bool:
    """Whether the line, composed, chooses the cell's options; ``chosen`` keeps what lines choose."""
    if line.overrides not in chosen:
        cfg = compose("train", line.overrides, with_hydra=True)
        chosen[line.overrides] = {**cfg.hydra.runtime.choices, **cfg.runtime.recipe.get("chosen", {})}
    theirs, ours = chosen[line.overrides], cell.summary["choices"]
    return all(_option(theirs, group) == _option(ours, group) for group in _GROUPS)


def _option(choices: Mapping[str, Any], group: str) -> str:
    return str(choices.get(group, "None")).replace("none", "None")


def _beside(name: str, line: Line, cell: Cell, index: int) -> dict[str, Any]:
    run = next(run.path for run in cell.runs if run.state == "done")
    result = read_result(run)
    origin = origin_of(run / CONFIG, str(result["choices"].get("backbone", "")), [result.get("weights_sha256")])
    overridden = (result.get("recipe") or {}).get("overridden") or ()
    other = [f"not the recipe's: {', '.join(map(str, overridden))}"] if overridden else []
    reasons = [*others(line.score, cell.summary, origin), *other, *incomparable(cell.summary)]
    made = compare(line.score, cell.summary, reasons, label=line.label)
    score = line.score
    size = f"{score.embedding_size}-D" if score.embedding_size else ""
    column = ", ".join(word for word in (score.setting, score.backbone, score.kind, size) if word)
    return {
        "cell": index, "table": name, "row": score.row, "column": column, "metric": score.metric,
        "paper": None if score.mean is None else str(score.mean), "std": None if score.std is None else str(score.std),
        "ours": made.mean, "ours_std": made.std, "difference": made.difference, "verdict": made.verdict,
        "note": made.note,
    }  # fmt: skip
