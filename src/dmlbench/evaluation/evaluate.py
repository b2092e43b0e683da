"""Compute every metric of a set of embeddings; tables of scores by query and class, and the queries with the lowest."""

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench.evaluation.embeddings.embed import Array, ids_of, labels_of, sets_of_arrays
from dmlbench.evaluation.metrics.clustering import ON_GPU, WholeSet
from dmlbench.evaluation.metrics.registry import mean_scores, of_queries, query_scores, score_names, set_scores
from dmlbench.evaluation.relevance import Relevance, degeneracies, relevance_of
from dmlbench.evaluation.search.candidates import Keys
from dmlbench.evaluation.search.pairwise import PairwiseSearch, ranks_like_unit_vectors, search_by
from dmlbench.evaluation.search.rerank import Reranker, check_shortlist, nearest, rank_shortlists, rerank_nearest
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.evaluation.spec import EvaluationSpec  # saved configurations name it as this module's
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError, closest, how_to_install

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. Scores are in [0, 1], except ``ami`` (may be negative) and intra- and inter-class
    distance (in [0, 2]).

    Attributes:
        scores: the value of each score, by name. A ranking score, such as ``map_at_r``, is the mean over all queries
            with a positive (a gallery item of the query's class). Other scores, such as ``nmi``, describe the whole
            set.
        per_query: the values of each ranking score for all queries [Q], by name. A query without a positive gets NaN.
        n_query: number of queries.
        n_gallery: number of gallery items; equal to ``n_query`` if no gallery was given.
        n_skipped_queries: number of queries without a positive. Ranking scores leave these queries out.
        kmeans: library, settings and seed of the k-means clustering for ``nmi`` and ``ami``. None if no score needs
            clusters.
        search: "exact" if the whole gallery was ranked for each query; "shortlist@N" if only a shortlist of N gallery
            items was ranked.
        p_at_1_by_chance: mean and standard deviation of P@1 over random rankings of the gallery.
        degenerate: a warning for each sign of collapsed embeddings, such as zero vectors or identical embeddings.
    """

    scores: dict[str, float]
    per_query: dict[str, NDArray[np.float64]] = field(repr=False)
    n_query: int
    n_gallery: int
    n_skipped_queries: int
    kmeans: str | None = None
    search: str = "exact"
    p_at_1_by_chance: tuple[float, float] = (0.0, 0.0)
    degenerate: tuple[str, ...] = ()


def evaluate(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None = None,
    spec: EvaluationSpec | None = None,
    *,
    distance: "BaseDistance | None" = None,
    progress: bool = False,
) -> Evaluation:
    """Rank the gallery for every query and score the ranking.

    A query never finds the gallery item with its own row id. Queries without a positive are skipped and counted.
    Without a ``distance`` (or with one that ranks alike), the ranking is by float64 inner products of float32 unit
    rows, ties by gallery index. Otherwise float64 values of the distance decide (see ``search.pairwise``).

    Args:
        queries: rows [Q, D].
        gallery: rows [N, D], or None: the queries are searched among themselves.
        spec: None is ``EvaluationSpec()``.
        progress: show a bar; only with a ``distance``.
    """
    spec = spec or EvaluationSpec()
    check_libraries(spec)
    reference = queries if gallery is None else gallery
    relevance = relevance_of(queries, reference, spec.scores)
    own = None if distance is None or ranks_like_unit_vectors(distance) else distance
    if spec.shortlist is not None:
        check_shortlist(spec.shortlist, own, k=relevance.k, num_gallery=len(reference))
    if own is not None:
        check_distance_supports(spec, own)
    names = score_names(of_queries(spec.scores))
    per_query = {name: np.full(len(queries), np.nan) for name in names}
    if names:
        hidden = not progress or own is None
        with tqdm(total=len(relevance.valid), desc="queries", unit="query", disable=hidden, leave=False) as bar:
            for part, relevant in _rankings(queries, gallery, relevance, spec, own):
                for name, scores in query_scores(relevant, relevance.positives[part], spec.scores).items():
                    per_query[name][part] = scores
                bar.update(len(part))
    if relevance.n_skipped_queries:
        skipped = relevance.n_skipped_queries
        logger.info("%d of %d queries have no positive in the gallery and are skipped", skipped, len(queries))
    clustered = reads_clusters(spec)
    on_gpu = spec.back_end == "faiss" and spec.device_for(queries.rows).type == "cuda"
    means = mean_scores(per_query)
    if len(names) < len(spec.scores):
        whole = WholeSet(queries, gallery, kmeans_settings=spec.kmeans_settings, on_gpu=on_gpu)
        means |= set_scores(whole, spec.scores)
    return Evaluation(
        means,
        per_query,
        len(queries),
        len(reference),
        relevance.n_skipped_queries,
        kmeans=spec.kmeans + ON_GPU * on_gpu if clustered else None,
        search=spec.search,
        p_at_1_by_chance=relevance.p_at_1_by_chance(),
        degenerate=tuple(degeneracies(queries, reference, relevance, cosine=own is None)),
    )


def evaluate_arrays(
    rows: Array,
    labels: Array,
    *,
    ids: Array | None = None,
    gallery_rows: Array | None = None,
    gallery_labels: Array | None = None,
    gallery_ids: Array | None = None,
    spec: EvaluationSpec | None = None,
) -> Evaluation:
    """Rank embeddings in memory by cosine similarity and compute scores. You need not normalize the embeddings.

    Args:
        rows: floating-point embeddings of the queries [Q, D]. If they are on a GPU, the search runs on that GPU.
        labels: class of each query [Q], as whole numbers or text.
        ids: a distinct whole number for each query [Q]. The search for a query skips the gallery item with the same id.
            Without a separate gallery, ids default to row numbers, so no query finds itself.
        gallery_rows: embeddings of the gallery [N, D]. None: the gallery of a query is all other queries.
        gallery_labels: class of each gallery item [N].
        gallery_ids: id of each gallery item [N]. If the gallery contains queries, pass ``ids`` and ``gallery_ids``, so
            that no query finds itself. Without them, no gallery item is skipped.
        spec: metrics and search settings. None uses the defaults of ``EvaluationSpec``.
    """
    gallery = None
    if gallery_rows is not None and gallery_labels is not None:
        gallery = gallery_rows, gallery_labels, gallery_ids
    elif any(part is not None for part in (gallery_rows, gallery_labels, gallery_ids)):
        raise RunError("a gallery needs rows and labels. Give both gallery_rows and gallery_labels.")
    return evaluate(*sets_of_arrays((rows, labels, ids), gallery), spec)


def reads_clusters(spec: EvaluationSpec) -> bool:
    return any(score.metric.reads == "clusters" for score in spec.scores)


def check_libraries(spec: EvaluationSpec) -> None:
    """Raises ConfigError if faiss is requested and not installed."""
    used = {"back_end": spec.back_end, **({"kmeans_library": spec.kmeans_library} if reads_clusters(spec) else {})}
    for key, library in used.items():
        if library == "faiss" and importlib.util.find_spec("faiss") is None:
            raise ConfigError(
                f"evaluation.{key}: got faiss, expected the package faiss to be installed. "
                f"{how_to_install('faiss-cpu')} Or set evaluation.{key}=auto."
            )


def check_distance_supports(spec: EvaluationSpec, distance: "BaseDistance") -> None:
    """Raises ConfigError for metrics or a back end that need unit vectors."""
    name = type(distance).__name__
    asked = [score.name for score in spec.scores if not score.metric.is_of_queries]
    if asked:
        raise ConfigError(
            f"evaluation.metrics: got {', '.join(asked)}, but {name} does not compare unit vectors. Leave them out."
        )
    if spec.back_end == "faiss" and spec.shortlist is None and not isinstance(distance, Reranker):
        raise ConfigError(
            f"evaluation.back_end: got faiss, but {name} does not compare unit vectors. Set evaluation.back_end=auto."
        )


def _rankings(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    relevance: Relevance,
    spec: EvaluationSpec,
    distance: "BaseDistance | None",
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k or the gallery's size]); without a distance, of unit vectors."""
    k, wanted = relevance.k, relevance.valid
    device, back_end, tile_bytes = spec.device_for(queries.rows), spec.back_end, spec.tile_bytes
    if isinstance(distance, Reranker):
        for part, columns, _ in rerank_nearest(
            queries, gallery, distance, k, wanted=wanted, tile_bytes=tile_bytes, back_end=back_end, device=device
        ):
            yield part, relevance.relevant(part, columns)
        return

    def by_rank(part: IntArray, keys: Keys) -> NDArray[np.bool_]:
        return relevance.relevant_by_rank(part, keys, search.exact(part), slack=search.slack)

    search = search_by(distance, queries, gallery, back_end=back_end, tile_bytes=tile_bytes, device=device)
    if isinstance(search, PairwiseSearch) and spec.shortlist is not None:
        yield from rank_shortlists(
            search, queries, gallery, by_rank, wanted=wanted, num_items=spec.shortlist, back_end=back_end
        )
    else:
        yield from search.ranked(k, by_rank, wanted=wanted)


def per_query_table(queries: EmbeddingSet, evaluation: Evaluation) -> pd.DataFrame:
    """One row per query: id, label and every score (NaN without a positive)."""
    return pd.DataFrame({"id": ids_of(queries), "label": labels_of(queries), **evaluation.per_query})


def per_class_table(
    queries: EmbeddingSet, evaluation: Evaluation, *, class_names: Sequence[str] | None = None
) -> pd.DataFrame:
    """One row per class of the queries, by label: number of queries, skipped ones, and mean scores of the others.

    ``class_names`` by label make a column "class".
    """
    table = per_query_table(queries, evaluation).drop(columns="id")
    names = list(evaluation.per_query)
    grouped = table.groupby("label", sort=True)
    result = grouped[names].mean().reset_index()
    result.insert(1, "queries", grouped.size().to_numpy())
    result.insert(2, "skipped", table[names[0]].isna().groupby(table["label"]).sum().to_numpy() if names else 0)
    if class_names is not None:
        result.insert(1, "class", [class_names[label] for label in result["label"]])
    return result


@dataclass(frozen=True)
class HardQuery:
    """A query with a low score, and its nearest gallery item."""

    id: int
    label: int
    score: float
    nearest_id: int
    nearest_label: int
    distance: float


def check_hardest(count: int, metric: str, known: Sequence[str]) -> None:
    """Raises ConfigError unless ``count`` is at least 1 and ``metric`` is in ``known``."""
    if count < 1:
        raise ConfigError(f"hardest: got {count}, expected at least 1.")
    if metric not in known:
        hint = closest(metric, known) if known else "this evaluation has none. Add map_at_r to evaluation.metrics."
        raise ConfigError(f"'{metric}' is not a score of single queries: {hint}")


def hardest_queries(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    evaluation: Evaluation,
    *,
    count: int,
    metric: str,
    tile_bytes: int = TILE_BYTES,
    distance: "BaseDistance | None" = None,
) -> list[HardQuery]:
    """The ``count`` queries with the lowest ``metric``, lowest first. Queries without a positive are left out."""
    check_hardest(count, metric, list(evaluation.per_query))
    scores = evaluation.per_query[metric]
    order = np.argsort(scores, kind="stable")  # NaN comes last
    chosen = order[: min(count, int((~np.isnan(scores)).sum()))]
    index = torch.from_numpy(chosen)
    part = EmbeddingSet(queries.rows.cpu()[index], queries.labels.cpu()[index], queries.ids.cpu()[index])
    reference = queries if gallery is None else gallery
    on_host = EmbeddingSet(reference.rows.cpu(), reference.labels.cpu(), reference.ids.cpu())
    found = nearest(part, on_host, 1, distance=distance, tile_bytes=tile_bytes)
    first = found.index[:, 0].numpy()
    return [
        HardQuery(int(i), int(label), float(scores[q]), int(other), int(other_label), float(far))
        for q, i, label, other, other_label, far in zip(
            chosen,
            ids_of(part),
            labels_of(part),
            ids_of(reference)[first],
            labels_of(reference)[first],
            found.distance[:, 0],
            strict=True,
        )
    ]


def to_csv(table: pd.DataFrame) -> bytes:
    """CSV whose floats read back to the same numbers."""
    return table.to_csv(index=False, na_rep="nan").encode()
