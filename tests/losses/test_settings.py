"""What losses, miners and regularizers reject; the objective: its precision, and regularizers beside the loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor, nn

from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.diva import Diva
from dmlbench.losses.diva_regularizers import PartDecorrelation, SelfSimilarity
from dmlbench.losses.initialization import init_class_vectors
from dmlbench.losses.layered import LayeredProxyAnchor
from dmlbench.losses.libc import Libc
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.metrix import Metrix
from dmlbench.losses.miners import DistanceWeighted, RandomPositiveHardestNegative, SwitchedNegatives
from dmlbench.losses.multi_similarity_oodml import MultiSimilarityOodml
from dmlbench.losses.objective import Objective
from dmlbench.losses.prototype_reconstruction import ReconstructionRegularizer, RecursiveRegularizer
from dmlbench.losses.proxy_anchor import ProxyAnchor
from dmlbench.losses.proxy_nca import ProxyNca
from dmlbench.losses.recall_at_k import RecallAtKSurrogate
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.losses.s2sd import SimilaritySelfDistillation
from dmlbench.losses.soft_triple import SoftTriple
from dmlbench.losses.uniform_prior import UniformPrior
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.losses.xml import CrossBatchRegularizer
from dmlbench.losses.zero_shot import ZeroShotRegularizer
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.types import ConfigError, ModelOutput

Make = Callable[..., object]
PAIRS = losses.ContrastiveLoss()
DISTANCE = AvslDistance(3, 4, top_k=2)


def s2sd(weight: float, **settings: Any) -> SimilaritySelfDistillation:
    return SimilaritySelfDistillation(weight, 8, lambda _: Objective(PAIRS), **settings)


SETTINGS: list[tuple[Make, tuple[Any, ...], dict[str, list[Any]]]] = [
    (ContrastiveC1, (), {"neg_margin": [1.0], "tolerance": [1.0]}),
    (CrossBatchMemory, (ContrastiveC1(), 6), {"memory_size": [0]}),
    (CrossBatchMemory, (ContrastiveC1(), 6, 10), {"weight": [0.0], "start_step": [-1]}),
    (Diva, (4,), {"embedding_size": [10]}),
    (Diva, (4, 8), {"intra_weight": [-1], "margin": [-1]}),
    (DistanceWeighted, (), {"cutoff": [0, 2]}),
    (init_class_vectors, (torch.empty(2, 2),), {"init": ["glorot"]}),
    (init_class_vectors, (torch.empty(2, 2), "normal"), {"init_std": [None, 0.0]}),
    (init_class_vectors, (torch.empty(2, 2), "he_normal"), {"init_std": [0.1]}),
    (LayeredProxyAnchor, (4, DISTANCE), {"level_weights": [(1.0, 1.0), (0.0, 0.0, 0.0)], "alpha": [0.0]}),
    (Libc, (4, 8), {"num_layers": [0], "num_heads": [0, 3], "dropout": [1.0], "label_smoothing": [-0.1],
                    "temperature": [0.0, torch.inf], "refined_weight": [-1.0], "backbone_weight": [torch.inf]}),
    (MarginOodml, (4,), {"beta": [0.0], "margin": [-0.1], "nu": [-1.0]}),
    (Metrix, (PAIRS,), {"pairs": [[]], "weight": [0.0], "alpha": [0.0], "num_hard_negatives": [0]}),
    (MultiSimilarityOodml, (), {"alpha": [0.0], "beta": [torch.inf], "epsilon": [-0.1]}),
    (PartDecorrelation, (1.0,), {"embedding_size": [6]}),
    (PartDecorrelation, (1.0, 8), {"hidden_size": [0]}),
    (ProxyAnchor, (4, 4), {"alpha": [0.0, torch.nan], "margin": [1.0]}),
    (ProxyNca, (4, 4), {"softmax_scale": [0.0], "proxy_std": [0.0]}),
    (RandomPositiveHardestNegative, (), {"cutoff": [-1]}),
    (RecallAtKSurrogate, (), {"k": [(), (0, 1)], "k_temperatures": [(1,), (1, 2, 4, 8, 0)], "rank_temperature": [0.0]}),
    (ReconstructionRegularizer, (), {"weight": [0.0, -1.0]}),
    (RecursiveRegularizer, (0.1, 5, 4), {"forgetting": [0.0, 1.5], "ridge": [torch.nan]}),
    (s2sd, (), {"weight": [-1.0]}),
    (s2sd, (0.5,), {"sizes": [(), (4, 0)], "distillation_weight": [-1.0], "feature_weight": [-1.0],
                    "feature_delay": [-1], "temperature": [0.0]}),
    (SelfSimilarity, (1.0, 8), {"queue_size": [0], "temperature": [0], "key_momentum": [1.1], "farthest": [2.5]}),
    (SoftTriple, (4, 4), {"centers_per_class": [0], "la": [0.0], "tau": [-1.0]}),
    (SwitchedNegatives, (miners.TripletMarginMiner(),), {"switch_probability": [1.5]}),
    (UniformPrior, (0.1, 6), {"chunk_size": [0, 4], "hidden_size": [0], "discriminator_interval": [0]}),
    (CrossBatchRegularizer, (0.1,), {"ridge": [-0.5], "num_splits": [-1]}),
    (ZeroShotRegularizer, (0.1, 4, 4), {"ridge": [0.0], "softmax_scale": [-1.0], "num_splits": [0]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "arguments", "name", "value"),
    [(make, given, name, x) for make, given, settings in SETTINGS for name, values in settings.items() for x in values],
)
def test_settings_out_of_range_are_named(make: Make, arguments: tuple[Any, ...], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make(*arguments, **{name: value})


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.tensor([0, 0, 1, 1])


def add(*weights: float, **named: nn.Module) -> Objective:
    parts = {f"r{i}": ReconstructionRegularizer(weight) for i, weight in enumerate(weights)}
    return Objective(PAIRS, regularizers={**parts, **named})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: add(0.5, 0.5), "a sum of 1, expected below 1.*mixing=add"),
        (lambda: Objective(PAIRS, mixing="sum"), "regularizer.mixing 'sum' is unknown"),  # type: ignore[arg-type]
        (lambda: add(dml=ReconstructionRegularizer(0.5)), "got the name 'dml'"),
        (lambda: add(a=PAIRS), r"regularizer\.a: got ContrastiveLoss"),
        (lambda: add(a=SelfSimilarity(0.1, 8), b=SelfSimilarity(0.1, 8, key_momentum=0.99)), "key_momentum: got"),
        (
            lambda: add(zsr=ZeroShotRegularizer(0.1, 8, 4)).check_labels(torch.tensor([0, 9])),
            r"regularizer\.zsr\.num_classes: got 8",
        ),
        (
            lambda: Objective(losses.MultiSimilarityLoss(), SwitchedNegatives(DistanceWeighted())),
            "negative pairs within a class",
        ),
        (lambda: SwitchedNegatives(miners.MultiSimilarityMiner())(*batch()), "returns pairs"),
        (lambda: ProxyAnchor(4, 8)(*batch(), (torch.tensor([0]),) * 3), "Set miner=null"),
        (lambda: Libc(4, 8)(torch.ones(1, 8), torch.tensor([0])), "got a batch of 1 image, expected at least 2"),
        (lambda: Diva(4, 8)(torch.ones(4, 8), torch.arange(4)), "Raise sampler.images_per_class"),
        (lambda: Diva(4, 8, shared="across_classes")(*batch()), "got 2 classes in a batch, expected at least 3"),
        (lambda: CrossBatchMemory(ContrastiveC1(), 8, 3).observe(*batch(), step=1), "memory_size: got 3"),
        (lambda: CrossBatchMemory(Diva(4, 8), 8, 16), "cannot compare a batch with a memory"),
        (lambda: Metrix(Diva(4, 8)), "Metrix does not support Diva"),
        (lambda: Metrix(ProxyAnchor(2, 3), variant="official"), "Set loss.variant=paper"),
        (lambda: Metrix(losses.ContrastiveLoss(distance=distances.LpDistance(p=1))), "got LpDistance"),
        (lambda: Metrix(losses.ContrastiveLoss(reducer=reducers.PerAnchorReducer())), "PerAnchorReducer"),
        (lambda: ZeroShotRegularizer(0.1, 4, 4, num_splits=2, halves="alternate"), "num_splits: got 2, expected 1"),
    ],
)
def test_what_does_not_compose_names_a_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_prototypes_of_another_size_are_named() -> None:
    z, y = torch.rand(4, 6), torch.randn(4, 4)
    regularizer = RecursiveRegularizer(0.1, 5, 4)
    with pytest.raises(ConfigError, match=r"got \(5, 4\), expected the pooling's \(6, 4\)"):
        regularizer(ModelOutput(y, {"histogram": z, "pooled": y}), torch.arange(4), lambda *_: torch.zeros(()))


def test_objective_leaves_autocast() -> None:
    embeddings, labels = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(8) // 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Objective(PAIRS)(ModelOutput(embeddings), labels, step=1)["loss"]
    assert inside.dtype == torch.float32
    assert torch.equal(inside, Objective(PAIRS)(ModelOutput(embeddings.float()), labels, step=1)["loss"])


class Mean(Regularizer):
    requires = ("histogram",)

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        return output.side["histogram"].mean() + dml_loss(2 * output.embedding, labels)


class Sum(nn.Module):
    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        return embeddings.sum()


@pytest.mark.parametrize(("mixing", "share"), [("convex", 0.75), ("add", 1.0)])
def test_regularizers_take_part_as_soon_as_their_side_outputs_are_there(
    mixing: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    objective = Objective(Sum(), None, {"mean": Mean(0.25)}, mixing=mixing)
    embeddings, labels = torch.ones(2, 3), torch.tensor([0, 1])
    assert objective(ModelOutput(embeddings), labels, step=1) == {"loss": 6, "dml": 6}
    with caplog.at_level("INFO"):
        parts = objective(ModelOutput(embeddings, {"histogram": torch.full((2, 4), 8.0)}), labels, step=2)
    assert parts == {"loss": share * 6 + 0.25 * (8 + 12), "dml": 6, "mean": 20}
    assert "step 2: regularizer 'mean' is now active" in caplog.text


def test_parameters_of_a_regularizer_that_has_not_started_decay() -> None:
    """GSP's code adds decay to the zero gradient of ZSR's label embeddings (gradient_transformers.py:61-67)."""
    zsr = ZeroShotRegularizer(0.1, 4, 3)
    before = zsr.label_embeddings.detach().clone()
    objective = Objective(Sum(), None, {"zsr": zsr})
    embeddings = torch.ones(2, 3, requires_grad=True)
    parts = objective(ModelOutput(embeddings), torch.tensor([0, 1]), step=1)
    assert parts["loss"] == parts["dml"] == 6
    parts["loss"].backward()
    torch.optim.SGD(zsr.parameters(), lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(zsr.label_embeddings.detach(), 0.95 * before)
