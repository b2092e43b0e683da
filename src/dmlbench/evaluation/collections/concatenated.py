"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the members' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one similarity tile per member serves every collection. Letters: Q queries, V of them with a positive, T
queries of a tile, N gallery items, W of them that can matter to some collection.
"""

import itertools
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
from tqdm import tqdm

from dmlbench import machine_code
from dmlbench.evaluation.collections.frontier import score_frontiers
from dmlbench.evaluation.collections.members import DistanceMember, Distances, Member, Members, UnitMember
from dmlbench.evaluation.collections.pruning import prune
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.evaluation.metrics.ranking import mean_scores
from dmlbench.evaluation.metrics.table import DEFAULT_METRICS, asked_scores, score_names
from dmlbench.evaluation.partial import PartialScores
from dmlbench.evaluation.search.pairwise import PairwiseSimilarity, ranks_like_unit_vectors
from dmlbench.evaluation.search.parallel import num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.search.similarity import strict_float32_products
from dmlbench.evaluation.search.unit_vectors import MIN_TILE_BYTES, unit_search
from dmlbench.evaluation.task import EvaluationSpec, RetrievalTask, retrieval_task
from dmlbench.runtime import single_threaded_torch
from dmlbench.types import EmbeddingSet, IntArray, RunError

Choice = tuple[int, ...]
"""The repeat of each fold."""

_TILE_ROWS, _FUSED_TILE_ROWS = 128, 256  # numpy's frontiers want to stay small; products alone, large
_TILE_COLUMNS = 6144
_BYTES_PER_CANDIDATE = 24  # and member: kept similarity, its merged copy or that of its own ranking, an exact one, sums
_BYTES_PER_CHOICE = 48  # reach, first place, hits, precision, their shares of scores
_CANDIDATES = 0.05  # of the gallery: for what bounds usually leave at most; a tile with more is halved
_CANDIDATES_PER_PLACE = 24  # likewise of a query in compiled code, whose every query has room for as many
_FRONTIER_BYTES = 64 * 2**20


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
        RunError: no query has a positive, a set cannot be searched, or ``partial`` lacks scores that it claims to hold.
    """
    everything = _evaluations(members, galleries, spec, distances, partial, own=False, progress=progress)
    return dict(zip(_choices(members), everything, strict=True))


def concatenated_and_own_scores(
    members: Members,
    galleries: Members | None = None,
    *,
    spec: EvaluationSpec,
    distances: Distances | None = None,
    partial: Path | None = None,
    progress: bool = False,
) -> tuple[dict[Choice, Evaluation], list[list[Evaluation]]]:
    """``concatenated_scores``, and the members' own evaluations [fold][repeat], which take the same products."""
    fused = fused_scorer() is not None
    found = iter(_evaluations(members, galleries, spec, distances, partial, own=fused, progress=progress))
    joined = dict(zip(_choices(members), found, strict=False))

    def own(fold: int, repeat: int, queries: EmbeddingSet) -> Evaluation:
        if fused:
            return next(found)
        gallery = None if galleries is None else galleries[fold][repeat]
        return evaluate(queries, gallery, spec, distance=distances[fold][repeat] if distances else None)

    return joined, [[own(f, r, queries) for r, queries in enumerate(fold)] for f, fold in enumerate(members)]


def _choices(members: Members) -> list[Choice]:
    return list(itertools.product(*(range(len(fold)) for fold in members)))


def _evaluations(
    members: Members,
    galleries: Members | None,
    spec: EvaluationSpec,
    distances: Distances | None,
    partial: Path | None,
    *,
    own: bool,
    progress: bool,
) -> Iterator[Evaluation]:
    """Those of all choices, then those of all members if ``own``."""
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    scored = asked_scores(DEFAULT_METRICS, spec.recall_at)
    task = retrieval_task(queries, reference, scored)
    names = score_names(scored)
    count = prod(map(len, members)) + own * sum(map(len, members))
    what = [*names, "and own"] if own else names
    store = PartialScores.of(
        partial, (count, len(names), len(queries)), members, galleries, names=what, distances=distances
    )
    _score(task, _members(members, galleries, distances, spec), store, spec, progress=progress)
    for scores in store.values:
        if np.isnan(scores[:, task.valid]).any():  # a mean would pass over them
            raise RunError(f"scores of queries are missing in {partial}; remove that folder and start again")
        values = dict(zip(names, scores, strict=True))
        yield Evaluation(mean_scores(values), values, len(queries), len(reference), task.n_skipped_queries)


def fused_scorer() -> Callable[..., bool] | None:
    """``score_fused`` where numba is installed, else None: numpy gives the same scores in more than twice the time."""
    module = machine_code.load("dmlbench.evaluation.collections.fused", task="collections are ranked")
    return None if module is None else cast(Callable[..., bool], module.score_fused)


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
    fused = fused_scorer()
    threads = num_threads()
    free = spec.tile_bytes // 2 // threads
    rows, columns, most = _tile_shape(task, sum(map(len, folds)), len(store.values), free, fused=fused is not None)

    def score(part: IntArray) -> bool:
        if fused is not None:
            return fused(folds, part, task, columns, most=most, recall_at=spec.recall_at, out=store.values)
        kept = prune(folds, part, task, columns, most=most)
        if kept is not None:
            score_frontiers(folds, part, task, kept, recall_at=spec.recall_at, out=store.values)
        return kept is not None

    def work(part: IntArray) -> IntArray:
        if not score(part):
            work(part[: len(part) // 2])
            work(part[len(part) // 2 :])
        return part

    left = task.valid[store.done :]
    tiles = [left[start : start + rows] for start in range(0, len(left), rows)]
    bar = tqdm(
        total=len(task.valid), initial=store.done, desc="collections", unit="query", disable=not progress, leave=False
    )
    with bar, single_threaded_products(), single_threaded_torch(), strict_float32_products():
        for part in over_threads(work, tiles, threads=threads):
            store.advance(len(part))
            bar.update(len(part))
    store.flush()


def _tile_shape(
    task: RetrievalTask, num_members: int, num_choices: int, free: int, *, fused: bool
) -> tuple[int, int, int]:
    """Queries of a tile, gallery items multiplied at a time, pairs that may be left; together ``free`` bytes."""
    num_gallery = len(task.gallery_labels)
    columns = min(num_gallery, _TILE_COLUMNS)
    candidates = max(64, int(_CANDIDATES * num_gallery))
    if fused:
        candidates = min(num_gallery, max(candidates, _CANDIDATES_PER_PLACE * task.k))
    else:
        free = max(0, free - min(_FRONTIER_BYTES, free // 2))
    beside = (4 * num_members + 16) * columns + _BYTES_PER_CHOICE * num_choices  # of each query, beside what is held
    per_candidate = _BYTES_PER_CANDIDATE * num_members
    most_rows = _FUSED_TILE_ROWS if fused else _TILE_ROWS
    rows = max(1, min(most_rows, free // (beside + per_candidate * candidates)))
    return rows, columns, max(rows * candidates, (free - rows * beside) // per_candidate)
