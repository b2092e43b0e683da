"""Few-shot adaptation of finished runs: the projection is adapted to k images of each test class, the support.

The other test images are the queries. The support is not augmented (the public code draws random crops of it).

Source: Milbich et al., NeurIPS 2021, section 4.5; settings of its public code (OOD-Study_FewShot.sh,
utilities/finetune_utils.py: 1,000 steps for 2 shots, 1,500 for 5, ten times the rate of the training, no decay).
"""

import contextlib
import copy
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dmlbench.apps.loading import config_with_weights, load_run, require_unit_vectors
from dmlbench.components import component, imported
from dmlbench.config import read_config
from dmlbench.data.batches.samplers import RepeatingClassBatchSampler
from dmlbench.evaluation.embeddings.embed import check_finite
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.registry import of_queries
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.experiment import Setup
from dmlbench.losses.diva import Diva
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import distance_weighted_triplets
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.base import Pooling
from dmlbench.models.projection import Projection
from dmlbench.oodml.episodes import OfficialEpisodes, check_shots, drawn_support
from dmlbench.results.store import CONFIG, kept_of, read_result, require_own_files, require_tested
from dmlbench.runtime import Precision, autocast, derive_seed, single_threaded_torch, write_json
from dmlbench.training.fit import BEST
from dmlbench.training.optim import OptimizerSettings, make_optimizer
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError, check_at_least, check_positive

FEW_SHOT = "few_shot.json"
"""Scores of a run's episodes, with the hash of its weights."""
_SCHEMA = 1
_STEPS, _STEPS_OF_MANY_SHOTS, _MANY_SHOTS = 1000, 1500, 5
"""Of 2 and 5 shots in the public code, OOD-Study_FewShot.sh."""


@dataclass(frozen=True)
class Adaptation:
    """Adam on the margin loss with fixed boundaries and distance-weighted negatives.

    Attributes:
        batch_size: at most; 112 in the public code.
        beta: boundary of the margin loss, which the public code does not train here.
    """

    steps: int
    lr: float
    weight_decay: float
    batch_size: int = 112
    images_per_class: int = 2
    beta: float = 1.2
    margin: float = 0.2

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps)
        check_positive(lr=self.lr)
        check_at_least(2, images_per_class=self.images_per_class)
        check_at_least(2 * self.images_per_class, batch_size=self.batch_size)


@dataclass(frozen=True)
class FewShotPlan:
    """Settings for all runs.

    Attributes:
        steps: None is 1,000, from 5 shots on 1,500 (public code).
        beta: None is the run's initial boundary, 1.2 for losses without one (public code).
        lr_factor: learning rate over that of the run's head.
        weight_decay: None is the run's.
        official: published episodes; None draws own ones.
        memory_bytes: limit of the cached features.
    """

    shots: tuple[int, ...]
    episodes: int
    spec: EvaluationSpec
    steps: int | None = None
    batch_size: int = 112
    images_per_class: int = 2
    beta: float | None = None
    margin: float = 0.2
    lr_factor: float = 10.0
    weight_decay: float | None = 0.0
    official: OfficialEpisodes | None = None
    memory_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        check_at_least(1, episodes=self.episodes)
        if not self.shots:
            raise ConfigError("shots: got an empty list, expected numbers such as shots=2,5,10.")
        if others := [score.name for score in self.spec.scores if score not in of_queries(self.spec.scores)]:
            raise ConfigError(f"metric: got '{others[0]}', expected a metric of rankings.")
        if self.spec.shortlist is not None:
            raise ConfigError(
                f"shortlist: got {self.spec.shortlist}, expected null, because the run compares unit vectors."
            )

    def adaptation(self, trained_by: OptimizerSettings, boundary: float, shots: int) -> Adaptation:
        lr = trained_by.lr * trained_by.lr_multipliers.get("head", 1.0) * self.lr_factor
        decay = trained_by.weight_decay if self.weight_decay is None else self.weight_decay
        beta = boundary if self.beta is None else self.beta
        steps = self.steps
        if steps is None:
            steps = _STEPS if shots < _MANY_SHOTS else _STEPS_OF_MANY_SHOTS
        return Adaptation(steps, lr, decay, self.batch_size, self.images_per_class, beta, self.margin)


