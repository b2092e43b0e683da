"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the models' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one tile of similarities per model serves every collection, and the models' own rankings as well. Letters:
M models, Q queries, T queries of a tile, N gallery items, S rankings by sums of F models each, k places that matter.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dmlbench import machine_code
from dmlbench.evaluation.collections import device_ranking, plain_ranking
from dmlbench.evaluation.collections.models import Bounds, FoldModel, Near, fold_models
from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.ranking import mean_scores
from dmlbench.evaluation.metrics.table import of_queries, query_scores, score_names
from dmlbench.evaluation.relevance import Relevance, relevance_of
from dmlbench.evaluation.resume import PartialScores, fingerprint_of
from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.on_device import halved_where_full, tiles_on_host
from dmlbench.evaluation.search.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.search.top_k import Tile
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import IntArray

Choice = tuple[int, ...]
"""The repeat of each fold."""

_TILE_ROWS = 144
_COLUMNS = 8192  # gallery items of a block
_SCORED = 2**16  # places scored at a time, whose terms stay in a core's own cache
_BYTES_PER_ITEM = 16  # of a query and a block, besides the similarities
_NEAR_ON_AVERAGE = 3  # times the places that matter: items that bound what every sum needs
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
    device = spec.device_for(queries.rows)
    models = fold_models(members, galleries, distances, tile_bytes=spec.tile_bytes, device=device)
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
    device = models[0].device
    on_host = tiles_on_host(device)
    ways: Any = plain_ranking if on_host else device_ranking
    fastest: Any = (compiled_ranking() if on_host else None) or ways
    scored = of_queries(spec.scores)
    threads = num_threads() if on_host else 1
    num_gallery, k = len(relevance.gallery_labels), min(relevance.k, len(relevance.gallery_labels))
    columns = -(-num_gallery // -(-num_gallery // _COLUMNS))  # blocks of one size
    free = spec.tile_bytes // 2 // threads
    per_query = (4 * len(models) + _BYTES_PER_ITEM) * columns + _BYTES_PER_PLACE * k * len(store.values)
    left = relevance.valid[store.state.done :]
    rows = max(1, min(_TILE_ROWS if on_host else len(left), free // 3 // per_query))

    def work(part: IntArray) -> IntArray:
        halved_where_full(lambda first, last: halved_where_crowded(part[first:last]), 0, len(part), device=device)
        return part

    def halved_where_crowded(part: IntArray) -> None:
        if not score(part):
            for half in np.array_split(part, 2):
                halved_where_crowded(half)

    def score(part: IntArray) -> bool:
        """Whether there was memory for all that is near."""
        found: list[list[Near]] = [[] for _ in rankings]
        slack = np.zeros(len(rankings))
        for start in range(0, num_gallery, columns):
            stop = min(start + columns, num_gallery)
            shape = (len(models), len(part), stop - start)
            value: Tile = (
                _workspace.array("similarity", shape, np.float32)
                if on_host
                else torch.empty(shape, dtype=torch.float32, device=device)
            )
            bounds = [model.similarities(part, start, stop, out=out) for model, out in zip(models, value, strict=True)]
            for out in value:
                exclude(out, relevance.own_column[part] - start)
            slack = np.maximum(slack, [_slack(bounds, sums) for sums in rankings])
            nearest, upper = ways.largest_on_average(value, rankings[0], _NEAR_ON_AVERAGE * k)
            for blocks, sums, distance in zip(found, rankings, slack, strict=True):
                these = slice(sums.min(), sums.max() + 1)
                reach = ways.reached_by(nearest[these], sums - these.start, k)
                if blocks:
                    reach = ways.larger(blocks[-1].reach, reach)
                largest = value[these.start] if sums.size == 1 else upper
                blocks.append(fastest.select(value[these], largest, start, reach, slack=distance))
            # exact similarities may take twice as much
            if sum(one.value.nbytes for blocks in found for one in blocks) > free // 6 and len(part) > 1:
                return False
        done = 0
        for sums, distance in zip(rankings, slack, strict=True):
            near = _joined(found.pop(0), ways.joined)
            relevant = relevance.gallery_labels[near.column] == np.repeat(relevance.query_labels[part], near.counts)
            own = models[sums.min() : sums.max() + 1]
            ranked = fastest.rank(own, part, near, sums - sums.min(), relevant, k=k, slack=distance)
            few = max(1, _SCORED // ranked[0].size)
            for first in range(0, len(sums), few):
                some = ranked[first : first + few]
                scores = query_scores(some.reshape(-1, k), np.tile(relevance.positives[part], len(some)), scored)
                for at, values in enumerate(scores.values()):
                    store.values[done : done + len(some), at, part] = values.reshape(len(some), -1)
                done += len(some)
        return True

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


def _joined(blocks: Sequence[Near], joined: Callable[[Sequence[Tile], IntArray], Tile]) -> Near:
    """What matters of the whole gallery."""
    if len(blocks) == 1:
        return blocks[0]
    value, column, counts, _ = zip(*blocks, strict=True)
    order = np.argsort(np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts]), kind="stable")
    return Near(joined(value, order), np.concatenate(column)[order], sum(counts), blocks[-1].reach)


def compiled_ranking() -> ModuleType | None:
    """The compiled twins of ``select`` and ``rank`` where numba is installed, else None; the same bits."""
    return machine_code.load("dmlbench.evaluation.collections.compiled_ranking", task="collections are ranked")
