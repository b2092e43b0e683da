"""The uniform prior's gradients are those of the ooDML study's code and a naive loop's, each for its own parameters."""

import pytest
import torch
from small_models import randn
from torch import Tensor, nn

from dmlbench.losses.uniform_prior import UniformPrior
from dmlbench.types import ModelOutput


def no_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    raise AssertionError("it takes no loss of embeddings")


def value_of(prior: UniformPrior, features: Tensor) -> Tensor:
    rows = torch.zeros(len(features), 2, dtype=features.dtype)
    return prior(ModelOutput(rows, {"features": features}), torch.zeros(len(features), dtype=torch.int64), no_loss)


def prior_of(features: int, **arguments) -> UniformPrior:
    torch.manual_seed(0)
    return UniformPrior(**({"weight": 0.2, "feature_size": features, "hidden_size": 5} | arguments)).double()


@pytest.mark.parametrize("case", ["u0", "u1"])
def test_value_and_both_gradients_equal_public_code(golden_tensors, golden_meta, monkeypatch, case: str) -> None:
    recorded, meta = golden_tensors("uniform_prior", f"{case}_"), golden_meta("uniform_prior")[case]
    features = recorded["features"].requires_grad_()
    sizes = {"chunk_size": meta["chunk_size"], "hidden_size": meta["hidden_size"]}
    prior = prior_of(features.shape[1], discriminator_interval=meta["interval"], **sizes)
    layers = zip(("fc1", "fc2", "fc3"), (m for m in prior.discriminator if isinstance(m, nn.Linear)), strict=True)
    public = {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers for kind in ("weight", "bias")}
    for name, parameter in public.items():
        parameter.data.copy_(recorded[name])
    for iteration in range(11):
        if f"{iteration}_u" in recorded:
            monkeypatch.setattr(torch, "rand", lambda *a, k=iteration, **b: recorded[f"{k}_u"])
        prior.step = iteration + 1
        value = value_of(prior, features)
        gradients = torch.autograd.grad(meta["weight"] * value, [features, *public.values()], allow_unused=True)
        if iteration not in meta["iterations"]:
            continue
        for actual, name in ((value, "adv"), (meta["weight"] * value, "loss"), (gradients[0], "grad_features")):
            torch.testing.assert_close(actual, recorded[f"{iteration}_{name}"], rtol=1e-8, atol=1e-12)
        for name, actual in zip(public, gradients[1:], strict=True):
            if iteration % meta["interval"]:
                assert actual is None  # so that an optimizer leaves it as it is
            else:
                torch.testing.assert_close(actual, recorded[f"{iteration}_grad_{name}"], rtol=1e-8, atol=1e-12)


def test_value_and_gradients_equal_a_naive_loop() -> None:
    prior, features = prior_of(6, chunk_size=2), randn(3, 6).requires_grad_()
    torch.manual_seed(4)
    value = value_of(prior, features)
    torch.manual_seed(4)
    uniform = 2 * torch.rand((9, 2), dtype=torch.float64) - 1
    parameters = list(prior.discriminator.parameters())
    fooled, own = [], []
    for row in range(3):
        for start in (0, 2, 4):
            said = torch.sigmoid(prior.discriminator(features[row, start : start + 2]))
            fooled.append(-said.log())
            own.append(-(1 - said).log())
    own += [-torch.sigmoid(prior.discriminator(u)).log() for u in uniform]
    expected = torch.stack(fooled).mean()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, features, retain_graph=True)[0] for x in (value, expected)))
    of_own = torch.autograd.grad(torch.stack(own).sum() / 9, parameters)
    for actual, wanted in zip(torch.autograd.grad(0.2 * value, parameters), of_own, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_the_discriminator_learns_in_all_batches_of_every_nth_step_of_training() -> None:
    def learns(prior: UniformPrior, step: int) -> bool:
        prior.step = step
        return value_of(prior, randn(2, 4)).requires_grad

    prior = prior_of(4, discriminator_interval=3)
    assert [learns(prior, step) for step in (1, 1, 2, 3, 4, 4, 5)] == [True, True, False, False, True, True, False]
    assert [learns(prior.eval(), step) for step in (1, 4)] == [False] * 2


def test_fewer_features_than_a_chunk_are_one_and_nan_stays_nan() -> None:
    prior = prior_of(6)
    assert prior.chunk_size == 6
    assert value_of(prior, torch.full((2, 6), torch.nan, dtype=torch.float64)).isnan()


def test_features_come_nearer_to_uniform_ones() -> None:
    """Narrow features spread out: their entries' variance comes nearer to a uniform distribution's, 1/3."""
    torch.manual_seed(0)
    prior = UniformPrior(1.0, 2, chunk_size=2, hidden_size=16, discriminator_interval=1)
    features = nn.Parameter(0.1 * torch.randn(256, 2))
    optimizer = torch.optim.Adam([features, *prior.parameters()], lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        value_of(prior, features).backward()
        optimizer.step()
    assert abs(float(features.detach().var()) - 1 / 3) < 0.1
