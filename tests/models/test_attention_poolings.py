"""DeLF, CBAM, CroW, T-SMK, WELDON, GeMax, GeM and k-max against naive loops in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from small_models import drawn, randn
from torch import Tensor, nn

from dmlbench.models.pooling.attention import Cbam, Delf
from dmlbench.models.pooling.base import Pooling, Variant
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.gemax import Gemax
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.pooling.reweighting import Crow, Tsmk
from dmlbench.models.pooling.weldon import Weldon
from dmlbench.models.projection import Projection


def pixels(image: Tensor) -> list[Tensor]:
    """[C, H, W] to the features of its pixels in rows."""
    return [image[:, row, column] for row in range(image.shape[1]) for column in range(image.shape[2])]


def naive_delf(pooling: Delf, image: Tensor) -> tuple[Tensor, list[float]]:
    """Neighbors outside the map count as 0."""
    total, scores = torch.zeros_like(image[:, 0, 0]), []
    assert pooling.hidden.bias is not None and pooling.score.bias is not None
    _, height, width = image.shape
    size = pooling.hidden.weight.shape[2]
    for row in range(height):
        for column in range(width):
            hidden = pooling.hidden.bias
            for i in range(size):
                for j in range(size):
                    y, x = row + i - size // 2, column + j - size // 2
                    if 0 <= y < height and 0 <= x < width:
                        hidden = hidden + pooling.hidden.weight[:, :, i, j] @ image[:, y, x]
            logit = pooling.score.weight.flatten() @ hidden.clamp(min=0) + pooling.score.bias
            score = torch.log1p(torch.exp(logit))[0]
            scores.append(score.item())
            total = total + score * image[:, row, column]
    return total / (len(scores) if pooling.variant == "official" else 1), scores


def naive_cbam(pooling: Cbam, image: Tensor) -> tuple[Tensor, list[float]]:
    features = torch.stack(pixels(image))
    logits = torch.zeros_like(features[0])
    for summary in (features.max(dim=0).values, features.mean(dim=0)):
        logits = logits + pooling.expand.weight @ (pooling.reduce.weight @ summary).clamp(min=0)
    scaled = image * torch.sigmoid(logits)[:, None, None]
    _, height, width = image.shape
    total, scores = torch.zeros_like(features[0]), []
    for row in range(height):
        for column in range(width):
            logit = torch.zeros((), dtype=image.dtype)
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    if 0 <= row + down < height and 0 <= column + right < width:
                        neighbor = scaled[:, row + down, column + right]
                        kernel = pooling.spatial.weight[0, :, down + 1, right + 1]
                        logit = logit + kernel[0] * neighbor.max() + kernel[1] * neighbor.mean()
            score = torch.sigmoid(logit)
            scores.append(score.item())
            total = total + score * scaled[:, row, column]
    return total / len(scores), scores


def naive_crow(pooling: Crow, image: Tensor) -> tuple[Tensor, list[float]]:
    rows = [feature.clamp(min=0) for feature in pixels(image)]
    norm = math.sqrt(sum(row.sum().item() ** 2 for row in rows))
    scores = [math.sqrt(row.sum().item() / norm) for row in rows]
    count = len(rows)
    official = pooling.variant == "official"
    present = [
        sum(1 / (1 + math.exp(-row[k].item())) if official else float(row[k] > 0) for row in rows) / count
        for k in range(image.shape[0])
    ]
    total = sum((score * row for score, row in zip(scores, rows, strict=True)), torch.zeros_like(rows[0]))
    epsilon = pooling.epsilon
    rarity = [math.log((len(present) * epsilon + sum(present)) / (epsilon + q)) for q in present]
    return total * torch.tensor(rarity, dtype=image.dtype) / (count if official else 1), scores


def naive_tsmk(pooling: Tsmk, image: Tensor) -> tuple[Tensor, None]:
    _, height, width = image.shape
    total = torch.zeros_like(image[:, 0, 0])
    for row in range(height):
        for column in range(width):
            window = image[:, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].mean(dim=(1, 2))
            total = total + image[:, row, column].norm() * (window + pooling.bias)
    return total / (height * width), None


def naive_weldon(pooling: Weldon, image: Tensor) -> tuple[Tensor, list[float]]:
    values = torch.stack(pixels(image))  # [n, C]
    out, taken = [], [0.0] * len(values)
    for channel in range(values.shape[1]):
        order = sorted(range(len(values)), key=lambda pixel: -values[pixel, channel].item())
        largest, smallest = order[: pooling.k_max], order[len(order) - pooling.k_min :]
        shares = (1 / pooling.k_max, 1 / max(pooling.k_min, 1)) if pooling.variant == "paper" else (1.0, 1.0)
        out.append(values[largest, channel].sum() * shares[0] + values[smallest, channel].sum() * shares[1])
        for pixel in largest + smallest:
            taken[pixel] += 1
    return torch.stack(out), taken


def naive_gemax(pooling: Gemax, image: Tensor) -> tuple[Tensor, None]:
    """The primal form, (sum_j x_j x_j' + lambda I)^-1 sum_j x_j."""
    matrix = pooling.regression_lambda * torch.eye(image.shape[0], dtype=image.dtype)
    for feature in pixels(image):
        matrix = matrix + torch.outer(feature, feature)
    return torch.linalg.inv(matrix) @ sum(pixels(image), torch.zeros_like(image[:, 0, 0])), None


def naive_gem(pooling: Gem, image: Tensor) -> tuple[Tensor, None]:
    power = pooling.power.flatten()
    return torch.stack([x.clamp(min=1e-6) ** power for x in pixels(image)]).mean(dim=0) ** (1 / power), None


def naive_k_max(pooling: KMax, image: Tensor) -> tuple[Tensor, None]:
    channels = [sorted(channel.flatten().tolist(), reverse=True)[: pooling.k] for channel in image]
    return torch.tensor([sum(values) / pooling.k for values in channels], dtype=image.dtype), None


NAIVE: list[tuple[Pooling, Callable[..., tuple[Tensor, list[float] | None]]]] = [
    (Delf(5, num_filters=7), naive_delf),
    (Delf(5, num_filters=7, conv_size=3, variant="paper"), naive_delf),
    (Cbam(5, channel_reduction=2), naive_cbam),
    (Crow(), naive_crow),
    (Crow(variant="paper", epsilon=1e-6), naive_crow),
    (Tsmk(5, variant="paper"), naive_tsmk),
    (Weldon(k_max=4, k_min=2), naive_weldon),
    (Weldon(k_max=4, k_min=2, variant="paper"), naive_weldon),
    (Weldon(k_max=2, k_min=0, variant="paper"), naive_weldon),
    (Gemax(regression_lambda=0.3), naive_gemax),
    (Gem(), naive_gem),
    (Gem(num_channels=5, per_channel=True), naive_gem),
    (KMax(7), naive_k_max),
]


@pytest.mark.parametrize(("pooling", "naive"), NAIVE)
def test_pooling_and_its_weights_equal_a_naive_loop(
    pooling: Pooling, naive: Callable[..., tuple[Tensor, list[float] | None]]
) -> None:
    x = randn(2, 5, 3, 4)
    pooled = drawn(pooling)(x, nn.Identity())
    for image in range(len(x)):
        expected, scores = naive(pooling, x[image])
        torch.testing.assert_close(pooled.embedding[image], expected, atol=1e-12, rtol=1e-10)
        if scores is not None:
            shares = torch.tensor([score / sum(scores) for score in scores], dtype=x.dtype)
            torch.testing.assert_close(pooled.side["weights"][image].flatten(), shares, atol=1e-12, rtol=1e-10)


def test_tsmk_official_holds_its_attention_fixed_in_the_gradient() -> None:
    x = randn(2, 5, 3, 4, seed=3).requires_grad_()
    gradients = []
    for variant in ("official", "paper"):
        pooled = drawn(Tsmk(5, variant=variant))(x, nn.Identity())
        gradients.append((pooled.embedding, *torch.autograd.grad(pooled.embedding.sum(), x)))
    assert torch.equal(gradients[0][0], gradients[1][0]) and not torch.allclose(gradients[0][1], gradients[1][1])
    weights = Tsmk(5)(x, nn.Identity()).side["weights"]
    mean_norm = torch.linalg.vector_norm(x.detach(), dim=1)[0].mean()
    assert torch.allclose(gradients[0][1][0, 2] / mean_norm, weights[0])  # d embedding / d x_i = w_i, for every channel


def test_weldon_counts_ties_in_the_official_variant_only() -> None:
    x = torch.ones(1, 2, 3, 3)
    assert torch.allclose(Weldon(k_max=3, k_min=2)(x, nn.Identity()).embedding, torch.full((1, 2), 18.0))
    assert torch.allclose(
        Weldon(k_max=3, k_min=2, variant="paper")(x, nn.Identity()).embedding, torch.full((1, 2), 2.0)
    )


def test_gemax_stays_exact_for_features_of_large_norm() -> None:
    x = 100 * randn(2, 32, 7, 7, seed=5)
    exact = Gemax()(x, nn.Identity()).embedding
    torch.testing.assert_close(Gemax()(x.float(), nn.Identity()).embedding.double(), exact, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_crow_gives_zero_and_no_gradient_through_pixels_without_positive_features(variant: Variant) -> None:
    x = torch.rand(1, 3, 2, 2)
    x[:, :, 0, 0] = -1.0
    x[:, :, 0, 1] = 0.0
    x.requires_grad_()
    pooled = Crow(variant=variant)(x, nn.Identity())
    pooled.embedding.sum().backward()
    assert pooled.side["weights"][0, 0].tolist() == [0.0, 0.0]
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[:, :, 0, 0].any()


@pytest.mark.parametrize("power", [3.0, 8.0, 40.0])
def test_gem_of_a_dead_channel_has_finite_gradients_at_any_power(power: float) -> None:
    x = torch.rand(2, 3, 4, 4)
    x[:, 1] = 0
    x.requires_grad_()
    pooling, project = Gem(power=power), Projection(3, 2)
    pooling(x, project).embedding.sum().backward()
    assert x.grad is not None and pooling.power.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(pooling.power.grad).all()
    assert (x.grad[:, [0, 2]] != 0).any()
