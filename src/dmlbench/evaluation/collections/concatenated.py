"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the models' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one tile of similarities per model serves every collection, and the models' own rankings as well. Letters:
M models, Q queries, T queries of a tile, N gallery items, S rankings by sums of F models each, k places that matter.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench import machine_code
from dmlbench.evaluation.collections.models import FoldModel, fold_models
from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.ranking import mean_scores
from dmlbench.evaluation.metrics.table import of_queries, query_scores, score_names
from dmlbench.evaluation.relevance import Relevance, relevance_of
from dmlbench.evaluation.resume import PartialScores, fingerprint_of
from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.search.similarity import FloatRows, strict_float32_products
from dmlbench.evaluation.search.top_k import (
    PADDING,
    column_of,
    entries_above,
    floor_below,
    kth_bound,
    settle,
)
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import single_threaded_torch
from dmlbench.types import IntArray, RunError

Choice = tuple[int, ...]
"""The repeat of each fold."""

Ranking = Callable[..., NDArray[np.bool_]]

_TILE_ROWS = 256
_SCORED = 2**16  # places scored at a time, whose terms stay in a core's own cache
_BYTES_PER_ITEM = 32  # of a query, beside the models' similarities and those of them that matter
_BYTES_PER_PLACE = 2  # of a ranking of a query: whether it is relevant

_workspace = Workspace()


def concatenated_scores(
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None = None,
    *,
    spec: EvaluationSpec,
    distances: ModelDistances | None = None,
    partial: Path | None = None,
    progress: bool = False,
) -> dict[Choice, Evaluation]:
    """Evaluate the joined embedding of every choice of one repeat per fold.

    The ranking is that of the sum over folds, in their order, of the models' exact similarities; ties go by gallery
    index.

    Args:
        members: query rows [Q, D] by every model, [fold][repeat]; all with the same ids and labels in the same order
            (the caller checks), D may differ.
        galleries: gallery rows likewise, or None: the queries are searched among themselves.
        spec: what to compute; ``back_end`` is of no use here.
        distances: the models' own distances, [fold][repeat]; None, as a whole or of a model, is that of unit vectors,
            and so is every distance that ranks as they do.
        partial: folder of what an interrupted call has computed: it is continued, if it is of the same models. The
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
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None = None,
    *,
    spec: EvaluationSpec,
    distances: ModelDistances | None = None,
    partial: Path | None = None,
    progress: bool = False,
) -> tuple[dict[Choice, Evaluation], list[list[Evaluation]]]:
    """``concatenated_scores``, and the models' own evaluations [fold][repeat], which take the same products."""
    found = _evaluations(members, galleries, spec, distances, partial, own=True, progress=progress)
    joined = {choice: next(found) for choice in _choices(members)}
    return joined, [[next(found) for _ in fold] for fold in members]


def _choices(members: ModelEmbeddings) -> list[Choice]:
    return list(itertools.product(*(range(len(fold)) for fold in members)))


def _evaluations(
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None,
    spec: EvaluationSpec,
    distances: ModelDistances | None,
    partial: Path | None,
    *,
    own: bool,
    progress: bool,
) -> Iterator[Evaluation]:
    """Those of all choices, then those of all models if ``own``."""
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    scored = of_queries(spec.scores)
    relevance = relevance_of(queries, reference, scored)
    names = score_names(scored)
    first = list(itertools.accumulate(map(len, members), initial=0))
    choices = np.array(_choices(members)) + first[:-1]
    rankings = [choices, *(np.array([[model]]) for model in range(first[-1]) if own)]
    fingerprint = ""
    if partial is not None:
        fingerprint = fingerprint_of(members, galleries, [*names, "and own"] if own else names, distances)
    store = PartialScores(partial, (sum(map(len, rankings)), len(names), len(queries)), fingerprint=fingerprint)
    models = fold_models(members, galleries, distances, tile_bytes=spec.tile_bytes)
    _score(models, rankings, relevance, store, spec, progress=progress)
    for scores in store.values:
        if np.isnan(scores[:, relevance.valid]).any():  # a mean would pass over them
            raise RunError(f"scores of queries are missing in {partial}; remove that folder and start again")
        values = dict(zip(names, scores, strict=True))
        yield Evaluation(mean_scores(values), values, len(queries), len(reference), relevance.n_skipped_queries)


