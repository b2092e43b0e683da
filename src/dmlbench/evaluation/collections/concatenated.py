"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the models' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one tile of similarities per model serves every collection, and the models' own rankings as well. Letters:
M models, Q queries, T queries of a tile, N gallery items, S rankings by sums of F models each, k places that matter.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench import machine_code
from dmlbench.evaluation.collections.models import Bounds, FoldModel, Near, fold_models
from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.ranking import mean_scores
from dmlbench.evaluation.metrics.table import of_queries, query_scores, score_names
from dmlbench.evaluation.relevance import Relevance, relevance_of
from dmlbench.evaluation.resume import PartialScores, fingerprint_of
from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.top_k import Found, floor_below, kth_bound, marked, pack, padded_place, settle
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import IntArray

Choice = tuple[int, ...]
"""The repeat of each fold."""

_TILE_ROWS = 144
_COLUMNS = 8192  # gallery items of a block
_TOGETHER = 8  # queries of a tile whose similarities are read while they are in a core's own cache
_SCORED = 2**16  # places scored at a time, whose terms stay in a core's own cache
_BYTES_PER_ITEM = 16  # of a query and a block, besides the similarities
_NEAR_ON_AVERAGE = 3  # times the places that matter: items that bound what every sum needs
# parts of float32 numbers, of which the last bit can mark relevant items, and the largest that is not marked
_VALUE, _SIGN, _FARTHEST = np.uint32(2**32 - 2), np.uint32(2**31), np.uint32(0x7F7FFFFE)
_BYTES_PER_PLACE = 2  # of a ranking of a query: whether it is relevant

_workspace = Workspace()