def initial_boundary(loss: Mapping[str, Any]) -> float:
    """Initial boundary of a run's margin loss; 1.2 for losses without boundaries.

    Source: ooDML's code reads --loss_margin_beta of the training command, whose default is 1.2 (parameters.py), when it
    adapts (utilities/finetune_utils.py); S2SD was trained with 0.6 (OOD-Study_FewShot.sh).
    """
    has_boundaries = issubclass(imported(loss["_target_"], "loss"), (MarginOodml, Diva))
    return float(loss["beta"]) if has_boundaries else Adaptation.beta


@dataclass(frozen=True)
class Compared:
    """Scores [episodes] of a run by name, before (zero-shot) and after (few-shot) adaptation."""

    zero_shot: Mapping[str, Sequence[float]]
    few_shot: Mapping[str, Sequence[float]]

    def gains(self, score: str) -> list[float] | None:
        """(few-shot - zero-shot) / zero-shot of each episode; None where a zero-shot score is 0."""
        pairs = list(zip(self.zero_shot[score], self.few_shot[score], strict=True))
        return [(few - zero) / zero for zero, few in pairs] if all(zero for zero, _ in pairs) else None


@dataclass(frozen=True)
class CachedFeatures:
    """Features of a run's images in main memory, from which a projection makes embeddings.

    Attributes:
        values: [N, C] if the projection follows the pooling, else the last maps [N, C, H, W].
        pooling: of the maps; None if ``values`` are vectors.
        batch_size: images whose embeddings are computed at once without gradients.
    """

    values: Tensor
    pooling: Pooling | None
    projection: Projection
    device: torch.device
    precision: Precision
    batch_size: int

    def embeddings(self, positions: Tensor, projection: Projection) -> Tensor:
        """Embeddings [B, D] float32 of the images at ``positions`` [B], with gradients to the projection."""
        values = self.values[positions].to(self.device)
        with autocast(self.device, self.precision):
            rows: Tensor = projection(values) if self.pooling is None else self.pooling(values, projection).embedding
        return projection.finished(rows.to(torch.float32))

    @torch.no_grad()
    def all_embeddings(self, projection: Projection) -> Tensor:
        """Embeddings [N, D] of all images, in main memory."""
        parts = torch.arange(len(self.values)).split(self.batch_size)
        return torch.cat([self.embeddings(part, projection).cpu() for part in parts])


@torch.no_grad()
def cache_features(setup: Setup, rows: IntArray, *, memory_bytes: int, describe: str) -> CachedFeatures:
    """Pass images through the network once: pooled features, or maps if the pooling projects before it pools.

    Args:
        setup: a run with a linear head, in evaluation mode.
        rows: [N] of its table.
        memory_bytes: limit of the features.
        describe: the run, for messages.
    """
    model, precision = setup.model, setup.settings.precision
    assert isinstance(model, PooledModel)
    memory_format = torch.channels_last if setup.settings.channels_last else torch.contiguous_format
    values: Tensor | None = None
    pools_first, done = True, 0
    for batch in tqdm(setup.batches(rows), desc="features", disable=not sys.stderr.isatty(), leave=False):
        images = batch.images.to(setup.device).contiguous(memory_format=memory_format)
        with autocast(setup.device, precision):
            part = model.pooled_features(images) if pools_first else model.last_map(images)
            if part is None:
                pools_first, part = False, model.last_map(images)
        if values is None:
            needed = len(rows) * part[0].numel() * part.element_size()
            if needed > memory_bytes:
                what = "pooled features" if pools_first else f"maps for {type(model.pooling).__name__}"
                raise RunError(
                    f"{describe}: {what} of {len(rows):,} images need {needed / 2**30:.2f} GiB, memory_bytes allows "
                    f"{memory_bytes / 2**30:.2f} GiB. Set memory_bytes={needed} or more."
                )
            values = torch.empty((len(rows), *part.shape[1:]), dtype=part.dtype)
        values[done : done + len(part)] = part.cpu()
        check_finite(values[done : done + len(part)].flatten(1), batch.ids, what=f"{describe}: features")
        done += len(part)
    assert values is not None and done == len(rows)
    pooling = None if pools_first else model.pooling
    return CachedFeatures(values, pooling, model.projection, setup.device, precision, setup.eval_batch_size)


