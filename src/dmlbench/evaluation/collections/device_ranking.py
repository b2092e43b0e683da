"""The twins of ``plain_ranking`` as tensor operations on an accelerator: only rankings and what float32 values do not
decide travel to the host, where it is settled in the same way, so the scores are the same bits.

Letters: as there.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.collections.models import FoldModel, Near
from dmlbench.evaluation.collections.plain_ranking import FARTHEST, settle_unsure
from dmlbench.evaluation.search.on_device import floor_below, kth_bound, to_device, to_host
from dmlbench.evaluation.search.top_k import pack, padded_place
from dmlbench.types import IntArray


def largest_on_average(value: Tensor, sums: IntArray, count: int) -> tuple[Tensor, Tensor]:
    """As ``plain_ranking.largest_on_average``."""
    middle = upper = value[0]
    if len(value) > 1:
        folds = [value[fold.min() : fold.max() + 1] for fold in sums.T]
        middle, upper = folds[0].amin(0), folds[0].amax(0)
        for fold in folds[1:]:
            middle += fold.amin(0)
            upper += fold.amax(0)
        middle += upper
    place = middle.topk(min(count, middle.shape[1]), dim=1, sorted=False).indices
    return value.gather(2, place.expand(len(value), -1, -1)), upper


def reached_by(some: Tensor, sums: IntArray, k: int) -> Tensor:
    """As ``plain_ranking.reached_by``: [T, S]."""
    height = some.shape[1]
    bounds = [kth_bound(total.flatten(0, 1), k).view(-1, height) for total in _totals(some, sums, at_once=len(some))]
    return torch.cat(bounds).T


def larger(reach: Tensor, other: Tensor) -> Tensor:
    """As ``plain_ranking.larger``."""
    return torch.maximum(reach, other)


def select(value: Tensor, largest: Tensor, first_column: int, reach: Tensor, *, slack: float) -> Near:
    """As ``plain_ranking.select``; the items are counted on the host."""
    row, column = torch.nonzero(largest >= floor_below(reach.amin(1, keepdim=True), slack), as_tuple=True)
    rows, columns = to_host(row, column)
    return Near(value[:, row, column], columns + first_column, np.bincount(rows, minlength=len(largest)), reach)


def joined(value: Sequence[Tensor], order: IntArray) -> Tensor:
    """As ``plain_ranking.joined``."""
    return torch.cat(list(value), dim=1)[:, to_device(value[0].device, order)[0]]


def rank(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    sums: IntArray,
    relevant: NDArray[np.bool_],
    *,
    k: int,
    slack: float,
) -> NDArray[np.bool_]:
    """As ``plain_ranking.rank``, as many sums at a time as take the memory of the models' similarities."""
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    place, shape = padded_place(near.counts)
    query = np.repeat(np.arange(len(part)), near.counts)
    device = near.value.device
    where, of_query, mark = to_device(device, place, query, relevant.astype(np.int32))
    done = 0
    at_once = len(models) * len(query) // max(1, shape[0] * shape[1])  # rankings are filled up to the longest
    for total in _totals(near.value, sums, at_once=at_once):
        some = slice(done, done + len(total))
        done += len(total)
        kept = total >= floor_below(near.reach[:, some].T, slack)[:, of_query]  # [S', n]
        # numbers whose last bit marks relevant items; with the other sign, the nearest comes first
        bits = ((total.view(torch.int32) & -2) | mark) ^ -(2**31)
        padded = torch.full((len(total), shape[0] * shape[1]), FARTHEST, dtype=torch.int32, device=device)
        padded[:, where] = bits.where(kept, FARTHEST)
        ordered = padded.view(torch.float32).view(-1, *shape).sort(dim=-1).values
        marks = (ordered.view(torch.int32) & 1).bool()
        ranked[some, :, : shape[1]] = to_host(marks[..., :k])[0]
        near_ones = ordered[..., 1:] - ordered[..., :-1] <= slack
        unsure = ((marks[..., 1:] != marks[..., :-1]) & near_ones).any(-1)  # [S', T]
        which, rows = to_host(*torch.nonzero(unsure, as_tuple=True))
        if len(which):
            found = torch.nonzero(kept & unsure[:, of_query], as_tuple=True)
            number, item, value = to_host(*found, total[found])
            count = np.bincount(number * len(part) + query[item], minlength=len(total) * len(part))
            keys = pack(value, item) | relevant[item]
            settle_unsure(
                models, part, near, sums, ranked, which + some.start, rows, count[which * len(part) + rows], keys,
                slack=slack,
            )  # fmt: skip
    return ranked


def _totals(value: Tensor, sums: IntArray, *, at_once: int) -> Iterator[Tensor]:
    """Sums [S', ..] of ``value`` [M, ..], fold by fold, at most ``at_once`` (or one) of them in turn."""
    for some in np.array_split(sums, -(-len(sums) // max(1, at_once))):
        (models,) = to_device(value.device, np.ascontiguousarray(some.T))
        total = value[models[0]]
        for fold in models[1:]:
            total += value[fold]
        yield total
