"""Parameter-efficient fine-tuning: what trains, naive forward passes, memory, resume, and impossible combinations."""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composed import composed
from timm.models import VisionTransformer
from torch import Tensor, nn

from dmlbench.checks import check
from dmlbench.models.backbones import TimmBackbone
from dmlbench.models.parameter_efficient import BitFit, Lora, Prompts, Tuning
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.training.optim import OptimizerSettings, make_optimizer
from dmlbench.types import ConfigError

pytest.importorskip("peft", reason="LoRA: extra peft")

BLOCKS = range(6)  # of test_vit, which is 64 wide
VITS = ["test_vit", "test_vit2", "test_vit3", "deit_tiny_distilled_patch16_224"]
METHODS: dict[str, Tuning] = {"lora": Lora(rank=3), "prompts": Prompts(4), "bitfit": BitFit()}
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def build(tuning: Tuning | None = None, name: str = "test_vit", **arguments: Any) -> TimmBackbone:
    torch.manual_seed(0)
    backbone = TimmBackbone(name, pretrained=False, **arguments)
    for i, (_, p) in enumerate(backbone.named_parameters()):  # biases and scales that make a difference
        if p.ndim == 1:
            nn.init.normal_(p, p.mean().item(), 0.1, generator=torch.Generator().manual_seed(i))
    if tuning is not None:
        tuning.apply(backbone)
    return backbone


def optimizer_of(backbone: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    settings = OptimizerSettings(partial(torch.optim.AdamW), lr=lr)
    trained = [(name, p) for name, p in backbone.named_parameters() if p.requires_grad]
    return make_optimizer({"backbone": trained}, settings, modules=[backbone])


def train(backbone: TimmBackbone, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (backbone.native(IMAGES) - 1).square().mean().backward()
        optimizer.step()


def trained_names(method: str) -> set[str]:
    """Exactly what trains of test_vit."""
    if method == "prompts":
        return {f"blocks.{i}.prompts" for i in BLOCKS}
    if method == "lora":
        return {f"blocks.{i}.attn.qkv.lora_{part}.default.weight" for i in BLOCKS for part in "AB"}
    layers = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    return {"patch_embed.proj.bias", "norm.bias", *(f"blocks.{i}.{layer}.bias" for i in BLOCKS for layer in layers)}


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_exactly_what_the_method_trains(method: str) -> None:
    backbone, plain = build(METHODS[method]), build()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    train(backbone, optimizer_of(backbone), 2)
    expected = {f"model.{name}" for name in trained_names(method)}
    parameters = dict(backbone.named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == expected
    assert {name for name, p in parameters.items() if p.grad is not None} == expected
    assert {name for name, value in before.items() if not torch.equal(value, parameters[name])} == expected
    assert backbone.tuning == method and plain.tuning is None
    assert all(module.training for module in backbone.modules())
    own = {name.replace(".block.", ".").replace(".base_layer.", ".") for name in parameters} - expected
    assert own == {name for name, _ in plain.named_parameters()} - (expected if method == "bitfit" else set())


@pytest.mark.parametrize("name", VITS)
def test_lora_starts_at_the_untouched_network(name: str) -> None:
    plain, tuned = build(name=name).eval(), build(Lora(dropout=0.3), name=name).eval()
    rates = {module.p for key, module in tuned.named_modules() if key.endswith("lora_dropout.default")}
    assert rates == {0.3}
    with torch.no_grad():
        assert torch.equal(tuned.native(IMAGES), plain.native(IMAGES))
        assert torch.equal(tuned(IMAGES)[0], plain(IMAGES)[0])


@pytest.mark.parametrize("modules", [("qkv",), ("qkv", "proj", "fc1", "fc2")])
def test_lora_is_a_scaled_low_rank_update_of_each_layer(modules: tuple[str, ...]) -> None:
    tuned, plain = build(Lora(rank=3, alpha=5.0, target_modules=modules)), build().eval()
    train(tuned, optimizer_of(tuned), 3)
    blocks = [name for name, _ in plain.model.named_modules() if name.startswith("blocks.")]
    layers = [name for name in blocks if name.endswith(modules)]  # not the patch embedding's convolution "proj"
    assert len(layers) == len(modules) * len(BLOCKS)
    with torch.no_grad():
        start = plain.native(IMAGES)
        for name in layers:
            layer = tuned.model.get_submodule(name)
            a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
            assert a.shape[0] == b.shape[1] == 3
            plain.model.get_submodule(name).weight += 5.0 / 3 * b @ a  # W x + (alpha / rank) B A x
        naive, found = plain.native(IMAGES), tuned.eval().native(IMAGES)
    torch.testing.assert_close(found, naive, rtol=1e-4, atol=1e-5)
    assert (found - start).norm() > 0.1 * start.norm()


@pytest.mark.parametrize("name", VITS)
def test_prompts_join_every_block_and_are_replaced_at_the_next(name: str) -> None:
    """Jia et al. 2022, equations 6 and 7, with each block's attention over prefix tokens, prompts and patches."""
    plain, tuned = build(name=name).eval(), build(Prompts(4), name=name).eval()
    model, count = plain.model, plain.model.num_prefix_tokens
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(IMAGES))))
        for i, block in enumerate(model.blocks):
            prompts = tuned.model.blocks[i].prompts
            tokens = [torch.cat([row[:count], prompts, row[count:]]) for row in x]
            x = torch.stack([block(row[None])[0] for row in tokens])
            x = torch.cat([x[:, :count], x[:, count + 4 :]], dim=1)
        naive = model.forward_head(model.norm(x), pre_logits=True)
        found = tuned.native(IMAGES)
        torch.testing.assert_close(found, naive, rtol=1e-4, atol=1e-5)
        assert (found - plain.native(IMAGES)).norm() > 1e-3 * naive.norm()
        assert tuned(IMAGES)[0].shape == plain(IMAGES)[0].shape
        several = build(Prompts(4), name=name, out_indices=(0, 2)).eval()
        torch.testing.assert_close(
            several(IMAGES)[1],
            tuned.model.forward_intermediates(
                IMAGES, indices=[2], norm=True, intermediates_only=True, output_fmt="NCHW"
            )[0],
        )


