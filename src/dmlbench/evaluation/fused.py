"""Scores of every choice of repeats by compiled code: from the members' tiles to single queries' scores, in one go.

Letters: M members, T queries of a tile, W columns multiplied at a time, C columns held of each query, S choices.
"""

import itertools
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.back_ends import exclude
from dmlbench.evaluation.compiled import LOWEST, WANTED, fill_exact, hold_near, rank_choices
from dmlbench.evaluation.evaluate import RetrievalTask
from dmlbench.evaluation.members import Member, UnitMember
from dmlbench.evaluation.parallel import Workspace
from dmlbench.evaluation.pruning import sum_slack
from dmlbench.evaluation.similarity import FloatRows
from dmlbench.types import IntArray

_workspace = Workspace()


def score_fused(
    folds: list[list[Member]],
    part: IntArray,
    task: RetrievalTask,
    columns: int,
    *,
    most: int,
    recall_at: Sequence[int],
    out: NDArray[np.float64],
) -> bool:
    """Write the scores of the queries ``part`` [T] into ``out`` [S, names, Q].

    Args:
        folds: [fold][repeat] where similarities come from.
        part: queries.
        task: labels and depth.
        columns: gallery items multiplied at a time.
        most: pairs of queries and items that may be held, where there is more than one query.
        recall_at: the K of R@K.
        out: what is written to.

    Returns:
        Whether ``most`` was enough; nothing is written otherwise.
    """
    num_gallery = len(task.gallery_labels)
    ends = np.cumsum([0, *map(len, folds)])
    later = np.array([prod(map(len, folds[fold + 1 :])) for fold in range(len(folds))], dtype=np.int64)
    shape = (len(part), num_gallery if len(part) == 1 else min(num_gallery, most // len(part)))
    reach = np.full((len(part), int(ends[1] * later[0])), LOWEST)
    count = np.zeros(len(part), dtype=np.int64)
    column = _workspace.array("column", shape, np.int64)
    value = _workspace.array("value", (int(ends[-1]), *shape), np.float32)
    slack = 0.0
    for start in range(0, num_gallery, columns):
        tile, tile_slack = _tile(folds, part, task, start, min(start + columns, num_gallery))
        slack = max(slack, tile_slack)
        if not hold_near(tile, start, ends, later, task.k, slack, reach, count, column, value):
            return False
    _rank(folds, part, task, (reach, count, column, value), ends, later, slack, recall_at=recall_at, out=out)
    return True


def _tile(
    folds: list[list[Member]], part: IntArray, task: RetrievalTask, start: int, stop: int
) -> tuple[FloatRows, float]:
    """Similarities [M, T, W] of gallery items start .. stop - 1, -inf for the query itself, and their slack."""
    shape = (sum(map(len, folds)), len(part), stop - start)
    values = _workspace.array("similarity", shape, np.float32)
    out = iter(values)
    tiles = [[member.tile(part, start, stop, out=next(out)) for member in fold] for fold in folds]
    for tile in itertools.chain.from_iterable(tiles):
        exclude(tile.value, task.own_column[part] - start)
    return values, sum_slack(tiles)


def _rank(
    folds: list[list[Member]],
    part: IntArray,
    task: RetrievalTask,
    held: tuple[FloatRows, IntArray, IntArray, FloatRows],
    ends: IntArray,
    later: IntArray,
    slack: float,
    *,
    recall_at: Sequence[int],
    out: NDArray[np.float64],
) -> None:
    """Rank what is held, first as far as float32 decides, then with the exact similarities that this asks for."""
    reach, count, column, value = held
    width = max(1, int(count.max()))
    used = np.arange(width) < count[:, None]
    relevant = task.relevant(part, np.where(used, column[:, :width], -1))
    positives = task.positives[part]
    depth = np.minimum(np.maximum(positives, max(recall_at)), task.k)
    exact = _workspace.array("exact", (len(value), len(part), width), np.float64)
    exact[...] = np.nan
    undecided = np.ones((len(part), len(out)), dtype=bool)
    first, hits = (np.zeros(undecided.shape, dtype=np.int64) for _ in range(2))
    precision = np.zeros(undecided.shape)
    while undecided.any():
        rank_choices(
            value, count, column, relevant, ends, later, reach, depth, positives, slack, exact, undecided, first, hits,
            precision,
        )  # fmt: skip
        for member, similarities in zip(itertools.chain.from_iterable(folds), exact, strict=True):
            _fill(member, part, count, column, similarities)
    scores = [first == 0, *(first < k for k in recall_at), hits / positives[:, None], precision / positives[:, None]]
    for at, values in enumerate(scores):  # in the order of ``score_names``
        out[:, at, part] = values.T


def _fill(member: Member, part: IntArray, count: IntArray, column: IntArray, exact: NDArray[np.float64]) -> None:
    """Compute the exact similarities of ``exact`` [T, C] that are wanted."""
    if isinstance(member, UnitMember):
        left, right = member.search.query.held, member.search.gallery.held
        if left is not None and right is not None:
            fill_exact(left, right, part, count, column, exact)
            return
    row, place = np.nonzero(exact == WANTED)
    exact[row, place] = member.exact(part)(row, column[row, place])
