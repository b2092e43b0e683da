"""Scores of every choice of repeats by compiled code: from the members' tiles to single queries' scores, in one go.

Letters: M members, T queries of a tile, W columns multiplied at a time, C columns held of each query, S choices.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.compiled_near import LOWEST, hold_near, hold_near_one
from dmlbench.evaluation.collections.compiled_rank import WANTED, fill_exact, rank_choices
from dmlbench.evaluation.collections.members import Member, PairTile, UnitMember
from dmlbench.evaluation.collections.pruning import sum_slack
from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.parallel import Workspace
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.task import RetrievalTask
from dmlbench.types import IntArray

_workspace = Workspace()


@dataclass
class _Held:
    """What is held of members that are ranked together: of all, fold by fold, or of one.

    Attributes:
        members: which ones.
        ends: [F + 1] first member of each fold, from the first of ``members``.
        later: [F] choices of the folds that follow.
        reach: [T, S] value that k items' sums reach.
        count: [T] items.
        column: [T, C] gallery index.
        value: [M, T, C] float32 similarities.
        slack: sums further apart are in the right order, even if a float32 sum with it is rounded.
    """

    members: slice
    ends: IntArray
    later: IntArray
    reach: FloatRows
    count: IntArray
    column: IntArray
    value: FloatRows
    slack: float = 0.0

    @classmethod
    def empty(cls, first: int, repeats: list[int], height: int, capacity: int) -> "_Held":
        """Of folds of ``repeats`` members, which start with the member ``first``."""
        ends = np.cumsum([0, *repeats])
        later = np.array([prod(repeats[fold + 1 :]) for fold in range(len(repeats))], dtype=np.int64)
        name = f"{first} {repeats}"
        column = _workspace.array(f"column {name}", (height, capacity), np.int64)
        value = _workspace.array(f"value {name}", (sum(repeats), height, capacity), np.float32)
        reach = np.full((height, prod(repeats)), LOWEST)
        return cls(
            slice(first, first + sum(repeats)), ends, later, reach, np.zeros(height, np.int64), column, value
        )  # fmt: skip

    def hold(self, tile: FloatRows, start: int, k: int, folds: list[list[PairTile]]) -> bool:
        """Add what matters of ``tile`` [M, T, W] of all members; False where there is no room for it."""
        largest = sum(max(member.largest for member in fold) for fold in folds)
        self.slack = max(self.slack, sum_slack(folds) + largest * 2.0**-22)
        held = (k, self.slack, self.reach, self.count, self.column, self.value)
        if len(self.value) == 1:
            return bool(hold_near_one(tile[self.members], start, *held))
        return bool(hold_near(tile[self.members], start, self.ends, self.later, *held))


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
    """Write the scores of the queries ``part`` [T] into ``out`` [S, names, Q], or [S + M, names, Q] with members' own.

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
    capacity = num_gallery if len(part) == 1 else min(num_gallery, most // len(part))
    repeats = [len(fold) for fold in folds]
    members = list(itertools.chain.from_iterable(folds))
    held = [_Held.empty(0, repeats, len(part), capacity)]
    if len(out) > prod(repeats):
        held += [_Held.empty(first, [1], len(part), capacity) for first in range(len(members))]
    for start in range(0, num_gallery, columns):
        stop = min(start + columns, num_gallery)
        values = _workspace.array("similarity", (len(members), len(part), stop - start), np.float32)
        tiles = [member.tile(part, start, stop, out=value) for member, value in zip(members, values, strict=True)]
        for tile in tiles:
            exclude(tile.value, task.own_column[part] - start)
        for group in held:
            mine = iter(tiles[group.members])
            by_fold = [list(itertools.islice(mine, int(size))) for size in np.diff(group.ends)]
            if not group.hold(values, start, task.k, by_fold):
                return False
    first = 0
    for group in held:
        num_choices = group.reach.shape[1]
        _rank(members[group.members], part, task, group, recall_at=recall_at, out=out[first : first + num_choices])
        first += num_choices
    return True


def _rank(
    members: list[Member],
    part: IntArray,
    task: RetrievalTask,
    held: _Held,
    *,
    recall_at: Sequence[int],
    out: NDArray[np.float64],
) -> None:
    """Rank what is held, first as far as float32 decides, then with the exact similarities that this asks for."""
    width = max(1, int(held.count.max()))
    used = np.arange(width) < held.count[:, None]
    relevant = task.relevant(part, np.where(used, held.column[:, :width], -1))
    positives = task.positives[part]
    depth = np.minimum(np.maximum(positives, max(recall_at)), task.k)
    exact = _workspace.array("exact", (len(members), len(part), width), np.float64)
    exact[...] = np.nan
    undecided = np.ones(held.reach.shape, dtype=bool)
    first, hits = (np.empty(undecided.shape, dtype=np.int32) for _ in range(2))
    precision = np.empty(undecided.shape)
    while undecided.any():
        rank_choices(
            held.value, held.count, held.column, relevant, held.ends, held.later, held.reach, depth, positives,
            held.slack, exact, undecided, first, hits, precision,
        )  # fmt: skip
        for member, similarities in zip(members, exact, strict=True):
            _fill(member, part, held, similarities)
    scores = [first == 0, *(first < k for k in recall_at), hits / positives[:, None], precision / positives[:, None]]
    for at, values in enumerate(scores):  # in the order of ``score_names``
        out[:, at, part] = values.T


def _fill(member: Member, part: IntArray, held: _Held, exact: NDArray[np.float64]) -> None:
    """Compute the exact similarities of ``exact`` [T, C] that are wanted."""
    if isinstance(member, UnitMember):
        left, right = member.search.query.held, member.search.gallery.held
        if left is not None and right is not None:
            fill_exact(left, right, part, held.count, held.column, exact)
            return
    row, place = np.nonzero(exact == WANTED)
    if len(row):
        exact[row, place] = member.exact(part)(row, held.column[row, place])
