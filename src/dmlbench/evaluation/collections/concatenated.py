"""Exact scores of concatenated fold models, for every choice of one repeat per fold, in one pass over the pairs.

Ranking by the sum of the models' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one tile of similarities per model serves every collection and the models themselves. Letters: M models,
Q queries, T queries of a tile, N gallery items, W of a block, n that some sum may need, S rankings by sums of F models
each, C items that bound what every sum needs, k places that matter.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dmlbench.evaluation.embeddings.embed import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.registry import mean_scores, of_queries, query_scores, score_names
from dmlbench.evaluation.relevance import Relevance, relevance_of
from dmlbench.evaluation.search import candidates, scan
from dmlbench.evaluation.search.candidates import FloatRows, Tile
from dmlbench.evaluation.search.pairwise import search_by
from dmlbench.evaluation.search.scan import Search
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

_TOGETHER = 8  # queries of a tile whose similarities are read while they are in a core's own cache
_RANKED = 2**18  # items of some sums that are put in order together

logger = logging.getLogger(__name__)

_workspace = candidates.Workspace()


class Near(NamedTuple):
    """Items that some sum of models may need, query by query."""

    value: FloatRows  # [M, n] similarities
    column: IntArray  # [n] gallery items, ascending for each query
    counts: IntArray  # [T] items of each query
    reach: FloatRows  # [T, S] values that the sums of at least k items reach


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
        spec: ``back_end`` is ignored.
        distances: the models' distances, [fold][repeat]; None, as a whole or of a model, is that of unit vectors.
        own: evaluate every model alone, too, from the same products.

    Returns:
        Evaluations by choice, the last fold's repeat changing fastest, and of the models [fold][repeat] if ``own``.
    """
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    scored = of_queries(spec.scores)
    relevance = relevance_of(queries, reference, scored)
    names = score_names(scored)
    distinct, number = _distinct_models(members, galleries, distances)
    choices = list(itertools.product(*(range(len(fold)) for fold in members)))
    models_of_choices = [[number[model] for model in enumerate(choice)] for choice in choices]
    sums, place = np.unique(models_of_choices, axis=0, return_inverse=True)  # in the order of the choices
    rankings = [sums, *(np.array([[model]]) for model in range(len(distinct)) if own)]
    scores = np.full((sum(map(len, rankings)), len(names), len(queries)), np.nan)
    # of its share, a model may hold a quarter in unit rows: all together half of the memory
    share = max(2 * spec.tile_bytes // len(distinct), MIN_TILE_BYTES)
    models: list[Search] = [
        search_by(
            None if distances is None else distances[fold][repeat],
            members[fold][repeat],
            None if galleries is None else galleries[fold][repeat],
            tile_bytes=share,
            device=spec.device_for(queries.rows),
        )
        for fold, repeat in distinct
    ]
    _score(models, rankings, relevance, scores, spec, progress=progress)
    found = []
    for one in scores:
        values = dict(zip(names, one, strict=True))
        found.append(Evaluation(mean_scores(values), values, len(queries), len(reference), relevance.n_skipped_queries))
    joint = {choice: found[at] for choice, at in zip(choices, place.ravel().tolist(), strict=True)}
    alone = [[found[len(sums) + number[f, r]] for r in range(len(fold))] for f, fold in enumerate(members) if own]
    return joint, alone


def _distinct_models(
    members: ModelEmbeddings, galleries: ModelEmbeddings | None, distances: ModelDistances | None
) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int]]:
    """Models (fold, repeat) without copies within a fold, and the index of each model in this list.

    Repeats without training are copies. Models with a distance of their own count as distinct.
    """
    sides = [side for side in (members, galleries) if side is not None]

    def are_equal(fold: int, one: int, other: int) -> bool:
        if distances is not None and (distances[fold][one], distances[fold][other]) != (None, None):
            return False
        pairs = ((side[fold][one].rows, side[fold][other].rows) for side in sides)
        return all(a.device == b.device and torch.equal(a, b) for a, b in pairs)

    distinct: list[tuple[int, int]] = []
    number = {}
    for fold, repeats in enumerate(members):
        for repeat in range(len(repeats)):
            first = next((one for one in range(repeat) if are_equal(fold, one, repeat)), repeat)
            if first == repeat:
                distinct.append((fold, repeat))
            number[fold, repeat] = distinct.index((fold, first))
    return distinct, number


