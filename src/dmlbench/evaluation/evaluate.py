"""The scores of a set of embeddings: from rows, labels and ids to every metric."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.metrics.clustering import WholeSet
from dmlbench.evaluation.metrics.ranking import mean_scores
from dmlbench.evaluation.metrics.table import of_queries, query_scores, score_names, set_scores
from dmlbench.evaluation.resume import PartialScores
from dmlbench.evaluation.search.by_distance import rank_by_distance, refuse_what_unit_vectors_have
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.evaluation.search.rerank import check_rerank
from dmlbench.evaluation.search.top_k import Keys
from dmlbench.evaluation.search.unit_vectors import unit_search

# configurations of runs name EvaluationSpec as this module's
from dmlbench.evaluation.task import EvaluationSpec, RetrievalTask, retrieval_task
from dmlbench.types import EmbeddingSet, IntArray

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Scores as fractions in [0, 1] (ami may fall below 0; class distances lie in [0, 2]).

    Attributes:
        scores: mean over the queries that have a positive, by name; then the scores of the whole set.
        per_query: [Q] by name; NaN for a query without a positive.
        n_query: queries given.
        n_gallery: gallery items searched (the queries, where no gallery was given).
        n_skipped_queries: queries without a positive, left out of the means.
        kmeans: library and seed of the clusters of nmi and ami, or None.
        search: "exact", or "rerank@N" where only N items of each query were ranked.
    """

    scores: dict[str, float]
    per_query: dict[str, NDArray[np.float64]]
    n_query: int
    n_gallery: int
    n_skipped_queries: int
    kmeans: str | None = None
    search: str = "exact"


def evaluate(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None = None,
    spec: EvaluationSpec | None = None,
    *,
    distance: "BaseDistance | None" = None,
    partial: Path | None = None,
    progress: bool = False,
) -> Evaluation:
    """Rank the gallery for every query and score the ranking.

    A query never finds the gallery item with its own row id. Queries without a positive are skipped and counted.

    With the Euclidean distance of unit vectors (``distance`` None, or one that ranks alike) rows are normalized to
    float32 unit rows once, the ranking is that of their float64 inner products with ties by gallery index, and the
    scores are bit-equal for every back end, tile size, thread count and device. So they are with a distance that bounds
    its float32 error (see ``pairwise``): float64 arithmetic on the float32 rows decides. With any other distance
    its matrix in float64 decides (in the distance's own precision if it has parameters); what that distance separates
    by rounding alone may depend on the tile.

    Args:
        queries: rows [Q, D]; the products run on the device of these rows.
        gallery: rows [N, D], or None: the queries are searched among themselves.
        spec: what to compute; None is ``EvaluationSpec()``.
        distance: the model's distance, larger is nearer if ``is_inverted``; one with parameters runs where these lie.
        partial: folder by which an interrupted search by ``distance`` goes on, to the very same scores, if it is of the
            same embeddings and settings. It stays, complete, for the caller to ``forget``. Unit vectors need none.
        progress: whether to show a bar, with a ``distance``.

    Raises:
        RunError: no query has a positive; empty sets, widths that differ, NaN, repeated gallery ids, or an id with two
            labels.
        ConfigError: the back end is missing; a metric of classes or clusters or a back end is asked for that unit
            vectors alone have; a shortlist that the distance does not offer, or too short a one.
    """
    spec = spec or EvaluationSpec()
    reference = queries if gallery is None else gallery
    task = retrieval_task(queries, reference, spec.scores)
    own = None if distance is None or ranks_like_unit_vectors(distance) else distance
    if spec.rerank is not None:
        check_rerank(spec.rerank, own, k=task.k, num_gallery=len(reference))
    if own is None:
        known = PartialScores(None, (len(of_queries(spec.scores)), len(queries)), fingerprint="")
        tiles = _unit_tiles(queries, gallery, spec, task)
    else:
        refuse_what_unit_vectors_have(spec, own)
        known, tiles = rank_by_distance(queries, gallery, task, spec, own, partial=partial, progress=progress)
    names = score_names(of_queries(spec.scores))
    if names:
        for part, relevant in tiles:
            for values, scores in zip(
                known.values, query_scores(relevant, task.positives[part], spec.scores).values(), strict=True
            ):
                values[part] = scores
            known.advance()
        known.flush()
    per_query = {name: np.array(values) for name, values in zip(names, known.values, strict=True)}
    if task.n_skipped_queries:
        logger.info(
            "%d of %d queries have no positive in the gallery and are skipped", task.n_skipped_queries, len(queries)
        )
    clustered = any(score.metric.reads == "clusters" for score in spec.scores)
    of_the_set: dict[str, float] = {}
    if len(of_queries(spec.scores)) < len(spec.scores):
        of_the_set = set_scores(WholeSet(queries, gallery, kmeans_seed=spec.kmeans_seed), spec.scores)
    return Evaluation(
        mean_scores(per_query) | of_the_set,
        per_query,
        len(queries),
        len(reference),
        task.n_skipped_queries,
        kmeans=spec.kmeans if clustered else None,
        search=spec.search,
    )


def _unit_tiles(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, spec: EvaluationSpec, task: RetrievalTask
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k]) by exact search among unit vectors."""
    search = unit_search(queries, gallery, back_end=spec.back_end, tile_bytes=spec.tile_bytes)

    def by_rank(part: IntArray, keys: Keys) -> NDArray[np.bool_]:
        return task.relevant_by_rank(part, keys, search.exact(part), slack=search.slack)

    yield from search.ranked(task.k, by_rank, wanted=task.valid)
