"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the members' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one similarity tile per member serves every collection. Letters: Q queries, V of them with a positive, T
queries of a tile, N gallery items, W of them that can matter to some collection.
"""

import itertools
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dmlbench.evaluation.candidates import LOWEST, floor_below, kth_bound, padded_place
from dmlbench.evaluation.evaluate import Evaluation, EvaluationSpec, RetrievalTask, fit_width, retrieval_task
from dmlbench.evaluation.frontier import Places, rank_choices
from dmlbench.evaluation.members import DistanceMember, Distances, Member, Members, PairTile, UnitMember
from dmlbench.evaluation.metrics import mean_scores, query_scores, score_names
from dmlbench.evaluation.pairwise import PairwiseSimilarity, ranks_like_unit_vectors
from dmlbench.evaluation.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.partial import PartialScores
from dmlbench.evaluation.search import MIN_TILE_BYTES, exclude, unit_search
from dmlbench.evaluation.similarity import FloatRows
from dmlbench.types import EmbeddingSet, IntArray

Choice = tuple[int, ...]
"""The repeat of each fold."""

_TILE_ROWS = 128
_TILE_COLUMNS = 6144
_BYTES_PER_CANDIDATE = 24  # and member: kept similarity, its merged copy, an exact one, shares of the sums
_CANDIDATES = 0.05  # of the gallery: for what bounds usually leave at most; a tile with more is halved
_FRONTIER_BYTES = 64 * 2**20

_workspace = Workspace()


def concatenated_scores(
    members: Members,
    galleries: Members | None = None,
    *,
    spec: EvaluationSpec,
    distances: Distances | None = None,
    partial: Path | None = None,
    progress: bool = False,
) -> dict[Choice, Evaluation]:
    """Evaluate the joined embedding of every choice of one repeat per fold.

    The ranking is that of the sum over folds, in their order, of the members' exact similarities; ties go by gallery
    index.

    Args:
        members: query rows [Q, D] of every run, [fold][repeat]; all with the same ids and labels in the same order
            (the caller checks), D may differ.
        galleries: gallery rows likewise, or None: the queries are searched among themselves.
        spec: what to compute; ``back_end`` is of no use here.
        distances: the runs' own distances, [fold][repeat]; None, as a whole or of a run, is that of unit vectors, and
            so is every distance that ranks as they do.
        partial: folder of what an interrupted call has computed: it is continued, if it is of the same members. The
            scores lie in a file there, so that they take no memory.
        progress: whether to show a bar.

    Returns:
        Evaluations by choice, the last fold's repeat changing fastest.

    Raises:
        RunError: no query has a positive, or a set cannot be searched.
    """
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    task = retrieval_task(queries, reference, recall_at=spec.recall_at)
    names = score_names(spec.recall_at)
    choices = list(itertools.product(*(range(len(fold)) for fold in members)))
    shape = (len(choices), len(names), len(queries))
    store = PartialScores.of(partial, shape, members, galleries, names=names, distances=distances)
    _score(task, _members(members, galleries, distances, spec), store, spec, progress=progress)
    result = {}
    for choice, scores in zip(choices, store.values, strict=True):
        values = dict(zip(names, scores, strict=True))
        result[choice] = Evaluation(mean_scores(values), values, len(queries), len(reference), task.n_skipped_queries)
    return result


def _members(
    members: Members, galleries: Members | None, distances: Distances | None, spec: EvaluationSpec
) -> list[list[Member]]:
    share = max(2 * spec.tile_bytes // sum(map(len, members)), MIN_TILE_BYTES)  # of which a quarter may be held

    def member(fold: int, repeat: int, queries: EmbeddingSet) -> Member:
        gallery = None if galleries is None else galleries[fold][repeat]
        distance = None if distances is None else distances[fold][repeat]
        if distance is not None and not ranks_like_unit_vectors(distance):
            return DistanceMember(PairwiseSimilarity(queries, queries if gallery is None else gallery, distance))
        return UnitMember(unit_search(queries, gallery, back_end="torch", tile_bytes=share))

    return [[member(f, r, queries) for r, queries in enumerate(fold)] for f, fold in enumerate(members)]


def _score(
    task: RetrievalTask, folds: list[list[Member]], store: PartialScores, spec: EvaluationSpec, *, progress: bool
) -> None:
    """Fill ``store`` with the scores of every choice and query, tile by tile in the order of the queries."""
    threads = num_threads()
    rows, columns, most = _tile_shape(len(task.gallery_labels), sum(map(len, folds)), spec.tile_bytes // 2 // threads)

    def work(part: IntArray) -> IntArray:
        places = _places(folds, part, task, columns, most=most)
        if places is None:
            work(part[: len(part) // 2])
            work(part[len(part) // 2 :])
            return part
        for choice, row, ranked in rank_choices(places):
            query = part[row]
            scores = query_scores(fit_width(ranked, task.k), task.positives[query], recall_at=spec.recall_at)
            for at, values in enumerate(scores.values()):
                store.values[choice, at, query] = values
        return part

    left = task.valid[store.done :]
    tiles = [left[start : start + rows] for start in range(0, len(left), rows)]
    bar = tqdm(
        total=len(task.valid), initial=store.done, desc="collections", unit="query", disable=not progress, leave=False
    )
    with bar, single_threaded_products():
        for part in over_threads(work, tiles, threads=threads):
            store.advance(len(part))
            bar.update(len(part))
    store.flush()


def _tile_shape(num_gallery: int, num_members: int, free: int) -> tuple[int, int, int]:
    """Queries of a tile, gallery items multiplied at a time, pairs that may be left; together ``free`` bytes."""
    columns = min(num_gallery, _TILE_COLUMNS)
    candidates = max(64, int(_CANDIDATES * num_gallery))
    free = max(0, free - min(_FRONTIER_BYTES, free // 2))
    per_row = (4 * num_members + 16) * columns + _BYTES_PER_CANDIDATE * num_members * candidates
    rows = max(1, min(_TILE_ROWS, free // per_row))
    return rows, columns, max(rows * candidates, free // 2 // (_BYTES_PER_CANDIDATE * num_members))


@dataclass
class _Kept:
    """Pairs of one gallery tile that the bounds leave: flat position in it [M], values of every member [members, M]."""

    count: IntArray
    column: IntArray
    lower: FloatRows
    upper: FloatRows
    value: FloatRows


def _places(
    folds: list[list[Member]], part: IntArray, task: RetrievalTask, columns: int, *, most: int
) -> Places | None:
    """Multiply every member's rows, then drop the pairs that no collection can need.

    Per pair, the sum over folds of the least similarity of any repeat bounds every collection from below, and that of
    the greatest from above. A pair whose upper bound is less than the k-th largest lower bound (less the slack) is a
    candidate of no collection. None where more than ``most`` pairs are left of more than one query.
    """
    floor = np.full((len(part), 1), LOWEST)
    kept: list[_Kept] = []
    slack = 0.0
    num_gallery = len(task.gallery_labels)
    for start in range(0, num_gallery, columns):
        found, floor, slack = _kept_of(folds, part, task, start, min(start + columns, num_gallery), floor, slack)
        kept.append(found)
        if sum(len(tile.column) for tile in kept) > most // 2:
            merged, floor = _merged(kept, task.k, slack)
            kept = [merged]
            if len(part) > 1 and len(merged.column) > most:
                return None
    merged, _ = _merged(kept, task.k, slack)
    target, (height, width) = padded_place(merged.count)
    width += 1  # the last place of every row is padding
    target += np.repeat(np.arange(height), merged.count)
    column = np.full(height * width, -1, dtype=np.int64)
    column[target] = merged.column
    values = []
    for value in merged.value:
        full = np.full(height * width, -np.inf, dtype=np.float32)
        full[target] = value
        values.append(full.reshape(height, width))
    ends = list(itertools.accumulate(map(len, folds), initial=0))
    by_fold = [values[a:b] for a, b in itertools.pairwise(ends)]
    columns_left = column.reshape(height, width)
    return Places(folds, part, columns_left, task.relevant(part, columns_left), by_fold, task.k, slack)


def _kept_of(
    folds: list[list[Member]],
    part: IntArray,
    task: RetrievalTask,
    start: int,
    stop: int,
    floor: FloatRows,
    slack: float,
) -> tuple[_Kept, FloatRows, float]:
    """What is left of gallery items start .. stop - 1; a floor that rises with every tile; the slack so far."""
    shape = (len(part), stop - start)
    tiles: list[list[PairTile]] = []
    numbers = itertools.count()
    for fold in folds:
        out = [_workspace.array(f"similarity {next(numbers)}", shape, np.float32) for _ in fold]
        tiles.append([member.tile(part, start, stop, out=o) for member, o in zip(fold, out, strict=True)])
    for tile in itertools.chain.from_iterable(tiles):
        exclude(tile.value, task.own_column[part] - start)
    slack = max(slack, _sum_slack(tiles))
    lower, upper = _bounds(tiles)
    floor = np.maximum(floor, floor_below(kth_bound(lower, task.k), slack))
    flat = np.flatnonzero(upper >= floor)
    count = np.diff(np.searchsorted(flat, np.arange(shape[0] + 1) * shape[1]))
    value = np.stack([np.take(tile.value.reshape(-1), flat) for tile in itertools.chain.from_iterable(tiles)])
    column = flat - np.repeat(np.arange(shape[0]) * shape[1] - start, count)
    return _Kept(count, column, lower.reshape(-1)[flat], upper.reshape(-1)[flat], value), floor, slack


def _sum_slack(tiles: list[list[PairTile]]) -> float:
    """Sums over folds that are further apart than this are in the right order, for every choice of repeats."""
    error = sum(max(tile.error for tile in fold) for fold in tiles)
    largest = sum(max(tile.largest for tile in fold) for fold in tiles)
    # each of the F - 1 float32 additions, in whichever order, rounds a sum of at most ``largest``
    return 2 * (error + 1.01 * (len(tiles) - 1) * largest * 2.0**-24)


def _bounds(tiles: list[list[PairTile]]) -> tuple[FloatRows, FloatRows]:
    """Sums over folds of the least and of the greatest similarity of any repeat: [T, W] each."""
    shape = tiles[0][0].value.shape
    sums = []
    for name, extreme in (("least", np.minimum), ("greatest", np.maximum)):
        total, one = (_workspace.array(f"{name} {part}", shape, np.float32) for part in ("sum", "fold"))
        for fold, members in enumerate(tiles):
            into = one if fold else total
            extreme(members[0].value, members[-1].value, out=into)
            for tile in members[1:-1]:
                extreme(into, tile.value, out=into)
            if fold:
                total += one
        sums.append(total)
    return sums[0], sums[1]


def _merged(kept: list[_Kept], k: int, slack: float) -> tuple[_Kept, FloatRows]:
    """The pairs of all gallery tiles so far, by row, that the bounds over all of them leave; the floor they reach."""
    height = len(kept[0].count)
    # short numbers are sorted by their digits, in no time
    row = np.concatenate([np.repeat(np.arange(height, dtype=np.uint16), tile.count) for tile in kept])
    order = np.argsort(row, kind="stable")
    count = np.sum([tile.count for tile in kept], axis=0)
    column, lower, upper = (
        np.concatenate([getattr(tile, name) for tile in kept])[order] for name in ("column", "lower", "upper")
    )
    target, shape = padded_place(count)
    padded = np.full(prod(shape), -np.inf, dtype=np.float32)
    padded[target] = lower
    floor = floor_below(kth_bound(padded.reshape(shape), k), slack)
    left = upper >= np.repeat(floor[:, 0], count)
    order = order[left]
    value = np.concatenate([tile.value for tile in kept], axis=1)[:, order]
    return _Kept(np.bincount(row[order], minlength=height), column[left], lower[left], upper[left], value), floor
