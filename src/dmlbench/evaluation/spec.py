"""How to evaluate embeddings."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmlbench.evaluation.metrics.clustering import KmeansInit, KmeansLibrary, KmeansSettings
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS, DEFAULT_RECALL_AT, Score, score_names, scores_of
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, check_tile_bytes
from dmlbench.runtime import select_device
from dmlbench.types import ConfigError

_SHORTLIST = "shortlist@"


@dataclass(frozen=True)
class EvaluationSpec:
    """Settings of an evaluation. Ranking scores do not depend on ``back_end``, ``tile_bytes`` or ``device``.

    Attributes:
        recall_at: the values of K for metrics such as ``recall_at_k``, in increasing order.
        back_end: the library that computes float32 similarities. If you choose "faiss" and the search runs on a GPU,
            faiss's k-means also runs on the GPU.
        tile_bytes: how many bytes of memory the search may use in addition to the embeddings.
        metrics: names of metrics from the table in ``docs/evaluation.md``. "recall_at_k" requests R@K for every K in
            ``recall_at``; "recall_at_10" requests only R@10.
        kmeans_seed: random seed of the k-means clustering that ``nmi`` and ``ami`` need. All attributes that begin with
            ``kmeans_`` configure this clustering.
        device: the device that computes similarities. "auto" uses a GPU if available; None uses the device that holds
            the embeddings.
        shortlist: None ranks the whole gallery. A number N first selects the N nearest gallery items of each query by a
            cheaper distance, then ranks only these. Only models with such a cheaper distance, such as AVSL, accept a
            number.
    """

    recall_at: tuple[int, ...] = DEFAULT_RECALL_AT
    back_end: BackEnd = "auto"
    tile_bytes: int = TILE_BYTES
    metrics: tuple[str, ...] = DEFAULT_METRICS
    kmeans_seed: int = 0
    kmeans_library: KmeansLibrary = "auto"
    kmeans_init: KmeansInit = "random"
    kmeans_restarts: int = 1
    kmeans_max_steps: int = 25
    shortlist: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for key in ("metrics", "recall_at"):
            if isinstance(getattr(self, key), str | int):
                raise ConfigError(f"{key}: got {getattr(self, key)!r}, expected a list.")
        object.__setattr__(self, "recall_at", tuple(self.recall_at))  # a configuration gives a list
        object.__setattr__(self, "metrics", tuple(self.metrics))
        scores_of(self.metrics, self.recall_at)
        check_tile_bytes(self.tile_bytes)
        _ = self.kmeans_settings  # checks them
        if self.shortlist is not None and self.shortlist < 1:
            raise ConfigError(f"shortlist: got {self.shortlist}, expected at least 1, or null for the whole gallery.")
        if self.shortlist is not None and "map" in self.metrics:
            raise ConfigError(
                f"shortlist: got {self.shortlist}, but map needs the whole ranking. Leave map out of "
                "evaluation.metrics, or set evaluation.shortlist=null."
            )

    def device_for(self, rows: Tensor) -> torch.device:
        """Return the device on which the embeddings ``rows`` are searched."""
        device = rows.device if self.device is None else select_device(self.device)
        if self.device in ("auto", "cuda") and device.type == "cuda":  # in a run on several GPUs, that of this process
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def search(self) -> str:
        """The text that describes the search in stored results: "exact" or "shortlist@N"."""
        return "exact" if self.shortlist is None else f"{_SHORTLIST}{self.shortlist}"

    @property
    def scores(self) -> tuple[Score, ...]:
        """Names and definitions of the scores that ``metrics`` and ``recall_at`` request, in the order of the metrics
        table."""
        return scores_of(self.metrics, self.recall_at)

    @property
    def kmeans_settings(self) -> KmeansSettings:
        return KmeansSettings(
            self.kmeans_seed, self.kmeans_library, self.kmeans_init, self.kmeans_restarts, self.kmeans_max_steps
        )

    @property
    def kmeans(self) -> str:
        """The text that describes the k-means clustering of ``nmi`` and ``ami`` in stored results."""
        return str(self.kmeans_settings)

    def replaced(self, **changes: Any) -> "EvaluationSpec":
        return dataclasses.replace(self, **changes)

    @property
    def score_names(self) -> tuple[str, ...]:
        return score_names(self.scores)


def shortlist_of(search: str) -> int | None:
    """The N of ``EvaluationSpec.search`` (None for an exact search)."""
    return int(search.removeprefix(_SHORTLIST)) if search.startswith(_SHORTLIST) else None
