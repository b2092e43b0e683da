"""Average, max, generalized-mean and k-max pooling against recorded values of public code and naive loops."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import Gap, GapGmp, Gmp
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError

INPUTS = ("signed", "nonneg")


@pytest.fixture(scope="module")
def golden(shared_dir: Path) -> dict[str, Tensor]:
    with np.load(shared_dir / "golden" / "poolings_gsp_tf.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}


def projection_from(weight: Tensor) -> Projection:
    """Recorded kernels are [C, D] or [1, 1, C, D]."""
    kernel = weight.reshape(weight.shape[-2:])
    project = Projection(*kernel.shape)
    with torch.no_grad():
        project.weight.copy_(kernel.T)
    return project


def check_recorded(golden: dict[str, Tensor], pooling: Pooling, *, name: str, kind: str, kernel: str) -> None:
    """Compare output and all gradients; recorded tensors are NHWC, histograms follow the embedding."""
    x = golden[f"features_{kind}"].permute(0, 3, 1, 2).clone().requires_grad_()
    project = projection_from(golden[f"{name}_{kernel}"])
    pooled = pooling(x, project)
    parts = [pooled.embedding] + ([pooled.side["histogram"]] if "histogram" in pooled.side else [])
    out = torch.cat(parts, dim=1)
    torch.testing.assert_close(out, golden[f"{name}_{kind}_out"], atol=1e-5, rtol=1e-5)
    (out * golden["grad_out"][:, : out.shape[1]]).sum().backward()
    assert x.grad is not None and project.weight.grad is not None
    expected = golden[f"{name}_{kind}_grad_features"].permute(0, 3, 1, 2)
    torch.testing.assert_close(x.grad, expected, atol=1e-5, rtol=1e-4)
    expected = golden[f"{name}_{kind}_grad_{kernel}"]
    torch.testing.assert_close(project.weight.grad.T.reshape(expected.shape), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("name", "pooling"), [("gap", Gap()), ("gmp", Gmp()), ("gap_gmp", GapGmp())])
def test_global_poolings_equal_recorded_values(
    golden: dict[str, Tensor], name: str, pooling: Pooling, kind: str
) -> None:
    check_recorded(golden, pooling, name=name, kind=kind, kernel="w0")


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("name", "per_channel"), [("gemean", False), ("gemean_perchannel", True)])
def test_gem_equals_recorded_values(golden: dict[str, Tensor], name: str, per_channel: bool, kind: str) -> None:
    pooling = Gem(num_channels=8, per_channel=per_channel)
    with torch.no_grad():
        pooling.power.copy_(golden[f"{name}_w0"].view(-1, 1, 1))
    check_recorded(golden, pooling, name=name, kind=kind, kernel="w1")
    assert pooling.power.grad is not None
    expected = golden[f"{name}_{kind}_grad_w0"].view(-1, 1, 1)
    torch.testing.assert_close(pooling.power.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", INPUTS)
def test_gsp_equals_recorded_values(golden: dict[str, Tensor], kind: str) -> None:
    pooling = Gsp(6, 5, transport_ratio=0.3, smoothing=5.0, memory_rows=10)
    state = pooling.state_dict()
    state["prototypes"] = golden["gsp_tf_train_w1"]
    state["prototypes_started"] = torch.tensor(True)
    pooling.load_state_dict(state)
    check_recorded(golden, pooling, name="gsp_tf_train", kind=kind, kernel="w0")
    assert pooling.prototypes.grad is not None
    expected = golden[f"gsp_tf_train_{kind}_grad_w1"]
    torch.testing.assert_close(pooling.prototypes.grad, expected, atol=1e-5, rtol=1e-4)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_k_max_and_its_gradient_equal_a_naive_loop() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = KMax(7)(x, Identity()).embedding
    out.sum().backward()
    for image in range(2):
        for channel in range(3):
            pixels = sorted(x[image, channel].flatten().tolist(), reverse=True)
            assert out[image, channel].item() == pytest.approx(sum(pixels[:7]) / 7, abs=1e-6)
            chosen = (x[image, channel] >= pixels[6]).float() / 7
            assert x.grad is not None and torch.allclose(x.grad[image, channel], chosen)


def test_k_max_is_max_for_one_and_average_for_all() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    project = Projection(3, 4)
    assert torch.allclose(KMax(1)(x, project).embedding, Gmp()(x, project).embedding, atol=1e-6)
    assert torch.allclose(KMax(20)(x, project).embedding, Gap()(x, project).embedding, atol=1e-6)


def test_k_max_beyond_the_map_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"k \(21\).*20 pixels"):
        KMax(21)(torch.zeros(1, 3, 4, 5), Projection(3, 4))
    with pytest.raises(ConfigError, match=r"k \(0\)"):
        KMax(0)


def test_gem_is_average_for_power_one_and_near_max_for_a_large_power() -> None:
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(2)) + 0.1
    assert torch.allclose(Gem(power=1.0)(x, Identity()).embedding, x.mean(dim=(2, 3)), atol=1e-6)
    assert torch.allclose(Gem(power=80.0)(x, Identity()).embedding, x.amax(dim=(2, 3)), rtol=0.05)


def test_gem_power_trains_only_if_asked() -> None:
    assert Gem().power.requires_grad and not Gem(learn_power=False).power.requires_grad


def test_gem_names_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="num_channels"):
        Gem(per_channel=True)
    with pytest.raises(ConfigError, match=r"power \(0\) of gem"):
        Gem(power=0)
    with pytest.raises(ConfigError, match=r"8 powers.*3 channels"):
        Gem(num_channels=8, per_channel=True)(torch.rand(1, 3, 2, 2), Projection(3, 2))


POOLINGS = [Gap(), Gmp(), GapGmp(), Gem(), KMax(1)]


@pytest.mark.parametrize("pooling", POOLINGS, ids=lambda pooling: type(pooling).__name__)
@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 2, 5)])
def test_maps_of_any_form_memory_format_and_precision_are_pooled(pooling: Pooling, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    project = Projection(3, 4)
    expected = pooling(x, project).embedding
    assert expected.shape == (shape[0], 4)
    last = pooling(x.contiguous(memory_format=torch.channels_last), project).embedding
    assert torch.allclose(last, expected, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = pooling(x.bfloat16(), project).embedding
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow, expected, atol=0.02)


def test_poolings_without_state_have_started_and_observe_nothing() -> None:
    pooling = Gap()
    pooled = pooling(torch.rand(2, 3, 4, 4), Projection(3, 4))
    pooling.observe(pooled, step=1)
    assert pooling.started and pooling.provides == () and pooled.side == {}
    assert pooling.input_width(128) == pooling.output_width(128) == 128


@pytest.mark.parametrize("power", [3.0, 8.0, 40.0])
def test_gem_of_a_dead_channel_has_finite_gradients_at_any_power(power: float) -> None:
    x = torch.rand(2, 3, 4, 4)
    x[:, 1] = 0
    x.requires_grad_()
    pooling, project = Gem(power=power), Projection(3, 2)
    pooling(x, project).embedding.sum().backward()
    assert x.grad is not None and pooling.power.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(pooling.power.grad).all()
    assert (x.grad[:, [0, 2]] != 0).any()
