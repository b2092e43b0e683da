"""The losses of conf/ are the formulas that public code computes, in value and gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dmlbench import build
from dmlbench.cli.front import compose
from dmlbench.losses.objective import Objective
from dmlbench.types import ModelOutput

# Configuration -> name of the record; batch b1 has a class with one image.
RECORDED = {
    "contrastive": ["loss=contrastive"],
    "triplet": ["loss=triplet"],
    "multi_similarity": ["loss=multi_similarity"],
    "multi_similarity_mined": ["loss=multi_similarity", "miner=multi_similarity"],
    "proxy_nca_pp": ["loss=proxy_nca_pp"],
    "proxy_nca_gsp": ["loss=proxy_nca_gsp"],
    "proxy_anchor": ["loss=proxy_anchor"],
    "margin": ["loss=margin", "loss.learn_beta=false"],
}


@pytest.fixture(scope="module")
def recorded(repository: Path) -> dict[str, np.ndarray]:
    with np.load(repository / "tests" / "fixtures" / "losses.npz", allow_pickle=False) as file:
        return dict(file)


def _objective(overrides: list[str], proxies: torch.Tensor) -> tuple[Objective, torch.nn.Parameter | None]:
    cfg = compose("train", overrides)
    OmegaConf.update(cfg, "runtime.num_classes", len(proxies))
    OmegaConf.update(cfg, "runtime.embedding_size", proxies.shape[1])
    objective = build.build_objective(cfg)
    parameters = dict(objective.loss.named_parameters())
    for name in ("proxies", "W"):
        if name in parameters:
            parameters[name].data = proxies.clone() if name == "proxies" else proxies.T.clone()
            return objective, parameters[name]
    return objective, None


@pytest.mark.parametrize("batch", ["b0", "b1"])
@pytest.mark.parametrize("name", RECORDED)
def test_configured_loss_equals_public_code(recorded, monkeypatch, name: str, batch: str) -> None:
    proxies = torch.from_numpy(recorded[f"{batch}_proxies"])
    objective, weights = _objective(RECORDED[name], proxies)
    embeddings = torch.from_numpy(recorded[f"{batch}_embeddings"]).requires_grad_()
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # the record is in float64
    value = objective(ModelOutput(embeddings), torch.from_numpy(recorded[f"{batch}_labels"]), step=1)["loss"]
    value.backward()
    # ProxyAnchor's public code normalizes with an epsilon: equal to 1e-12 of the value.
    np.testing.assert_allclose(value.item(), recorded[f"{batch}_{name}_loss"], rtol=1e-8)
    np.testing.assert_allclose(embeddings.grad.numpy(), recorded[f"{batch}_{name}_grad"], rtol=1e-7, atol=1e-9)
    if weights is not None:
        np.testing.assert_allclose(weights.grad.numpy(), recorded[f"{batch}_{name}_grad_proxies"], rtol=1e-7, atol=1e-9)


def test_objective_leaves_autocast() -> None:
    objective, _ = _objective(["loss=contrastive"], torch.zeros(4, 8))
    embeddings = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(8) // 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = objective(ModelOutput(embeddings), labels, step=1)["loss"]
    assert inside.dtype == torch.float32
    assert torch.equal(inside, objective(ModelOutput(embeddings.float()), labels, step=1)["loss"])


def test_loss_parameters_are_the_group_loss() -> None:
    from dmlbench.training.optim import parameter_groups

    objective, proxies = _objective(["loss=proxy_anchor"], torch.zeros(4, 8))
    groups = parameter_groups({}, objective)
    assert [parameter is proxies for _, parameter in groups["loss"]] == [True]