def _score(
    models: list[FoldModel],
    rankings: list[IntArray],
    relevance: Relevance,
    store: PartialScores,
    spec: EvaluationSpec,
    *,
    progress: bool,
) -> None:
    """Fill ``store`` with the scores of every ranking and query, tile by tile in the order of the queries.

    Args:
        models: fold by fold.
        rankings: groups [S, F] of sums of models.
        relevance: of the gallery to the queries, and how deep to rank.
        store: what is known so far; its rankings are those of all groups in turn.
        spec: what to compute.
        progress: whether to show a bar.
    """
    rank: Ranking = compiled_ranking() or plain_ranking
    scored = of_queries(spec.scores)
    threads = num_threads()
    num_gallery, k = len(relevance.gallery_labels), min(relevance.k, len(relevance.gallery_labels))
    per_query = (8 * len(models) + _BYTES_PER_ITEM) * num_gallery + _BYTES_PER_PLACE * k * len(store.values)
    rows = max(1, min(_TILE_ROWS, spec.tile_bytes // 2 // threads // per_query))

    def work(part: IntArray) -> IntArray:
        value = _workspace.array("similarity", (len(models), len(part), num_gallery), np.float32)
        bounds = [model.similarities(part, out=out) for model, out in zip(models, value, strict=True)]
        for out in value:
            exclude(out, relevance.own_column[part])
        relevant = relevance.query_labels[part, None] == relevance.gallery_labels
        done = 0
        for sums in rankings:
            error, largest = (
                sum(max(getattr(bounds[model], name) for model in fold) for fold in sums.T)
                for name in ("error", "largest")
            )
            # each of the F - 1 float32 additions rounds a sum of at most ``largest``, and so does adding the slack
            slack = 2 * (error + 1.01 * (sums.shape[1] - 1) * largest * 2.0**-24) + largest * 2.0**-22
            these = slice(int(sums.min()), int(sums.max()) + 1)
            ranked = rank(models[these], part, value[these], sums - these.start, relevant, k=k, slack=slack)
            few = max(1, _SCORED // ranked[0].size)
            for first in range(0, len(sums), few):
                some = ranked[first : first + few]
                scores = query_scores(some.reshape(-1, k), np.tile(relevance.positives[part], len(some)), scored)
                for at, values in enumerate(scores.values()):
                    store.values[done : done + len(some), at, part] = values.reshape(len(some), -1)
                done += len(some)
        return part

    left = relevance.valid[store.state.done :]
    tiles = [left[start : start + rows] for start in range(0, len(left), rows)]
    bar = tqdm(
        total=len(relevance.valid),
        initial=store.state.done,
        desc="collections",
        unit="query",
        disable=not progress,
        leave=False,
    )
    with bar, single_threaded_products(), single_threaded_torch(), strict_float32_products():
        for part in over_threads(work, tiles, threads=threads):
            store.state.done += len(part)
            store.advance()
            bar.update(len(part))
    store.flush()


def compiled_ranking() -> Ranking | None:
    """``compiled_ranking`` where numba is installed, else None: ``plain_ranking`` gives the same bits, more slowly."""
    module = machine_code.load("dmlbench.evaluation.collections.compiled_ranking", task="collections are ranked")
    return None if module is None else module.compiled_ranking


def plain_ranking(
    models: Sequence[FoldModel],
    part: IntArray,
    value: FloatRows,
    sums: IntArray,
    relevant: NDArray[np.bool_],
    *,
    k: int,
    slack: float,
) -> NDArray[np.bool_]:
    """Relevance by rank [S, T, k] of every sum of similarities.

    Args:
        models: [M] where exact similarities come from.
        part: [T] queries.
        value: [M, T, N] their similarities, -inf for the query itself.
        sums: [S, F] the models of every sum.
        relevant: [T, N] whether an item is of the query's class.
        k: places that matter.
        slack: sums further apart than this are in the right order.
    """
    lower, upper = np.zeros((2, *value.shape[1:]), dtype=np.float32)
    for column in sums.T:  # what every sum of one model per fold lies between
        lower += value[column.min() : column.max() + 1].min(axis=0)
        upper += value[column.min() : column.max() + 1].max(axis=0)
    items = column_of(entries_above(upper, floor_below(kth_bound(lower, k), slack)).padded())  # [T, W], ascending
    near = np.take_along_axis(value, np.maximum(items, 0)[None], axis=2)
    near[:, items < 0] = -np.inf
    relevant = np.take_along_axis(relevant, items, axis=1)
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    for chosen, out in zip(sums, ranked, strict=True):
        total = near[chosen[0]].copy()
        for model in chosen[1:]:
            total += near[model]
        keys = entries_above(total, floor_below(kth_bound(total, k), slack)).padded()

        def exact(row: IntArray, place: IntArray, chosen: IntArray = chosen) -> NDArray[np.float64]:
            similarity = np.zeros(len(row))
            for model in chosen:
                similarity += models[model].exact(part)(row, items[row, place])
            return similarity

        found = np.take_along_axis(relevant, column_of(keys), axis=1) & (keys < PADDING)
        marks = settle(keys, exact, k=k, slack=slack, relevant=found)[1]
        assert marks is not None  # relevance was passed
        out[:, : marks.shape[1]] = marks[:, :k]
    return ranked
