"""Scores of a whole set of embeddings: k-means clusters and distances within and between classes."""

import importlib.util
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch

from dmlbench.evaluation.embeddings.embed import ids_of, labels_of, self_columns
from dmlbench.evaluation.search.unit_vectors import FloatRows, unit_rows
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError, check_at_least, check_choice

KmeansInit = Literal["random", "k-means++"]
KmeansLibrary = Literal["auto", "faiss", "scikit-learn"]

ON_GPU = " on a GPU"  # after the settings, where faiss ran on one
_CHUNK_ROWS = 4096  # unit rows held in float64 at once
_RAW_QUERIES = 256  # whose distances to the whole gallery are held in float64 at once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KmeansSettings:
    """How clusters are found."""

    seed: int = 0  # in [0, 2^31)
    library: KmeansLibrary = "auto"  # faiss if installed, else scikit-learn; their clusters differ
    init: KmeansInit = "random"  # rows are the first centers
    restarts: int = 1  # the run with the least sum of squared distances counts
    max_steps: int = 25  # of Lloyd's algorithm: faiss's default; scikit-learn ends earlier at its tolerance

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"kmeans_seed: got {self.seed}, expected a number in [0, 2^31), as faiss requires.")
        check_choice("kmeans_library", self.library, get_args(KmeansLibrary))
        check_choice("kmeans_init", self.init, get_args(KmeansInit))
        check_at_least(1, kmeans_restarts=self.restarts, kmeans_max_steps=self.max_steps)

    @property
    def chosen_library(self) -> str:
        if self.library != "auto":
            return self.library
        return "faiss" if importlib.util.find_spec("faiss") is not None else "scikit-learn"

    def __str__(self) -> str:
        """For results: library, seed and settings that differ from the defaults."""
        starts = f", {self.restarts} starts" if self.restarts > 1 else ""
        steps = f", {self.max_steps} steps" if self.max_steps != KmeansSettings.max_steps else ""
        init = f", {self.init}" if self.init != "random" else ""
        return f"{self.chosen_library}{init}{starts}{steps}, seed {self.seed}"


def kmeans_of(text: str) -> KmeansSettings:
    """The settings of ``str(settings)``."""
    form = r"(\S+?)(?:, (k-means\+\+))?(?:, (\d+) starts)?(?:, (\d+) steps)?, seed (\d+)"
    found = re.fullmatch(form, text.removesuffix(ON_GPU))
    if found is None:
        raise ConfigError(f"kmeans: got '{text}', expected settings such as 'faiss, seed 0'.")
    library: Any
    init: Any
    library, init, restarts, steps, seed = found.groups()
    return KmeansSettings(int(seed), library, init or "random", int(restarts or 1), int(steps or 25))


class WholeSet:
    """All items of an evaluation, each once: the queries, then the gallery's other ones.

    pytorch-metric-learning clusters the queries alone; without a separate gallery, that is the same set.
    """

    def __init__(
        self,
        queries: EmbeddingSet,
        gallery: EmbeddingSet | None,
        *,
        kmeans_settings: KmeansSettings,
        on_gpu: bool = False,
    ) -> None:
        self.kmeans_settings, self.on_gpu = kmeans_settings, on_gpu
        self.labels = labels_of(queries)
        rows = queries.rows
        if gallery is not None:
            only = ~np.isin(ids_of(gallery), ids_of(queries))
            rows = torch.cat([queries.rows.cpu(), gallery.rows.cpu()[torch.from_numpy(only)]])
            self.labels = np.concatenate([self.labels, labels_of(gallery)[only]])
        self.rows = unit_rows(rows)  # [N, D]
        self.raw_rows: FloatRows = rows.detach().to("cpu", torch.float32).numpy()  # as given
        self._searched = queries, gallery

    @cached_property
    def mutual_information(self) -> dict[str, float]:
        """nmi and ami of the classes and as many k-means clusters."""
        clusters = kmeans(self.rows, len(np.unique(self.labels)), self.kmeans_settings, on_gpu=self.on_gpu)
        return mutual_information(self.labels, clusters)

    @cached_property
    def raw_nmi(self) -> float:
        """nmi by the geometric mean of the entropies, with clusters of rows that are not normalized."""
        from sklearn.metrics import normalized_mutual_info_score

        clusters = kmeans(self.raw_rows, len(np.unique(self.labels)), self.kmeans_settings, on_gpu=self.on_gpu)
        return float(normalized_mutual_info_score(self.labels, clusters, average_method="geometric"))

    @cached_property
    def raw_first_hits(self) -> IntArray:
        return first_hits(*self._searched)

    @cached_property
    def class_distances(self) -> tuple[float, float]:
        return class_distances(self.rows, self.labels)


