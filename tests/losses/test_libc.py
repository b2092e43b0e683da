"""LIBC is the public code in value and every gradient, a naive loop of its attention, and reproducible with dropout."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmlbench.losses.libc import Libc

CLASSES, SIZE = 5, 8
LABELS = torch.tensor([0, 1, 1, 2, 2, 2, 4])
OURS = {
    "fc": "classifier", "gnn.dim_red": "enter", "gnn.bottleneck.0": "norm", "gnn.fc.0": "refined_classifier",
    "att.q_linear": 0, "att.k_linear": 1, "att.v_linear": 2, "att.out": "self_attn.out_proj",
}  # fmt: skip


def batch_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(len(LABELS), SIZE, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss_of(dtype: torch.dtype = torch.float64, **settings: Any) -> Libc:
    torch.manual_seed(0)
    return Libc(CLASSES, SIZE, **{"dropout": 0.0, **settings}).to(dtype)


def placed(parameters: dict[str, Tensor], name: str) -> Tensor:
    """Our tensor that the public code calls ``name``; queries, keys and values are thirds of one of ours."""
    owner, kind = name.rsplit(".", 1)
    if owner in OURS:
        return parameters[f"{OURS[owner]}.{kind}"]
    layer, part = owner.removeprefix("gnn.gnn_model.node_model.").split(".", 2)[1:]
    ours = OURS.get(part, part)
    if isinstance(ours, int):
        return parameters[f"layers.{layer}.self_attn.in_proj_{kind}"].chunk(3)[ours]
    return parameters[f"layers.{layer}.{ours}.{kind}"]


@pytest.mark.parametrize("case", ["c0", "c1", "c2"])
def test_equals_the_public_code(golden, golden_meta, case: str) -> None:
    record, settings = golden("libc"), golden_meta("libc")["cases"][case]
    loss = Libc(
        settings["classes"], settings["size"], num_layers=settings["num_layers"], num_heads=settings["num_heads"],
        concatenate_layers=bool(settings["cat"]), temperature=settings["temperature"], dropout=0.0,
    ).double()  # fmt: skip
    parameters = dict(loss.named_parameters())
    with torch.no_grad():
        for name in settings["parameters"]:
            placed(parameters, name).copy_(torch.tensor(record[f"{case}_{name}"]))
    x = torch.tensor(record[f"{case}_embeddings"], requires_grad=True)
    y = torch.tensor(record[f"{case}_labels"])
    value = loss(x, y)
    value.backward()
    np.testing.assert_allclose(value.item(), record[f"{case}_loss"], rtol=1e-10)
    np.testing.assert_allclose(x.grad.numpy(), record[f"{case}_grad"], rtol=1e-8, atol=1e-10)
    gradients = {name: p.grad for name, p in parameters.items() if p.requires_grad}
    assert gradients.keys() == parameters.keys() - {"norm.bias"}
    for name in settings["parameters"]:
        if name != "gnn.bottleneck.0.bias":  # the public code does not train it either
            found = placed(gradients, name).numpy()
            np.testing.assert_allclose(found, record[f"{case}_grad_{name}"], rtol=1e-8, atol=1e-10, err_msg=name)
    for part in ("backbone", "refined"):
        loss.backbone_weight, loss.refined_weight = float(part == "backbone"), float(part == "refined")
        np.testing.assert_allclose(loss(x, y).item(), record[f"{case}_{part}"], rtol=1e-10)


def test_messages_are_a_naive_loop_over_images_and_heads() -> None:
    loss, heads = loss_of(num_heads=4), 4
    attention = loss.layers[0].self_attn
    torch.nn.init.normal_(attention.in_proj_bias)
    hidden = batch_of()
    (wq, wk, wv), (bq, bk, bv) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    q, k, v = hidden @ wq.T + bq, hidden @ wk.T + bk, hidden @ wv.T + bv
    size = SIZE // heads
    expected = torch.zeros_like(hidden)
    for i in range(len(hidden)):
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            weights = [math.exp((q[i, at] @ k[j, at]).item() / math.sqrt(size)) for j in range(len(hidden))]
            for j, weight in enumerate(weights):
                expected[i, at] += weight / (1 + sum(weights)) * v[j, at]
    expected = expected @ attention.out_proj.weight.T + attention.out_proj.bias
    found, _ = attention(hidden, hidden, hidden, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_first_weights_are_drawn_as_the_public_code_draws_them() -> None:
    loss = Libc(50, 64)
    attention = loss.layers[0].self_attn
    for weight in (*attention.in_proj_weight.chunk(3), attention.out_proj.weight):
        bound = math.sqrt(6 / (64 + 64))  # xavier, each of the four by itself
        assert 0.98 * bound < weight.abs().max() <= bound
    assert not attention.in_proj_bias.any()
    assert not attention.out_proj.bias.any()
    assert loss.refined_classifier.weight.std().item() == pytest.approx(0.001, rel=0.05)
    assert torch.equal(loss.norm.weight, torch.ones(64))
    # With these the refined part is that of chance, log C.
    refined = Libc(50, 64, backbone_weight=0.0)(torch.randn(16, 64), torch.arange(16))
    assert refined.item() == pytest.approx(math.log(50), abs=0.05)


def test_backbone_part_alone_sees_lengths_and_refined_part_alone_the_batch() -> None:
    x, longer, other = batch_of(), batch_of(), batch_of()
    longer[0] *= 3
    other[-1] = -other[-1]
    for backbone, refined in ((1.0, 0.0), (0.0, 1.0)):
        loss = loss_of(backbone_weight=backbone, refined_weight=refined)
        torch.nn.init.normal_(loss.refined_classifier.weight)
        value = loss(x, LABELS)
        assert torch.isclose(loss(longer, LABELS), value) == bool(refined)
        gradients = []
        for batch in (x, other):
            inputs = batch.clone().requires_grad_()
            gradients.append(torch.autograd.grad(loss(inputs, LABELS), inputs)[0][0])
        assert torch.allclose(*gradients) == bool(backbone)


def test_a_part_of_weight_0_is_not_computed() -> None:
    x = batch_of()
    alone = loss_of(dropout=0.1, refined_weight=0.0)
    with torch.no_grad():
        alone.enter.weight.fill_(torch.nan)
    state = torch.get_rng_state()
    value = alone(x, LABELS)
    assert torch.equal(torch.get_rng_state(), state)  # no dropout
    value.backward()
    assert value == alone._cross_entropy(alone.classifier(x), LABELS)
    assert {name for name, p in alone.named_parameters() if p.grad is not None} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert alone(x[:1], LABELS[:1]).isfinite()  # one image is a batch
    refined = loss_of(backbone_weight=0.0)
    refined(x, LABELS).backward()
    assert refined.classifier.weight.grad is None


def test_settings_of_dropout_smoothing_and_init_are_used() -> None:
    loss = loss_of(refined_weight=0.0, label_smoothing=0.3, temperature=0.5)
    log_shares = (loss.classifier(batch_of()) / 0.5).log_softmax(1)
    values = [-(0.7 * row[label] + 0.3 * row.mean()) for row, label in zip(log_shares, LABELS, strict=True)]
    torch.testing.assert_close(loss(batch_of(), LABELS), sum(values) / len(values))
    layer = Libc(CLASSES, SIZE, dropout=0.3).layers[0]
    rates = [module.p for module in layer.modules() if isinstance(module, torch.nn.Dropout)]
    assert [layer.self_attn.dropout, *rates] == [0.3] * 4
    torch.manual_seed(0)
    classifier = Libc(50, 64, init="he_normal").classifier
    assert classifier.weight.std().item() == pytest.approx(math.sqrt(2 / 50), rel=0.05)
    assert not classifier.bias.any()
