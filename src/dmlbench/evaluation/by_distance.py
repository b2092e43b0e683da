"""The ranking of an evaluation by a distance of its own: of the whole gallery or of a shortlist, resumable.

Letters: Q queries, T of them in a tile, k places that matter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench.evaluation.metrics.table import of_queries, score_names
from dmlbench.evaluation.relevance import Relevance, fit_width
from dmlbench.evaluation.resume import PartialScores, fingerprint_of
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.evaluation.search.pairwise_search import pairwise_search
from dmlbench.evaluation.search.rerank import ranks_lists, rematched, reranked
from dmlbench.evaluation.search.top_k import Keys, column_of, settle
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, nearest
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, Neighbors

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Tiles = Iterator[tuple[IntArray, NDArray[np.bool_]]]


def refuse_what_unit_vectors_have(spec: EvaluationSpec, distance: "BaseDistance") -> None:
    """
    Raises:
        ConfigError: metrics of clusters or the back end faiss are asked for, which need unit vectors.
    """
    name = type(distance).__name__
    asked = [score.name for score in spec.scores if not score.metric.is_of_queries]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} compare unit vectors, which {name} does not; leave them out of evaluation.metrics"
        )
    if spec.back_end == "faiss" and spec.rerank is None and not ranks_lists(distance):
        raise ConfigError(
            f"back_end=faiss searches among unit vectors, which {name} does not compare; set evaluation.back_end=auto"
        )


def nearest_by_distance(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    k: int,
    *,
    distance: "BaseDistance | None",
    tile_bytes: int = TILE_BYTES,
) -> Neighbors:
    """As ``search.nearest``, by any distance; None, and one that ranks alike, is that of unit vectors.

    Returns:
        index [Q, k] int64 into the gallery and the distance's own values [Q, k] float64, both on the CPU; NaN behind
        the items that one which ranks lists has compared.

    Raises:
        RunError: the sets cannot be searched, or the distance gives NaN.
    """
    if distance is None or ranks_like_unit_vectors(distance):
        return nearest(queries, gallery, k, tile_bytes=tile_bytes)
    if ranks_lists(distance):
        found = rematched(queries, gallery, distance, k, wanted=np.arange(len(queries)), tile_bytes=tile_bytes)
        _, indices, values = zip(*found, strict=True)
        behind = ((0, 0), (0, indices[0].shape[1] - values[0].shape[1]))
        value = np.pad(np.concatenate(values), behind, constant_values=np.nan)
        return Neighbors(torch.from_numpy(np.concatenate(indices)), torch.from_numpy(value))
    search = pairwise_search(queries, gallery, distance, tile_bytes=tile_bytes)

    def finish(part: IntArray, keys: Keys) -> IntArray:
        return column_of(settle(keys, search.exact(part), k=k, slack=search.slack)[:, :k])

    index = np.concatenate([column for _, column in search.ranked(k, finish, wanted=np.arange(len(queries)))])
    value = search.exact(np.arange(len(queries)))(np.repeat(np.arange(len(queries)), k), index.reshape(-1))
    nearer_is_larger = value.reshape(index.shape)
    return Neighbors(
        torch.from_numpy(index), torch.from_numpy(nearer_is_larger if distance.is_inverted else -nearer_is_larger)
    )


def rank_by_distance(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    relevance: Relevance,
    spec: EvaluationSpec,
    distance: "BaseDistance",
    *,
    partial: Path | None,
    progress: bool,
) -> tuple[PartialScores, Tiles]:
    """The scores known so far, and the ranking of the queries that are left.

    Args:
        queries: rows [Q, D].
        gallery: rows [N, D], or None: the queries are searched among themselves.
        relevance: of the gallery to the queries, and how deep to rank.
        spec: how to evaluate.
        distance: larger is nearer if ``is_inverted``.
        partial: folder of an interrupted call, or None.
        progress: whether to show a bar.

    Returns:
        Scores to be written to, and an iterator over (queries [T], relevance by rank [T, k or the gallery's size]).
        After each, the scores of these queries must be written before the next one is asked for.
    """
    device = spec.device_for(queries.rows)
    if ranks_lists(distance):
        return _rank_lists(queries, gallery, relevance, spec, distance, device, partial=partial, progress=progress)
    bar = tqdm(total=0, desc="distances", unit="pair", unit_scale=True, disable=not progress, leave=False)
    search = pairwise_search(queries, gallery, distance, tile_bytes=spec.tile_bytes, bar=bar, device=device)
    names = score_names(of_queries(spec.scores))
    plan = search.plan(relevance.k, len(relevance.valid))
    order = f"rerank {spec.rerank}, blocks of {plan.rows if plan.by_half and spec.rerank is None else None}"
    known = _partial_scores(partial, queries, gallery, names, order, distance)

    def by_rank(part: IntArray, keys: Keys) -> NDArray[np.bool_]:
        return relevance.relevant_by_rank(part, keys, search.exact(part), slack=search.slack)

    def tiles() -> Tiles:
        with bar:
            if spec.rerank is None:
                bar.reset(search.num_pairs(relevance.k, len(relevance.valid), done=known.state.done))
                yield from search.ranked(relevance.k, by_rank, wanted=relevance.valid, state=known.state)
            else:
                left = relevance.valid[known.state.done :]
                bar.reset(len(left) * min(spec.rerank, search.num_gallery))
                yield from reranked(
                    search, queries, gallery, by_rank,
                    wanted=left, num_items=spec.rerank, back_end=spec.back_end, state=known.state,
                )  # fmt: skip

    return known, tiles()


def _rank_lists(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, relevance: Relevance, spec: EvaluationSpec,
    distance: "BaseDistance", device: torch.device, *, partial: Path | None, progress: bool,
) -> tuple[PartialScores, Tiles]:  # fmt: skip
    """``rank_by_distance`` for one that ranks the first items of lists again."""
    known = _partial_scores(partial, queries, gallery, score_names(of_queries(spec.scores)), "lists", distance)
    left = relevance.valid[known.state.done :]

    def tiles() -> Tiles:
        with tqdm(total=len(left), desc="matching", unit="query", disable=not progress, leave=False) as bar:
            for part, columns, _ in rematched(
                queries, gallery, distance, relevance.k,
                wanted=left, tile_bytes=spec.tile_bytes, back_end=spec.back_end, device=device, bar=bar,
            ):  # fmt: skip
                known.state.done += len(part)
                yield (
                    part,
                    fit_width(relevance.relevant(part, columns), min(relevance.k, len(relevance.gallery_labels))),
                )

    return known, tiles()


def _partial_scores(
    folder: Path | None, queries: EmbeddingSet, gallery: EmbeddingSet | None, names: tuple[str, ...], order: str,
    distance: "BaseDistance",
) -> PartialScores:  # fmt: skip
    """What ``folder`` knows of these sets, scores, distance and order of work."""
    fingerprint = ""
    if folder is not None:
        galleries = None if gallery is None else [[gallery]]
        fingerprint = fingerprint_of([[queries]], galleries, names=[*names, order], distances=[[distance]])
    return PartialScores(folder, (len(names), len(queries)), fingerprint=fingerprint)
