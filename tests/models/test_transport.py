"""The transport layer against recorded values of the authors' public code, autodiff and itself in other precisions."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dmlbench.models.transport import _solve_logits, clip_norm, prototype_cost, transport_weights

LAYER_CASES = tuple(f"c{number:02d}" for number in range(12))
# Recorded after 1,000 iterations, which autodiff takes seconds for.
LONG_CASES = ("c01", "c03", "c05", "c07", "c09", "c11")


@pytest.fixture(scope="module")
def settings(golden_meta) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in golden_meta("gsp_layer")["cases"]}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Error relative to the largest entry: gradients hold entries that cancel to rounding."""
    scale = expected.abs().max().item()
    assert (actual - expected).abs().max().item() <= tolerance * scale


def run_layer(recorded: dict[str, Tensor], *, ratio: float, smoothing: float, **solver: Any) -> dict[str, Tensor]:
    features, prototypes = recorded["features"].requires_grad_(), recorded["prototypes"].requires_grad_()
    rows = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features
    cost = prototype_cost(rows, prototypes)
    cost.retain_grad()
    plan = transport_weights(cost, transport_ratio=ratio, smoothing=smoothing, **solver)
    pooled = torch.bmm(plan.weights[:, None], rows)[:, 0]
    loss = (pooled * recorded["grad_out_pooled"]).sum()
    (loss + (plan.histogram * recorded["grad_out_z"]).sum()).backward()
    assert features.grad is not None and prototypes.grad is not None and cost.grad is not None
    return {
        "cost": cost.detach(),
        "rho": (1 / rows.shape[1] - ratio * plan.weights).detach(),
        "pooled": pooled.detach(),
        "z": plan.histogram.detach(),
        "grad_features": features.grad,
        "grad_prototypes": prototypes.grad,
        "grad_cost": cost.grad,
    }


@pytest.mark.parametrize("case", LAYER_CASES)
def test_exact_solver_equals_converged_iterations_and_the_official_layer(golden_tensors, settings, case: str) -> None:
    recorded = golden_tensors("gsp_layer", f"{case}_")
    result = run_layer(recorded, ratio=settings[case]["mu"], smoothing=settings[case]["eps"])
    assert_close(result["cost"], recorded["off_cost"], 1e-12)
    for name in ("rho", "pooled", "z", "grad_features", "grad_prototypes", "grad_cost"):
        assert_close(result[name], recorded[f"conv_{name}"], 1e-8)
        assert_close(result[name], recorded[f"off_{name}"], 1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LONG_CASES else []) for case in LAYER_CASES]
)
def test_fixed_point_solver_equals_algorithm_3(golden_tensors, settings, case: str) -> None:
    recorded, given = golden_tensors("gsp_layer", f"{case}_"), settings[case]
    solver = {"solver": "fixed_point", "iterations": given["k"]}
    result = run_layer(recorded, ratio=given["mu"], smoothing=given["eps"], **solver)
    for name in ("rho", "pooled", "z"):
        assert_close(result[name], recorded[f"alg3_{name}"], 1e-8)
    for name in ("grad_features", "grad_prototypes", "grad_cost"):
        assert_close(result[name], recorded[f"alg3auto_{name}"], 1e-8)


def test_float32_layer_equals_official_float32_layer(golden_tensors) -> None:
    recorded = golden_tensors("gsp_module", "f32_")
    result = run_layer(recorded, ratio=0.3, smoothing=5.0)
    for name in ("rho", "pooled", "z"):
        assert_close(result[name], recorded[f"off_{name}"], 1e-5)
    for name in ("grad_features", "grad_prototypes"):
        assert_close(result[name], recorded[f"off_{name}"], 2e-5)


