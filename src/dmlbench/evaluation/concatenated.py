"""Exact scores of joined embeddings: one model per fold, every choice of a repeat per fold, in one pass over the pairs.

Ranking by the sum of the members' squared distances of unit rows is ranking by the distance of the concatenated unit
vectors, so one similarity tile per member serves every collection. Letters: T queries of a tile, N gallery items, W of
them that can matter to some collection.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dmlbench.evaluation.candidates import ExactSimilarity, above, kth_largest, narrow_again, settle
from dmlbench.evaluation.evaluate import Evaluation, EvaluationSpec, RetrievalTask, fit_width, retrieval_task
from dmlbench.evaluation.metrics import mean_scores, query_scores, score_names
from dmlbench.evaluation.search import UnitSearch, unit_search
from dmlbench.evaluation.similarity import FloatRows, exact_similarities, strict_float32_products
from dmlbench.types import EmbeddingSet, IntArray

Members = Sequence[Sequence[EmbeddingSet]]
"""Embeddings of one test set, indexed [fold][repeat]."""

Choice = tuple[int, ...]
"""The repeat of each fold."""

_BYTES_PER_PAIR = 24  # and member: float32 similarity, its kept copy, an exact one, shares of the bounds


@dataclass(frozen=True)
class _Member:
    """A run's unit rows, and its float32 operands on the device: query [Q, D], gallery [N, D]."""

    search: UnitSearch
    query: Tensor
    gallery: Tensor