def test_prompts_equal_public_code(golden_tensors, golden_meta) -> None:
    recorded, meta = golden_tensors("vpt", "p0_"), golden_meta("vpt")["p0"]
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 3, "num_classes": 0}
    model = VisionTransformer(num_heads=meta["num_heads"], mlp_ratio=meta["mlp_ratio"], **sizes).double()
    weights = {key.removeprefix("weight_"): x for key, x in recorded.items() if key.startswith("weight_")}
    model.load_state_dict(weights)
    Prompts(meta["num_prompts"])._tune(model.requires_grad_(False))
    for block, prompts in zip(model.blocks, recorded["prompts"], strict=True):
        assert float(block.prompts.detach().abs().max()) <= meta["bound"]
        block.prompts.data = prompts.clone()
    token = model.forward_features(recorded["images"])[:, 0]
    torch.testing.assert_close(token, recorded["class_token"], rtol=1e-9, atol=1e-11)
    (token * recorded["direction"]).sum().backward()
    gradients = torch.stack([block.prompts.grad for block in model.blocks])
    torch.testing.assert_close(gradients, recorded["grad_prompts"], rtol=1e-8, atol=1e-11)


def test_prompts_begin_within_the_bound_of_the_papers_code() -> None:
    prompts = torch.cat([block.prompts for block in build(Prompts(200)).model.blocks])
    bound = math.sqrt(6 / (3 * 16 * 16 + 64))  # KMnP/vpt@7f3942e, src/models/vit_prompt/vit.py
    assert 0.99 * bound < prompts.abs().max() <= bound
    assert prompts.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert len({tuple(block.prompts[0].tolist()) for block in build(Prompts(2)).model.blocks}) == len(BLOCKS)


