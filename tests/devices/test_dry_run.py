"""Training steps on CUDA without a GPU: no tensor is left on the CPU, and what waits for the device is known."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml
from composed import composed
from devices.pretended_cuda import CUDA, moved, pretended_cuda
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from dmlbench import build
from dmlbench.components import component
from dmlbench.config import config_folder
from dmlbench.losses.objective import Objective
from dmlbench.models.net import features_of
from dmlbench.models.projection import Projection
from dmlbench.types import ModelOutput

# Of each wait that stays, why. Everything else that a training step computes waits for nothing.
PML_PAIRS = "pytorch-metric-learning lists pairs and triplets, whose number is known to the device alone"
PML_REDUCER = "pytorch-metric-learning averages over terms that it selects, or asks whether there are any"
PML_INDEX = "pytorch-metric-learning indexes by a list that it makes on the host"
MEMORY_PAIRS = "losses of pytorch-metric-learning take the pairs with a memory as lists"
MIXTURES = "reducers of pytorch-metric-learning average over all that they are given"
MINER = "miners of pytorch-metric-learning choose by what the device has computed, and draw from it"
STAY: Mapping[str, str] = {
    "loss_and_miner_utils.py get_all_pairs_indices: nonzero": PML_PAIRS,
    "loss_and_miner_utils.py get_all_triplets_indices_vectorized_method: nonzero": PML_PAIRS,
    "loss_and_miner_utils.py convert_to_triplets: nonzero": PML_PAIRS,
    "threshold_reducer.py element_reduction_helper: index": PML_REDUCER,
    "divisor_reducer.py sum_and_divide: _local_scalar_dense": PML_REDUCER,
    "generic_pair_loss.py _assert_either_pos_or_neg: _local_scalar_dense": PML_REDUCER,
    "supcon_loss.py _compute_loss: _local_scalar_dense": PML_REDUCER,
    "large_margin_softmax_loss.py get_target_mask: index_put_": PML_INDEX,
    "large_margin_softmax_loss.py compute_loss: index": PML_INDEX,
    "xbm.py memory_part: nonzero": MEMORY_PAIRS,
    "metrix.py _contrastive: nonzero": MIXTURES,
    "metrix.py _contrastive: index": MIXTURES,
    "xbm.py _without_own: index": MEMORY_PAIRS,
    "distance_weighted_miner.py mine: index": MINER,
    "loss_and_miner_utils.py get_random_triplet_indices: _unique2": MINER,
    "loss_and_miner_utils.py get_random_triplet_indices: nonzero": MINER,
    "loss_and_miner_utils.py get_random_triplet_indices: index": MINER,
    "loss_and_miner_utils.py get_random_triplet_indices: multinomial": MINER,
    "triplet_margin_miner.py mine: index": MINER,
    "multi_similarity_miner.py mine: nonzero": MINER,
}

CLASSES, SIZE, STEPS = 6, 16, 2
SMALL: Mapping[str, Mapping[str, Any]] = {
    "pooling": {"num_prototypes": 4, "memory_rows": 12, "num_centers": 4, "feature_size": 4, "num_slices": 4,
                "num_heads": 2, "attention_dim": 8, "num_filters": 8, "num_layers": 1, "start_step": 0},
    "loss": {"memory_size": 24, "start_step": 0},
    "head": {"level_size": 8, "top_k": 4},
    "regularizer": {"num_prototypes": 4, "embedding_size": SIZE, "chunk_size": 4, "sizes": [24, 32]},
}  # fmt: skip


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml") if path.stem != "none")


def option(group: str, name: str) -> dict[str, Any]:
    """An option of ``conf`` with those that it builds on, without composing a whole configuration."""
    own = yaml.safe_load((config_folder() / group / f"{name}.yaml").read_text("utf-8"))
    merged: dict[str, Any] = {}
    for base in own.pop("defaults", ()):
        if isinstance(base, str) and base != "_self_":
            merged |= option(group, base)
        elif isinstance(base, dict) and (key := next(iter(base))).startswith("/"):
            merged[key.partition("@")[2]] = option(group, base[key])
    return OmegaConf.to_container(OmegaConf.merge(merged, own))  # type: ignore[return-value]


def configuration(**options: str | dict[str, Any] | None) -> DictConfig:
    """Options by group, in small; of the rest the usual ones."""
    cfg = composed()
    cfg.runtime.update({"num_classes": CLASSES, "image_size": [32, 32], "num_channels": 8, "num_features": 8,
                        "map_size": [4, 5], "embedding_size": SIZE})  # fmt: skip
    cfg.head.out_features = SIZE
    for group, chosen in options.items():
        node = option(group, chosen) if isinstance(chosen, str) else chosen
        cfg[group] = None if node is None else _small(node, SMALL.get(group, {}))
    return cfg


def _small(node: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _small(v, sizes) if isinstance(v, dict) else sizes.get(k, v) for k, v in node.items()}


def batch_labels() -> Tensor:
    return torch.arange(12) % CLASSES


def objective_of(cfg: DictConfig) -> Objective:
    regularizers, mixing = build.build_regularizers(cfg)
    return Objective(component(cfg.loss), component(cfg.miner), regularizers, mixing=mixing)


def waits_of_loss(**options: str | dict[str, Any]) -> set[str]:
    """What training steps of an objective waited for."""
    objective = objective_of(configuration(**options)).train()
    torch.manual_seed(0)
    with pretended_cuda() as device:
        moved(objective)
        device.waits.clear()
        for step in range(1, STEPS + 1):
            embeddings = torch.randn(12, SIZE, device=CUDA, requires_grad=True)
            output = ModelOutput(embeddings, {"keys": torch.randn(12, SIZE, device=CUDA)})
            parts = objective(output, batch_labels(), step=step)
            assert parts.keys() == {"loss", "dml", *objective.regularizers}
            assert {x.device for x in parts.values()} == {CUDA}
            assert torch.isfinite(parts["loss"].detach().twin)
    return set(device.waits)


LOSSES = [name for name in names("loss") if "layered" not in name]
OF_PML = {name for name in LOSSES if option("loss", name)["_target_"].startswith("pytorch_metric_learning")}
OF_PML.add("metrix")  # which wraps one of them
OF_PAIRS = ("contrastive", "contrastive_c1", "margin", "margin_gsp", "margin_oodml", "multi_similarity", "supcon",
            "triplet")  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_loss(loss: str) -> None:
    waits = waits_of_loss(loss=loss)
    assert waits <= STAY.keys()
    if loss not in OF_PML and loss != "arcface":  # which is pytorch-metric-learning's in all but one function
        assert not waits


@pytest.mark.parametrize(("shared", "intra"), [("permuted", "permuted"), ("across_classes", "within_class")])
@pytest.mark.parametrize("shares", ["of_batch", "of_queue"])
def test_diva_with_keys(shared: str, intra: str, shares: str) -> None:
    others = option("regularizer", "diva")
    others["self_similarity"] |= {"queue_size": 20, "shares": shares}
    loss = option("loss", "diva") | {"shared": shared, "intra": intra}
    assert not waits_of_loss(loss=loss, regularizer=others)


@pytest.mark.parametrize("loss", OF_PAIRS)
def test_loss_with_a_memory(loss: str) -> None:
    waits = waits_of_loss(loss=option("loss", "xbm") | {"loss": option("loss", loss)})
    assert waits <= STAY.keys()
    assert not waits or loss != "contrastive_c1"


@pytest.mark.parametrize("pairs", ["positive_negative", "anchor_negative"])
@pytest.mark.parametrize("loss", ["contrastive", "multi_similarity", "proxy_anchor"])
def test_loss_with_mixtures(loss: str, pairs: str) -> None:
    node = option("loss", "metrix") | {"loss": option("loss", loss), "pairs": [pairs], "num_hard_negatives": 3}
    waits = waits_of_loss(loss=node)
    assert waits <= STAY.keys()
    assert not waits or loss != "proxy_anchor"
    assert loss == "contrastive" or not any(wait.startswith("metrix.py") for wait in waits)
    if loss != "proxy_anchor":
        assert waits_of_loss(loss=node, miner="multi_similarity") <= STAY.keys()


@pytest.mark.parametrize(
    ("miner", "loss"), [*((name, "triplet") for name in names("miner")), ("multi_similarity", "contrastive_c1")]
)
def test_miner(miner: str, loss: str) -> None:
    assert waits_of_loss(loss=loss, miner=miner) <= STAY.keys()


@pytest.mark.parametrize("miner", ["distance_weighted_oodml", "rho_distance_weighted"])
def test_miners_of_this_project_wait_for_nothing(miner: str) -> None:
    assert not waits_of_loss(loss="margin_oodml", miner=miner)


def poolings() -> list[str]:
    """One of those that differ in numbers alone, which are small here."""
    return sorted({str(_small(option("pooling", name), SMALL["pooling"])): name for name in names("pooling")}.values())


@pytest.mark.parametrize("pooling", poolings())
def test_pooling(pooling: str) -> None:
    cfg = configuration(pooling=pooling)
    module = component(cfg.pooling).train()
    channels = 8
    project = Projection(channels, module.input_width(SIZE))
    with pretended_cuda() as device:
        moved(nn.ModuleList([module, project]))
        device.waits.clear()
        for step in range(1, STEPS + 1):
            shape = (12, channels, 1, 1) if module.needs == "native" else (12, channels, 4, 5)
            maps = torch.rand(shape, device=CUDA, requires_grad=True)
            pooled = module(maps, project)
            module.observe(pooled, step=step)
            assert {x.device for x in (pooled.embedding, *pooled.side.values())} == {CUDA}
            assert torch.isfinite(pooled.embedding.detach().twin).all()
        assert module.started if hasattr(module, "started") else True
        module.eval()
        for explained in (module.contributions(maps, project), module.nearest_prototypes(maps, project)):
            assert explained is None or explained.device == CUDA
    assert not device.waits


@pytest.mark.parametrize(
    ("regularizer", "pooling", "loss"),
    [
        *((name, pooling, "proxy_anchor") for name in names("regularizer") for pooling in ("gsp", "gap_histogram")),
        *(("xml", "gap_histogram", loss) for loss in ("margin_oodml", "recall_at_k_surrogate")),
    ],
)
def test_regularizer(regularizer: str, pooling: str, loss: str) -> None:
    cfg = configuration(regularizer=regularizer, pooling=pooling, loss=loss)
    module, objective = component(cfg.pooling).train(), objective_of(cfg).train()
    project = Projection(8, module.input_width(SIZE))
    with pretended_cuda() as device:
        moved(nn.ModuleList([module, project, objective]))
        device.waits.clear()
        for step in range(1, STEPS + 1):
            maps = torch.rand(12, 8, 4, 5, device=CUDA)
            pooled = module(maps, project)
            module.observe(pooled, step=step)
            output = ModelOutput(pooled.embedding, pooled.side | features_of(maps))
            parts = objective(output, batch_labels(), step=step)
        assert len(parts) == 3
        assert parts["loss"].device == CUDA
    assert not device.waits