def concatenated_scores(
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None = None,
    *,
    spec: EvaluationSpec,
    distances: ModelDistances | None = None,
    own: bool = False,
    partial: Path | None = None,
    progress: bool = False,
) -> tuple[dict[Choice, Evaluation], list[list[Evaluation]]]:
    """Evaluate the joined embedding of every choice of one repeat per fold.

    The ranking is that of the sum over folds, in their order, of the models' exact similarities; ties go by gallery
    index.

    Args:
        members: query rows [Q, D] by every model, [fold][repeat]; all with the same ids and labels in the same order
            (the caller checks), D may differ.
        galleries: gallery rows by the same models, or None: the queries are searched among themselves.
        spec: what to compute; ``back_end`` is ignored.
        distances: the models' own distances, [fold][repeat]; None, as a whole or of a model, is that of unit vectors,
            and so is every distance that ranks as they do.
        own: whether to evaluate every model by itself, too, which takes the same products.
        partial: folder of what an interrupted call has computed: it is continued, if it is of the same models. The
            scores lie in a file there, so that they take no memory.
        progress: whether to show a bar.

    Returns:
        Evaluations by choice, the last fold's repeat changing fastest, and those of the models [fold][repeat], if
        ``own``.

    Raises:
        RunError: no query has a positive, or a set cannot be searched.
    """
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    scored = of_queries(spec.scores)
    relevance = relevance_of(queries, reference, scored)
    names = score_names(scored)
    choices = list(itertools.product(*(range(len(fold)) for fold in members)))
    first = list(itertools.accumulate(map(len, members), initial=0))
    rankings = [np.array(choices) + first[:-1], *(np.array([[model]]) for model in range(first[-1]) if own)]
    fingerprint = ""
    if partial is not None:
        fingerprint = fingerprint_of(members, galleries, [*names, "and own"] if own else names, distances)
    store = PartialScores(partial, (sum(map(len, rankings)), len(names), len(queries)), fingerprint=fingerprint)
    models = fold_models(members, galleries, distances, tile_bytes=spec.tile_bytes)
    _score(models, rankings, relevance, store, spec, progress=progress)
    found = []
    for scores in store.values:
        values = dict(zip(names, scores, strict=True))
        found.append(Evaluation(mean_scores(values), values, len(queries), len(reference), relevance.n_skipped_queries))
    joined, alone = dict(zip(choices, found, strict=False)), found[len(choices) :]
    return joined, [alone[start:stop] for start, stop in itertools.pairwise(first) if own]


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
    compiled = compiled_ranking()
    select, rank = (plain_select, plain_rank) if compiled is None else (compiled.select, compiled.rank)
    scored = of_queries(spec.scores)
    threads = num_threads()
    num_gallery, k = len(relevance.gallery_labels), min(relevance.k, len(relevance.gallery_labels))
    columns = -(-num_gallery // -(-num_gallery // _COLUMNS))  # blocks of one size
    free = spec.tile_bytes // 2 // threads
    per_query = (4 * len(models) + _BYTES_PER_ITEM) * columns + _BYTES_PER_PLACE * k * len(store.values)
    rows = max(1, min(_TILE_ROWS, free // 3 // per_query))

    def work(part: IntArray) -> IntArray:
        found: list[list[Near]] = [[] for _ in rankings]
        slack = np.zeros(len(rankings))
        for start in range(0, num_gallery, columns):
            stop = min(start + columns, num_gallery)
            value = _workspace.array("similarity", (len(models), len(part), stop - start), np.float32)
            bounds = [model.similarities(part, start, stop, out=out) for model, out in zip(models, value, strict=True)]
            for out in value:
                exclude(out, relevance.own_column[part] - start)
            slack = np.maximum(slack, [_slack(bounds, sums) for sums in rankings])
            middle, upper = _middle_and_upper(value, rankings[0])
            nearest = _largest_on_average(value, middle, _NEAR_ON_AVERAGE * k)
            for blocks, sums, distance in zip(found, rankings, slack, strict=True):
                these = slice(sums.min(), sums.max() + 1)
                reach = blocks[-1].reach if blocks else np.full((len(part), len(sums)), -np.inf, np.float32)
                reach = np.maximum(reach, _reach(nearest[these], sums - these.start, k))
                largest = value[these.start] if sums.size == 1 else upper
                blocks.append(select(value[these], largest, start, reach, slack=distance))
            # exact similarities may take twice as much
            if sum(one.value.nbytes for blocks in found for one in blocks) > free // 6 and len(part) > 1:
                return np.concatenate([work(half) for half in np.array_split(part, 2)])  # too much is near
        done = 0
        for sums, distance in zip(rankings, slack, strict=True):
            near = _joined(found.pop(0))
            relevant = relevance.gallery_labels[near.column] == np.repeat(relevance.query_labels[part], near.counts)
            own = models[sums.min() : sums.max() + 1]
            ranked = rank(own, part, near, sums - sums.min(), relevant, k=k, slack=distance)
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
    with bar, single_threaded_products():
        for part in over_threads(work, tiles, threads=threads):
            store.state.done += len(part)
            store.advance(part)
            bar.update(len(part))
    store.flush()


def _slack(bounds: Sequence[Bounds], sums: IntArray) -> float:
    """How far apart sums [S, F] of models are in the right order."""
    error, largest = (
        sum(max(getattr(bounds[model], name) for model in fold) for fold in sums.T) for name in ("error", "largest")
    )
    # each of the F - 1 float32 additions rounds a sum of at most ``largest``, and so do adding the slack and marking
    return 2 * (error + 1.01 * (sums.shape[1] - 1) * largest * 2.0**-24) + largest * 2.0**-21 + 2.0**-147


def _joined(blocks: Sequence[Near]) -> Near:
    """What matters of the whole gallery."""
    if len(blocks) == 1:
        return blocks[0]
    value, column, counts, _ = zip(*blocks, strict=True)
    order = np.argsort(np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts]), kind="stable")
    return Near(np.concatenate(value, axis=1)[:, order], np.concatenate(column)[order], sum(counts), blocks[-1].reach)


def _totals(value: FloatRows, sums: IntArray) -> Iterator[FloatRows]:
    """Every sum of ``value`` [M, ..], fold by fold, valid until the next; what both have in common is added once."""
    before: list[int] = []
    totals: list[FloatRows] = []
    for models in sums.tolist():
        same = next((fold for fold, model in enumerate(before) if model != models[fold]), 0)
        del totals[same:]
        for fold in range(same, len(models)):
            one = value[models[fold]]
            out = _workspace.array(f"total of {fold}", one.shape, np.float32)
            totals.append(np.add(totals[-1], one, out=out) if fold else one)
        before = models
        yield totals[-1]


def compiled_ranking() -> ModuleType | None:
    """The compiled twins of ``plain_select`` and ``plain_rank`` where numba is installed, else None; the same bits."""
    return machine_code.load("dmlbench.evaluation.collections.compiled_ranking", task="collections are ranked")


def plain_select(value: FloatRows, largest: FloatRows, first_column: int, reach: FloatRows, *, slack: float) -> Near:
    """What may be among the k nearest items by any sum of similarities, of a block of the gallery.

    Args:
        value: [M, T, W] similarities to the block, -inf for the query itself.
        largest: [T, W] what no sum exceeds.
        first_column: gallery item of the block's first column.
        reach: [T, S] values that at least k items reach, here or in blocks before.
        slack: sums further apart than this are in the right order.
    """
    flat, edges = value.reshape(len(value), -1), np.arange(len(largest) + 1) * largest.shape[1]
    item = np.flatnonzero(largest >= floor_below(reach.min(axis=1, keepdims=True), slack))
    count = np.diff(np.searchsorted(item, edges))
    return Near(flat[:, item], item - np.repeat(edges[:-1] - first_column, count), count, reach)


def _reach(some: FloatRows, sums: IntArray, k: int) -> FloatRows:
    """Values [T, S] that every sum of at least k of the items ``some`` [M, T, C] reaches; -inf if there are fewer."""
    return np.concatenate([kth_bound(total, k) for total in _totals(some, sums)], axis=1)


def _largest_on_average(value: FloatRows, middle: FloatRows, count: int) -> FloatRows:
    """``value`` [M, T, W] of the ``count`` items [M, T, C] whose ``middle`` [T, W] is largest: they do for a bound."""
    height, width = middle.shape
    place = np.argpartition(middle, -min(count, width), axis=1)[:, -count:]
    return np.take(value.reshape(len(value), -1), place + np.arange(height)[:, None] * width, axis=1)


def _middle_and_upper(value: FloatRows, sums: IntArray) -> tuple[FloatRows, FloatRows]:
    """Of what every sum of ``value`` [M, T, W] lies between: twice the middle, which stands for the average, and the
    upper end [T, W]. The next call overwrites them."""
    if len(value) == 1:
        return value[0], value[0]
    lower, upper = (_workspace.array(name, value.shape[1:], np.float32) for name in ("lower", "upper"))
    one = _workspace.array("one", (_TOGETHER, upper.shape[1]), np.float32)
    for start in range(0, len(upper), _TOGETHER):
        rows = slice(start, start + _TOGETHER)
        for bound, total in ((np.minimum, lower[rows]), (np.maximum, upper[rows])):
            for number, fold in enumerate(sums.T):
                out = one[: len(total)] if number else total
                bound.reduce(value[fold.min() : fold.max() + 1, rows], axis=0, out=out)
                if number:
                    total += out
        lower[rows] += upper[rows]
    return lower, upper


def plain_rank(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
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
        near: what may be among the k nearest.
        sums: [S, F] the models of every sum.
        relevant: [n] whether an item of ``near`` is of the query's class.
        k: places that matter.
        slack: sums further apart than this are in the right order.
    """
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    query = np.repeat(np.arange(len(part)), near.counts)
    waiting: list[tuple[IntArray, ...]] = []  # rankings that float32 values do not decide: sum, query, count, keys
    for number, (total, reach) in enumerate(zip(_totals(near.value, sums), near.reach.T, strict=True)):
        item = np.flatnonzero(total >= np.repeat(floor_below(reach, slack), near.counts))
        count = np.bincount(query[item], minlength=len(part))
        place, shape = padded_place(count)
        bits = np.full(shape, _FARTHEST)
        bits.reshape(-1)[place] = ((total[item].view(np.uint32) & _VALUE) | relevant[item]) ^ _SIGN
        ordered = np.sort(bits.view(np.float32), axis=1)  # the nearest first
        marks = (ordered.view(np.uint32) & 1).astype(bool)
        ranked[number, :, : shape[1]] = marks[:, :k]
        unsure = ((marks[:, 1:] != marks[:, :-1]) & (ordered[:, 1:] - ordered[:, :-1] <= slack)).any(axis=1)
        item, rows = item[unsure[query[item]]], np.flatnonzero(unsure)
        keys = pack(total[item], item) | relevant[item]
        waiting.append((np.full(len(rows), number), rows, count[rows], keys))
        if number + 1 == len(sums) or sum(len(held[-1]) for held in waiting) >= len(query):
            which, rows, count, keys = map(np.concatenate, zip(*waiting, strict=True))
            exact = functools.partial(_exact_sums, models, part, near, query, sums[which])
            settled = settle(Found(count, keys).padded(), exact, k=k, slack=slack, by_mark=True)[:, :k]
            ranked[which, rows, : settled.shape[1]] = marked(settled)
            waiting.clear()
    return ranked


def _exact_sums(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    query: IntArray,
    sums: IntArray,
    at: IntArray,
    item: IntArray,
) -> NDArray[np.float64]:
    """Exact sums [m] of ``sums[at]`` [m, F] for items ``item`` [m] of ``near``, which are of queries ``query`` [n]."""
    total = np.zeros(len(item))
    for chosen in sums[at].T:  # what several sums need is computed once
        asked, place = np.unique(chosen * len(query) + item, return_inverse=True)
        number, asked = np.divmod(asked, len(query))
        parts = np.split(asked, np.searchsorted(number, range(1, len(models))))
        exact = [
            model.exact(part)(query[some], near.column[some])
            for model, some in zip(models, parts, strict=True)
            if len(some)
        ]
        total += np.concatenate(exact)[place]
    return total
