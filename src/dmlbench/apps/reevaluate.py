"""Scores of a finished run again, from its embeddings or its checkpoint, and of embeddings from anywhere."""

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_metric_learning.distances import BaseDistance

from dmlbench.apps.embed_folder import OWN_DISTANCE
from dmlbench.apps.loaded import distance_of_run, load, load_run, table_of_run
from dmlbench.components import component
from dmlbench.evaluation.analysis import (
    HardQuery,
    check_hardest,
    hardest_queries,
    per_class_table,
    per_query_table,
    to_csv,
)
from dmlbench.evaluation.embeddings.embed import StoredEmbeddings, load_embeddings
from dmlbench.evaluation.embeddings.files import read_embeddings
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.evaluation.metrics.table import of_queries, score_names
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.cautions import DEGENERATE, cautions
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files, require_tested
from dmlbench.runtime import atomic_write, package_versions, set_strict_float32, write_json
from dmlbench.types import ConfigError, DataError, EmbeddingSet, ImageTable, RunError

INPUTS, OUTPUTS = ("embeddings", "labels", "gallery", "gallery_labels"), ("output", "per_query", "per_class")
"""Keys of the configuration that name files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated, and its scores."""

    source: str
    queries: EmbeddingSet
    gallery: EmbeddingSet | None  # None where the queries were searched among themselves
    spec: EvaluationSpec
    evaluation: Evaluation
    stored: dict[str, float] | None = None  # a run's scores in its ``result.json``
    table: ImageTable | None = None  # the images that the ids count, where they were asked for and found
    distance: BaseDistance | None = None  # by which rows were compared; None is that of unit vectors
    cautions: tuple[str, ...] = ()  # what a run's scores are not (``results.cautions``)

    def notes(self) -> list[str]:
        """What a reader of the scores must know."""
        result, n = list(self.cautions), self.evaluation
        if n.n_skipped_queries:
            skipped = f"{n.n_skipped_queries} of {n.n_query} queries"
            result.append(f"{skipped} have no positive and are left out of the means")
        if n.degenerate and not any(caution.startswith(DEGENERATE) for caution in result):
            result.append(f"{DEGENERATE}{'; '.join(n.degenerate)}")
        beyond = [k for k in self.spec.recall_at if k > n.n_gallery]
        if beyond and "recall_at_k" in self.spec.metrics:
            result.append(f"recall at {', '.join(map(str, beyond))} looks at the whole gallery of {n.n_gallery}")
        if n.kmeans is not None:
            result.append(f"clusters of nmi and ami: k-means of {n.kmeans}")
        return result

    def summary(self) -> dict[str, Any]:
        """Scores, counts and settings, for a JSON file."""
        n = self.evaluation
        return {
            "source": self.source,
            "scores": n.scores,
            **{key: getattr(n, key) for key in ("n_query", "n_gallery", "n_skipped_queries")},
            "settings": {**dataclasses.asdict(self.spec), "kmeans": n.kmeans},
            "notes": self.notes(),
            "versions": package_versions(),
        }


def evaluate_from(cfg: DictConfig) -> Evaluated:
    """Evaluate what a configuration of ``dmlbench evaluate`` names, and write the files that it asks for."""
    _check_request(cfg)
    result = _evaluate_run(cfg) if cfg.run is not None else _evaluate_file(cfg)
    if cfg.output is not None:
        write_json(Path(cfg.output), result.summary())
    if cfg.per_query is not None:
        atomic_write(Path(cfg.per_query), to_csv(per_query_table(result.queries, result.evaluation)))
    if cfg.per_class is not None:
        names = None if result.table is None else result.table.class_names
        atomic_write(Path(cfg.per_class), to_csv(per_class_table(result.queries, result.evaluation, class_names=names)))
    return result


