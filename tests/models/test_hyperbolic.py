"""The Poincare ball: distance, gradients, exact search, collections and trained runs with the hyperbolic head."""

import math

import numpy as np
import pytest
import torch
from composed import composed
from omegaconf import OmegaConf
from torch import Tensor

from dmlbench import build
from dmlbench.checks import check
from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.search.pairwise import PairwiseSearch
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.hyperbolic import PoincareDistance, riemannian, to_ball
from dmlbench.models.hyperbolic_head import HyperbolicHead
from dmlbench.types import ConfigError, EmbeddingSet, RunError


def points(
    number: int, size: int = 6, *, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, size, generator=generator, dtype=torch.float64) * scale
    return to_ball(x, curvature=0.1, clip_radius=2.3).to(dtype)


def naive_distance(x: Tensor, y: Tensor, c: float) -> float:
    """2 / sqrt(c) artanh(sqrt(c) |-x (+) y|) by Moebius addition, with Python floats."""
    a, b = [-float(v) for v in x], [float(v) for v in y]
    aa, bb, ab = (math.fsum(p * q for p, q in zip(*pair, strict=True)) for pair in ((a, a), (b, b), (a, b)))
    denominator = 1 + 2 * c * ab + c * c * aa * bb
    left, right = (1 + 2 * c * ab + c * bb) / denominator, (1 - c * aa) / denominator
    length = math.sqrt(math.fsum((left * p + right * q) ** 2 for p, q in zip(a, b, strict=True)))
    return 2 / math.sqrt(c) * math.atanh(math.sqrt(c) * length)