def _score(
    models: list[Search], rankings: list[IntArray], relevance: Relevance, scores: NDArray[np.float64],
    spec: EvaluationSpec, *, progress: bool,
) -> None:  # fmt: skip
    """Fill ``scores`` [rankings of all groups, names, Q] for ``rankings``: groups [S, F] of sums of ``models``."""
    device, on_host = models[0].device, models[0].on_host
    rank = numba_rank() or rank_by_numpy
    scored = of_queries(spec.scores)
    threads = models[0].threads
    num_gallery, k = len(relevance.gallery_labels), min(relevance.k, len(relevance.gallery_labels))
    columns = -(-num_gallery // -(-num_gallery // _COLUMNS))  # blocks of one size
    free = spec.tile_bytes // 2 // threads
    per_query = (4 * len(models) + _BYTES_PER_ITEM) * columns + _BYTES_PER_PLACE * k * len(scores)
    rows = max(1, min(_TILE_ROWS if on_host else len(relevance.valid), free // 3 // per_query))

    def work(part: IntArray) -> int:
        scan.halved_where_full(lambda first, last: halved_where_crowded(part[first:last]), 0, len(part), device=device)
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
            value = scan.empty_tile((len(models), len(part), stop - start), device, on_host=on_host)
            bounds = [m.bounded_similarities(part, start, stop, out=x) for m, x in zip(models, value, strict=True)]
            for out in value:
                scan.exclude(out, relevance.own_column[part] - start)
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
        scan.single_threaded_products(),
    ):
        for count in scan.over_threads(work, scan.parts_of(relevance.valid, rows), threads=threads):
            bar.update(count)


def _slack(bounds: Sequence[tuple[float, float]], sums: IntArray) -> float:
    """Sums [S, F] further apart than this are in the right order; ``bounds``: ``bounded_similarities`` by model."""
    error, largest = (sum(max(bounds[model][i] for model in fold) for fold in sums.T) for i in (0, 1))
    # each of the F - 1 float32 additions rounds a sum of at most ``largest``, and so do adding the slack and marking
    return 2 * (error + 1.01 * (sums.shape[1] - 1) * largest * 2.0**-24) + largest * 2.0**-21 + 2.0**-147


@functools.cache
def numba_rank() -> Callable[..., NDArray[np.bool_]] | None:
    """``rank_by_numpy`` in numba kernels, which give the same bits; None where numba cannot be used."""
    try:
        from dmlbench.evaluation.collections.numba_ranking import is_cached, rank
    except Exception as error:  # numba is missing, does not fit the other libraries, or has no folder for its cache
        logger.info("ranking collections without numba, which is slower (%s). The extra 'fast' installs it.", error)
        return None
    if not is_cached():
        logger.info("compiling the numba kernels that rank collections (only once, up to ten seconds)")
    return rank


def largest_on_average(value: Tile, sums: IntArray, count: int) -> tuple[FloatRows, Tile]:
    """``value`` [M, T, W] of ``count`` items [M, T, C] large on average, and a bound [T, W] of all ``sums`` [S, F]."""
    if isinstance(value, Tensor):
        average, bound = _middle_and_upper(value, sums)
        nearest = average.topk(min(count, average.shape[1]), dim=1, sorted=False).indices
        return candidates.to_host(value.gather(2, nearest.expand(len(value), -1, -1)))[0], bound
    middle, upper = candidates.to_host(*_middle_and_upper(torch.from_numpy(value), sums))
    height, width = middle.shape
    place = np.argpartition(middle, -min(count, width), axis=1)[:, -count:]
    return np.take(value.reshape(len(value), -1), place + np.arange(height)[:, None] * width, axis=1), upper


def reached_by(some: FloatRows, sums: IntArray, k: int) -> FloatRows:
    """Values [T, S] that every sum of at least k of the items ``some`` [M, T, C] reaches; -inf if there are fewer."""
    return np.concatenate([candidates.kth_bound(total, k) for total in _totals(some, sums)], axis=1)


def select(value: Tile, largest: Tile, first_column: int, reach: FloatRows, *, slack: float) -> Near:
    """Items of a block of the gallery that may be among the k nearest by any sum of similarities ``value`` [M, T, W].

    ``largest`` [T, W] bounds every sum, ``reach`` [T, S] is what at least k items reach, here or in blocks before. Sums
    further apart than ``slack`` are in the right order. The block's first column is the item ``first_column``.
    """
    floor = candidates.floor_below(reach.min(axis=1, keepdims=True), slack)
    flat = value.reshape(len(value), -1)
    if isinstance(largest, Tensor) and isinstance(flat, Tensor):
        place = torch.nonzero((largest >= candidates.to_device(largest.device, floor)[0]).flatten())[:, 0]
        item, near = candidates.to_host(place, torch.as_tensor(flat)[:, place])
    else:
        item = np.flatnonzero(largest >= floor)
        near = np.asarray(flat[:, item])
    counts, column = candidates.by_row(item, largest.shape)
    return Near(near, column + first_column, counts, reach)


def joined(blocks: Sequence[Near]) -> Near:
    """Concatenate the items of all blocks, query by query."""
    if len(blocks) == 1:
        return blocks[0]
    value, column, counts, _ = zip(*blocks, strict=True)
    order = np.argsort(np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts]), kind="stable")
    return Near(np.concatenate(value, axis=1)[:, order], np.concatenate(column)[order], sum(counts), blocks[-1].reach)


