"""Backbones against recorded values of public networks; batch norm freezing; weights files, right and wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from dmlbench.models import backbones
from dmlbench.models.backbones import Backbone, TimmBackbone
from dmlbench.models.bninception import BNInception
from dmlbench.models.efficientnet_lite import EfficientNetLite
from dmlbench.models.googlenet import GoogLeNet
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.models.weights import load_weights, read_weights
from dmlbench.training.checkpoint import save_checkpoint
from dmlbench.types import ConfigError, DataError


def fill(module: nn.Module, *, rule: str) -> None:
    """Seeded weights by the rules under which the recorded values were computed."""
    state = module.state_dict()
    for number, key in enumerate(sorted(state)):
        if key.endswith("num_batches_tracked"):
            continue
        torch.manual_seed(number)
        value = torch.randn(state[key].shape)
        if rule == "brief":
            value = (0.05 * value).abs() + 0.5 if key.endswith("running_var") else 0.05 * value
        elif key.endswith("running_var"):
            value = 0.5 * value.abs() + 0.5
        elif key.endswith(("running_mean", "bias")):
            value = 0.1 * value
        elif value.ndim == 1:
            value = 1 + 0.2 * value
        else:
            value = value * (2 / value[0].numel()) ** 0.5
        state[key].copy_(value)


@pytest.fixture(scope="module")
def bninception() -> BNInception:
    torch.manual_seed(0)
    return BNInception(pretrained=False).eval()


@pytest.mark.parametrize(
    ("build", "file", "classifier"),
    [
        (lambda: BNInception(pretrained=False), "bninception_keys.txt", "last_linear."),
        (ResNet20, "cifar_resnet20_keys.txt", "linear."),
    ],
)
def test_network_has_the_public_names_and_shapes(golden_dir: Path, build: Any, file: str, classifier: str) -> None:
    """Names, shapes and types in the recorded order; the network has no classifier."""
    lines = [x for x in (golden_dir / file).read_text().splitlines() if not x.startswith(("#", classifier))]
    state = build().state_dict().items()
    assert [f"{key}\t{tuple(value.shape)}\t{str(value.dtype)[6:]}" for key, value in state] == lines


# --- BN-Inception


@pytest.mark.slow
def test_bninception_equals_the_public_network_in_float64(golden) -> None:
    recorded = golden("bninception_forward")
    model = BNInception(pretrained=False).eval()
    fill(model, rule="he")
    torch.manual_seed(int(recorded["input_seed"]))
    with torch.no_grad():
        (last,) = model.double()(torch.randn(2, 3, 224, 224).double())
    sample = last.flatten()[recorded["he_sample_index"]]
    np.testing.assert_allclose(sample, recorded["he_sample_values_float64"], rtol=1e-8, atol=1e-8)


def test_bninception_and_its_pools_equal_the_public_network(
    bninception: BNInception, golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = golden("bninception_forward")
    taps: list[Tensor] = []

    def tapped(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **options: Any) -> Tensor:
            taps.append(pool(*args, **options))
            return taps[-1]

        return run

    monkeypatch.setattr(F, "max_pool2d", tapped(F.max_pool2d))
    monkeypatch.setattr(F, "avg_pool2d", tapped(F.avg_pool2d))
    fill(bninception, rule="he")
    torch.manual_seed(int(recorded["input_seed"]))
    with torch.no_grad():
        (last,) = bninception(torch.randn(2, 3, 224, 224))
    names = ["pool1_3x3_s2", "pool2_3x3_s2"]
    names += [f"inception_{block}_pool" for block in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b")]
    assert len(taps) == len(names)
    for name, tap in zip(names, taps, strict=True):
        if f"he_tap_{name}_shape" in recorded:
            assert tap.shape == tuple(recorded[f"he_tap_{name}_shape"])
            expected = recorded[f"he_tap_{name}_mean_per_image_channel"]
            np.testing.assert_allclose(tap.mean(dim=(2, 3)).numpy(), expected, rtol=1e-3, atol=1e-3)
    assert last.shape == tuple(recorded["he_feature_shape"])
    sample = last.flatten()[recorded["he_sample_index"]]
    np.testing.assert_allclose(sample, recorded["he_sample_values"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(last.mean(dim=(2, 3)), recorded["he_mean_per_image_channel"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(last.amax(dim=(2, 3)), recorded["he_max_per_image_channel"], rtol=1e-3, atol=1e-3)


def test_bninception_gives_three_levels() -> None:
    torch.manual_seed(0)
    model = BNInception(pretrained=False, out_levels=(0, 1, 2)).eval()
    assert model.channels == (576, 1056, 1024)
    with torch.no_grad():
        maps = model(torch.randn(1, 3, 64, 64))
    assert [level.shape[1:] for level in maps] == [(576, 4, 4), (1056, 2, 2), (1024, 2, 2)]


def test_bninception_preprocesses_to_blue_green_red_in_0_to_255(bninception: BNInception) -> None:
    images = torch.tensor([255, 117, 10], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = torch.tensor([10.0 - 104, 0.0, 255.0 - 128]).view(1, 3, 1, 1)
    assert torch.equal(bninception.preprocess(images), expected)
    torch.testing.assert_close(bninception.preprocess(images / 255), expected, atol=1e-4, rtol=0)


def test_bninception_loads_the_public_form_of_the_file(bninception: BNInception, tmp_path: Path) -> None:
    """Batch-norm tensors as (1, C), a classifier, and none of the later num_batches_tracked."""
    state = {
        key: value[None] if "_bn." in key else value
        for key, value in bninception.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    state |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "weights.pth")
    loaded = BNInception(pretrained=True, weights_file=str(tmp_path / "weights.pth"))
    for key, value in bninception.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value) or key.endswith("num_batches_tracked")


# --- ResNet20


def test_googlenet_equals_torchvisions_on_images_from_zero_to_one(tmp_path: Path) -> None:
    public = torchvision.models.googlenet(transform_input=True, init_weights=False).eval()
    torch.save(public.state_dict(), tmp_path / "googlenet.pth")
    ours = GoogLeNet(pretrained=True, weights_file=str(tmp_path / "googlenet.pth")).eval()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    public.fc = nn.Identity()
    with torch.inference_mode():
        torch.testing.assert_close(ours.native(ours.preprocess(images)), public((images - mean) / std))


@pytest.mark.parametrize("rule", ["brief", "he"])
def test_resnet20_equals_the_public_network(golden, rule: str) -> None:
    recorded = golden("cifar_resnet20_forward")
    model = ResNet20(out_levels=(0, 1, 2)).eval()
    fill(model, rule=rule)
    with torch.no_grad():  # in float64, from which the recorded float32 values differ by up to 1.3e-4
        maps = model.double()(torch.from_numpy(recorded["input"]).double())
    np.testing.assert_allclose(maps[2], recorded[f"{rule}_layer3"], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(maps[0].mean(dim=(0, 2, 3)), recorded[f"{rule}_layer1_mean"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(maps[1].mean(dim=(0, 2, 3)), recorded[f"{rule}_layer2_mean"], rtol=1e-4, atol=1e-5)


@pytest.mark.data
def test_resnet20_loads_the_public_checkpoint(shared_dir: Path) -> None:
    path = shared_dir / "data" / "checkpoints" / "resnet20-12fca82f.th"
    model = ResNet20(weights_file=str(path))
    public = read_weights(path)
    assert torch.equal(model.conv1.weight, public["conv1.weight"])
    assert torch.equal(model.state_dict()["layer3.2.bn2.running_var"], public["layer3.2.bn2.running_var"])


def test_stem_stride_two_halves_every_map() -> None:
    model = ResNet20(stem_stride=2).eval()
    with torch.no_grad():
        (last,) = model(model.preprocess(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)))
    assert last.shape == (2, 64, 8, 8)


# --- preprocessing


def test_uint8_and_unit_interval_images_are_normalized_alike() -> None:
    model = ResNet20(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
    std = torch.tensor([0.5, 0.25, 0.125]).view(1, 3, 1, 1)
    expected = (images.double() / 255 - mean) / std
    torch.testing.assert_close(model.preprocess(images).double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.preprocess(images / 255).double(), expected, atol=1e-5, rtol=0)
    last = images.contiguous(memory_format=torch.channels_last)
    assert model.preprocess(last).is_contiguous(memory_format=torch.channels_last)


# --- batch norm


def batch_norm_state(model: Backbone) -> tuple[Tensor, Tensor]:
    state = model.state_dict()
    return state["bn1.running_mean"].clone(), state["bn1.weight"].clone()


@pytest.mark.parametrize(
    ("freezing", "statistics_move", "affine_moves"),
    [("none", True, True), ("stats", False, True), ("all", False, False)],
)
def test_batch_norm_freezing_outlasts_train(freezing: Any, statistics_move: bool, affine_moves: bool) -> None:
    torch.manual_seed(0)
    model = ResNet20(batch_norm=freezing)
    outer = nn.Sequential(model).eval().train()
    mean, weight = batch_norm_state(model)
    optimizer = torch.optim.SGD([p for p in outer.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(4, 3, 8, 8) + 1)[-1].square().mean().backward()
    optimizer.step()
    new_mean, new_weight = batch_norm_state(model)
    assert torch.equal(mean, new_mean) is not statistics_move
    assert torch.equal(weight, new_weight) is not affine_moves
    assert model.bn1.weight.requires_grad is (freezing != "all")
    assert model.conv1.weight.requires_grad and model.training


# --- timm


@pytest.mark.parametrize(
    ("name", "channels"), [("resnet18", 512), ("resnet50.tv_in1k", 2048), ("mobilenetv3_small_050", 288)]
)
def test_timm_network_returns_its_last_map(name: str, channels: int) -> None:
    model = TimmBackbone(name, pretrained=False).eval()
    with torch.no_grad():
        (last,) = model(model.preprocess(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)))
    assert last.shape == (1, channels, 2, 2) and model.channels == (channels,)
    assert model.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])


def test_timm_network_returns_the_stages_asked_for_and_equal_its_last_map() -> None:
    torch.manual_seed(0)
    model = TimmBackbone("resnet18", pretrained=False, out_indices=(2, 3, 4), batch_norm="all").eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        maps = model(images)
        assert torch.equal(maps[-1], model.model.forward_features(images))
    assert model.channels == (128, 256, 512)
    assert [level.shape[1:] for level in maps] == [(128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert not model.model.bn1.weight.requires_grad


def test_a_run_s_checkpoint_gives_the_weights_of_its_backbone(tmp_path: Path) -> None:
    trained = ResNet20()
    model = {f"backbone.{name}": value for name, value in trained.state_dict().items()}
    model |= {"head.weight": torch.zeros(2, 64), "pooling.backbone.weight": torch.zeros(3)}
    save_checkpoint(tmp_path / "best.ckpt", {"model": model, "objective": {}, "step": 3, "score": 0.5})
    found = ResNet20(weights_file=str(tmp_path / "best.ckpt")).state_dict()
    assert all(torch.equal(found[name], value) for name, value in trained.state_dict().items())
    safetensors.torch.save_file(model, tmp_path / "model.safetensors")  # of an exported folder
    found = ResNet20(weights_file=str(tmp_path / "model.safetensors")).state_dict()
    assert all(torch.equal(found[name], value) for name, value in trained.state_dict().items())
    other = {"model": {"network.weight": torch.zeros(1)}, "objective": {}}
    save_checkpoint(tmp_path / "other.ckpt", other)
    with pytest.raises(ConfigError, match="contains no named tensors"):
        read_weights(tmp_path / "other.ckpt")
    torch.save({"model": {"network.weight": torch.zeros(1)}, "epoch": 3}, tmp_path / "deit.pth")
    assert read_weights(tmp_path / "deit.pth").keys() == {"network.weight"}


@pytest.mark.parametrize("source", ["weights.pth", "weights.safetensors", "the cache"])
def test_timm_network_loads_a_file_with_a_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    torch.manual_seed(0)
    state = timm.create_model("resnet18", pretrained=False).state_dict()
    path = tmp_path / ("model.safetensors" if source == "the cache" else source)
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    given = {"weights_file": str(path)}
    if source == "the cache":
        monkeypatch.setattr(backbones, "_cached_file", lambda *_: path)
        given = {}
    model = TimmBackbone("resnet18", pretrained=True, **given)
    assert torch.equal(model.model.conv1.weight, state["conv1.weight"])


def test_cached_files_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "checkpoints").mkdir()
    for name in ("resnet18.pth", "checkpoints/googlenet-1378be20.pth"):
        torch.save({"conv1.weight": Payload()}, tmp_path / name)
    monkeypatch.setattr(backbones, "_cached_file", lambda *_: tmp_path / "resnet18.pth")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match="never executed"):
        TimmBackbone("resnet18", pretrained=True)
    with pytest.raises(ConfigError, match="googlenet: cannot load"):
        GoogLeNet(pretrained=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("failing", ["connection", "download"])
def test_failing_download_says_what_to_place_where(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    asked: list[str] = []

    def broken(*_: Any, **__: Any) -> None:
        asked.append("download")
        raise ValueError("proxy says no")

    def unreachable(*_: Any, **__: Any) -> None:
        asked.append("connection")
        if failing == "connection":
            raise OSError("proxy says no")

    monkeypatch.setattr(backbones, "_cached_file", lambda *_: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(timm, "create_model", broken)
    message = r"proxy says no.*timm/resnet50\.tv_in1k.*resnet50-0676ba61\.pth.*weights_file=.*pretrained=false"
    with pytest.raises(ConfigError, match=message):
        TimmBackbone("resnet50.tv_in1k", pretrained=True)
    assert asked == ["connection", "download"][: 1 + (failing == "download")]


# --- errors


def gray(dtype: torch.dtype, channels: int = 1) -> Tensor:
    return ResNet20().preprocess(torch.zeros(2, channels, 4, 4, dtype=dtype))


def vit(height: int, width: int) -> tuple[Tensor, ...]:
    return TimmBackbone("test_vit", pretrained=False)(torch.zeros(1, 3, height, width))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BNInception(pretrained=True), r"bn_inception-52deb4733\.pth.*weights_file=.*pretrained=false"),
        (lambda: ResNet20(stem_stride=3), "stem_stride: got 3"),
        (lambda: ResNet20(out_levels=()), "out_levels"),
        (lambda: ResNet20(out_levels=(1, 0)), "out_levels"),
        (lambda: ResNet20(out_levels=(0, 3)), "out_levels"),
        (lambda: ResNet20(out_levels=(1, 1)), "out_levels"),
        (lambda: ResNet20(batch_norm="half"), "'half'.*all, none, stats"),
        (lambda: ResNet20(weights_file="nothing.pth"), r"nothing\.pth.*weights_file"),
        (lambda: EfficientNetLite(3, pretrained=False), r"variant: got 3, expected one of \[0, 1, 2\]"),
        (lambda: TimmBackbone("resnet5O", pretrained=False), "'resnet5O'.*did you mean.*resnet50"),
        (lambda: TimmBackbone("resnet50.tv_in2k", pretrained=False), r"resnet50\.tv_in1k"),
        (lambda: TimmBackbone("resnet18", pretrained=False, out_indices=(5,)), "out_levels"),
        (lambda: TimmBackbone("resnet18", pretrained=False, image_size=0), "image_size: got 0"),
        (
            lambda: TimmBackbone("resnet18", pretrained=False, image_size=64),
            "image_size: got 64, expected null, as timm's 'resnet18'",
        ),
        (lambda: TimmBackbone("test_vit", pretrained=False, image_size=227), "227 x 227.*224 x 224 or 240 x 240"),
        (lambda: vit(227, 230), "227 x 230.*16 x 16.*224 x 224 or 240 x 240.*pad_images=true"),
        (lambda: vit(10, 40), "10 x 40 .*16 x 32 or 16 x 48"),
        (lambda: gray(torch.float32), r"\(2, 1, 4, 4\)"),
        (lambda: gray(torch.int64, 3), "int64"),
    ],
)
def test_what_a_backbone_cannot_do_is_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        build()


# --- weights files


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


def small_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Small().state_dict()


@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappings_of_a_checkpoint_are_taken_off(tmp_path: Path, wrapped: bool) -> None:
    state = small_state()
    content: Any = {"state_dict": {f"module.{key}": value for key, value in state.items()}, "epoch": 3}
    torch.save(content if wrapped else state, tmp_path / "w.pth")
    model = Small()
    load_weights(model, tmp_path / "w.pth")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("second.weight"), r"'second.weight' \(1, 3\) is missing"),
        (lambda state: state.update({"second.weight": torch.zeros(1, 4)}), r"'second.weight'.*\(1, 4\).*\(1, 3\)"),
        (lambda state: state.update({"fc.weight": torch.zeros(2)}), r"'fc.weight' \(2,\) is unknown"),
    ],
)
def test_first_difference_is_named_and_nothing_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    state = small_state()
    change(state)
    torch.save(state, tmp_path / "w.pth")
    model = Small()
    before = model.first.weight.clone()
    with pytest.raises(ConfigError, match=message):
        load_weights(model, tmp_path / "w.pth")
    assert torch.equal(model.first.weight, before)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("kind", ["text", "empty", "truncated", "objects", "no_tensors", "safetensors"])
def test_file_that_is_no_weights_is_refused_and_never_executed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    if kind == "objects":
        torch.save({"state_dict": Payload()}, path)
    elif kind == "no_tensors":
        torch.save({"a": 1}, path)
    else:
        torch.save(small_state(), path)
        whole = path.read_bytes()
        path.write_bytes({"text": b"hello world\n", "empty": b"", "safetensors": b"short"}.get(kind, whole[:400]))
    with pytest.raises(ConfigError, match=r"weights file '.*w\.(pth|safetensors)'"):
        load_weights(Small(), path)
    assert not Path("executed").exists()