def concatenated_scores(
    members: Members,
    galleries: Members | None = None,
    *,
    spec: EvaluationSpec,
    progress: bool = False,
) -> dict[Choice, Evaluation]:
    """Evaluate the joined embedding of every choice of one repeat per fold.

    The ranking is that of the sum over folds, in their order, of the members' exact similarities; ties go by gallery
    index.

    Args:
        members: query rows [Q, D] of every run, [fold][repeat]; all with the same ids and labels in the same order
            (the caller checks), D may differ.
        galleries: gallery rows likewise, or None: the queries are searched among themselves.
        spec: what to compute; ``back_end`` is of no use here. ``tile_bytes`` is for the tiles of all members together.
        progress: whether to show a bar.

    Returns:
        Evaluations by choice, the last fold's repeat changing fastest.

    Raises:
        RunError: no query has a positive, or a set cannot be searched.
    """
    queries = members[0][0]
    reference = queries if galleries is None else galleries[0][0]
    task = retrieval_task(queries, reference, recall_at=spec.recall_at)
    folds = [
        [_member(part, None if galleries is None else galleries[f][r], spec) for r, part in enumerate(fold)]
        for f, fold in enumerate(members)
    ]
    names = score_names(spec.recall_at)
    per_query = {
        choice: {name: np.full(len(queries), np.nan) for name in names}
        for choice in itertools.product(*(range(len(fold)) for fold in folds))
    }
    rows = max(1, spec.tile_bytes // (len(reference) * (_BYTES_PER_PAIR * sum(map(len, folds)) + _BYTES_PER_PAIR)))
    with tqdm(total=len(task.valid), desc="collections", unit="query", disable=not progress, leave=False) as bar:
        for start in range(0, len(task.valid), rows):
            part = task.valid[start : start + rows]
            tile = _tile(folds, part, task)
            for choice, total in tile.sums():
                relevant = _ranked_relevance(tile, choice, total, task.k)
                for name, values in query_scores(relevant, task.positives[part], recall_at=spec.recall_at).items():
                    per_query[choice][name][part] = values
            bar.update(len(part))
    return {
        choice: Evaluation(mean_scores(values), values, len(queries), len(reference), task.n_skipped_queries)
        for choice, values in per_query.items()
    }


def _member(queries: EmbeddingSet, gallery: EmbeddingSet | None, spec: EvaluationSpec) -> _Member:
    search = unit_search(queries, gallery, back_end="torch", tile_bytes=spec.tile_bytes)
    query = torch.from_numpy(search.product.query).to(search.device)
    return _Member(search, query, torch.from_numpy(search.product.gallery).to(search.device))


@dataclass(frozen=True)
class _Tile:
    """Similarities of a tile's T queries to the W gallery items that can matter to any collection.

    Attributes:
        folds: [fold][repeat] the members.
        part: [T] queries.
        column: [T, W] gallery index, ascending; -1 is padding.
        relevant: [T, W] whether the item is of the query's class.
        value: [fold][repeat] float32 [T, W], -inf where padded.
        floor: [T, 1] float32 that every candidate of any collection reaches.
        known: [fold][repeat] float64 [T, W] exact similarities computed so far, NaN elsewhere; shared by collections.
        slack: sums further apart than this are in the right order.
    """

    folds: list[list[_Member]]
    part: IntArray
    column: IntArray
    relevant: NDArray[np.bool_]
    value: list[list[FloatRows]]
    floor: FloatRows
    known: list[list[NDArray[np.float64]]]
    slack: float

    def sums(self) -> Iterator[tuple[Choice, FloatRows]]:
        """Every collection with its float32 sums [T, W], added fold by fold; common beginnings are added once.

        The array is overwritten when the next one is asked for.
        """
        # numpy on purpose: these additions are too small to share out to threads
        partial = [np.empty(self.column.shape, dtype=np.float32) for _ in self.value]

        def extend(choice: Choice, total: FloatRows) -> Iterator[tuple[Choice, FloatRows]]:
            fold = len(choice)
            if fold == len(self.value):
                yield choice, total
                return
            for repeat, value in enumerate(self.value[fold]):
                yield from extend((*choice, repeat), np.add(total, value, out=partial[fold]))

        for repeat, value in enumerate(self.value[0]):
            yield from extend((repeat,), value)

    def exact(self, choice: Choice) -> ExactSimilarity:
        """Sums over folds of the exact similarities of pairs (row of the tile, place in ``column``)."""

        def similarity(rows: IntArray, places: IntArray) -> NDArray[np.float64]:
            total = np.zeros(len(rows))
            for fold, repeat in enumerate(choice):
                known, search = self.known[fold][repeat], self.folds[fold][repeat].search
                new = np.isnan(known[rows, places])
                r, p = rows[new], places[new]
                known[r, p] = exact_similarities(search.query, search.gallery, self.part[r], self.column[r, p])
                total += known[rows, places]
            return total

        return similarity


def _ranked_relevance(tile: _Tile, choice: Choice, total: FloatRows, k: int) -> NDArray[np.bool_]:
    """Relevance by rank [T, k] of one collection from its float32 sums [T, W]."""
    candidates = narrow_again(above(total, tile.floor), k, slack=tile.slack)
    found = np.take_along_axis(tile.relevant, np.maximum(candidates.column, 0), axis=1) & (candidates.column >= 0)
    _, relevant = settle(candidates, tile.exact(choice), k=k, slack=tile.slack, relevant=found)
    assert relevant is not None  # it was passed
    return fit_width(relevant, k)


def _tile(folds: list[list[_Member]], part: IntArray, task: RetrievalTask) -> _Tile:
    """Multiply every member's rows, then drop the pairs that no collection can need.

    Per pair, the sum over folds of the least similarity of any repeat bounds every collection from below, and that of
    the greatest from above; rounded addition is monotonic, so both bound the float32 sums too. A pair whose upper bound
    is less than the k-th largest lower bound (less the slack) is a candidate of no collection.
    """
    device = folds[0][0].query.device
    own = task.own_column[part]
    held = np.flatnonzero(own >= 0)
    own_entry = (torch.from_numpy(held).to(device), torch.from_numpy(own[held]).to(device))
    index = torch.from_numpy(part).to(device)
    value: list[list[Tensor]] = []
    with strict_float32_products():
        for fold in folds:
            value.append([member.query[index] @ member.gallery.T for member in fold])  # [T, N] each
    for similarity in itertools.chain.from_iterable(value):
        similarity[own_entry] = -torch.inf
    slack = _sum_slack(folds)
    upper = _bound(value, torch.maximum)
    floor = torch.full_like(upper[:, :1], torch.finfo(torch.float32).min)  # above -inf, which marks the query itself
    if task.k < upper.shape[1]:
        kth = _kth(_bound(value, torch.minimum), task.k)
        floor = torch.maximum(floor, torch.nextafter(kth - slack, torch.full_like(kth, -torch.inf)))
    keep = upper >= floor
    column = _padded_columns(keep)
    chosen, padding = column.clamp_min(0), column < 0
    kept = [[s.gather(1, chosen).masked_fill_(padding, -torch.inf).cpu().numpy() for s in fold] for fold in value]
    columns = column.cpu().numpy()
    known = [[np.full(columns.shape, np.nan) for _ in fold] for fold in folds]
    return _Tile(folds, part, columns, task.relevant(part, columns), kept, floor.cpu().numpy(), known, slack)


def _sum_slack(folds: list[list[_Member]]) -> float:
    """Sums over folds that are further apart than this are in the right order, for every choice of repeats."""
    error = sum(max(member.search.product.error for member in fold) for fold in folds)
    largest = sum(max(member.search.product.largest for member in fold) for fold in folds)
    # each of the F - 1 float32 additions rounds a sum of at most ``largest``
    return 2 * (error + 1.01 * (len(folds) - 1) * largest * 2.0**-24)


def _bound(value: list[list[Tensor]], extreme: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sum over folds, in the order of ``_Tile.sums``, of the extreme over repeats: [T, N]."""
    total = reduce(extreme, value[0])
    for fold in value[1:]:
        total = total + reduce(extreme, fold)
    return total


def _kth(values: Tensor, k: int) -> Tensor:
    """The k-th largest of each row: [T, N] -> [T, 1]."""
    if values.device.type == "cpu":
        return torch.from_numpy(kth_largest(values.numpy(), k))
    return torch.topk(values, k, dim=1).values[:, -1:]


def _padded_columns(keep: Tensor) -> Tensor:
    """Columns where ``keep`` [T, N] is true, ascending, padded with -1: [T, W]."""
    count = keep.sum(dim=1)
    row, column = torch.nonzero(keep, as_tuple=True)
    place = torch.arange(len(row), device=keep.device) - torch.repeat_interleave(torch.cumsum(count, 0) - count, count)
    result = torch.full((len(keep), int(count.max())), -1, device=keep.device)
    result[row, place] = column
    return result