@pytest.mark.parametrize("method", METHODS)
def test_resumed_training_ends_in_the_same_bits(method: str) -> None:
    whole = build(METHODS[method])
    half, fresh = copy.deepcopy(whole), build(METHODS[method])
    train(whole, optimizer_of(whole), 4)
    optimizer = optimizer_of(half)
    train(half, optimizer, 2)
    fresh.load_state_dict(half.state_dict())
    resumed = optimizer_of(fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(fresh, resumed, 2)
    found = fresh.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.state_dict().items())


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def saved_bytes(backbone: TimmBackbone) -> int:
    """Bytes of distinct activations that the backward pass keeps."""
    known = {p.untyped_storage().data_ptr() for p in [*backbone.parameters(), *backbone.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        backbone.native(IMAGES)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("method", METHODS)
def test_gradients_and_optimizer_state_take_the_memory_of_what_trains(method: str) -> None:
    def memory(backbone: TimmBackbone) -> tuple[int, int, int]:
        optimizer = optimizer_of(backbone)
        train(backbone, optimizer, 1)
        trained = bytes_of([p for p in backbone.parameters() if p.requires_grad])
        moments = bytes_of([x for s in optimizer.state.values() for name, x in s.items() if name != "step"])
        return trained, bytes_of([p.grad for p in backbone.parameters() if p.grad is not None]), moments

    trained, gradients, moments = memory(build(METHODS[method]))
    assert gradients == trained and moments == 2 * trained  # AdamW's averages of gradients and their squares
    elements = {"lora": 6 * 3 * (64 + 192), "prompts": 6 * 4 * 64}
    if method in elements:
        assert trained == 4 * elements[method]
    assert moments < 0.07 * memory(build())[2]


def test_biases_alone_need_fewer_activations() -> None:
    full, biases = saved_bytes(build()), saved_bytes(build(BitFit()))
    assert biases < 0.85 * full


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Lora(rank=0), r"tuning\.rank: got 0, expected at least 1"),
        (lambda: Lora(alpha=0), r"tuning\.alpha: got 0"),
        (lambda: Lora(dropout=1.0), r"tuning\.dropout: got 1\.0"),
        (lambda: Prompts(0), r"tuning\.num_prompts: got 0"),
        (lambda: build(Lora(target_modules=("query",))), r"target_modules: got \['query'\].*fc1, fc2, proj, qkv"),
        (lambda: build(Lora(target_modules=())), r"target_modules: got \[\]"),
        (lambda: BitFit().apply(ResNet20()), r"tuning: got bitfit with a backbone of ResNet20, .* backbone=vit_small"),
        (lambda: build(Prompts(), name="resnet10t"), r"tuning: got prompts with a backbone of ResNet"),
        (lambda: build(Lora(), name="eva02_tiny_patch14_224"), r"tuning: got lora with a backbone of Eva"),
        (lambda: build(BitFit(), frozen_until="all"), r"tuning: got bitfit with backbone\.frozen_until=all"),
    ],
)
def test_impossible_combinations_are_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_features_that_change_have_no_cache() -> None:
    cfg = composed("backbone=vit_small", "tuning=bitfit", "feature_cache=maps")
    with pytest.raises(ConfigError, match=r"tuning: got .*BitFit with a feature cache.*feature_cache=none"):
        check(cfg)


def test_lora_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"tuning: got lora.*pip install '\.\[peft\]'"):
        build(Lora())


def test_tuned_backbones_take_layer_decay() -> None:
    for tuning in METHODS.values():
        backbone = build(tuning)
        layers = backbone.layer_ids()
        assert layers.keys() == dict(backbone.named_parameters()).keys()
        for name, layer in layers.items():
            if name.startswith("model.blocks."):
                assert layer == int(name.split(".")[2]) + 1


def test_mixed_precision_runs() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for tuning in METHODS.values():
            output = build(tuning).native(IMAGES)
            F.normalize(output).sum().backward()
            assert output.isfinite().all()
