"""ProxyAnchor is the formula it names and PML's loss in value, gradients and first proxies, at any scale."""

import math

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor, nn

from dmlbench.losses.proxy_anchor import ProxyAnchor

CLASSES, SIZE = 5, 7
BATCHES = {
    "several of most classes": [0, 1, 0, 3, 1, 0, 4, 3],  # class 2 is absent
    "one of each": [4, 2, 0, 1, 3],
    "a single class": [2, 2, 2],
    "a single image": [3],
}


def naive(x: Tensor, y: Tensor, proxies: Tensor, *, alpha: float, margin: float) -> Tensor:
    positive, negative = [], []
    for c in range(len(proxies)):
        s = [x[b] @ proxies[c] / x[b].norm() / proxies[c].norm() for b in range(len(x))]
        pull = [torch.exp(-alpha * (s[b] - margin)) for b in range(len(x)) if y[b] == c]
        push = [torch.exp(alpha * (s[b] + margin)) for b in range(len(x)) if y[b] != c]
        if pull:
            positive.append(torch.log(1 + sum(pull)))
        negative.append(torch.log(1 + sum(push, x.new_zeros(()))))
    return torch.stack(positive).mean() + torch.stack(negative).mean()


def draw(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(dtype: torch.dtype = torch.float64, **settings: float) -> ProxyAnchor:
    torch.manual_seed(0)
    return ProxyAnchor(CLASSES, SIZE, **settings).to(dtype)


def take(loss: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient of the embeddings, gradient of the proxies."""
    x = x.clone().requires_grad_()
    value = loss(x, y)
    return value.detach(), *torch.autograd.grad(value, [x, loss.proxies])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("alpha", "margin"), [(32.0, 0.1), (3.0, 0.0), (100.0, 0.6)])
def test_equals_a_naive_loop_and_pml(batch: str, alpha: float, margin: float) -> None:
    y = torch.tensor(BATCHES[batch])
    x, loss = draw(len(y)), loss_of(alpha=alpha, margin=margin)
    pml = ProxyAnchorLoss(CLASSES, SIZE, margin=margin, alpha=alpha)
    pml.proxies.data = loss.proxies.data.clone()
    inputs = [x.clone().requires_grad_(), loss.proxies]
    value = naive(inputs[0], y, loss.proxies, alpha=alpha, margin=margin)
    expected = (value.detach(), *torch.autograd.grad(value, inputs))
    found = take(loss, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, take(pml, x, y), rtol=1e-8, atol=1e-10)


def test_first_proxies_are_those_of_pml() -> None:
    torch.manual_seed(7)
    ours = ProxyAnchor(CLASSES, SIZE).proxies
    next_draw = torch.rand(())
    torch.manual_seed(7)
    assert torch.equal(ours, ProxyAnchorLoss(CLASSES, SIZE).proxies)
    assert torch.equal(next_draw, torch.rand(()))


def test_gradients_scale_with_the_weight_of_the_loss_and_can_be_taken_again() -> None:
    y = torch.tensor(BATCHES["one of each"])
    x, loss = draw(len(y)).requires_grad_(), loss_of()
    value = 0.25 * loss(x, y)
    first, again = (torch.autograd.grad(value, [x, loss.proxies], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.testing.assert_close(first, tuple(0.25 * g for g in take(loss, x.detach(), y)[1:]))
    (alone,) = torch.autograd.grad(loss(x.detach(), y), [loss.proxies])  # embeddings of a frozen model
    torch.testing.assert_close(alone, 4 * first[1])


@pytest.mark.parametrize("alpha", [32.0, 1000.0])
def test_float32_keeps_to_float64_where_exponentials_overflow(alpha: float) -> None:
    """exp(1000 * 1.1) is beyond float64, exp(1000 * -0.9) below it; the logarithm of their sum is neither."""
    y = torch.tensor([0, 1, 0, 3, 1, 0, 4, 3])
    wide, narrow = loss_of(alpha=alpha), loss_of(torch.float32, alpha=alpha)
    for x in (draw(len(y)), wide.proxies.detach()[y], -wide.proxies.detach()[y], wide.proxies.detach()[(y + 1) % 5]):
        # alpha multiplies the rounding of the cosines.
        value, *gradients = take(narrow, x.float(), y)
        expected, *gradients64 = take(wide, x, y)
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        for gradient, gradient64 in zip(gradients, gradients64, strict=True):
            error = (gradient - gradient64).norm() / gradient64.norm()
            assert error < 2e-6 * alpha, error


def test_a_closed_form_at_a_large_alpha() -> None:
    """Images on their own proxy, proxies at right angles: only the margins are left, log (1 + 2 exp(alpha / 10))."""
    loss = ProxyAnchor(3, 4, alpha=1000.0)
    loss.proxies.data = 0.3 * torch.eye(3, 4)
    value, x_grad, proxy_grad = take(loss, 2 * torch.eye(3, 4), torch.arange(3))
    assert value.item() == pytest.approx(100 + math.log(2), rel=1e-6)
    # Each proxy turns away from the two other images, with the weight 1/2 of their sum, and 1/3 of the mean.
    torch.testing.assert_close(proxy_grad[:, :3], (1 - torch.eye(3)) * 1000 / 6 / 0.3)
    torch.testing.assert_close(x_grad[:, :3], (1 - torch.eye(3)) * 1000 / 6 / 2)


@pytest.mark.parametrize("alpha", [32.0, 1000.0])
@pytest.mark.parametrize("zero", ["embeddings", "proxies", "both"])
def test_vectors_of_zeros_are_orthogonal_to_all_and_have_finite_gradients(zero: str, alpha: float) -> None:
    x, y, loss = draw(8, torch.float32), torch.tensor([0, 1, 0, 3, 1, 0, 4, 3]), loss_of(torch.float32, alpha=alpha)
    if zero != "proxies":
        x = x * 0
    if zero != "embeddings":
        loss.proxies.data.zero_()
    value, *gradients = take(loss, x, y)
    counts = torch.bincount(y, minlength=CLASSES)
    exponent = 0.1 * alpha
    positive = sum(exponent + math.log(math.exp(-exponent) + int(n)) for n in counts if n) / int((counts > 0).sum())
    negative = sum(exponent + math.log(math.exp(-exponent) + 8 - int(n)) for n in counts) / CLASSES
    assert value.item() == pytest.approx(positive + negative, rel=1e-6)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
