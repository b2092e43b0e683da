"""``frozen_until``: which layers train, and that the frozen part and the rest make the whole forward pass."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dmlbench.models.backbones import Backbone, StoredMaps, TimmBackbone
from dmlbench.models.bninception import BNInception
from dmlbench.models.efficientnet_lite import EfficientNetLite
from dmlbench.models.googlenet import GoogLeNet
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.types import ConfigError

SIDE = 64


def timm(name: str) -> Callable[..., Backbone]:
    return lambda **options: TimmBackbone(name, pretrained=False, **options)


CASES = [
    (lambda **options: ResNet20(**options), "layer1", "layer2.0.conv1.weight"),
    (lambda **options: BNInception(pretrained=False, **options), "inception_4b", "inception_4c_1x1.weight"),
    (lambda **options: GoogLeNet(pretrained=False, **options), "inception4b", "layers.inception4c.branch1.conv.weight"),
    (lambda **options: EfficientNetLite(0, pretrained=False, **options), "blocks.4", "model.blocks.5.0.conv_pw.weight"),
    (timm("resnet18"), "layer3", "model.layer4.0.conv1.weight"),
    (timm("convnext_atto"), "stages.2", "model.stages.3.downsample.0.weight"),
    (timm("vit_tiny_patch16_224"), "blocks.9", "model.blocks.10.norm1.weight"),
    (timm("mobilenetv2_035"), "blocks.4", "model.blocks.5.0.conv_pw.weight"),
    (timm("test_vit"), "patch_projection", "model.pos_embed"),
    (timm("test_vit"), "patch_embed", "model.blocks.0.norm1.weight"),
]
NAMES = ["resnet20", "bn_inception", "googlenet", "efficientnet", "resnet18", "convnext", "vit", "mobilenetv2"]
NAMES += ["vit_patch_projection", "vit_patch_embed"]


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("make, stage, first_trained", CASES, ids=NAMES)
def test_the_frozen_part_and_the_rest_are_the_whole_and_gradients_stop_there(
    make: Callable[..., Backbone], stage: str, first_trained: str
) -> None:
    torch.manual_seed(0)
    side = 224 if make is CASES[6][0] else SIDE
    images = torch.randint(256, (2, 3, side, side), dtype=torch.uint8)
    backbone = make(frozen_until=stage)
    backbone.eval()
    expected = backbone(backbone.preprocess(images))[-1]
    for until in (stage, "all"):
        backbone.freeze("none", until)
        outputs = backbone.frozen_outputs(images)
        stored = StoredMaps(tuple(tuple(x.shape[1:]) for x in outputs), (side, side))
        records = stored.pack(outputs)
        assert records.shape == (2, sum(x[0].numel() for x in outputs), 1, 1)
        backbone.stored = stored
        difference = backbone.maps_of(records)[-1] - expected
        assert difference.norm() <= 1e-5 * expected.norm()  # memory formats differ
        backbone.stored = None

    backbone.freeze("none", None)
    backbone.requires_grad_(True)
    backbone.freeze("none", stage)
    backbone.train()
    names = [name for name, p in backbone.named_parameters() if p.requires_grad]
    every = [name for name, _ in backbone.named_parameters()]
    assert first_trained in names
    assert 0 < len(names) < len(every)
    statistics = {n: m.running_mean.clone() for n, m in backbone.named_modules() if isinstance(m, _BatchNorm)}
    backbone.maps_of(images)[-1].square().sum().backward()
    reached = [name for name, p in backbone.named_parameters() if p.grad is not None]
    assert set(reached) <= set(names)
    assert first_trained in reached
    for name, module in backbone.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            trains = any(p.requires_grad for p in module.parameters())
            assert torch.equal(statistics[name], module.running_mean) != trains
    backbone.freeze("none", "all")
    assert not any(p.requires_grad for p in backbone.parameters())
    assert not any(module.training for module in backbone.train().modules() if isinstance(module, _BatchNorm))


@pytest.mark.parametrize(
    "make, stage, message",
    [
        (timm("resnet18"), "layer5", "frozen_until: .*'layer5'"),
        (timm("resnet18"), "layer4", "frozen_until: .*'layer4'"),  # the last stage is "all"
        (timm("swin_tiny_patch4_window7_224"), "layers.1", "frozen_until: "),
        (lambda **options: ResNet20(out_levels=(0, 2), **options), "layer1", "maps of several levels"),
    ],
)
def test_stages_that_cannot_be_named_are_errors(make: Callable[..., Backbone], stage: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(frozen_until=stage)


def test_a_frozen_backbone_has_no_batch_norm_to_train() -> None:
    with pytest.raises(ConfigError, match=r"batch_norm: got stats with backbone\.frozen_until=all"):
        ResNet20(batch_norm="stats", frozen_until="all")


@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_distilled_patch16_224"])
def test_frozen_patch_projection_is_that_of_hyp_vit(name: str) -> None:
    """htdt/hyp_metric, model.py: ``freeze(model, 0)`` freezes ``patch_embed`` and ``pos_drop`` (no weights)."""
    backbone = TimmBackbone(name, pretrained=False, frozen_until="patch_projection")
    frozen = {name for name, p in backbone.named_parameters() if not p.requires_grad}
    assert frozen == {"model.patch_embed.proj.weight", "model.patch_embed.proj.bias"}
    backbone.native(torch.randn(2, 3, SIDE, SIDE)).sum().backward()
    assert {name for name, p in backbone.named_parameters() if p.grad is None} == frozen
