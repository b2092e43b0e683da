"""The interface of every pooling: forms of maps, precision, gradients, NaN, state, contributions and errors."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from small_models import CHANNELS, POOLINGS, make_pooling, randn, shaken
from torch import Tensor

from dmlbench.models.pooling.attention import Cbam, Delf
from dmlbench.models.pooling.attention_pool import AttentionPool
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.gap_histogram import GapHistogram
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.gsp import Gsp, PrototypePooling
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.pooling.native import Native
from dmlbench.models.pooling.netvlad import NetVlad
from dmlbench.models.pooling.otp import Otp
from dmlbench.models.pooling.reweighting import Crow
from dmlbench.models.pooling.second_order import Gsop
from dmlbench.models.pooling.simpool import SimPool
from dmlbench.models.pooling.transformer import Transformer
from dmlbench.models.pooling.weldon import Weldon
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError

BATCH_NORMALIZED = ("gsop", "gsop_paper", "solar", "solar_paper")
MODES = [(name, False) for name in POOLINGS] + [(name, True) for name in BATCH_NORMALIZED]


def parts_of(pooled: Pooled) -> list[Tensor]:
    return [pooled.embedding, *pooled.side.values()]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 4, 4), (3, 2, 5)])
@pytest.mark.parametrize(("name", "training"), MODES)
def test_maps_of_any_form_memory_format_and_precision_are_pooled(
    name: str, training: bool, shape: tuple[int, int, int]
) -> None:
    batch, height, width = shape
    pooling, project = make_pooling(name, (height, width))
    pooling.train(training)
    # numbers that bfloat16 holds exactly: what differs then is the arithmetic
    x = (torch.rand(batch, CHANNELS, height, width, generator=torch.Generator().manual_seed(3)) + 0.1).bfloat16()
    pooled = pooling(x.float(), project)
    assert pooled.embedding.shape == (batch, pooling.output_width(project.out_features))
    assert set(pooled.side) == set(pooling.provides)
    assert all(part.dtype == torch.float32 for part in parts_of(pooled))
    if "weights" in pooled.side:
        assert pooled.side["weights"].shape == shape and (pooled.side["weights"] >= 0).all()
        torch.testing.assert_close(pooled.side["weights"].sum(dim=(1, 2)), torch.ones(batch))
    last = pooling(x.float().contiguous(memory_format=torch.channels_last), project)
    torch.testing.assert_close(last.embedding, pooled.embedding, atol=1e-5, rtol=1e-5)
    plain = pooling(x, project)
    torch.testing.assert_close(plain.embedding, pooled.embedding, atol=1e-5, rtol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            under_autocast = pooling(narrow, project)
        sum(part.square().sum() for part in parts_of(under_autocast)).backward()
        assert narrow.grad is not None and narrow.grad.isfinite().all()
        if training:
            continue  # batch norm over few values magnifies rounding
        tolerance = 0.02 if name.startswith(("delf", "solar")) else 1e-5  # their convolutions follow autocast
        for part, exact in zip(parts_of(under_autocast), parts_of(pooled), strict=True):
            assert part.dtype == torch.float32
            torch.testing.assert_close(part, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("value", [0.0, 0.7, -300.0])
@pytest.mark.parametrize("size", [(1, 1), (3, 4)])
@pytest.mark.parametrize(("name", "training"), MODES)
def test_equal_features_give_finite_values_and_gradients(
    name: str, training: bool, size: tuple[int, int], value: float
) -> None:
    pooling, project = make_pooling(name, size)
    pooling.train(training)
    x = torch.full((2, CHANNELS, *size), value, requires_grad=True)
    pooled = pooling(x, project)
    (pooled.embedding.sum() + sum(side.square().sum() for side in pooled.side.values())).backward()
    gradients = [parameter.grad for parameter in (x, *pooling.parameters(), *project.parameters())]
    for tensor in (*parts_of(pooled), *gradients):
        assert tensor is not None and tensor.isfinite().all()
    if "weights" in pooled.side:
        torch.testing.assert_close(pooled.side["weights"].sum(dim=(1, 2)), torch.ones(2))


@pytest.mark.parametrize("name", POOLINGS)
def test_nan_in_a_map_reaches_its_embedding_and_no_other(name: str) -> None:
    pooling, project = make_pooling(name, (3, 3))
    x = torch.rand(3, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(4))
    x[1, 2, 0, 1] = torch.nan
    pooled = pooling(x, project)
    assert not pooled.embedding[1].isfinite().all()
    for part in parts_of(pooled):
        assert name == "simpool_official" or part[[0, 2]].isfinite().all()  # its minimum is the batch's
        if isinstance(pooling, PrototypePooling | GapHistogram):
            assert not part[1].isfinite().all()


# Crow("paper") jumps where a feature changes its sign, Tsmk("official") stops a gradient on purpose.
@pytest.mark.parametrize(("name", "training"), [mode for mode in MODES if mode[0] not in ("crow_paper", "tsmk")])
def test_gradient_equals_finite_differences(name: str, training: bool) -> None:
    pooling, project = make_pooling(name, (2, 3))
    shaken(pooling).train(training)
    x = randn(2, CHANNELS, 2, 3, seed=3).requires_grad_()
    names = [name for name, _ in pooling.named_parameters()]

    def embed(x: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(pooling, state, (x, project.double())).embedding

    values = [parameter.detach().clone().requires_grad_() for parameter in pooling.parameters()]
    assert torch.autograd.gradcheck(embed, (x, *values), fast_mode=True)


@pytest.mark.parametrize("name", POOLINGS)
def test_a_copy_of_the_state_gives_the_same_embedding(name: str) -> None:
    pooling, project = make_pooling(name, (2, 3))
    copy = POOLINGS[name]((2, 3)).eval()
    copy.load_state_dict(pooling.state_dict())
    x = torch.randn(2, CHANNELS, 2, 3)
    assert torch.equal(copy(x, project).embedding, pooling(x, project).embedding)


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("size", [(3, 4), (1, 1)])
def test_contributions_are_shares(name: str, size: tuple[int, int]) -> None:
    pooling, project = make_pooling(name, size)
    shares = pooling.contributions(torch.randn(2, CHANNELS, *size), project)
    if name in ("gemax", "sliced_wasserstein"):
        assert shares is None
        return
    assert shares is not None and shares.shape == (2, *size) and (shares >= 0).all()
    torch.testing.assert_close(shares.sum(dim=(1, 2)), torch.ones(2))


ANY_WIDTH = ("gap", "gmp", "gap_gmp", "gem", "k_max", "crow", "crow_paper", "weldon", "weldon_paper", "gemax")


@pytest.mark.parametrize("name", [name for name in POOLINGS if name not in ANY_WIDTH])
def test_other_channels_or_widths_are_rejected(name: str) -> None:
    pooling, project = make_pooling(name, (2, 2))
    with pytest.raises(ConfigError, match=rf"{CHANNELS + 1}|{project.out_features + 1}"):
        pooling(torch.rand(1, CHANNELS + 1, 2, 2), Projection(CHANNELS + 1, project.out_features + 1))


X = torch.rand(1, 3, 2, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KMax(21)(torch.zeros(1, 3, 4, 5), Projection(3, 4)), "k: got 21, expected at most 20"),
        (lambda: Native()(X, Projection(3, 4)), r"\(1, 3, 2, 2\).*pooling=gap"),
        (lambda: KMax(0), "k: got 0"),
        (lambda: Gem(per_channel=True), "num_channels"),
        (lambda: Cbam(8, channel_reduction=16), "channel_reduction: got 16, expected 1 to 8"),
        (lambda: Delf(3, conv_size=2), "conv_size: got 2"),
        (lambda: Weldon(k_max=5)(X, Projection(3, 4)), "got 5 and 3, expected at most 4"),
        (lambda: Crow(epsilon=math.nan), "epsilon: got nan"),
        (lambda: Gsop(6, (2, 0)), "map_width: got 0"),
        (lambda: Gsop(4, (2, 3))(torch.rand(2, 3, 5, 6), Projection(3, 4)), r"\(5, 6\).*\(2, 3\).*variant=paper"),
        (lambda: Gsp(6, 64, memory_rows=100), r"memory_rows: got 100.*num_prototypes \(64\)"),
        (lambda: Gsp(6, start_step=-1), "start_step: got -1"),
        (lambda: Gsp(6, transport_ratio=2.0), "transport_ratio: got 2.0"),
        (lambda: Gsp(6, weighting="residual", transport_ratio=1.0), "transport_ratio: got 1.0, expected below 1"),
        (lambda: NetVlad(num_centers=0), "num_centers: got 0"),
        (lambda: NetVlad(feature_size=0), "feature_size: got 0"),
        (lambda: NetVlad(feature_size=None), "head.out_features: got null, expected a multiple of 8"),
        (lambda: Otp(feature_size=None, embedding_size=30), "head.out_features: got 30, expected a multiple of 8"),
        (lambda: Otp(smoothing=0.0), "smoothing: got 0.0"),
        (lambda: AttentionPool(10, num_heads=4), r"num_heads: got 4.*\(10\)"),
        (lambda: AttentionPool(8, num_queries=4, merge="concatenate").input_width(6), "num_queries: got 4.* 6."),
        (lambda: SimPool(8, power=0.0), "power: got 0.0"),
        (lambda: Transformer(8, num_layers=0), "num_layers: got 0"),
        (lambda: Transformer(6, position="sine"), "sine positions: got 6"),
    ],
)
def test_arguments_outside_their_range_are_rejected(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("build", [partial(NetVlad, num_centers=3), partial(Otp, num_prototypes=3)])
def test_without_a_feature_size_embeddings_have_the_size_of_the_head(build: Callable[..., Pooling]) -> None:
    pooling = build(feature_size=None, embedding_size=12)
    width = pooling.input_width(12)
    assert (width, pooling.output_width(width)) == (4, 12)
    assert pooling(torch.rand(2, 5, 3, 4), Projection(5, width)).embedding.shape == (2, 12)