def rank_by_numpy(
    models: Sequence[Search], part: IntArray, near: Near, sums: IntArray, relevant: NDArray[np.bool_], *, k: int,
    slack: float,
) -> NDArray[np.bool_]:  # fmt: skip
    """Relevance by rank [S, T, k] of the queries ``part`` [T] by every sum of similarities of ``sums`` [S, F] models.

    ``relevant`` [n] says whether an item of ``near``, the candidates for the k nearest, is of the query's class. Sums
    further apart than ``slack`` are in the right order; exact similarities of ``models`` [M] decide the others.
    """
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    query = np.repeat(np.arange(len(part)), near.counts)
    totals = zip(_totals(near.value, sums), near.reach.T, strict=True)
    at_once = max(1, _RANKED // max(1, len(query)))
    for start in range(0, len(sums), at_once):
        some = sums[start : start + at_once]
        counts, keys = [], []
        for total, reach in itertools.islice(totals, len(some)):
            item = np.flatnonzero(total >= np.repeat(candidates.floor_below(reach, slack), near.counts))
            counts.append(np.bincount(query[item], minlength=len(part)))
            keys.append(candidates.pack(total[item], item) | relevant[item])
        exact = functools.partial(_exact_sums, models, part, near, query, np.repeat(some, len(part), axis=0))
        rows = candidates.Found(np.concatenate(counts), np.concatenate(keys)).padded()
        settled = candidates.order_exactly(rows, exact, k=k, slack=slack, by_mark=True)[:, :k]
        of_sums = candidates.marked(settled).reshape(len(some), len(part), -1)
        ranked[start : start + len(some), :, : settled.shape[1]] = of_sums
    return ranked


def _exact_sums(
    models: Sequence[Search], part: IntArray, near: Near, query: IntArray, sums: IntArray, at: IntArray, item: IntArray
) -> NDArray[np.float64]:
    """Exact sums [m] of ``sums[at]`` [m, F] for items ``item`` [m] of ``near``, which are of queries ``query`` [n]."""
    total = np.zeros(len(item))
    for chosen in sums[at].T:  # what several sums need is computed once
        asked, place = np.unique(chosen * len(query) + item, return_inverse=True)
        number, asked = np.divmod(asked, len(query))
        parts = np.split(asked, np.searchsorted(number, range(1, len(models))))
        pairs = zip(models, parts, strict=True)
        exact = [m.exact(part)(query[some], near.column[some]) for m, some in pairs if len(some)]
        total += np.concatenate(exact)[place]
    return total


def _middle_and_upper(value: Tensor, sums: IntArray) -> tuple[Tensor, Tensor]:
    """Twice the middle and the upper end [T, W] of the range of all ``sums`` [S, F] of ``value`` [M, T, W]."""
    if len(value) == 1:
        return value[0], value[0]
    middle, upper = torch.zeros(2, *value.shape[1:], device=value.device)
    step = _TOGETHER if value.device.type == "cpu" else len(upper)
    for start in range(0, len(upper), step):
        rows = slice(start, start + step)
        for fold in sums.T:
            repeats = value[fold.min() : fold.max() + 1, rows]
            middle[rows] += repeats.amin(0)
            upper[rows] += repeats.amax(0)
        middle[rows] += upper[rows]
    return middle, upper


def _totals(value: FloatRows, sums: IntArray) -> Iterator[FloatRows]:
    """Every sum of ``value`` [M, ..], valid until the next; a prefix shared with the sum before is not added again."""
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