def first_hits(queries: EmbeddingSet, gallery: EmbeddingSet | None) -> IntArray:
    """Number of gallery items nearer than a query's nearest positive [Q'], by Euclidean distance of the given rows.

    Float64 products of float32 rows decide, ties by gallery index. Queries without a positive are left out.
    """
    reference = queries if gallery is None else gallery
    own = torch.from_numpy(self_columns(ids_of(queries), ids_of(reference)))
    items, item_labels = reference.rows.double(), reference.labels.to(reference.rows.device)
    squares = (items * items).sum(1)
    found = []
    for part in torch.arange(len(queries)).split(_RAW_QUERIES):
        rows, columns = queries.rows[part].to(items), own[part]
        distances = squares - 2 * rows @ items.T  # less the query's own square, which orders nothing
        hides = torch.nonzero(columns >= 0)[:, 0]
        distances[hides, columns[hides]] = torch.inf
        positive = queries.labels[part].to(item_labels)[:, None] == item_labels
        positive[hides, columns[hides]] = False
        nearest, first = distances.where(positive, torch.inf).min(1, keepdim=True)
        before = torch.arange(len(items), device=items.device) < first
        nearer = (distances < nearest) | ((distances == nearest) & before)
        found.append(nearer.sum(1)[positive.any(1)].cpu().numpy())
    return np.concatenate(found)


def kmeans(rows: FloatRows, num_clusters: int, settings: KmeansSettings, *, on_gpu: bool = False) -> IntArray:
    """Cluster [N] of each row [N, D] by Lloyd's algorithm on all rows (faiss would sample 256 per cluster by default).

    The clusters, and with them NMI and AMI, depend on the settings, the library and, by rounding, the machine.
    ``on_gpu`` lets faiss use the first GPU; tests cover that only with a mock of faiss.
    """
    logger.info("k-means: %d clusters, %s%s", num_clusters, settings, ON_GPU * on_gpu)
    if settings.chosen_library == "faiss":
        import faiss

        other = {} if settings.init == "random" else {"init_method": faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS}
        clustering = faiss.Kmeans(
            rows.shape[1], num_clusters, niter=settings.max_steps, nredo=settings.restarts, seed=settings.seed,
            min_points_per_centroid=1, max_points_per_centroid=len(rows), gpu=int(on_gpu), **other,
        )  # fmt: skip
        clustering.train(np.ascontiguousarray(rows))
        return clustering.index.search(rows, 1)[1][:, 0].astype(np.int64)
    from sklearn.cluster import KMeans

    model = KMeans(
        num_clusters, init=settings.init, n_init=settings.restarts, max_iter=settings.max_steps,
        random_state=settings.seed,
    )  # fmt: skip
    return model.fit(rows).labels_.astype(np.int64)


def mutual_information(labels: IntArray, clusters: IntArray) -> dict[str, float]:
    """nmi and ami of two partitions [N], both by the arithmetic mean."""
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    return {
        "nmi": float(normalized_mutual_info_score(labels, clusters, average_method="arithmetic")),
        "ami": float(adjusted_mutual_info_score(labels, clusters, average_method="arithmetic")),
    }


def class_distances(rows: FloatRows, labels: IntArray) -> tuple[float, float]:
    """(intra, inter): mean cosine distance 1 - x.y within classes, and between the directions of class means.

    With S the sum of a class's n unit vectors, its n (n - 1) ordered pairs have the mean distance
    1 - (|S|^2 - sum_i |x_i|^2) / (n (n - 1)); *intra* is the mean over the classes with at least two items.
    With T the sum over C classes of S / |S|, *inter* is 1 - (|T|^2 - C) / (C (C - 1)). Rows [N, D] are unit vectors; a
    zero row is at distance 1 from everything.

    Source: Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML
    2020 (pi_intra, pi_inter), as their code computes them.
    """
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=labels[order[0]] - 1))
    intra: list[float] = []
    directions, num_directions = np.zeros(rows.shape[1]), 0
    for members in np.split(order, starts[1:]):
        total, squares = np.zeros(rows.shape[1]), 0.0
        for start in range(0, len(members), _CHUNK_ROWS):
            part = rows[members[start : start + _CHUNK_ROWS]].astype(np.float64)
            norm = np.sqrt((part * part).sum(axis=1, keepdims=True))
            part /= np.where(norm == 0, 1.0, norm)  # renormalized in float64; zero rows stay zero
            total += part.sum(axis=0)
            squares += float((part * part).sum())
        length, n = float(np.sqrt(total @ total)), len(members)
        if n > 1:
            intra.append(max(0.0, 1 - (length**2 - squares) / (n * (n - 1))))
        directions += total / length if length > 0 else 0.0
        num_directions += length > 0
    if not intra or len(starts) < 2:
        raise RunError(
            f"intra_class_distance, inter_class_distance: got {len(labels)} items of {len(starts)} classes, expected "
            "at least two classes, one of them with two items. Leave both scores out of evaluation.metrics."
        )
    inter = 1 - (float(directions @ directions) - num_directions) / (len(starts) * (len(starts) - 1))
    return float(np.mean(intra)), inter
