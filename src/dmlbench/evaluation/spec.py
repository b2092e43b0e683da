"""What is to be evaluated, and how."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmlbench.evaluation.metrics.clustering import KmeansInit, KmeansLibrary, KmeansSettings
from dmlbench.evaluation.metrics.table import (
    DEFAULT_METRICS,
    DEFAULT_RECALL_AT,
    Score,
    asked_scores,
    score_names,
)
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, check_tile_bytes
from dmlbench.runtime import select_device
from dmlbench.types import ConfigError

_SHORTLIST = "shortlist@"


@dataclass(frozen=True)
class EvaluationSpec:
    """How to evaluate.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search; every choice gives the same scores of rankings of the same embeddings.
            "faiss" with rows on a GPU also looks for the clusters of nmi and ami there.
        tile_bytes: bound of the memory taken beyond the embeddings; no influence on the scores.
        metrics: what to compute, names of ``dmlbench.evaluation.metrics.table``; "recall_at_k" is for every K.
        kmeans_seed, kmeans_library, kmeans_init, kmeans_restarts, kmeans_max_steps: how the clusters of nmi and ami are
            found, see ``KmeansSettings``.
        device: where products run and candidates are selected, as in configurations ("auto": a GPU where there is one);
            None: where the rows lie. No influence on the scores.
        shortlist: N, with a distance that offers it: it ranks the N nearest items by its cheap rows instead of all.
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
        object.__setattr__(self, "recall_at", tuple(self.recall_at))  # a configuration gives a list
        object.__setattr__(self, "metrics", tuple(self.metrics))
        asked_scores(self.metrics, self.recall_at)
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
        """Where ``rows`` are searched.

        Raises:
            ConfigError: ``device`` is unknown or not on this machine.
        """
        device = rows.device if self.device is None else select_device(self.device)
        if device.type == "cuda" and device.index is None:  # tensors name theirs, and cuda is not equal to cuda:0
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def search(self) -> str:
        """How the ranking is found, as results name it."""
        return "exact" if self.shortlist is None else f"{_SHORTLIST}{self.shortlist}"

    @property
    def scores(self) -> tuple[Score, ...]:
        """What is computed, in the order in which results list it."""
        return asked_scores(self.metrics, self.recall_at)

    @property
    def kmeans_settings(self) -> KmeansSettings:
        return KmeansSettings(
            self.kmeans_seed, self.kmeans_library, self.kmeans_init, self.kmeans_restarts, self.kmeans_max_steps
        )

    @property
    def kmeans(self) -> str:
        """How the clusters of nmi and ami are found, as results name it."""
        return str(self.kmeans_settings)

    def replaced(self, **changes: Any) -> "EvaluationSpec":
        """A copy with ``changes``, checked in the same way."""
        return dataclasses.replace(self, **changes)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores, in the order in which results list them."""
        return score_names(self.scores)


def shortlist_of(search: str) -> int | None:
    """The N of "shortlist@N", None of "exact": what ``EvaluationSpec.search`` was made from."""
    return int(search.removeprefix(_SHORTLIST)) if search.startswith(_SHORTLIST) else None