def test_plan_satisfies_its_marginals_and_optimality() -> None:
    """Oracle without a recorded value: pi_ij / rho_j has the form t exp(-epsilon c_ij) with one t per image."""
    cost = 2 * torch.rand(3, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratio, smoothing = 0.4, 8.0
    plan = transport_weights(cost, transport_ratio=ratio, smoothing=smoothing)
    rest = 1 / 12 - ratio * plan.weights
    scale = ratio * plan.weights / rest / torch.exp(-smoothing * cost).sum(dim=1)
    assert torch.allclose(scale, scale[:, :1].expand_as(scale), rtol=1e-10)
    transported = scale[:, None, :] * torch.exp(-smoothing * cost) * rest[:, None, :]
    assert torch.allclose(transported.sum(dim=(1, 2)), torch.full((3,), ratio, dtype=torch.float64))
    assert torch.allclose(transported.sum(dim=2) / ratio, plan.histogram)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("smoothing", [0.5, 5.0, 20.0])
def test_gradient_equals_finite_differences(ratio: float, smoothing: float) -> None:
    cost = torch.rand(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def solve(cost: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(transport_weights(cost, transport_ratio=ratio, smoothing=smoothing))

    assert torch.autograd.gradcheck(solve, (cost,), atol=1e-6, rtol=1e-5)


def test_transport_ratio_one_gives_uniform_weights_and_mean_of_assignments() -> None:
    cost = torch.rand(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for solver in ("exact", "fixed_point"):
        plan = transport_weights(cost, transport_ratio=1, smoothing=5.0, solver=solver)
        assert torch.equal(plan.weights, torch.full((2, 9), 1 / 9, dtype=torch.float64))
        assert torch.allclose(plan.histogram, torch.softmax(-5 * cost, dim=1).mean(dim=2))
        expected = torch.autograd.grad(torch.softmax(-5 * cost, dim=1).mean(dim=2)[:, 0].sum(), cost)[0]
        actual = torch.autograd.grad(plan.histogram[:, 0].sum() + plan.weights.square().sum(), cost)[0]
        assert torch.allclose(actual, expected)


def test_float32_is_near_float64_and_finite_for_every_setting() -> None:
    generator = torch.Generator().manual_seed(3)
    for smoothing, ratio, pixels in itertools.product((0.5, 20.0, 100.0), (0.1, 0.25, 0.5, 0.7), (1, 4, 49)):
        uniform = 2 * torch.rand(4, 8, pixels, dtype=torch.float64, generator=generator)
        # Two groups of pixels, exactly tied within: the mean has a plateau where ratio * pixels is an integer.
        tied = 1.9 * (torch.arange(pixels) % 2).double().expand(4, 8, pixels)
        for cost in (uniform, tied):
            wide = transport_weights(cost, transport_ratio=ratio, smoothing=smoothing)
            assert torch.allclose(wide.weights.sum(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-12)
            narrow_cost = cost.float().requires_grad_()
            narrow = transport_weights(narrow_cost, transport_ratio=ratio, smoothing=smoothing)
            tolerance = 2e-6 if smoothing <= 20 else 1e-5
            assert_close(narrow.weights.detach().double(), wide.weights, tolerance)
            assert_close(narrow.histogram.detach().double(), wide.histogram, tolerance)
            (narrow.weights.square().sum() + narrow.histogram.square().sum()).backward()
            assert narrow_cost.grad is not None and bool(narrow_cost.grad.isfinite().all())


def test_fixed_point_solver_stays_finite_in_float32_at_large_smoothing() -> None:
    cost = (2 * torch.rand(2, 8, 49, generator=torch.Generator().manual_seed(4))).requires_grad_()
    plan = transport_weights(cost, transport_ratio=0.3, smoothing=100.0, solver="fixed_point")
    plan.histogram.square().sum().backward()
    assert bool(plan.weights.isfinite().all()) and cost.grad is not None and bool(cost.grad.isfinite().all())


def test_cost_and_its_gradient_equal_naive_distances() -> None:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 5, 7, generator=generator).requires_grad_()
    prototypes = (0.3 * torch.randn(4, 7, generator=generator)).requires_grad_()
    target = torch.randn(2, 4, 5, generator=generator)
    wide = [features.detach().double().requires_grad_(), prototypes.detach().double().requires_grad_()]
    x = wide[0] / wide[0].norm(dim=-1, keepdim=True).clamp(min=1)
    y = wide[1] / wide[1].norm(dim=-1, keepdim=True).clamp(min=1)
    naive = (y[None, :, None] - x[:, None]).norm(dim=-1)
    cost = prototype_cost(features, prototypes)
    assert cost.dtype == torch.float32
    assert torch.allclose(cost.double(), naive, atol=2e-7)
    (cost * target).sum().backward()
    (naive * target).sum().backward()
    assert features.grad is not None and prototypes.grad is not None
    assert torch.allclose(features.grad.double(), wide[0].grad, atol=1e-5)
    assert torch.allclose(prototypes.grad.double(), wide[1].grad, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_zero_where_a_feature_equals_a_prototype(dtype: torch.dtype) -> None:
    prototypes = torch.tensor([[0.25, 0.5], [0.0, -0.5]], dtype=dtype, requires_grad=True)
    features = prototypes.detach()[:1, None].clone().requires_grad_()  # [1, 1, 2]
    cost = prototype_cost(features, prototypes)
    assert cost[0, 0, 0] == 0
    gradient = torch.autograd.grad(cost[0, 0, 0], (features, prototypes))
    assert not gradient[0].any() and not gradient[1].any()


def test_clip_norm_leaves_the_unit_ball_alone() -> None:
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    assert torch.allclose(clip_norm(rows), torch.tensor([[0.3, 0.4], [0.6, 0.8], [0.0, 0.0]]))
    clip_norm(rows).sum().backward()
    assert rows.grad is not None and bool(rows.grad.isfinite().all())


def bisected(log_mass: torch.Tensor, ratio: float) -> torch.Tensor:
    """The root by 80 halvings, row by row: of some hundreds, 1e-21 is left."""
    low = math.log(ratio / (1 - ratio)) - log_mass.amax(dim=1, keepdim=True)
    high = math.log(ratio / (1 - ratio)) - log_mass.amin(dim=1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.sigmoid(middle + log_mass).mean(dim=1, keepdim=True) < ratio
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize("pixels", [1, 2, 49, 64, 196])
@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0, 200.0])
def test_the_offset_is_the_root_for_even_clustered_and_equal_masses(pixels: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(30, pixels, generator=generator, dtype=torch.float64)
    masses = {
        "even": uniform * spread,
        "two clusters": (uniform < 0.4).double() * spread,
        "two noisy clusters": (uniform < 0.4).double() * spread + uniform * 0.1,
        "three clusters": (uniform * 3).floor() * spread / 2,
        "skewed": spread * uniform.log().clamp(min=-20) / 5,
        "equal": torch.full_like(uniform, -spread),
    }
    for ratio in (0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 0.99, 1 - 1e-12, 1 - 2**-53):
        for dtype in (torch.float64, torch.float32):
            given = {name: log_mass.to(dtype) for name, log_mass in masses.items()}
            every_row = torch.cat(list(given.values())).double()
            expected = torch.sigmoid(bisected(every_row, ratio) + every_row).split(30)
            for (name, rows), wanted in zip(given.items(), expected, strict=True):
                # What float32 can say: sigma moves by a quarter of the offset's rounding.
                rounding = torch.finfo(torch.float32).eps * max(8.0, float(masses[name].abs().max()))
                tolerance = 1e-12 if dtype is torch.float64 else rounding / min(1.0, 4 - 4 * ratio)
                found = torch.sigmoid(_solve_logits(rows, ratio)).double()
                assert (found - wanted).abs().max() <= tolerance, (name, ratio, dtype)


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_share_is_met_for_masses_of_every_spread(spread: float, dtype: torch.dtype) -> None:
    """One prototype makes l_j = -epsilon c_j whatever it may be: groups, ties, outliers, many scales."""
    generator = torch.Generator().manual_seed(11)
    for pixels, ratio in itertools.product(
        (1, 2, 5, 49, 196), (0.01, 0.1, 0.25, 0.3, 0.5, 0.95, 0.999, 1 - 1e-12, 1 - 2**-53)
    ):
        groups = torch.randint(0, 4, (8, pixels), generator=generator) + 1e-3 * torch.rand(8, pixels)
        scales = torch.empty(8, pixels).exponential_(generator=generator)
        single = torch.zeros(8, pixels)
        single[:, 0] = 1
        for cost in (groups, scales, single, 1 - single):
            cost = (spread * cost).to(dtype)[:, None, :]
            plan = transport_weights(cost, transport_ratio=ratio, smoothing=1.0)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            assert torch.allclose(plan.weights.sum(dim=1), torch.ones(8, dtype=dtype), atol=tolerance / ratio)
            # Nearer pixels never weigh less, beyond rounding.
            ordered = plan.weights.gather(1, cost[:, 0].argsort(dim=1))
            assert bool((ordered.diff(dim=1) <= tolerance / (ratio * pixels)).all())
