"""Networks of tokens as backbones: maps of patch tokens, image sizes, and the pooling that a network brings along."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from dmlbench.models.backbones import TimmBackbone
from dmlbench.models.net import PooledModel, pooled_channels
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.native import Native
from dmlbench.models.projection import Projection
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.types import ConfigError

# A class token; a register token and the norm behind the average; a register token and attention pooling; two tokens.
VITS = ["test_vit", "test_vit2", "test_vit3", "deit_tiny_distilled_patch16_224"]


def build(name: str, **arguments: Any) -> TimmBackbone:
    torch.manual_seed(0)
    return TimmBackbone(name, pretrained=False, **arguments).eval()


def images(height: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VITS)
def test_map_is_the_patch_tokens_row_by_row(name: str) -> None:
    backbone = build(name)
    x = images(64, 96)
    with torch.no_grad():
        (last,) = backbone(x)
        tokens = backbone.model.forward_features(x)
    assert last.shape == (2, backbone.channels[0], 4, 6)
    prefix = tokens.shape[1] - 24
    assert prefix == backbone.model.num_prefix_tokens >= 1
    for row in range(4):
        for column in range(6):
            assert torch.equal(last[:, :, row, column], tokens[:, prefix + 6 * row + column])


def test_map_is_that_of_timms_intermediates_after_the_final_norm() -> None:
    backbone, x = build("test_vit"), images(64, 48)
    several = build("test_vit", out_indices=(2, 5))
    with torch.no_grad():
        (expected,) = backbone.model.forward_intermediates(x, indices=[5], norm=True, intermediates_only=True)
        maps = several(x)
        assert torch.equal(backbone(x)[0], expected)
    assert several.channels == (64, 64) and [level.shape for level in maps] == [(2, 64, 4, 3)] * 2
    assert torch.equal(maps[1], expected)


def test_swin_gives_its_map_channels_first() -> None:
    backbone, x = build("swin_tiny_patch4_window7_224"), images(64, 96, batch=1)
    with torch.no_grad():
        (last,) = backbone(x)
        output = backbone.model.forward_features(x)
    assert last.shape == (1, 768, 2, 3) and output.shape == (1, 2, 3, 768)
    assert torch.equal(last, output.movedim(3, 1))


# --- image sizes


@pytest.mark.parametrize("name", ["test_vit", "test_vit3"])
def test_size_set_once_equals_the_size_taken_as_it_comes(name: str) -> None:
    fixed, free = build(name, image_size=(96, 64)), build(name)
    with torch.no_grad():
        torch.testing.assert_close(fixed(images(96, 64))[0], free(images(96, 64))[0])
        assert fixed(images(64, 64))[0].shape == (2, fixed.channels[0], 4, 4)
    assert fixed.model.pos_embed.shape[1] < free.model.pos_embed.shape[1]


def test_padding_is_that_of_timm() -> None:
    backbone, x = build("test_vit", pad_images=True), images(70, 50)
    theirs = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True, dynamic_img_pad=True).eval()
    theirs.load_state_dict(backbone.model.state_dict())
    with torch.no_grad():
        (last,) = backbone(x)
        assert torch.equal(last.flatten(2).transpose(1, 2), theirs.forward_features(x)[:, 1:])
        assert torch.equal(last, backbone(F.pad(x, (0, 14, 0, 10)))[0])
    assert last.shape == (2, 64, 5, 4)
    assert build("test_vit", pad_images=True, image_size=150).model.patch_embed.img_size == (160, 160)


def test_network_of_one_image_size_says_which_and_can_be_set_to_another() -> None:
    name = "vit_relpos_small_patch16_224"
    with pytest.raises(ConfigError, match=r"got images of 64 x 64 .*expected 224 x 224.*Crop to 224 x 224.*image_size"):
        build(name)(images(64, 64))
    with torch.no_grad():
        assert build(name, image_size=64)(images(64, 64))[0].shape == (2, 384, 4, 4)


# --- weights, normalization, precision


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_vit3"])
def test_weights_file_of_the_full_model_fits_whatever_the_image_size(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    public = timm.create_model(name, pretrained=False)
    torch.save(public.state_dict(), tmp_path / "weights.pth")
    backbone = build(name, weights_file=str(tmp_path / "weights.pth"), image_size=64)
    assert torch.equal(backbone.model.blocks[0].attn.qkv.weight, public.blocks[0].attn.qkv.weight)
    public.set_input_size(img_size=(64, 64))
    with torch.no_grad():
        expected = public.eval().forward_head(public.forward_features(images(64, 64)), pre_logits=True)
        torch.testing.assert_close(backbone.native(images(64, 64)), expected)


def test_weights_of_a_resampled_network_fit_its_own_size(tmp_path: Path) -> None:
    first = build("test_vit", image_size=64)
    state = {name: value + 1 for name, value in first.state_dict().items()}
    torch.save(state, tmp_path / "weights.pth")
    second = build("test_vit", image_size=64, weights_file=str(tmp_path / "weights.pth"))
    assert all(torch.equal(value, state[name]) for name, value in second.state_dict().items())
    with pytest.raises(ConfigError, match="has shape"):
        build("test_vit", image_size=96, weights_file=str(tmp_path / "weights.pth"))
    torch.save(timm.create_model("test_vit").state_dict() | {"other": torch.zeros(1)}, tmp_path / "wrong.pth")
    with pytest.raises(ConfigError, match=r"'other' .* is unknown to the model"):
        build("test_vit", image_size=64, weights_file=str(tmp_path / "wrong.pth"))


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("option", ["vit_small", "dinov2_small", "clip_vit_b16", "deit_small", "dino_vit_small"])
def test_configured_networks_are_published_and_normalize_as_they_were_trained(option: str, repository: Path) -> None:
    config = OmegaConf.load(repository / "conf" / "backbone" / f"{option}.yaml")
    assert timm.list_pretrained(config.name) == [config.name]
    backbone = build(config.name, image_size=config.image_size)
    published = timm.get_pretrained_cfg(config.name)
    assert published is not None
    torch.testing.assert_close(backbone.mean.flatten(), torch.tensor(published.mean))
    torch.testing.assert_close(backbone.std.flatten(), torch.tensor(published.std))
    patch = backbone.model.patch_embed.patch_size[0]
    with torch.no_grad():
        (last,) = backbone(images(config.image_size, config.image_size, batch=1))
    assert last.shape == (1, backbone.channels[0], config.image_size // patch, config.image_size // patch)


# --- the network's own pooling


@pytest.mark.parametrize("name", [*VITS, "swin_tiny_patch4_window7_224", "resnet18", "mobilenetv3_small_050"])
def test_native_vector_is_what_timm_gives_to_its_classifier(name: str) -> None:
    backbone = build(name)
    x = images(64, 64)
    with torch.no_grad():
        vector = backbone.native(x)
        expected = backbone.model.forward_head(backbone.model.forward_features(x), pre_logits=True)
        assert torch.equal(vector, expected)
        whole = timm.create_model(name, pretrained=False, num_classes=0).eval()
        whole.load_state_dict(backbone.model.state_dict())
        if not hasattr(whole, "patch_embed"):
            assert torch.equal(vector, whole(x))
    assert vector.shape == (2, backbone.native_channels)


def test_native_vector_of_hyp_vits_networks_is_what_their_whole_networks_return() -> None:
    """DeiT: the mean of class and distillation token, in training, too; DINO: the class token."""
    x = images(64, 64)
    for name, wanted in (("deit_tiny_distilled_patch16_224", (0, 1)), ("vit_small_patch16_224.dino", (0,))):
        backbone = build(name)
        with torch.no_grad():
            tokens = backbone.model.forward_features(x)
            for training in (False, True):
                assert torch.equal(backbone.train(training).native(x), tokens[:, wanted].mean(dim=1))
            assert torch.equal(backbone.native(x), backbone.model(x))


def test_native_vector_of_a_network_outside_timm_is_the_average() -> None:
    torch.manual_seed(0)
    backbone, x = ResNet20().eval(), images(16, 24)
    with torch.no_grad():
        torch.testing.assert_close(backbone.native(x), backbone(x)[-1].mean(dim=(2, 3)))


@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "resnet18", "mobilenetv3_small_050"])
def test_model_with_native_pooling_projects_the_native_vector(name: str) -> None:
    backbone = build(name)
    projection = Projection(pooled_channels(backbone, Native()), 6)
    model = PooledModel(backbone, Native(), projection).eval()
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(pixels)
        expected = backbone.native(backbone.preprocess(pixels)) @ projection.weight.T
    assert output.embedding.shape == (3, 6) and output.side == {}
    torch.testing.assert_close(output.embedding, expected)


def test_native_vector_trains_all_layers_and_a_map_those_before_it() -> None:
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for pooling in (Native(), Gap()):
        model = PooledModel(build("test_vit3"), pooling, Projection(96, 6)).train()
        model(pixels).embedding.square().sum().backward()
        listed = dict(model.parameter_groups()["backbone"])
        idle = {name.split(".")[2] for name, parameter in listed.items() if parameter.grad is None}
        assert idle <= (set() if isinstance(pooling, Native) else {"attn_pool", "norm", "fc_norm"}), idle
        assert ("attn_pool" in idle) is isinstance(pooling, Gap)


def test_every_layer_before_the_map_trains() -> None:
    backbone = TimmBackbone("efficientnet_b0", pretrained=False)  # timm calls its last convolution a head
    model = PooledModel(backbone, Gap(), Projection(backbone.channels[-1], 4))
    model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).embedding.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
