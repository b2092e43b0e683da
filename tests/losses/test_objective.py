"""The losses of conf/ are the formulas that public code computes, in value and gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dmlbench import build
from dmlbench.cli.front import compose
from dmlbench.losses.objective import Mixing, Objective
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ConfigError, ModelOutput

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
    objective = Objective(build.component(cfg.loss), build.component(cfg.miner))
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


class Mean(Regularizer):
    requires = ("histogram",)

    def forward(self, output: ModelOutput, labels: torch.Tensor, dml_loss: DmlLoss) -> torch.Tensor:
        return output.side["histogram"].mean() + dml_loss(2 * output.embedding, labels)


class Sum(nn.Module):
    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor, indices_tuple: None = None) -> torch.Tensor:
        return embeddings.sum()


@pytest.mark.parametrize(("mixing", "share"), [("convex", 0.75), ("add", 1.0)])
def test_regularizers_take_part_as_soon_as_their_side_outputs_are_there(
    mixing: Mixing, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    objective = Objective(Sum(), None, {"mean": Mean(0.25)}, mixing=mixing)
    embeddings, labels = torch.ones(2, 3), torch.tensor([0, 1])
    assert objective(ModelOutput(embeddings), labels, step=1) == {"loss": 6, "dml": 6}
    with caplog.at_level("INFO"):
        parts = objective(ModelOutput(embeddings, {"histogram": torch.full((2, 4), 8.0)}), labels, step=2)
    assert parts == {"loss": share * 6 + 0.25 * (8 + 12), "dml": 6, "mean": 20}
    assert "step 2: the regularizer 'mean' takes part from here on" in caplog.text


def test_regularizers_that_leave_nothing_to_the_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sum to 1, which leaves nothing.*mixing=add"):
        Objective(Sum(), None, {"a": Mean(0.5), "b": Mean(0.5)})
    Objective(Sum(), None, {"a": Mean(0.5), "b": Mean(0.5)}, mixing="add")
    with pytest.raises(ConfigError, match="must be above 0"):
        Mean(0.0)
    for name in ("loss", "dml", "keys", "a.b"):
        with pytest.raises(ConfigError, match=f"cannot be called '{name}'"):
            Objective(Sum(), None, {name: Mean(0.5)})
    with pytest.raises(ConfigError, match="'a' is a Sum, which is no Regularizer"):
        Objective(Sum(), None, {"a": Sum()})
    with pytest.raises(ConfigError, match="mixing 'sum' is unknown"):
        Objective(Sum(), None, {}, mixing="sum")


def test_a_regularizer_that_the_pooling_cannot_serve_is_refused_when_the_run_is_built() -> None:
    node = {"_target_": f"{__name__}.Mean", "weight": 0.1}
    for pooling, message in (("gap", "needs 'histogram' of the pooling"), ("gsp_small", None)):
        cfg = compose("train", [f"pooling={pooling}"])
        OmegaConf.update(cfg, "runtime.num_classes", 4)
        cfg.regularizer = {"mean_of_histograms": node, "mixing": "add"}
        model = build.build_model(cfg)
        if message is None:
            assert list(build.build_objective(cfg, model).regularizers) == ["mean_of_histograms"]
        else:
            with pytest.raises(ConfigError, match=message):
                build.build_objective(cfg, model)
