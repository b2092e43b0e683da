"""GSP's combinations, histogram, codebook and sliced Wasserstein poolings against public code and naive loops."""

from collections.abc import Callable

import pytest
import torch
from small_models import CHANNELS, POOLINGS, make_pooling, randn
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.gap_histogram import GapHistogram
from dmlbench.models.pooling.global_pooling import Gap, Gmp
from dmlbench.models.pooling.gsp import Gsp, PrototypePooling
from dmlbench.models.pooling.netvlad import NetVlad
from dmlbench.models.pooling.otp import Otp, balanced_plan
from dmlbench.models.pooling.sliced_wasserstein import SlicedWasserstein
from dmlbench.models.projection import Projection


def outputs(pooled: Pooled) -> Tensor:
    """The embedding, then the side outputs: histogram, its reconstruction by the prototypes, weights of the pixels."""
    names = [name for name in ("histogram", "reconstruction", "weights") if name in pooled.side]
    return torch.cat([pooled.embedding] + [pooled.side[name].flatten(1) for name in names], dim=1)


def clip(v: Tensor) -> Tensor:
    return v / v.norm().clamp(min=1)


def naive_transport(pixels: Tensor, prototypes: Tensor, ratio: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """rho [n] and plan [m, n] of the paper's iteration for one image."""
    cost = torch.stack([torch.stack([(clip(p) - clip(f)).norm() for f in pixels]) for p in prototypes])
    kernel, n = torch.exp(-smoothing * cost), len(pixels)
    scale = torch.ones((), dtype=pixels.dtype)
    for _ in range(200):
        rho = 1 / n / (1 + scale * kernel.sum(dim=0))
        scale = ratio / (kernel @ rho).sum()
    return rho, scale * kernel * rho


def naive_gsp_mass(pooling: Gsp, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [n] and histogram [m]."""
    rho, plan = naive_transport(pixels, pooling.prototypes, pooling.transport_ratio, pooling.smoothing)
    mass = rho / (1 - 0.3) if pooling.weighting == "residual" else (1 / len(pixels) - rho) / 0.3
    return mass, plan.sum(dim=1) / 0.3


def naive_gsp_shares(pooling: Gsp, image: Tensor, mass: Tensor) -> Tensor:
    """Contributions [n] of the pixels ``image`` [n, C] with weights [n]."""
    if pooling.combine is None:
        return mass
    shares = torch.zeros_like(mass)
    for values in image.T:
        weighted = len(mass) * mass * values
        if pooling.combine == "gem":
            powers = weighted.clamp(min=1e-6) ** pooling.power.flatten()
            shares = shares + powers / powers.sum() / image.shape[1]
        else:
            shares[(values if pooling.combine == "gmp" else weighted).argmax()] += 1 / image.shape[1]
    return (shares + mass) / 2 if pooling.combine == "gmp" else shares


def naive_reconstruction(histogram: Tensor, prototypes: Tensor) -> Tensor:
    return torch.stack([share * nu for share, nu in zip(histogram, prototypes, strict=True)]).sum(dim=0)


def naive_gsp(pooling: Gsp, image: Tensor, pixels: Tensor, weight: Tensor) -> Tensor:
    """``image`` [HW, C] and its projected ``pixels`` [HW, D]; the order of ``outputs``."""
    n = len(pixels)
    mass, histogram = naive_gsp_mass(pooling, pixels)
    if pooling.combine == "gem":
        power = pooling.power.flatten()
        powers = torch.stack([(n * mass[j] * image[j]).clamp(min=1e-6) ** power for j in range(n)])
        pooled = weight @ powers.mean(dim=0) ** (1 / power)
    elif pooling.combine == "weighted_gmp":
        pooled = weight @ torch.stack([n * mass[j] * image[j] for j in range(n)]).amax(dim=0)
    else:
        pooled = torch.stack([mass[j] * pixels[j] for j in range(n)]).sum(dim=0)
    if pooling.combine == "gmp":
        pooled = pooled + weight @ image.amax(dim=0)
    return torch.cat([pooled, histogram, naive_reconstruction(histogram, pooling.prototypes), mass])


def naive_histogram(pooling: GapHistogram, image: Tensor, pixels: Tensor, weight: Tensor) -> Tensor:
    points = [clip(f) if pooling.variant == "official" else f for f in pixels]
    shares = [torch.softmax(torch.stack([10 * nu @ g for nu in pooling.prototypes]), dim=0) for g in points]
    histogram = torch.stack(shares).mean(dim=0)
    return torch.cat([weight @ image.mean(dim=0), histogram, naive_reconstruction(histogram, pooling.prototypes)])


def naive_vlad(pooling: NetVlad, image: Tensor, pixels: Tensor, weight: Tensor) -> Tensor:
    parts = []
    for k, center in enumerate(pooling.centers):
        total = torch.zeros_like(center)
        for f in pixels:
            scores = torch.stack(
                [w @ f + b for w, b in zip(pooling.assignment_weight, pooling.assignment_bias, strict=True)]
            )
            total = total + torch.softmax(scores, dim=0)[k] * (f - center)
        parts.append(total / total.norm())
    whole = torch.cat(parts)
    return whole / whole.norm() if pooling.variant == "paper" else whole


def naive_otp_plan(pooling: Otp, pixels: Tensor) -> Tensor:
    """[m, n]"""
    m, n = len(pooling.prototypes), len(pixels)
    cost = torch.stack([torch.stack([(clip(p) - clip(f)).norm() for f in pixels]) for p in pooling.prototypes])
    kernel = torch.exp(-pooling.smoothing * cost)
    u = torch.ones(m, dtype=pixels.dtype)
    for _ in range(pooling.iterations):
        v = 1 / n / (kernel.T @ u)
        u = 1 / m / (kernel @ v)
    return u[:, None] * kernel * (1 / n / (kernel.T @ u))


def naive_otp(pooling: Otp, image: Tensor, pixels: Tensor, weight: Tensor) -> Tensor:
    m, n = len(pooling.prototypes), len(pixels)
    plan = naive_otp_plan(pooling, pixels)
    return m**0.5 * torch.cat([sum((plan[i, j] * pixels[j] for j in range(n)), torch.zeros(2)) for i in range(m)])


def naive_sliced(pooling: SlicedWasserstein, image: Tensor, pixels: Tensor, weight: Tensor) -> Tensor:
    out, n = [], len(pixels)
    for theta, references in zip(pooling.slices, pooling.references, strict=True):
        values = sorted((f @ (theta / theta.norm()) for f in pixels), key=lambda value: value.item())
        m = len(references)
        for r in references:
            rank = sum(other.item() < r.item() for other in references)
            at = min(max((rank + 1) / (m + 1) * (n + 1) - 1, 0), n - 1)
            low = min(int(at + 1e-9), n - 1)
            high = min(low + 1, n - 1)
            out.append(values[low] + (at - low) * (values[high] - values[low]) - r)
    return torch.stack(out)


ORACLES: dict[type[Pooling], Callable[..., Tensor]] = {
    Gsp: naive_gsp,
    GapHistogram: naive_histogram,
    NetVlad: naive_vlad,
    Otp: naive_otp,
    SlicedWasserstein: naive_sliced,
}


@pytest.mark.parametrize("name", [name for name, build in POOLINGS.items() if type(build((1, 1))) in ORACLES])
@pytest.mark.parametrize(("height", "width"), [(3, 4), (1, 1), (1, 2)])
def test_values_and_gradients_equal_a_naive_loop(name: str, height: int, width: int) -> None:
    pooling, project = make_pooling(name, (height, width))
    pooling, project = pooling.double(), project.double()
    if isinstance(pooling, SlicedWasserstein):  # references that are out of order
        with torch.no_grad():
            pooling.references.copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
    if isinstance(pooling, PrototypePooling):  # prototypes longer than 1, which only the cost clips
        with torch.no_grad():
            pooling.prototypes.mul_(1.5)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 8, height, width, dtype=torch.float64, generator=generator).requires_grad_()
    names = [n for n, _ in pooling.named_parameters()]
    inputs = [x, project.weight, *pooling.parameters()]
    out = outputs(pooling(x, project))
    naive = []
    for image in x.flatten(2).transpose(1, 2):
        naive.append(ORACLES[type(pooling)](pooling, image, image @ project.weight.T, project.weight))
    expected = torch.stack(naive)
    assert (out - expected).abs().max() < 1e-9
    direction = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    actual = torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((expected * direction).sum(), inputs, allow_unused=True)
    for label, one, other in zip(["x", "projection", *names], actual, wanted, strict=True):
        if one is None or other is None:
            assert (one is None or not one.any()) and (other is None or not other.any()), label
        else:
            assert (one - other).abs().max() < 1e-8, label


@pytest.mark.parametrize("name", ["gsp", "gsp_residual", "gsp_gmp", "gsp_weighted_gmp", "gsp_gem"])
def test_contributions_of_gsp_equal_a_naive_loop(name: str) -> None:
    pooling, project = make_pooling(name, (3, 4))
    pooling, project = pooling.double(), project.double()
    assert isinstance(pooling, Gsp)
    x = randn(2, CHANNELS, 3, 4, seed=2)
    shares = pooling.contributions(x, project).flatten(1)
    for found, image in zip(shares, x.flatten(2).transpose(1, 2), strict=True):
        mass, _ = naive_gsp_mass(pooling, image @ project.weight.T)
        expected = naive_gsp_shares(pooling, image, mass)
        torch.testing.assert_close(found.double(), expected, atol=1e-7, rtol=1e-6)  # shares of maxima are float32


def test_otp_shows_where_its_plan_takes_mass_from_and_which_prototype_takes_most() -> None:
    pooling, project = make_pooling("otp", (3, 4))
    pooling, project = pooling.double(), project.double()
    assert isinstance(pooling, Otp)
    x = randn(2, CHANNELS, 3, 4, seed=2)
    shares, found = pooling.contributions(x, project), pooling.nearest_prototypes(x, project)
    assert found is not None and found.shape == (2, 3, 4)
    nearest = []
    for b, image in enumerate(x.flatten(2).transpose(1, 2)):
        pixels = image @ project.weight.T
        plan = naive_otp_plan(pooling, pixels).detach()
        torch.testing.assert_close(shares[b].flatten(), plan.sum(dim=0).float())
        assert found[b].flatten().tolist() == [int(column.argmax()) for column in plan.T]
        nearest += [int(torch.stack([(clip(p) - clip(f)).norm() for p in pooling.prototypes]).argmin()) for f in pixels]
    assert found.flatten().tolist() != nearest  # equal masses of the prototypes move some pixels elsewhere


@pytest.mark.parametrize("combine", ["gmp", "weighted_gmp"])
def test_combinations_with_the_maximum_start_their_prototypes_from_averages(combine: str) -> None:
    gsp, project = Gsp(6, 5, memory_rows=10, combine=combine), Projection(8, 6)
    x = torch.rand(10, 8, 3, 4, generator=torch.Generator().manual_seed(6))
    pooled = gsp(x, project)
    average, maximum = Gap()(x, project).embedding, Gmp()(x, project).embedding
    if combine == "gmp":
        assert torch.allclose(pooled.embedding, average + maximum, atol=1e-5)
    else:
        assert torch.equal(pooled.embedding, maximum)
    gsp.observe(pooled, step=1)
    alone = Gsp(6, 5, memory_rows=10)
    alone.observe(Pooled(average), step=1)
    assert gsp.started and torch.allclose(gsp.prototypes, alone.prototypes, atol=1e-5)  # the maximum stays out
    if combine == "gmp":
        assert torch.allclose(gsp(x, project).embedding, alone(x, project).embedding + maximum, atol=1e-5)


def test_otp_gives_the_average_and_zeros_until_it_has_started_from_such_averages() -> None:
    torch.manual_seed(0)
    otp, project = Otp(num_prototypes=3, feature_size=2, memory_rows=6), Projection(8, 2)
    x = torch.rand(6, 8, 3, 4, generator=torch.Generator().manual_seed(8))
    pooled = otp(x, project)
    average = Gap()(x, project).embedding
    assert torch.allclose(pooled.embedding, torch.cat([average, torch.zeros(6, 4)], dim=1), atol=1e-6)
    assert torch.allclose(pooled.side["pooled"], average, atol=1e-6)  # whatever the head makes of the embedding
    otp.observe(pooled, step=1)
    assert otp.started and torch.allclose(otp.memory, average / average.norm(dim=1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("smoothing", [2.0, 100.0])
def test_balanced_plan_meets_both_marginals(smoothing: float) -> None:
    cost = torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(9))
    plan = balanced_plan(cost, smoothing=smoothing, iterations=2000)
    assert torch.allclose(plan.sum(dim=1), torch.full((2, 9), 1 / 9), atol=1e-6)
    assert torch.allclose(plan.sum(dim=2), torch.full((2, 4), 1 / 4), atol=1e-3)


def test_sliced_wasserstein_of_as_many_points_as_pixels_sorts_the_pixels() -> None:
    pooling = SlicedWasserstein(1, num_references=12, num_slices=1)
    with torch.no_grad():
        pooling.slices.fill_(1)
    x = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(11))
    moved = pooling(x, nn.Identity()).embedding + pooling.references
    assert torch.allclose(moved, x.flatten(1).sort(dim=1).values, atol=1e-5)
    assert torch.equal(pooling(x, nn.Identity()).embedding, pooling(x.flip(3), nn.Identity()).embedding)
