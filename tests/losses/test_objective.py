"""The objective: its precision, its group of parameters, and regularizers beside the loss."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.losses.objective import Mixing, Objective
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ModelOutput


def _objective(name: str) -> Objective:
    """The configured loss, for four classes and embeddings of eight values."""
    cfg = compose("train", [f"loss={name}"])
    OmegaConf.update(cfg, "runtime.num_classes", 4)
    OmegaConf.update(cfg, "runtime.embedding_size", 8)
    return Objective(component(cfg.loss), component(cfg.miner))


def test_objective_leaves_autocast() -> None:
    objective = _objective("contrastive")
    embeddings = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(8) // 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = objective(ModelOutput(embeddings), labels, step=1)["loss"]
    assert inside.dtype == torch.float32
    assert torch.equal(inside, objective(ModelOutput(embeddings.float()), labels, step=1)["loss"])


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
