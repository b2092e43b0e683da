"""ZSR and XML equal public code and naive loops, and take part in training over both poolings that have prototypes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from small_models import randn
from torch import Tensor

from dmlbench import build
from dmlbench.config import compose
from dmlbench.losses import xml
from dmlbench.losses.prototype_reconstruction import ReconstructionRegularizer, RecursiveRegularizer
from dmlbench.losses.xml import ClassSplits, CrossBatchRegularizer, Halves, cross_batch_loss, ridge_predict
from dmlbench.losses.zero_shot import ZeroShotRegularizer, zero_shot_loss
from dmlbench.types import ConfigError, ModelOutput


def histograms(rows: int, bins: int, seed: int = 1) -> Tensor:
    return (2 * randn(rows, bins, seed=seed)).softmax(dim=1)


def rows_of(first: list[int], size: int) -> Halves:
    return torch.tensor(first), torch.tensor([i for i in range(size) if i not in first])


def pair_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    """A smooth loss of pairs: squared distances of equal classes against exponentials of the others."""
    distance = (embeddings[:, None] - embeddings[None]).square().sum(dim=2)
    same = labels[:, None] == labels[None]
    return torch.where(same, distance, (-distance).exp()).mean()


def close(actual: Tensor | list[Tensor], expected: Tensor | list[Tensor], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(value, inputs))


# The oracles: one sample at a time, with the inverse of the m x m matrix ---------------------------------------------


def naive_map(z: Tensor, y: Tensor, rows: Tensor, ridge: float) -> Tensor:
    """[D, m]"""
    normal = ridge * torch.eye(z.shape[1], dtype=z.dtype)
    cross = torch.zeros(y.shape[1], z.shape[1], dtype=z.dtype)
    for i in rows.tolist():
        normal = normal + torch.outer(z[i], z[i])
        cross = cross + torch.outer(y[i], z[i])
    return cross @ torch.linalg.inv(normal)


def naive_zero_shot(z: Tensor, labels: Tensor, v: Tensor, halves: Halves, reduction: str) -> Tensor:
    values: list[list[Tensor]] = []
    for fitted, predicted in (halves, halves[::-1]):
        fit = naive_map(z, v[labels], fitted, 0.05)
        values.append([])
        for i in predicted.tolist():
            scores = torch.stack([9.5 * (row @ (fit @ z[i])) for row in v]).exp()
            values[-1].append(-(scores[labels[i]] / scores.sum()).log())
    means = [torch.stack(half).mean() for half in values]
    return torch.stack(values[0] + values[1]).mean() if reduction == "batch" else means[0] + means[1]


def naive_cross_batch(z: Tensor, y: Tensor, labels: Tensor, halves: Halves, loss: Callable) -> Tensor:
    total = torch.zeros((), dtype=z.dtype)
    for fitted, predicted in (halves, halves[::-1]):
        fit = naive_map(z, y, fitted, 0.05)
        total = total + loss(torch.stack([fit @ z[i] for i in predicted.tolist()]), labels[predicted])
    return total


# Values and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [9.5, 1.0])
@pytest.mark.parametrize("case", ["c0", "c1", "c2", "c3"])
def test_zero_shot_loss_equals_public_code(golden_tensors, case: str, scale: float) -> None:
    recorded = golden_tensors("zsr_loss", f"{case}_")
    suffix = "" if scale == 9.5 else "_scale1"
    z, v = recorded["z"].requires_grad_(), recorded["class_embeddings"].requires_grad_()
    half = len(z) // 2
    halves = (torch.arange(half), torch.arange(half, len(z)))
    labels = recorded["labels"]
    value = zero_shot_loss(z, labels, v, halves, ridge=0.05, softmax_scale=scale)
    close(value, recorded[f"loss{suffix}"], 1e-6)
    close(gradients(value, [z, v]), [recorded[f"grad_{name}{suffix}"] for name in ("z", "class_embeddings")], 1e-6)
    predicted = [xml.ridge_predict(z[fit], v[labels[fit]], z[rows], ridge=0.05) for rows, fit in (halves, halves[::-1])]
    close(torch.cat(predicted), recorded["predicted"], 1e-6)
    if scale == 9.5:
        interleaved = (torch.arange(0, len(z), 2), torch.arange(1, len(z), 2))
        value = zero_shot_loss(z, labels, v, interleaved, ridge=0.05, softmax_scale=scale)
        close(value, recorded["loss_interleaved_halves"], 1e-6)


# Fewer and more images than bins; unequal halves; an odd batch; one image against the others.
SHAPES = [(8, 5, [0, 1, 2, 3]), (8, 20, [0, 1, 2, 3]), (7, 3, [4, 5, 6]), (12, 4, [0, 1]), (2, 6, [1]), (5, 1, [0, 1])]


@pytest.mark.parametrize("reduction", ["batch", "halves"])
@pytest.mark.parametrize(("size", "bins", "first"), SHAPES)
def test_zero_shot_loss_equals_a_naive_loop(size: int, bins: int, first: list[int], reduction) -> None:
    z, v = histograms(size, bins).requires_grad_(), randn(9, 3).requires_grad_()
    labels = torch.arange(size) // 2
    halves = rows_of(first, size)
    value = zero_shot_loss(z, labels, v, halves, ridge=0.05, softmax_scale=9.5, reduction=reduction)
    expected = naive_zero_shot(z, labels, v, halves, reduction)
    close(value, expected)
    close(gradients(value, [z, v]), gradients(expected, [z, v]))


@pytest.mark.parametrize(("size", "bins", "first"), SHAPES)
def test_cross_batch_loss_equals_a_naive_loop(size: int, bins: int, first: list[int]) -> None:
    z, y = histograms(size, bins).requires_grad_(), randn(size, 4).requires_grad_()
    labels = torch.arange(size) // 2
    halves = rows_of(first, size)
    value = cross_batch_loss(z, y, labels, halves, pair_loss, ridge=0.05)
    expected = naive_cross_batch(z, y, labels, halves, pair_loss)
    close(value, expected)
    close(gradients(value, [z, y]), gradients(expected, [z, y]))


def test_reconstruction_equals_a_naive_loop() -> None:
    made, y = randn(6, 4), randn(6, 4, seed=2)
    value = ReconstructionRegularizer(0.01)(ModelOutput(y, {"reconstruction": made, "pooled": y}), labels(6), pair_loss)
    close(value, torch.stack([sum((made[i] - y[i]) ** 2) for i in range(6)]).mean())


def labels(size: int, images: int = 2) -> Tensor:
    return torch.arange(size) // images


@pytest.mark.parametrize("forgetting", [1.0, 0.7])
def test_recursive_prototypes_are_the_fit_to_all_batches_forgotten_exponentially(forgetting: float) -> None:
    regularizer = RecursiveRegularizer(0.01, 3, 2, forgetting=forgetting, ridge=0.1)
    batches = [(histograms(4 + k, 3, seed=k), randn(4 + k, 2, seed=10 + k)) for k in range(4)]
    previous = torch.zeros(3, 2, dtype=torch.float64)
    old_normal = 0.1 * torch.eye(3, dtype=torch.float64)
    for k, (z, y) in enumerate(batches):
        z.requires_grad_(), y.requires_grad_()
        value = regularizer(ModelOutput(y, {"histogram": z, "pooled": y}), labels(len(z)), pair_loss)
        normal = 0.1 * torch.eye(3, dtype=torch.float64)
        cross = torch.zeros(3, 2, dtype=torch.float64)
        for i, (old_z, old_y) in enumerate(batches[: k + 1]):  # equation 2.5
            past = i < k
            rows = zip(old_z.detach() if past else old_z, old_y.detach() if past else old_y, strict=True)
            for one_z, one_y in rows:
                normal = normal + forgetting ** (k - i) * torch.outer(one_z, one_z)
                cross = cross + forgetting ** (k - i) * torch.outer(one_z, one_y)
        prototypes = torch.linalg.inv(normal) @ cross  # equation 2.6
        expected = torch.stack([(prototypes.T @ a - b).square().sum() for a, b in zip(z, y, strict=True)]).mean()
        close(value, expected)
        close(gradients(value, [z, y]), gradients(expected, [z, y]))
        # Equation 2.7, with the factor that its W lacks.
        fit = z.T @ z + (1 - forgetting) * 0.1 * torch.eye(3, dtype=torch.float64)
        if k:
            share = forgetting * torch.linalg.inv(normal) @ old_normal
            own = torch.linalg.pinv(fit) @ z.T @ y
            close((share @ previous + (torch.eye(3) - share) @ own).detach(), prototypes.detach(), 1e-8)
        previous, old_normal = prototypes.detach(), normal.detach()


def test_recursive_prototypes_by_the_loss_stand_still_in_evaluation() -> None:
    regularizer = RecursiveRegularizer(0.01, 3, 2, penalty="dml")
    z, y = histograms(4, 3), randn(4, 2)
    output = ModelOutput(y, {"histogram": z, "pooled": y})
    made = z @ xml.solve_gram(z.T @ z, z.T @ y, ridge=0.05)
    close(regularizer(output, labels(4), pair_loss), pair_loss(made, labels(4)))
    state = {name: value.clone() for name, value in regularizer.state_dict().items()}
    regularizer.eval()(output, labels(4), pair_loss)
    assert all(torch.equal(value, state[name]) for name, value in regularizer.state_dict().items())


# Splits --------------------------------------------------------------------------------------------------------------


def balance(halves: Halves, of: Tensor) -> int:
    first, second = halves
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(len(of)))
    assert first.tolist() == sorted(first.tolist()) and second.tolist() == sorted(second.tolist())
    assert not set(of[first].tolist()) & set(of[second].tolist())
    assert len(first) and len(second)
    return abs(len(first) - len(second))


@pytest.mark.parametrize(
    ("of", "most"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], 0),
        ([7, 3, 7, 3], 0),
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 1, 2, 3, 4], 1),
        ([5, 5, 5, 5, 5, 5, 1], 5),
        ([0, 0, 0, 0, 1, 2, 3, 9], 4),
    ],
)
def test_halves_share_no_class_and_are_as_equal_as_their_classes_allow(of: list[int], most: int) -> None:
    splits = ClassSplits(50)
    drawn = splits(torch.tensor(of))
    assert len(drawn) == 50
    assert max(balance(halves, torch.tensor(of)) for halves in drawn) <= most


# Rows of a batch of collages in the public code: labels tile(range(16), [4]), halves [::2] and [1::2]
# (yetigurbuz/generalized-sum-pooling b765b889, tensorflow: cifar_collage.py line 238, zsr_loss.py lines 119 to 123).
COLLAGE = torch.arange(16).repeat(4)


def test_alternating_halves_of_collages_are_those_of_the_public_code() -> None:
    splits = ClassSplits(halves="alternate")
    ((first, second),) = splits(COLLAGE)
    assert (first.tolist(), second.tolist()) == (list(range(0, 64, 2)), list(range(1, 64, 2)))
    for seed in range(3):
        shuffled = COLLAGE[torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
        ((first, second),) = splits(shuffled)
        assert set(shuffled[first].tolist()) == set(range(0, 16, 2))
        assert set(shuffled[second].tolist()) == set(range(1, 16, 2))


def test_zsr_with_alternating_halves_equals_public_code_on_a_batch_of_collages() -> None:
    # 2.7851536254036184: ZSRLoss of pytorch/gsp/zsr_loss.py (b765b889) in float64, given rows [::2], then [1::2], which
    # it halves in the middle.
    zsr = ZeroShotRegularizer(0.5, 16, 6, halves="alternate").double()
    zsr.label_embeddings.data = 0.1 * randn(16, 6, seed=3)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    output = ModelOutput(randn(64, 6), {"histogram": histograms(64, 12)[order]})
    close(zsr(output, COLLAGE[order], pair_loss), torch.tensor(2.7851536254036184, dtype=torch.float64), 1e-6)


def test_draws_follow_the_seed_and_go_on_after_a_resume_whatever_else_draws() -> None:
    def drawn(splits: ClassSplits) -> list[list[int]]:
        return [first.tolist() for first, _ in splits(labels(32))]

    torch.manual_seed(3)
    whole = ClassSplits(2)
    torch.manual_seed(3)
    stopped = ClassSplits(2)
    expected = [drawn(whole) for _ in range(6)]
    assert len({str(halves) for pair in expected for halves in pair}) == 12  # no draw is repeated
    assert [drawn(stopped) for _ in range(3)] == expected[:3]
    state = stopped.state_dict()
    torch.manual_seed(4)
    resumed = ClassSplits(2)
    assert drawn(resumed) != expected[0]
    resumed.load_state_dict(state)
    np.random.seed(1)  # noqa: NPY002 - no global generator matters
    torch.manual_seed(5)
    assert [drawn(resumed) for _ in range(3)] == expected[3:]
    before = resumed.state_dict()["draws"].clone()
    drawn(resumed.eval())
    assert resumed.draws == before


def test_repeated_splits_are_averaged() -> None:
    z, y = histograms(8, 5), randn(8, 4)
    output = ModelOutput(y, {"histogram": z, "pooled": y})
    zsr, xml = ZeroShotRegularizer(0.1, 4, 3, num_splits=4).double(), CrossBatchRegularizer(0.01, num_splits=4)
    for regularizer in (zsr, xml):
        drawn = regularizer.splits.eval()(labels(8))
        value = regularizer(output, labels(8), pair_loss)
        if regularizer is zsr:
            single = [naive_zero_shot(z, labels(8), zsr.label_embeddings, halves, "batch") for halves in drawn]
        else:
            single = [naive_cross_batch(z, y, labels(8), halves, pair_loss) for halves in drawn]
        close(value, torch.stack(single).mean())


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: ZeroShotRegularizer(0.1, 8, 4), lambda: CrossBatchRegularizer(0.01)])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_batch_of_one_class_counts_nothing_and_is_reported_once(make: Callable, size: int, caplog) -> None:
    regularizer = make().double()
    z, y = histograms(size, 5).requires_grad_(), randn(size, 4).requires_grad_()
    output = ModelOutput(y, {"histogram": z, "pooled": y})
    for _ in range(2):
        value = regularizer(output, torch.full((size,), 3), pair_loss)
    value.backward()
    assert value == 0 and not z.grad.any()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "classes_per_batch" in caplog.text


# In a run ------------------------------------------------------------------------------------------------------------


def test_a_pooling_without_prototypes_is_refused() -> None:
    for name in ("zsr", "xml", "xml_reconstruction"):
        cfg = compose("train", ["pooling=gap", f"regularizer={name}"])
        OmegaConf.update(cfg, "runtime.num_classes", 4)
        with pytest.raises(ConfigError, match=rf"regularizer '{name}' needs"):
            build.build_objective(cfg, build.build_model(cfg))


def test_ridge_fit_minimizes_its_objective() -> None:
    z, y = histograms(9, 4), randn(9, 3)
    fit = ridge_predict(z, y, torch.eye(4, dtype=z.dtype), ridge=0.05).T.requires_grad_()  # [D, m]
    objective = (fit @ z.T - y.T).square().sum() + 0.05 * fit.square().sum()
    close(gradients(objective, [fit])[0], torch.zeros_like(fit))


def test_every_pairing_of_classes_is_drawn_equally_often() -> None:
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for first, _ in ClassSplits(3000)(labels(8)):
        pair = tuple(sorted(set(labels(8)[first].tolist())))
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6 and all(abs(count - 500) < 100 for count in counts.values())


@pytest.mark.parametrize("classes", [2, 5, 8])
def test_alternating_halves_of_some_classes_are_disjoint_and_balanced(classes: int) -> None:
    drawn = torch.randperm(75, generator=torch.Generator().manual_seed(classes))[:classes]
    of = drawn.repeat_interleave(4)
    ((first, second),) = ClassSplits(halves="alternate")(of)
    assert not set(of[first].tolist()) & set(of[second].tolist())
    assert len(first) - len(second) == 4 * (classes % 2)
