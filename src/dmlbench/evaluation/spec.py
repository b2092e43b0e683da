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
    """How to evaluate. ``back_end``, ``tile_bytes`` and ``device`` do not change the scores of a ranking.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search. "faiss" with rows on a GPU also runs k-means there.
        tile_bytes: bound of the memory beyond the embeddings.
        metrics: names of ``dmlbench.evaluation.metrics.registry``; "recall_at_k" is for every K.
        kmeans_seed: seed of the clusters of nmi and ami; the other ``kmeans_`` arguments set k-means.
        device: where products run ("auto": a GPU if available); None: the device of the rows.
        shortlist: N: rank only the N items nearest by the distance's cheap rows (see ``search.rerank``); None: all.
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
            raise ConfigError(f"shortlist ({self.shortlist}) must be at least 1, or null for the whole gallery")
        if self.shortlist is not None and "map" in self.metrics:
            raise ConfigError(
                f"map needs the whole ranking, and shortlist ({self.shortlist}) gives the first places only; "
                "leave map out of evaluation.metrics, or set evaluation.shortlist=null"
            )

    def device_for(self, rows: Tensor) -> torch.device:
        """The device on which ``rows`` are searched."""
        device = rows.device if self.device is None else select_device(self.device)
        if device.type == "cuda" and device.index is None:  # tensors name theirs, and cuda is not equal to cuda:0
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def search(self) -> str:
        """How the ranking is found, for results."""
        return "exact" if self.shortlist is None else f"{_SHORTLIST}{self.shortlist}"

    @property
    def scores(self) -> tuple[Score, ...]:
        """The requested scores in the order of the metrics table."""
        return scores_of(self.metrics, self.recall_at)

    @property
    def kmeans_settings(self) -> KmeansSettings:
        return KmeansSettings(
            self.kmeans_seed, self.kmeans_library, self.kmeans_init, self.kmeans_restarts, self.kmeans_max_steps
        )

    @property
    def kmeans(self) -> str:
        """How the clusters of nmi and ami are found, for results."""
        return str(self.kmeans_settings)

    def replaced(self, **changes: Any) -> "EvaluationSpec":
        return dataclasses.replace(self, **changes)

    @property
    def score_names(self) -> tuple[str, ...]:
        return score_names(self.scores)


def shortlist_of(search: str) -> int | None:
    """The N of ``EvaluationSpec.search`` (None for an exact search)."""
    return int(search.removeprefix(_SHORTLIST)) if search.startswith(_SHORTLIST) else None
