"""How GSP starts: memory, k-center, exact resume; and how it degenerates to average pooling."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.gsp import Gsp, greedy_k_center
from dmlbench.models.projection import Projection
from dmlbench.models.transport import clip_norm


def batch(seed: int, rows: int = 8, channels: int = 5, height: int = 3, width: int = 4) -> Tensor:
    return torch.randn(rows, channels, height, width, generator=torch.Generator().manual_seed(seed))


def started_gsp(**arguments: float) -> tuple[Gsp, Projection]:
    torch.manual_seed(0)
    gsp, project = Gsp(6, 4, memory_rows=16, **arguments), Projection(5, 6)
    for step in (1, 2):
        gsp.observe(gsp(batch(step), project), step=step)
    assert gsp.started
    return gsp, project


def test_k_center_equals_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    initial, candidates = torch.randn(3, 4, generator=generator), torch.randn(20, 4, generator=generator)
    covered = [row.numpy() for row in initial]
    for pick in greedy_k_center(initial, candidates, 6):
        radii = [min(float(np.linalg.norm(row.numpy() - c)) for c in covered) for row in candidates]
        farthest = candidates[int(np.argmax(radii))]
        assert torch.equal(pick, farthest)
        covered.append(farthest.numpy())


def test_k_center_equals_the_recorded_start_over_classifier_rows(golden_tensors) -> None:
    golden = golden_tensors("gsp_module", "m0_")
    rows = golden["classifier_weight"]
    picked = greedy_k_center(rows[:1], rows[1:], 63)
    torch.testing.assert_close(torch.cat([rows[:1], picked]), golden["prototypes"])


def test_prototypes_start_in_place_from_the_memory_with_the_batch_that_fills_it() -> None:
    torch.manual_seed(0)
    gsp, project = Gsp(6, 4, memory_rows=16), Projection(5, 6)
    parameter = gsp.prototypes
    outputs = [gsp(batch(step), project) for step in (1, 2)]
    assert torch.allclose(outputs[0].embedding, Gap()(batch(1), project).embedding, atol=1e-6)
    assert "histogram" not in outputs[0].side
    assert torch.allclose(outputs[0].side["weights"], torch.full((8, 3, 4), 1 / 12))
    gsp.observe(outputs[0], step=1)
    assert not gsp.started
    gsp.observe(outputs[1], step=2)
    assert gsp.started and gsp.prototypes is parameter
    memory = clip_norm(torch.cat([pooled.embedding for pooled in outputs]).detach())
    assert torch.equal(gsp.memory, memory)
    assert torch.equal(gsp.prototypes.detach(), greedy_k_center(memory[:4], memory[4:], 4))
    pooled = gsp(batch(3), project)
    assert set(gsp.provides) <= set(pooled.side)
    assert torch.allclose(pooled.side["histogram"].sum(dim=1), torch.ones(8), atol=1e-5)
    assert torch.allclose(pooled.side["weights"].sum(dim=(1, 2)), torch.ones(8), atol=1e-5)
    pooled.embedding.square().sum().backward()
    assert gsp.prototypes.grad is not None and gsp.prototypes.grad.abs().sum() > 0
    before = {name: value.clone() for name, value in gsp.state_dict().items()}
    gsp.observe(gsp(batch(9), project), step=3)  # they do not start again
    assert all(torch.equal(value, before[name]) for name, value in gsp.state_dict().items())


@pytest.mark.parametrize(("memory_rows", "size", "start_step"), [(5, 3, 0), (4, 6, 0), (4, 4, 3)])
def test_the_memory_holds_the_last_rows_after_the_start_step(memory_rows: int, size: int, start_step: int) -> None:
    gsp = Gsp(2, 2, memory_rows=memory_rows, start_step=start_step)
    for step in range(1, start_step + 1):
        gsp.observe(Pooled(torch.rand(size, 2)), step=step)
        assert not gsp.started and int(gsp.filled) == 0
    first, second = torch.arange(4.0 * size).view(2, size, 2) / 100
    gsp.observe(Pooled(first), step=start_step + 1)
    if size < memory_rows:  # the batch that fills the memory overwrites the end of the one before
        assert not gsp.started
        gsp.observe(Pooled(second), step=start_step + 2)
        assert torch.equal(gsp.memory, torch.cat([first[: memory_rows - size], second]))
    else:
        assert torch.equal(gsp.memory, first[-memory_rows:])
    assert gsp.started


def test_state_dict_continues_a_half_filled_memory_exactly() -> None:
    torch.manual_seed(0)
    project = Projection(5, 6)
    whole = Gsp(6, 4, memory_rows=16)
    resumed = Gsp(6, 4, memory_rows=16)
    whole.observe(whole(batch(1), project), step=1)
    resumed.load_state_dict(whole.state_dict())
    for gsp in (whole, resumed):
        assert not gsp.started
        gsp.observe(gsp(batch(2), project), step=2)
        assert gsp.started
    again = Gsp(6, 4, memory_rows=16)
    again.load_state_dict(resumed.state_dict())
    assert again.started
    assert torch.equal(again(batch(3), project).embedding, whole(batch(3), project).embedding)


def test_gsp_equals_gap_when_transport_ratio_is_one() -> None:
    gsp, project = started_gsp(transport_ratio=1.0)
    x = batch(5).requires_grad_()
    pooled = gsp(x, project)
    assert torch.allclose(pooled.embedding, Gap()(x, project).embedding, atol=1e-6)
    gradient = torch.autograd.grad(pooled.side["histogram"][:, 0].sum(), gsp.prototypes)[0]
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(("case", "combine", "smoothing"), [("m0", None, 5.0), ("m1", "weighted_gmp", 0.5)])
def test_gsp_with_projection_equals_the_official_module(golden_tensors, case, combine, smoothing: float) -> None:
    """yetigurbuz/generalized-sum-pooling b765b889, pytorch/gsp/embed_layer.py:140-184, pooling_method gap and gmp:
    normalized embedding, classifier on top, gradients of all inputs."""
    golden = golden_tensors("gsp_module", f"{case}_")
    gsp = Gsp(8, 64, transport_ratio=0.3, smoothing=smoothing, memory_rows=128, combine=combine).double()
    gsp.load_state_dict(
        gsp.state_dict() | {"prototypes": golden["prototypes"], "prototypes_started": torch.tensor(True)}
    )
    project = Projection(10, 8, bias=True).double()
    project.load_state_dict({"weight": golden["embed_weight"], "bias": golden["embed_bias"]})
    x = golden["features"].requires_grad_()
    pooled = gsp(x, project)
    unit = torch.nn.functional.normalize(pooled.embedding)
    logits = pooled.embedding @ golden["classifier_weight"].T + golden["classifier_bias"]
    torch.testing.assert_close(unit, golden["out_emb"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(logits, golden["out_logits"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(pooled.side["histogram"], golden["out_z"], rtol=1e-6, atol=1e-8)
    loss = (unit * golden["grad_out_emb"]).sum() + (logits * golden["grad_out_logits"]).sum()
    (loss + (pooled.side["histogram"] * golden["grad_out_z"]).sum()).backward()
    expected = [golden[f"grad_{name}"] for name in ("features", "embed_weight", "embed_bias", "prototypes")]
    for actual, value in zip(
        [x.grad, project.weight.grad, project.bias.grad, gsp.prototypes.grad], expected, strict=True
    ):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6)
