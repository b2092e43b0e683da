"""The objects of a run and what they do together; ``build.py`` makes them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.distances import BaseDistance
from torch.optim import Optimizer

from dmlbench.data.batches.loaders import EvalBatches, TrainBatches
from dmlbench.data.batches.transforms import Transform
from dmlbench.data.images.feature_cache import FeatureView
from dmlbench.data.images.sources import ImageSource
from dmlbench.data.protocols import Protocol
from dmlbench.evaluation.embeddings.embed import embed
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.losses.objective import Objective
from dmlbench.models.closed_form import Moments
from dmlbench.models.net import MetricModel, PooledModel
from dmlbench.ranks import ONE, Ranks
from dmlbench.runtime import autocast, network_pass, shows_progress
from dmlbench.training.fit import FitSettings
from dmlbench.training.log import Logger
from dmlbench.training.nearest_images import draw_nearest, nearest_images
from dmlbench.training.stage_plan import Plan
from dmlbench.types import EmbeddingSet, ImageTable, IntArray, RetrievalSet, Split

Images = ImageSource | torch.Tensor


@dataclass(frozen=True)
class Data:
    """A data set under a protocol: the images, who trains and who is tested, and the classes renumbered from 0."""

    table: ImageTable
    split: Split
    class_index: IntArray  # [num_classes of the table], -1 for classes that are not trained on


@dataclass(frozen=True)
class Setup:
    """Data, model and evaluation, shared by training and applications."""

    data: Data
    images: Images | FeatureView  # what batches for evaluation read: opened for ``transform``, or features of the cache
    open_images: Callable[[str], Images]  # the images themselves, for the transform "train" or "eval"
    transform: Transform
    model: MetricModel
    rerank: BaseDistance | None  # of the first neighbors of the test
    settings: FitSettings
    spec: EvaluationSpec
    choices: dict[str, str]  # the chosen option of each group
    device: torch.device
    eval_batch_size: int  # another number moves embeddings by about 1e-6
    num_workers: int | None  # processes that read ahead; None: the loader decides
    ranks: Ranks = ONE  # they embed a part each; the first one scores

    def batches(self, rows: IntArray) -> EvalBatches:
        """Table rows as batches without augmentation."""
        return EvalBatches(
            self.data.table, rows, images=self.images, transform=self.transform, batch_size=self.eval_batch_size,
            device=self.device, num_workers=self.num_workers,
        )  # fmt: skip

    def embed(
        self, part: RetrievalSet, rows_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[EmbeddingSet, EmbeddingSet | None]:
        """Queries and, where it is a set of its own, the gallery; ``rows_of`` images are the embeddings by default."""
        self.model.eval()
        formatted = network_pass(
            rows_of or (lambda images: self.model(images).embedding), self.device, self.settings.precision,
            channels_last=self.settings.channels_last,
        )  # fmt: skip

        def embedded(rows: IntArray, describe: str) -> EmbeddingSet:
            own, progress = rows[self.ranks.rows_of_batches(len(rows), self.eval_batch_size)], shows_progress()
            found = embed(
                formatted, self.batches(own), device=self.device, progress=progress, count=len(own), describe=describe
            )
            return self.ranks.all_embeddings(found, len(rows), self.eval_batch_size)

        queries = embedded(part.query, "queries")
        return queries, None if part.gallery is None else embedded(part.gallery, "gallery")

    def test(
        self, part: RetrievalSet, spec: EvaluationSpec | None = None
    ) -> tuple[EmbeddingSet, EmbeddingSet | None, Evaluation]:
        """Queries, gallery and their scores in a test: with a ``rerank``, rows have cells and lists are reranked."""
        queries, gallery = self.embed_test(part)
        return queries, gallery, self.score(queries, gallery, spec, self.rerank)

    def embed_test(self, part: RetrievalSet) -> tuple[EmbeddingSet, EmbeddingSet | None]:
        """``embed``, with cells where a ``rerank`` needs them."""
        rows_of = None
        if self.rerank is not None:
            model: Any = self.model  # which has cells: ``build_rerank`` has asked
            rows_of = functools.partial(model.rows_with_cells, grid_size=int(self.rerank.grid_size))
        return self.embed(part, rows_of)

    def score(
        self, queries: EmbeddingSet, gallery: EmbeddingSet | None, spec: EvaluationSpec | None = None,
        distance: BaseDistance | None = None,
    ) -> Evaluation:  # fmt: skip
        """Scores by a distance, None is the model's."""
        distance = distance or self.model.distance
        return evaluate(queries, gallery, spec or self.spec, distance=distance, progress=shows_progress())

    def validate(
        self, watch: Callable[[EmbeddingSet, EmbeddingSet | None], None] = lambda queries, gallery: None
    ) -> dict[str, float]:
        """Scores of the weights of now on the validation set, whose embeddings ``watch`` is shown.

        Clustering costs more than a ranking: it is left out unless the run is selected by it.
        """
        assert self.data.split.val is not None
        kept = [s.name for s in self.spec.scores if s.metric.is_of_queries or s.name == self.settings.monitor]
        queries, gallery = self.embed(self.data.split.val)
        watch(queries, gallery)
        scored = self.ranks.is_first
        scores = self.score(queries, gallery, self.spec.replaced(metrics=tuple(kept))).scores if scored else {}
        return self.ranks.same(scores)

    def nearest_picture(self, queries: EmbeddingSet, gallery: EmbeddingSet | None) -> NDArray[np.uint8]:
        """A few queries of the sets and the images nearest to them, as evaluation sees them: [H, W, 3]."""

        def images(rows: IntArray) -> NDArray[np.uint8]:
            batches = replace(self, num_workers=0, images=self.open_images("eval")).batches(rows)
            return torch.cat([batch.images.cpu() for batch in batches]).permute(0, 2, 3, 1).numpy()

        found = nearest_images(queries, gallery, distance=self.model.distance, tile_bytes=self.spec.tile_bytes)
        return draw_nearest(*found, images)

    @torch.no_grad()
    def fit_head(self) -> None:
        """Fit a closed-form head to the training images, as evaluation sees them."""
        model = self.model
        if not isinstance(model, PooledModel) or model.projection.closed_form is None:
            return
        num_classes = int(self.data.class_index.max()) + 1
        model.projection.check_closed_form(num_classes)
        moments = Moments(model.projection.in_features, num_classes)
        model.eval()
        for batch in self.batches(self.data.split.train):
            with autocast(self.device, self.settings.precision):
                rows = model.projection_inputs(batch.images.to(self.device))
            labels = torch.from_numpy(self.data.class_index)[batch.labels]
            moments.add(rows, labels.repeat_interleave(len(rows) // len(labels)))  # a pooling may have several vectors
        model.projection.fit(moments)


@dataclass(frozen=True)
class Experiment:
    """A run's setup and training.

    Attributes:
        provenance: of the configuration in ``result.json``: coordinates, seeds, hashes, recipe, values of all keys
            ``variant`` (which choose between a paper and its public code), SHA-256 of weights and user code.
    """

    setup: Setup
    protocol: Protocol
    plan: Plan | None  # of stage 1, which this training follows
    batches: TrainBatches  # endless
    objective: Objective
    optimizer: Optimizer
    schedule: Any
    loggers: list[Logger]
    image_size: tuple[int, int]  # height and width of training images
    steps_per_epoch: int  # optimizer steps of the sampler's epoch
    provenance: dict[str, Any]
    configuration: str  # resolved, as YAML
