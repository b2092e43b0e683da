"""Poolings against values and gradients recorded from the GSP study's TensorFlow code."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dmlbench.models.pooling.attention import Cbam, Delf
from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.gap_histogram import GapHistogram
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.gemax import Gemax
from dmlbench.models.pooling.global_pooling import Gap, GapGmp, Gmp
from dmlbench.models.pooling.gsp import Gsp, PrototypePooling
from dmlbench.models.pooling.netvlad import NetVlad
from dmlbench.models.pooling.otp import Otp
from dmlbench.models.pooling.reweighting import Crow, Tsmk
from dmlbench.models.pooling.second_order import Gsop, Solar
from dmlbench.models.pooling.weldon import Weldon
from dmlbench.models.projection import Projection


def layer(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


def statistics(name: str) -> list[str]:
    return [f"{name}.running_mean", f"{name}.running_var"]


GSOP_LAYERS = {
    branch: [f"{branch}_reduce", f"{branch}_norm", *(f"{branch}_head.{part}" for part in ("norm", "rows", "out"))]
    for branch in ("channel", "pixel")
}
GSOP_NORMS = ("channel_norm", "channel_head.norm", "pixel_norm", "pixel_head.norm")
GSOP = ["", *(w for names in GSOP_LAYERS.values() for n in names for w in layer(n))]
GSOP += [s for name in GSOP_NORMS for s in statistics(name)]
SOLAR = [w for name in ("query", "query_norm", "key", "key_norm", "value", "out") for w in layer(name)]
SOLAR += ["gem.power", "", *statistics("query_norm"), *statistics("key_norm")]


# The weights by name in the order of the recorded ones; "" is the projection.
RECORDED: dict[str, tuple[Callable[[], Pooling], list[str]]] = {
    "gap": (Gap, [""]),
    "gmp": (Gmp, [""]),
    "gap_gmp": (GapGmp, [""]),
    "gemean": (Gem, ["power", ""]),
    "gemean_perchannel": (lambda: Gem(num_channels=8, per_channel=True), ["power", ""]),
    "delf": (lambda: Delf(8, num_filters=12), ["", *layer("hidden"), *layer("score")]),
    "cbam": (
        lambda: Cbam(8, channel_reduction=2, conv_size=3),
        ["", "reduce.weight", "expand.weight", "spatial.weight"],
    ),
    "crow": (Crow, [""]),
    "tsmk_nap": (lambda: Tsmk(6), ["", "bias"]),
    "weldon": (Weldon, [""]),
    "gemax": (Gemax, [""]),
    "gsop_train": (lambda: Gsop(6, (4, 4), attention_dim=5), GSOP),
    "gsop_infer": (lambda: Gsop(6, (4, 4), attention_dim=5).eval(), GSOP),
    "solar_train": (lambda: Solar(8), SOLAR),
    "solar_infer": (lambda: Solar(8).eval(), SOLAR),
    "gsp_tf_train": (lambda: Gsp(6, 5, memory_rows=10), ["", "prototypes"]),
    "gsp_tf_maxaug": (lambda: Gsp(6, 5, memory_rows=10, combine="gmp"), ["", "prototypes"]),
    "gsp_tf_gemean": (lambda: Gsp(6, 5, memory_rows=10, smoothing=0.5, combine="gem"), ["power", "", "prototypes"]),
    "metagap_histogram": (lambda: GapHistogram(6, 5), ["", "prototypes"]),
    "vlad": (lambda: NetVlad(num_centers=3, feature_size=2), ["centers", "", "assignment_weight", "assignment_bias"]),
    "otp": (lambda: Otp(num_prototypes=3, feature_size=2, memory_rows=6), ["", "prototypes"]),
}


@pytest.mark.parametrize("kind", ["signed", "nonneg"])
@pytest.mark.parametrize("name", RECORDED)
def test_values_and_gradients_equal_recorded_ones(golden_tensors, name: str, kind: str) -> None:
    """Recorded maps are NHWC, a histogram follows the embedding."""
    golden = golden_tensors("poolings_gsp_tf")
    build, weights = RECORDED[name]
    pooling = build()
    assert f"{name}_w{len(weights)}" not in golden, "every recorded weight is set"
    assert {key for key, _ in pooling.named_parameters()} <= {*weights}, "every weight is recorded"
    recorded = dict(zip(weights, (golden[f"{name}_w{number}"] for number in range(len(weights))), strict=True))
    project = Projection(*recorded[""].shape[-2:])
    tensors = {**dict(pooling.named_parameters()), **dict(pooling.named_buffers()), "": project.weight}
    with torch.no_grad():
        for key, value in recorded.items():
            tensors[key].copy_(_in_torch_order(value, tensors[key]))
    if isinstance(pooling, PrototypePooling):
        pooling.load_state_dict(pooling.state_dict() | {"prototypes_started": torch.tensor(True)})
    x = golden[f"features_{kind}"].permute(0, 3, 1, 2).clone().requires_grad_()
    pooled = pooling(x, project)
    out = torch.cat([pooled.embedding] + [pooled.side[key] for key in ("histogram",) if key in pooled.side], dim=1)
    assert_close(out, golden[f"{name}_{kind}_out"], atol=1e-5, rtol=1e-5)
    (out * golden["grad_out"][:, : out.shape[1]]).sum().backward()
    assert_close(x.grad, golden[f"{name}_{kind}_grad_features"].permute(0, 3, 1, 2), atol=1e-5, rtol=1e-4)
    for number, key in enumerate(weights):
        if tensors[key].requires_grad:
            expected = _in_torch_order(golden[f"{name}_{kind}_grad_w{number}"], tensors[key])
            assert_close(tensors[key].grad, expected, atol=1e-5, rtol=1e-4)


def _in_torch_order(recorded: Tensor, like: Tensor) -> Tensor:
    """A Keras kernel [(height, width,) in, out] as torch keeps it; a table of the shape of ``like`` is one already."""
    if recorded.ndim == 4:
        recorded = recorded.permute(3, 2, 0, 1)
    elif recorded.ndim == 2 and recorded.shape != like.shape:  # none of the recorded kernels is square
        recorded = recorded.T
    return recorded.reshape(like.shape)
