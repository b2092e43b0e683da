"""The comparison of a pooling with what public code gave, for all poolings that the GSP study's code has."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.prototypes import PrototypePooling
from dmlbench.models.projection import Projection


@pytest.fixture(scope="session")
def check_recorded(golden_dir: Path) -> Callable[..., None]:
    """``check_recorded(pooling, name, kind, weights)``: see ``_check``."""
    with np.load(golden_dir / "poolings_gsp_tf.npz", allow_pickle=False) as arrays:
        golden = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}

    def check(pooling: Pooling, name: str, kind: str, weights: tuple[str, ...]) -> None:
        _check(golden, pooling, name, kind, weights)

    return check


def _check(golden: dict[str, Tensor], pooling: Pooling, name: str, kind: str, weights: tuple[str, ...]) -> None:
    """Set the recorded weights, compare the output and all gradients.

    Args:
        golden: recorded arrays; maps are NHWC, a histogram follows the embedding.
        pooling: with as many channels, dimensions and prototypes as were recorded.
        name: of the recorded pooling.
        kind: of the recorded input, "signed" or "nonneg".
        weights: parameters and buffers in the order of the recorded weights; "" is the projection.
    """
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
