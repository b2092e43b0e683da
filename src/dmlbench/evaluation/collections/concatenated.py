"""Exact scores of concatenated fold models, for every choice of one repeat per fold, in one pass over the pairs.

Ranking by the sum of the models' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one tile of similarities per model serves every collection and the models themselves. Letters: M models,
Q queries, T queries of a tile, N gallery items, S rankings by sums of F models each, k places that matter.
"""

import itertools
import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench.evaluation.collections import ranking
from dmlbench.evaluation.collections.ranking import Near, joined, largest_on_average, reached_by, select
from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.table import mean_scores, of_queries, query_scores, score_names
from dmlbench.evaluation.relevance import Relevance, relevance_of
from dmlbench.evaluation.search.pairwise import search_by
from dmlbench.evaluation.search.scan import (
    Search,
    empty_tile,
    exclude,
    halved_where_full,
    over_threads,
    parts_of,
    single_threaded_products,
)
from dmlbench.evaluation.search.unit_vectors import MIN_TILE_BYTES
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import IntArray

Choice = tuple[int, ...]
"""The repeat of each fold."""

_TILE_ROWS = 224
_COLUMNS = 8192  # gallery items of a block
_SCORED = 2**16  # places scored at a time, whose terms stay in a core's own cache
_BYTES_PER_ITEM = 16  # of a query and a block, besides the similarities
_NEAR_ON_AVERAGE = 3  # times the places that matter: items that bound what every sum needs
_BYTES_PER_PLACE = 2  # of a ranking of a query: whether it is relevant

logger = logging.getLogger(__name__)


