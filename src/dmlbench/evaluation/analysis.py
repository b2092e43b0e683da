"""Tables of scores by query and by class, and the queries with the lowest scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from dmlbench.evaluation.embeddings.sets import ids_of, labels_of
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.types import ConfigError, EmbeddingSet, closest

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance


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
        raise ConfigError(f"hardest ({count}) must be at least 1")
    if metric not in known:
        hint = closest(metric, known) if known else "it has none; add map_at_r to evaluation.metrics"
        raise ConfigError(f"'{metric}' is no score of single queries in this evaluation: {hint}")


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
    """The ``count`` queries with the lowest ``metric``, lowest first. Queries without a positive are left out.

    Raises:
        ConfigError: ``count`` is below 1, or ``metric`` is no score of a query that was computed.
    """
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
