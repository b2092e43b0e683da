"""The assembled model: widths, precision, parameter groups, the start of its pooling and its projection."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.projection import Projection
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.types import ConfigError


def images(rows: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator)


def build(pooling: Pooling) -> PooledModel:
    torch.manual_seed(0)
    return PooledModel(ResNet20(), pooling, Projection(64, 6))


def test_model_is_preprocessing_backbone_pooling_and_projection_in_turn() -> None:
    model = build(Gap()).eval()
    with torch.no_grad():
        output = model(images())
        last = model.backbone(model.backbone.preprocess(images()))[-1]
        expected = last.mean(dim=(2, 3)) @ model.projection.weight.T
    assert torch.allclose(output.embedding, expected, atol=1e-5)
    assert output.embedding.shape == (8, model.embedding_size)


def test_default_distance_is_euclidean_between_normalized_embeddings() -> None:
    model = build(Gap())
    rows = torch.randn(4, 6)
    unit = F.normalize(rows)
    assert torch.allclose(model.distance(rows), torch.cdist(unit, unit), atol=1e-3)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    for pooling in (Gap(), Gem(), Gsp(6, 4, memory_rows=8)):
        model = build(pooling)
        model.backbone.freeze("all")
        groups = model.parameter_groups()
        assert list(groups) == ["backbone", "pooling", "head", "distance"]
        listed = [pair for group in groups.values() for pair in group]
        expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(listed) == len(expected) and all(expected[name] is p for name, p in listed)
        assert [name for name, _ in groups["head"]] == ["projection.weight"]
        assert len(groups["pooling"]) == (0 if isinstance(pooling, Gap) else 1)
        assert not any("bn" in name for name, _ in groups["backbone"])


def test_gsp_model_evaluates_before_it_starts_and_trains_its_prototypes_after() -> None:
    gsp = Gsp(6, 4, memory_rows=8)
    model = build(gsp)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        assert "histogram" not in model.eval()(images()).side
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in (1, 2):
        before = gsp.prototypes.detach().clone()
        output = model(images())
        model.observe(output, step=step)
        started_now = gsp.prototypes.detach().clone()
        optimizer.zero_grad()
        output.embedding.square().sum().backward()
        optimizer.step()
        assert torch.equal(before, started_now) is (step == 2)
    assert gsp.started and "histogram" in output.side
    assert not torch.equal(gsp.prototypes.detach(), started_now)


def test_channels_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"head\.in_features: got 32, .*64"):
        PooledModel(ResNet20(), Gap(), Projection(32, 6))
    with pytest.raises(ConfigError, match=r"\(2, 4\), expected 5 channels"):
        Projection(5, 3)(torch.zeros(2, 4))


def test_a_pooling_that_does_not_project_is_named() -> None:
    class Average(Pooling):
        def forward(self, x: Tensor, project: Projection) -> Pooled:
            return Pooled(x.mean(dim=(2, 3)))

    class Bare(Pooling):
        def forward(self, x: Tensor, project: Projection) -> Pooled:
            return project(x.mean(dim=(2, 3)))  # type: ignore[return-value]

    backbone = ResNet20()
    for pooling, got in ((Average(), r"embeddings of \(2, 64\)"), (Bare(), "Tensor")):
        model = PooledModel(backbone, pooling, Projection(backbone.channels[-1], 8))
        with pytest.raises(ConfigError, match=rf": got {got}, expected Pooled with embeddings \[B, 8\]"):
            model(torch.rand(2, 3, 32, 32))


def test_projection_of_a_map_is_the_projection_of_every_pixel() -> None:
    torch.manual_seed(0)
    for project in (Projection(5, 3, bias=True), Projection(5, 3, layer_norm=True)):
        x = torch.randn(2, 5, 3, 4)
        pixel = project(x[:, :, 1, 2])
        assert torch.allclose(project(x)[:, :, 1, 2], pixel, atol=1e-6)
        assert torch.allclose(project(x.contiguous(memory_format=torch.channels_last)), project(x), atol=1e-6)


def test_projection_normalizes_before_its_linear_layer() -> None:
    project = Projection(5, 3, layer_norm=True)
    x = torch.randn(4, 5)
    centered = x - x.mean(dim=1, keepdim=True)
    normalized = centered / (centered.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(project(x), normalized @ project.weight.T, atol=1e-6)
    assert [name for name, _ in project.named_parameters()] == ["weight"]


@pytest.mark.parametrize(("init", "weight", "bias"), [("glorot_uniform", (6 / 2_560) ** 0.5, 0.0),
                                                      ("kaiming_uniform_a5", 2_048**-0.5, 2_048**-0.5)])  # fmt: skip
def test_a_projection_starts_as_its_init_says(init: str, weight: float, bias: float) -> None:
    """torch.nn.Linear (ooDML, architectures/resnet50.py:26) starts weights and biases in +-1 / sqrt(2048)."""
    torch.manual_seed(0)
    projection = Projection(2048, 512, bias=True, init=init)
    assert projection.weight.abs().max().item() == pytest.approx(weight, rel=1e-3)
    assert projection.bias.abs().max().item() == pytest.approx(bias, rel=2e-2)
    assert projection.weight.square().mean().item() == pytest.approx(weight**2 / 3, rel=1e-2)  # uniform
    with pytest.raises(ConfigError, match="init 'glorot' is unknown"):
        Projection(2, 2, init="glorot")


@torch.no_grad()
def test_inputs_of_the_projection_are_averaged_where_it_projects_pixels() -> None:
    for pooling in (Gap(), Gsp(6, 4)):
        model = PooledModel(ResNet20(), pooling, Projection(64, 6, init="pca")).eval()
        pixels = model.last_map(images(3)).flatten(2).transpose(1, 2)
        torch.testing.assert_close(model.projection_inputs(images(3)), F.normalize(pixels.mean(1)))