def concatenated_scores(
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None = None,
    *,
    spec: EvaluationSpec,
    distances: ModelDistances | None = None,
    own: bool = False,
    progress: bool = False,
) -> tuple[dict[Choice, Evaluation], list[list[Evaluation]]]:
    """Evaluate the concatenated embedding of every choice of one repeat per fold.

    The ranking is by the sum over folds, in their order, of the models' exact similarities, ties by gallery index.

    Args:
        members: query rows [Q, D] by every model, [fold][repeat]; equal ids and labels in the same order (the caller
            checks), D may differ.
        galleries: gallery rows by the same models, or None: the queries are searched among themselves.
        spec: what to compute; ``back_end`` is ignored.
        distances: the models' distances, [fold][repeat]; None, as a whole or of a model, is that of unit vectors.
        own: whether to evaluate every model alone, too, from the same products.
        progress: whether to show a bar.

    Returns:
        Evaluations by choice, the last fold's repeat changing fastest, and of the models [fold][repeat] if ``own``.
    """
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    scored = of_queries(spec.scores)
    relevance = relevance_of(queries, reference, scored)
    names = score_names(scored)
    choices = list(itertools.product(*(range(len(fold)) for fold in members)))
    first = list(itertools.accumulate(map(len, members), initial=0))
    rankings = [np.array(choices) + first[:-1], *(np.array([[model]]) for model in range(first[-1]) if own)]
    scores = np.full((sum(map(len, rankings)), len(names), len(queries)), np.nan)
    # of its share, a model may hold a quarter in unit rows: all together half of the memory
    share = max(2 * spec.tile_bytes // first[-1], MIN_TILE_BYTES)
    models: list[Search] = [
        search_by(
            None if distances is None else distances[fold][repeat],
            rows,
            None if galleries is None else galleries[fold][repeat],
            tile_bytes=share,
            device=spec.device_for(queries.rows),
        )
        for fold, repeats in enumerate(members)
        for repeat, rows in enumerate(repeats)
    ]
    _score(models, rankings, relevance, scores, spec, progress=progress)
    found = []
    for one in scores:
        values = dict(zip(names, one, strict=True))
        found.append(Evaluation(mean_scores(values), values, len(queries), len(reference), relevance.n_skipped_queries))
    joint, alone = dict(zip(choices, found, strict=False)), found[len(choices) :]
    return joint, [alone[start:stop] for start, stop in itertools.pairwise(first) if own]


def _score(
    models: list[Search],
    rankings: list[IntArray],
    relevance: Relevance,
    scores: NDArray[np.float64],
    spec: EvaluationSpec,
    *,
    progress: bool,
) -> None:
    """Fill ``scores`` [rankings of all groups, names, Q] for ``rankings``: groups [S, F] of sums of ``models``."""
    device, on_host = models[0].device, models[0].on_host
    rank = (numba_ranking() or ranking).rank
    scored = of_queries(spec.scores)
    threads = models[0].threads
    num_gallery, k = len(relevance.gallery_labels), min(relevance.k, len(relevance.gallery_labels))
    columns = -(-num_gallery // -(-num_gallery // _COLUMNS))  # blocks of one size
    free = spec.tile_bytes // 2 // threads
    per_query = (4 * len(models) + _BYTES_PER_ITEM) * columns + _BYTES_PER_PLACE * k * len(scores)
    rows = max(1, min(_TILE_ROWS if on_host else len(relevance.valid), free // 3 // per_query))

    def work(part: IntArray) -> int:
        halved_where_full(lambda first, last: halved_where_crowded(part[first:last]), 0, len(part), device=device)
        return len(part)

    def halved_where_crowded(part: IntArray) -> None:
        near = near_items(part)
        if near is not None:
            for number, (one, sums, slack) in enumerate(near):
                score(part, one, sums, slack, first=sum(map(len, rankings[:number])))
            return
        for half in np.array_split(part, 2):
            halved_where_crowded(half)

    def near_items(part: IntArray) -> list[tuple[Near, IntArray, float]] | None:
        """For each group what is near, its sums and their slack; None if that exceeds the memory."""
        found: list[list[Near]] = [[] for _ in rankings]
        slacks = np.zeros(len(rankings))
        for start in range(0, num_gallery, columns):
            stop = min(start + columns, num_gallery)
            value = empty_tile((len(models), len(part), stop - start), device, on_host=on_host)
            bounds = [
                model.bounded_similarities(part, start, stop, out=out) for model, out in zip(models, value, strict=True)
            ]
            for out in value:
                exclude(out, relevance.own_column[part] - start)
            slacks = np.maximum(slacks, [_slack(bounds, sums) for sums in rankings])
            nearest, upper = largest_on_average(value, rankings[0], _NEAR_ON_AVERAGE * k)
            for blocks, sums, slack in zip(found, rankings, slacks, strict=True):
                these = slice(sums.min(), sums.max() + 1)
                reach = reached_by(nearest[these], sums - these.start, k)
                if blocks:
                    reach = np.maximum(blocks[-1].reach, reach)
                largest = value[these.start] if sums.size == 1 else upper
                blocks.append(select(value[these], largest, start, reach, slack=slack))
            # exact similarities may take twice as much
            if sum(one.value.nbytes for blocks in found for one in blocks) > free // 6 and len(part) > 1:
                return None
        return [(joined(blocks), sums, slack) for blocks, sums, slack in zip(found, rankings, slacks, strict=True)]

    def score(part: IntArray, near: Near, sums: IntArray, slack: float, *, first: int) -> None:
        relevant = relevance.gallery_labels[near.column] == np.repeat(relevance.query_labels[part], near.counts)
        own = models[sums.min() : sums.max() + 1]
        ranked = rank(own, part, near, sums - sums.min(), relevant, k=k, slack=slack)
        few = max(1, _SCORED // ranked[0].size)
        for start in range(0, len(sums), few):
            some = ranked[start : start + few]
            found = query_scores(some.reshape(-1, k), np.tile(relevance.positives[part], len(some)), scored)
            for at, values in enumerate(found.values()):
                scores[first + start : first + start + len(some), at, part] = values.reshape(len(some), -1)

    with (
        tqdm(total=len(relevance.valid), desc="collections", unit="query", disable=not progress, leave=False) as bar,
        single_threaded_products(),
    ):
        for count in over_threads(work, parts_of(relevance.valid, rows), threads=threads):
            bar.update(count)


def _slack(bounds: Sequence[tuple[float, float]], sums: IntArray) -> float:
    """Sums [S, F] further apart than this are in the right order; ``bounds``: ``bounded_similarities`` by model."""
    error, largest = (sum(max(bounds[model][i] for model in fold) for fold in sums.T) for i in (0, 1))
    # each of the F - 1 float32 additions rounds a sum of at most ``largest``, and so do adding the slack and marking
    return 2 * (error + 1.01 * (sums.shape[1] - 1) * largest * 2.0**-24) + largest * 2.0**-21 + 2.0**-147


@cache
def numba_ranking() -> ModuleType | None:
    """The numba kernels of ``ranking``, which give the same bits; None where numba cannot be used."""
    try:
        from dmlbench.evaluation.collections import numba_ranking as kernels
    except Exception as error:  # numba is missing, does not fit the other libraries, or has no folder for its cache
        logger.info("collections are ranked without numba, in more time (%s); the extra 'fast' brings it", error)
        return None
    logger.info("collections are ranked by numba; compiling takes up to some ten seconds once, then it is kept")
    return kernels