def _check_request(cfg: DictConfig) -> None:
    """Refuse before the work rather than after it."""
    if (cfg.run is None) == (cfg.embeddings is None):
        raise ConfigError("give either run=<run directory> or embeddings=<file>")
    if cfg.rerank is not None and not (cfg.run is not None and cfg.from_checkpoint):
        raise ConfigError("rerank compares cells of the test images' maps; give run=<directory> from_checkpoint=true")
    for key in (*INPUTS[1:], "model"):
        if cfg.run is not None and cfg[key] is not None:
            raise ConfigError(f"{key}={cfg[key]} belongs to embeddings=<file>; a run has its own")
    outputs = [Path(cfg[key]) for key in OUTPUTS if cfg[key] is not None]
    for path in outputs:
        if not path.parent.is_dir():
            raise RunError(f"cannot write {path}: there is no folder {path.parent}")
    files = [os.path.realpath(path) for path in (*outputs, *(Path(cfg[key]) for key in INPUTS if cfg[key] is not None))]
    for path in outputs:
        if files.count(os.path.realpath(path)) > 1:
            raise ConfigError(f"{path} is named twice; every file that is read or written needs a name of its own")
    if cfg.hardest is not None:
        spec: EvaluationSpec = component(cfg.evaluation)
        check_hardest(cfg.hardest, cfg.hardest_by, score_names(of_queries(spec.scores)))


def hardest(result: Evaluated, *, count: int, metric: str) -> list[HardQuery]:
    """The queries of an evaluation with the lowest scores (see ``hardest_queries``)."""
    return hardest_queries(
        result.queries, result.gallery, result.evaluation, count=count, metric=metric,
        tile_bytes=result.spec.tile_bytes, distance=result.distance,
    )  # fmt: skip


def _evaluate_file(cfg: DictConfig) -> Evaluated:
    spec: EvaluationSpec = component(cfg.evaluation)
    stored = read_embeddings(cfg.embeddings, cfg.labels, gallery=cfg.gallery, gallery_labels=cfg.gallery_labels)
    distance = _distance_of_file(cfg, stored)
    evaluation = evaluate(stored.queries, stored.gallery, spec, distance=distance)
    return Evaluated(str(cfg.embeddings), stored.queries, stored.gallery, spec, evaluation, distance=distance)


def _distance_of_file(cfg: DictConfig, stored: StoredEmbeddings) -> BaseDistance | None:
    """What compares the rows of a file; None is the distance of unit vectors."""
    if cfg.model is None:
        if own := stored.metadata.get(OWN_DISTANCE):
            raise RunError(
                f"{cfg.embeddings} is compared by {own} of {stored.metadata.get('model')}, not as unit vectors; name "
                "that model with model=<run directory or exported folder>"
            )
        return None
    model = load(cfg.model, device="cpu")
    if stored.queries.rows.shape[1] != model.embedding_size:
        raise RunError(
            f"{cfg.embeddings} has rows of {stored.queries.rows.shape[1]} numbers, {cfg.model} makes "
            f"{model.embedding_size}; name the model that made them"
        )
    return model.network.distance if model.has_own_distance else None


def _evaluate_run(cfg: DictConfig) -> Evaluated:
    run_dir = Path(cfg.run)
    result = read_result(run_dir)
    require_tested(run_dir, result)
    stored = result["metrics"]["test"]
    spec: EvaluationSpec = component(cfg.evaluation)
    warned = tuple(cautions({**result, "search": spec.search}))
    if not cfg.from_checkpoint:
        require_own_files(run_dir, result)
        kept = load_embeddings(run_dir / EMBEDDINGS)
        distance = distance_of_run(run_dir)
        evaluation = evaluate(kept.queries, kept.gallery, spec, distance=distance)
        table = None
        if cfg.per_class is not None or cfg.hardest is not None:
            try:
                table = table_of_run(run_dir, result)
            except (DataError, RunError) as error:
                log.warning("ids and labels stay without names: %s", error)
        return Evaluated(str(run_dir), kept.queries, kept.gallery, spec, evaluation, stored, table, distance, warned)
    set_strict_float32()
    asked = OmegaConf.to_container(cfg.evaluation, resolve=True)  # whose values are this command's own keys
    again = {} if cfg.rerank is None else {"rerank": OmegaConf.to_container(cfg.rerank, resolve=True)}
    trained = load_run(run_dir, {"num_workers": cfg.num_workers, "evaluation": asked, **again}, device=cfg.device)
    assert trained.data.split.test is not None
    queries, gallery, evaluation = trained.test(trained.data.split.test)
    table, distance = trained.data.table, trained.rerank or trained.model.distance
    if trained.rerank is not None:
        warned = tuple(cautions({**result, "search": spec.search, "rerank": trained.rerank.description}))
    return Evaluated(str(run_dir), queries, gallery, spec, evaluation, stored, table, distance, warned)
