"""What a composed configuration amounts to: initial values, epochs, decay and length, without images or weights.

Recipes are compared by these values with public code, since equal settings in YAML may still train differently.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from composed import composed
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench import build
from dmlbench.components import component
from dmlbench.data.image_table import Listing, table_of
from dmlbench.experiment import Data
from dmlbench.losses.objective import Objective
from dmlbench.models.net import MetricModel
from dmlbench.runtime import seed_everything
from dmlbench.training.fit import FitSettings
from dmlbench.training.optim import frozen
from dmlbench.types import ImageTable

PUBLISHED = {
    "cub200": {"train": (5_864, 100), "test": (5_924, 100)},
    "cars196": {"train": (8_054, 98), "test": (8_131, 98)},
    "sop": {"train": (59_551, 11_318), "test": (60_502, 11_316)},
    "cub200_2010": {"train": (2_990, 100), "test": (3_043, 100)},
    "inshop": {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
}
"""Images and classes by role."""


@functools.cache
def published_table(name: str) -> ImageTable:
    """A data set's published counts without its images; classes of a role are as equal in size as they can be."""
    labels, roles, first = [], [], 0
    for role, (images, classes) in PUBLISHED[name].items():
        if role != "gallery":  # has the classes of the queries
            first = max(labels, default=-1) + 1
        labels += sorted(first + np.arange(images) % classes)
        roles += [role] * images
    names = [f"class_{c}" for c in range(max(labels) + 1)]
    paths = [f"{row}.jpg" for row in range(len(labels))]
    return table_of(Listing("", paths, np.array(labels), names, np.array(roles), name=name, digest="none"))


@dataclass(frozen=True)
class Effective:
    """Effective values of a run at its first step, with random weights.

    Attributes:
        batches: labels [B] of the first batches.
        rates, decays: learning rate and weight decay of each trained parameter by name.
        trained_in_warmup: names of the parameters that have gradients while ``fit.warmup_frozen`` is frozen.
        kmeans: settings of the clustering behind NMI.
    """

    model: MetricModel
    objective: Objective
    settings: FitSettings
    num_classes: int
    steps_per_epoch: int
    batches: tuple[Tensor, ...]
    rates: dict[str, float]
    decays: dict[str, float]
    trained_in_warmup: frozenset[str]
    kmeans: str
    deviations: tuple[str, ...]
    schedule: Any

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Initial values of all trained parameters by name; those of the objective begin with ``objective.``."""
        return {name: value.detach() for name, value in _named(self.model, self.objective).items()}

    @property
    def class_vectors(self) -> dict[str, Tensor]:
        """Those with a row, or an entry, for each class: proxies, centers, boundaries, label embeddings."""
        return {name: x for name, x in self.parameters.items() if x.shape[:1] == (self.num_classes,)}

    @property
    def mean_norms(self) -> dict[str, float]:
        """Mean length of the rows of each matrix in ``class_vectors``."""
        return {name: x.norm(dim=1).mean().item() for name, x in self.class_vectors.items() if x.ndim == 2}

    def anchors(self, size: int = 512, *, spread: float = 1.0) -> int:
        """Images of the first batch that the miner makes an anchor of, for random unit embeddings.

        Args:
            spread: standard deviation around one common direction; small values look like a network at its start.
        """
        labels = self.batches[0]
        rng = torch.Generator().manual_seed(0)
        rows = torch.randn(len(labels), size, generator=rng) * spread / size**0.5
        rows[:, 0] += 1.0
        assert self.objective.miner is not None
        return len(self.objective.miner(normalize(rows), labels)[0].unique())


def effective(*overrides: str, table: ImageTable | None = None, num_batches: int = 3) -> Effective:
    """Build what ``dmlbench train`` with these overrides would train, on a data set's published counts.

    Args:
        table: instead of the counts of the configured data set.
    """
    cfg = composed(*overrides)
    if "pretrained" in cfg.backbone:
        cfg.backbone.pretrained = False
    name = cfg.dataset.name
    cfg.dataset.table = {"_target_": "effective.given"}
    _tables.append(table or published_table(name))
    data = build.build_data(cfg)
    seed_everything(0)
    model = build.build_model(cfg)
    objective = build.build_objective(cfg, model)
    optimizer, schedule = build.build_optimizer(cfg, model, objective)
    settings = build.build_fit_settings(cfg)
    names = {id(parameter): name for name, parameter in _named(model, objective).items()}
    with frozen(settings.warmup_frozen, model, objective):
        in_warmup = frozenset(_named(model, objective))
    return Effective(
        model, objective, settings, cfg.runtime.num_classes, cfg.runtime.steps_per_epoch,
        _first_batches(cfg, data, num_batches),
        _by_name(names, optimizer.param_groups, "lr"), _by_name(names, optimizer.param_groups, "weight_decay"),
        in_warmup, component(cfg.evaluation).kmeans, tuple(cfg.runtime.recipe.get("deviations", ())),
        schedule,
    )  # fmt: skip


_tables: list[ImageTable] = []


def given() -> ImageTable:
    """The table that ``effective`` was last asked about, as the configuration's data set."""
    return _tables.pop()


def _named(model: MetricModel, objective: Objective) -> dict[str, torch.nn.Parameter]:
    found = dict(model.named_parameters()) | {f"objective.{name}": p for name, p in objective.named_parameters()}
    return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def _by_name(names: dict[int, str], groups: Sequence[dict[str, object]], key: str) -> dict[str, float]:
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


def _first_batches(cfg, data: Data, count: int) -> tuple[Tensor, ...]:
    labels = data.class_index[data.table.labels[data.split.train]]
    sampler = iter(component(cfg.sampler, labels=labels, seed=0))
    return tuple(torch.from_numpy(labels[next(sampler).rows]) for _ in range(count))
