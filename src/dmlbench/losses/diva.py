"""DiVA: margin losses of parts of the embedding, each with its own triplets."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.device_copies import to_device
from dmlbench.losses.base import WholeBatchLoss
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import Triplets, drawn_by_distance, drawn_evenly
from dmlbench.types import ConfigError, check_at_least

PARTS = ("discriminative", "shared", "self_similarity", "intra")  # of an embedding, equal in size, in their order


def unit_parts(embeddings: Tensor) -> dict[str, Tensor]:
    """Each part of embeddings [B, D] as unit vectors [B, D / 4], by name."""
    return dict(zip(PARTS, normalize(embeddings.unflatten(1, (len(PARTS), -1)), dim=2).unbind(1), strict=True))


def check_parts(embedding_size: int) -> int:
    """Dimensions of a part."""
    if embedding_size % len(PARTS):
        raise ConfigError(f"embedding_size: got {embedding_size}, expected a multiple of DiVA's {len(PARTS)} parts.")
    return embedding_size // len(PARTS)


class Diva(WholeBatchLoss):
    """Margin losses of three parts of the embedding, each with its own boundaries and triplets.

        margin(discriminative) + shared_weight * margin(shared) + intra_weight * margin(intra)

    with margin as of ``MarginOodml`` and the boundary that of the anchor's true class. Triplets:
        discriminative: as of ``miners.distance_weighted_triplets``.
        permuted: the same after the labels have been permuted over the batch.
        across_classes: for each image a negative as above and a positive of a third class, so that nothing separates
            classes.
        within_class: as many triplets as images, each of three images, repeated or not, of a class drawn evenly.

    The paper describes "across_classes" and "within_class"; its code's command lines have "permuted" and
    "within_class", the ooDML study's code "permuted" for both. The fourth part, self_similarity, and the decorrelation
    of parts are regularizers (``diva_regularizers``).

    Source: Milbich et al., DiVA: Diverse Visual Feature Aggregation for Deep Metric Learning, ECCV 2020;
    Confusezius/ECCV2020_DiVA_MultiFeature_DML e5713049, diva_main.py, batchminer/;
    CompVis/Characterizing_Generalization_in_DML 0c70f0ec, ood_diva_main.py.
    """

    labels_on_host = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        shared_weight: float = 0.3,
        intra_weight: float = 0.3,
        shared: Literal["permuted", "across_classes"] = "permuted",
        intra: Literal["within_class", "permuted"] = "within_class",
        margin: float = 0.2,
        beta: float = 1.2,
        learn_beta: bool = True,
        nu: float = 0.0,
    ) -> None:
        super().__init__()
        check_parts(embedding_size)
        check_at_least(0, shared_weight=shared_weight, intra_weight=intra_weight)
        self.num_classes = num_classes
        self.weights = {"discriminative": 1.0, "shared": shared_weight, "intra": intra_weight}
        self.kinds = {"discriminative": "labels", "shared": shared, "intra": intra}
        make = partial(MarginOodml, num_classes, margin=margin, beta=beta, learn_beta=learn_beta, nu=nu)
        self.margins = nn.ModuleDict({part: make() for part in self.kinds})

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        parts, values = unit_parts(embeddings), []
        for part, kind in self.kinds.items():
            triplets = drawn_triplets(kind, parts[part], labels)
            values.append(self.weights[part] * self.margins[part](parts[part], labels, triplets))
        return torch.stack(values).sum()


def drawn_triplets(kind: str, rows: Tensor, labels: Tensor) -> Triplets:
    """Draw anchors, positives and negatives [T]; see ``Diva`` for the kinds, "labels" are the discriminative."""
    known, device = labels.cpu(), rows.device
    classes, counts = known.unique(return_counts=True)
    if len(classes) < 2 or counts.max() < 2:
        raise ConfigError(
            f"triplets: got {len(classes)} classes with at most {int(counts.max())} images each in a batch, expected "
            "at least 2 and 2. Raise sampler.images_per_class or sampler.classes_per_batch."
        )
    if kind == "within_class":
        chosen = classes[torch.randint(len(classes), (len(known),))]
        same = known[None, :] == chosen[:, None]  # [B, B]
        three = (torch.rand(3, *same.shape).masked_fill_(~same, -1)).argmax(2)
        anchor, positive, negative = (to_device(x, device) for x in three)
        return anchor, positive, negative
    if kind == "permuted":
        known = known[torch.randperm(len(known))]
    different = to_device(known[:, None] != known, device)
    negative = drawn_by_distance(rows.detach(), different)
    if kind == "across_classes":
        if len(classes) < 3:
            raise ConfigError(
                "shared=across_classes: got 2 classes in a batch, expected at least 3. Raise sampler.classes_per_batch."
            )
        labels = to_device(labels, device)
        third = different & (labels != labels[negative][:, None])
        return torch.arange(len(known), device=device), drawn_evenly(third), negative
    same = (known[:, None] == known).fill_diagonal_(False)
    anchor, positive = (to_device(x, device) for x in (same.any(1).nonzero()[:, 0], drawn_evenly(same)))
    return anchor, positive[anchor], negative[anchor]