@pytest.mark.parametrize("curvature", [0.1, 0.01])
def test_distance_equals_moebius_addition(curvature: float) -> None:
    x, y = points(7), points(5, scale=0.01, seed=1)
    distance = PoincareDistance(curvature)
    expected = torch.tensor([[naive_distance(a, b, curvature) for b in y] for a in x], dtype=torch.float64)
    torch.testing.assert_close(distance(x, y), expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(distance.pairwise_distance(x[:5], y), expected.diagonal(), rtol=1e-11, atol=1e-13)


def test_small_curvature_is_twice_the_euclidean_distance() -> None:
    x = points(6)
    torch.testing.assert_close(PoincareDistance(1e-9)(x, x), 2 * torch.cdist(x, x), rtol=1e-6, atol=1e-6)


def test_gradients_equal_differences_and_are_finite_at_equal_points() -> None:
    x, y = points(3).requires_grad_(), points(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(PoincareDistance(), (x, y))
    assert torch.autograd.gradcheck(lambda v: to_ball(v, curvature=0.1, clip_radius=0.5), (x * 1.0,))
    same = points(4, dtype=torch.float32).requires_grad_()
    PoincareDistance()(same, same).sum().backward()
    assert torch.isfinite(same.grad).all()


def test_a_riemannian_gradient_is_scaled_by_the_inverse_metric() -> None:
    x = points(4).requires_grad_()
    (plain,) = torch.autograd.grad((x**3).sum(), x)
    (scaled,) = torch.autograd.grad((riemannian(x, 0.1) ** 3).sum(), x)
    factor = ((1 - 0.1 * (x**2).sum(1, keepdim=True)) / 2) ** 2
    torch.testing.assert_close(scaled, factor * plain)


def test_points_stay_in_the_ball() -> None:
    rows = to_ball(torch.tensor([[1e15, 0.0], [0.0, 0.0], [3.0, 4.0]]), curvature=0.1)
    assert rows.norm(dim=1).tolist() == pytest.approx([0.999 / 0.1**0.5, 0.0, 0.1**-0.5 * math.tanh(0.1**0.5 * 5)])
    cut = to_ball(torch.tensor([[30.0, 40.0]], dtype=torch.float64), curvature=0.1, clip_radius=2.3)
    assert float(cut.norm()) == pytest.approx(0.1**-0.5 * math.tanh(0.1**0.5 * 2.3), rel=1e-6)
    with pytest.raises(RunError, match=r"got a point with norm 4, expected below 3\.162"):
        PoincareDistance()(torch.tensor([[4.0]]), torch.tensor([[0.0]]))


def sets() -> tuple[EmbeddingSet, EmbeddingSet]:
    """Points of all lengths, some of them equal, some nearly so."""
    rows = torch.cat([points(150, scale=s, seed=i, dtype=torch.float32) for i, s in enumerate((0.01, 0.3, 3.0))])
    rows[40] = rows[7]
    rows[41] = rows[7] * (1 + 1e-7)
    made = []
    for part in (rows[:60], rows):
        number = len(part)
        made.append(EmbeddingSet(part, torch.arange(number) % 9, torch.arange(number)))
    return made[0], made[1]


def float64_values(queries: EmbeddingSet, gallery: EmbeddingSet) -> np.ndarray:
    x, y = queries.rows.double(), gallery.rows.double()
    return torch.stack([PoincareDistance().pairwise_distance(row.expand_as(y), y) for row in x]).numpy()


@pytest.mark.parametrize("within", [True, False])
def test_search_equals_a_naive_loop_rank_by_rank(within: bool) -> None:
    queries, gallery = sets()
    if within:
        queries = gallery
    found = nearest(queries, None if within else gallery, 50, distance=PoincareDistance()).index
    exact = float64_values(queries, gallery)
    for query in range(len(queries)):
        order = np.lexsort((np.arange(len(gallery)), exact[query]))
        assert found[query].tolist() == [i for i in order if int(gallery.ids[i]) != int(queries.ids[query])][:50]


def test_float32_decides_nearly_all_pairs(monkeypatch) -> None:
    rows = points(400, size=64, dtype=torch.float32)
    everything = EmbeddingSet(rows, torch.arange(400) % 20, torch.arange(400))
    compare, compared = PairwiseSearch._by_pairs, []

    def counted(search: PairwiseSearch, first: np.ndarray, second: np.ndarray) -> Tensor:
        compared.append(len(first))
        return compare(search, first, second)

    monkeypatch.setattr(PairwiseSearch, "_by_pairs", counted)
    nearest(everything, None, 10, distance=PoincareDistance())
    assert sum(compared) < 0.1 * 400 * 400


def test_collections_rank_by_the_sum_of_distances() -> None:
    labels, ids = torch.arange(40) % 5, torch.arange(40)
    members = [
        [EmbeddingSet(points(40, seed=4 * fold + repeat, dtype=torch.float32), labels, ids) for repeat in range(2)]
        for fold in range(2)
    ]
    distances = [[PoincareDistance()] * 2] * 2
    found, _ = concatenated_scores(members, spec=EvaluationSpec((1, 3)), distances=distances)
    assert len(found) == 4
    for choice, evaluation in found.items():
        total = sum(float64_values(fold[repeat], fold[repeat]) for fold, repeat in zip(members, choice, strict=True))
        np.fill_diagonal(total, np.inf)
        order = np.argsort(total, axis=1, kind="stable")
        hits = labels.numpy()[order] == labels.numpy()[:, None]
        assert evaluation.per_query["p_at_1"].tolist() == hits[:, 0].tolist()
        assert evaluation.per_query["recall_at_3"].tolist() == hits[:, :3].any(1).tolist()


def test_float32_errors_stay_below_the_bound() -> None:
    _, gallery = sets()
    distance = PoincareDistance()
    relative, absolute = distance.float32_error(gallery.rows, gallery.rows)
    exact = distance(gallery.rows.double(), gallery.rows.double())
    error = (distance(gallery.rows, gallery.rows).double() - exact).abs()
    assert relative < 1e-4 and bool((error <= relative * exact + absolute).all())


def configured(*overrides: str) -> tuple[build.MetricModel, build.Objective]:
    cfg = composed("head=hyperbolic", "backbone=resnet20_small", *overrides)
    check(cfg)
    OmegaConf.update(cfg, "runtime.num_classes", 4)
    OmegaConf.update(cfg, "runtime.image_size", [32, 32])
    torch.manual_seed(0)
    model = build.build_model(cfg)
    return model, build.build_objective(cfg, model)


def test_losses_of_distances_get_the_balls_and_losses_of_cosines_the_directions() -> None:
    model, pairs = configured("loss=pairwise_cross_entropy")
    assert isinstance(model.distance, PoincareDistance)
    x = points(8, 128, dtype=torch.float32)
    torch.testing.assert_close(pairs.loss.distance(x, x), model.distance(x, x))
    assert list(pairs.parameters()) == []
    _, proxies = configured("loss=proxy_anchor")
    labels = torch.arange(8) % 4
    torch.testing.assert_close(proxies.loss(x, labels), proxies.loss(0.5 * x, labels))
    with pytest.raises(ConfigError, match=r"loss: got .*, which cannot use the head's distance, PoincareDistance"):
        configured("loss=xbm_contrastive")


def test_regularizers_give_the_loss_points_of_the_ball() -> None:
    _, objective = configured("loss=pairwise_cross_entropy", "pooling=gap_histogram", "regularizer=xml")
    rows, labels = 9 * torch.randn(8, 128), torch.arange(8) % 4
    curvature, clip_radius = 0.1, 2.3
    inside = to_ball(rows, curvature=curvature, clip_radius=clip_radius)
    torch.testing.assert_close(objective._plain_loss(rows, labels), objective.loss(inside, labels))


def test_hier_needs_the_heads_curvature() -> None:
    configured("regularizer=hier")
    with pytest.raises(ConfigError, match=r"curvature: got 0\.1, but head\.curvature is 0\.2"):
        configured("regularizer=hier", "head.curvature=0.2")


@pytest.mark.parametrize("key", ["curvature", "clip_radius"])
def test_settings_that_make_no_ball(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        HyperbolicHead(4, 2, **{key: 0.0})


def test_what_does_not_combine_with_the_head_names_what_does() -> None:
    for overrides, remedy in (
        (["loss=circle"], "which uses its own distance instead of PoincareDistance. Choose another"),
        (["loss=xbm_contrastive"], r"Choose a loss of pairs or triplets, such as contrastive, or of proxies"),
        (["loss=contrastive", "rerank=diml"], r"got a head with PoincareDistance, .* Set rerank=null"),
        (["regularizer=hier", "head.clip_radius=1.0"], r"clip_radius: got 2\.3, but head\.clip_radius is 1\.0"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            configured(*overrides)