def adapt(
    features: CachedFeatures, support: IntArray, labels: IntArray, adaptation: Adaptation, *, seed: int
) -> Projection:
    """Train a copy of the projection on the support: positions [S] in ``features`` with labels [S].

    The seed is that of batches and triplets; nothing else is random.
    """
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ConfigError(f"support: got {len(names)} class, expected at least two.")
    device = features.device
    projection = copy.deepcopy(features.projection).requires_grad_(True)
    loss = MarginOodml(len(names), margin=adaptation.margin, beta=adaptation.beta, learn_beta=False).to(device)
    optimizer = make_optimizer(
        {"head": list(projection.named_parameters())},
        OptimizerSettings(partial(torch.optim.Adam, fused=True), adaptation.lr, adaptation.weight_decay),
        modules=(projection,),
    )
    batches = RepeatingClassBatchSampler(
        classes,
        classes_per_batch=min(adaptation.batch_size // adaptation.images_per_class, len(names)),
        images_per_class=adaptation.images_per_class,
        seed=derive_seed(seed, "batches"),
    )
    triplets = torch.Generator(device).manual_seed(derive_seed(seed, "triplets"))
    positions, of_class = torch.from_numpy(support), torch.from_numpy(classes)
    # Threads wait longer than they compute such small products, and one thread makes the result reproducible.
    with single_threaded_torch() if features.pooling is None else contextlib.nullcontext():
        for _ in range(adaptation.steps):
            rows = torch.from_numpy(next(batches).rows)
            batch_labels = of_class[rows]  # on the host, as loss and triplets want them
            embeddings = features.embeddings(positions[rows], projection)
            mined = distance_weighted_triplets(embeddings, batch_labels, generator=triplets)
            optimizer.zero_grad()
            loss(embeddings, batch_labels, mined).backward()
            optimizer.step()
    return projection.requires_grad_(False)


def few_shot_of_run(
    run_dir: Path, plan: FewShotPlan, *, device: str = "auto", num_workers: int | None = None
) -> dict[int, Compared]:
    """Score a run's episodes by number of shots; keep each in ``few_shot.json`` as soon as it is done.

    Everything random depends on the run's seed, the number of shots and the episode.
    """
    result = read_result(run_dir)
    bound = _bound_to(run_dir, result)
    config = read_config(run_dir / CONFIG)
    trained_by, boundary = component(config["optim"]), initial_boundary(config["loss"])
    drawn = None
    if plan.official is not None:
        drawn = {"sha256": plan.official.sha256, "merge_order": list(plan.official.merge_order)}
    adaptations, settings, keys = {}, {}, {}
    for shots in plan.shots:
        adaptations[shots] = plan.adaptation(trained_by, boundary, shots)
        # everything but the run and the episode that decides the scores
        settings[shots] = {"shots": shots, **asdict(adaptations[shots]), "official": drawn}
        digest = hashlib.sha256(json.dumps(settings[shots], sort_keys=True).encode()).hexdigest()
        keys[shots] = f"{shots}-{digest[:12]}"
    held = kept_of(run_dir / FEW_SHOT, bound, "adaptations", schema=_SCHEMA)
    names = set(plan.spec.score_names)
    missing = [
        (shots, episode)
        for shots in plan.shots
        for episode in range(plan.episodes)
        if not names <= set(held.get(keys[shots], {}).get("episodes", {}).get(str(episode), {}).get("few_shot", {}))
    ]
    if missing:
        setup = load_run(run_dir, {"num_workers": num_workers}, device=device)
        loaded = _Loaded(run_dir, setup, plan, seed=result["seed"])
        for shots, episode in tqdm(missing, desc=run_dir.name, disable=None, unit="episode"):
            scores = loaded.episode(shots, episode, adaptations[shots])
            held = kept_of(run_dir / FEW_SHOT, bound, "adaptations", schema=_SCHEMA)  # others may have added some
            kept = held.setdefault(keys[shots], {"settings": settings[shots]})
            of_episode = kept.setdefault("episodes", {}).setdefault(str(episode), {})
            for kind, found in scores.items():
                of_episode[kind] = of_episode.get(kind, {}) | found
            write_json(run_dir / FEW_SHOT, {"schema": _SCHEMA, **bound, "adaptations": held})
    return {shots: _compared(held[keys[shots]]["episodes"], plan) for shots in plan.shots}


def _compared(episodes: Mapping[str, Any], plan: FewShotPlan) -> Compared:
    found = [episodes[str(episode)] for episode in range(plan.episodes)]
    zero, few = (
        {name: [float(scores[kind][name]) for scores in found] for name in plan.spec.score_names}
        for kind in ("zero_shot", "few_shot")
    )
    return Compared(zero, few)


class _Loaded:
    """A run's test images as inputs of its projection, and their scores."""

    def __init__(self, run_dir: Path, setup: Setup, plan: FewShotPlan, *, seed: int) -> None:
        self.run_dir, self.setup, self.plan, self.seed = run_dir, setup, plan, seed
        test = setup.data.split.test
        if test is None or test.gallery is not None:
            raise RunError(f"{run_dir}: expected a test set without a separate gallery.")
        self.rows = test.query
        self.labels: IntArray = setup.data.table.labels[self.rows]
        check_shots(self.labels, plan.shots, setup.data.table.class_names)
        # all at once, so that errors in a file of episodes come before the images are read
        self.support = {(k, e): self._support(k, e) for k in plan.shots for e in range(plan.episodes)}

    @cached_property
    def features(self) -> CachedFeatures:
        return cache_features(self.setup, self.rows, memory_bytes=self.plan.memory_bytes, describe=str(self.run_dir))

    @cached_property
    def unadapted(self) -> torch.Tensor:
        return self.features.all_embeddings(self.features.projection)

    def _support(self, shots: int, episode: int) -> IntArray:
        if self.plan.official is not None:
            return self.plan.official.support(self.setup.data.table, self.rows, shots=shots, episode=episode)
        return drawn_support(self.labels, shots=shots, seed=self.seed, episode=episode)

    def episode(self, shots: int, episode: int, adaptation: Adaptation) -> dict[str, dict[str, float]]:
        """Zero-shot and few-shot scores of one episode's queries."""
        support = self.support[shots, episode]
        episode_seed = derive_seed(self.seed, "few_shot", shots, episode)
        adapted = adapt(self.features, support, self.labels[support], adaptation, seed=episode_seed)
        queries = np.setdiff1d(np.arange(len(self.rows)), support)
        return {
            "zero_shot": self._scores(self.unadapted, queries),
            "few_shot": self._scores(self.features.all_embeddings(adapted), queries),
        }

    def _scores(self, rows: torch.Tensor, queries: IntArray) -> dict[str, float]:
        ids, labels = torch.from_numpy(self.rows[queries]), torch.from_numpy(self.labels[queries])
        return evaluate(EmbeddingSet(rows[torch.from_numpy(queries)], labels, ids), None, self.plan.spec).scores


def _bound_to(run_dir: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """Hash of the weights of a run that can be adapted."""
    require_tested(run_dir, result)
    if "rerank" in result:
        raise RunError(f"{run_dir} uses rerank, which episodes do not support. Name the same run without rerank.")
    head: type[nn.Module] = imported(config_with_weights(run_dir)["head"]["_target_"], "head")
    if not issubclass(head, Projection):
        raise RunError(f"head of {run_dir}: got {head.__name__}, expected a linear layer.")
    require_unit_vectors(run_dir)
    return require_own_files(run_dir, result, (BEST,))
