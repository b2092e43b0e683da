"""Search by distances of their own: against sorts of float64 values, of every route."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pytorch_metric_learning.distances import BaseDistance, DotProductSimilarity, LpDistance, SNRDistance

from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.evaluate import Evaluation, evaluate, hardest_queries
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS, query_scores, scores_of
from dmlbench.evaluation.search import pairwise, scan
from dmlbench.evaluation.search.pairwise import PairwiseSearch, is_symmetric
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError

RECALL_AT = (1, 3)
ASKED = scores_of(DEFAULT_METRICS, RECALL_AT)
LEVELS, NODES = 2, 12


def avsl(seed: int = 0, *, variant: str = "official") -> AvslDistance:
    torch.manual_seed(seed)
    distance = AvslDistance(LEVELS, NODES, top_k=5, variant=variant)
    maps = [F.normalize(torch.rand(4, NODES, 6) - 0.3, dim=2) for _ in range(LEVELS)]
    distance.observe(list(itertools.pairwise(maps)))
    with torch.no_grad():
        distance.alpha.normal_(1, 0.2)
        distance.beta.normal_(0, 0.2)
        if variant == "paper":  # three edges above 0, so that two of the five kept are below
            distance.edges.uniform_(-0.1, -0.05)
            distance.edges[..., :3].uniform_(0.3, 1)
            assert bool((distance.normalized_edges() < 0).any())
    return distance


def rows_of(count: int, *, seed: int, classes: int = 6) -> EmbeddingSet:
    """AVSL's rows in clusters; some are equal, some nearly so."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    e = rng.normal(size=(classes, LEVELS, NODES))[labels] + 0.8 * rng.normal(size=(count, LEVELS, NODES))
    e /= np.linalg.norm(e, axis=2, keepdims=True)
    rows = np.stack([e, rng.uniform(0, 0.4, e.shape)], axis=1).reshape(count, -1)
    rows[count // 2 : count // 2 + 8] = rows[:8]
    rows[count // 3 : count // 3 + 6] = rows[10] * (1 + 1e-7 * rng.normal(size=(6, rows.shape[1])))
    return EmbeddingSet(torch.from_numpy(rows).float(), torch.from_numpy(labels), torch.arange(count) * 3)


def float64_values(queries: EmbeddingSet, gallery: EmbeddingSet, distance: BaseDistance) -> NDArray[np.float64]:
    """Distances [Q, N] of all pairs; equal rows tie."""
    content, place = torch.unique(torch.cat([queries.rows, gallery.rows]).double(), dim=0, return_inverse=True)
    double = copy.deepcopy(distance).double()
    left = content.repeat_interleave(len(content), 0)
    with torch.inference_mode():
        value = double.pairwise_distance(left, content.repeat(len(content), 1)).view(len(content), -1).numpy()
    return np.asarray(value[place[: len(queries)].numpy()][:, place[len(queries) :].numpy()])


def sorted_float64(queries: EmbeddingSet, gallery: EmbeddingSet, distance: BaseDistance) -> list[IntArray]:
    """Gallery indices by rank of every query."""
    order = []
    for q, row in enumerate(float64_values(queries, gallery, distance)):
        own = np.flatnonzero(gallery.ids.numpy() == int(queries.ids[q]))
        ranked = np.lexsort((np.arange(len(row)), row))
        order.append(ranked[~np.isin(ranked, own)])
    return order


def scores_by_sorting(queries: EmbeddingSet, gallery: EmbeddingSet, order: list[IntArray]) -> dict[str, NDArray]:
    """Scores of rankings, also of rankings of a part of the gallery."""
    found: dict[str, list[float]] = {}
    for q, columns in enumerate(order):
        relevant = (gallery.labels[columns] == queries.labels[q]).numpy()
        positives = int(((gallery.labels == queries.labels[q]) & (gallery.ids != queries.ids[q])).sum())
        for name, value in query_scores(relevant[None], np.array([max(1, positives)]), ASKED).items():
            found.setdefault(name, []).append(value[0] if positives else np.nan)
    return {name: np.array(values) for name, values in found.items()}


def assert_same(found: Evaluation, expected: dict[str, NDArray]) -> None:
    assert found.per_query.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found.per_query[name], values, err_msg=name)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "_MIN_ROWS", 8)


@pytest.fixture(params=[1, 3, "tensors"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, or the code of an accelerator on tensors of the CPU."""
    if request.param == "tensors":
        monkeypatch.setattr(scan, "tiles_on_host", lambda device: False)
    else:
        monkeypatch.setattr(scan, "num_threads", lambda: request.param)


@pytest.mark.usefixtures("_small_blocks", "_threads")
@pytest.mark.parametrize(
    ("variant", "tile_bytes"), [("official", 12_000), ("official", 300_000), ("official", 2**29), ("paper", 2**29)]
)
def test_a_set_within_itself_is_ranked_as_a_sort_of_float64_values_does(variant: str, tile_bytes: int) -> None:
    queries, distance = rows_of(110, seed=1), avsl(variant=variant)
    expected = scores_by_sorting(queries, queries, sorted_float64(queries, queries, distance))
    assert 0.2 < np.nanmean(expected["map_at_r"]) < 0.9
    assert_same(evaluate(queries, None, EvaluationSpec(RECALL_AT, tile_bytes=tile_bytes), distance=distance), expected)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("tile_bytes", [4096, 2**29])
def test_queries_in_a_gallery_are_ranked_so_without_themselves(tile_bytes: int) -> None:
    both, distance = rows_of(90, seed=2), avsl()
    queries, gallery = (EmbeddingSet(both.rows[x], both.labels[x], both.ids[x]) for x in (slice(0, 50), slice(30, 90)))
    expected = scores_by_sorting(queries, gallery, sorted_float64(queries, gallery, distance))
    assert_same(
        evaluate(queries, gallery, EvaluationSpec(RECALL_AT, tile_bytes=tile_bytes), distance=distance), expected
    )


@pytest.mark.usefixtures("_small_blocks")
def test_half_of_the_pairs_serve_both_sides_where_the_distance_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, distance, compute, pairs = rows_of(400, seed=3, classes=80), avsl(), AvslTiles.__call__, []

    def counted(self: AvslTiles, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        pairs.append(len(left) * len(right))
        return compute(self, left, right)

    monkeypatch.setattr(AvslTiles, "__call__", counted)
    halved = evaluate(queries, None, EvaluationSpec(RECALL_AT), distance=distance)
    assert 0.5 < sum(pairs) / 400**2 < 0.6
    pairs.clear()
    monkeypatch.setattr(distance, "is_symmetric", False, raising=False)
    full = evaluate(queries, None, EvaluationSpec(RECALL_AT), distance=distance)
    assert sum(pairs) > 0.99 * 400**2  # a query without a positive is not searched for
    assert_same(halved, full.per_query)


def test_distances_are_symmetric_only_where_that_is_known() -> None:
    assert is_symmetric(avsl()) and is_symmetric(LpDistance(p=1)) and is_symmetric(DotProductSimilarity())
    assert not is_symmetric(SNRDistance())

    class Skewed(LpDistance):
        pass

    assert not is_symmetric(Skewed())


@pytest.mark.fast_sample(6)
@pytest.mark.usefixtures("_small_blocks", "_threads")
@pytest.mark.parametrize(
    "distance",
    [LpDistance(normalize_embeddings=False, p=1), DotProductSimilarity(normalize_embeddings=False), SNRDistance()],
    ids=lambda distance: type(distance).__name__,
)
@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_distances_without_a_bound_are_ranked_by_their_float64_matrix(distance: BaseDistance, scale: float) -> None:
    rng = np.random.default_rng(4)
    rows = torch.from_numpy(rng.normal(size=(70, 5)) * rng.uniform(0.5, 2, (70, 1)) * scale).float()
    queries = EmbeddingSet(rows, torch.from_numpy(rng.integers(0, 7, 70)), torch.arange(70))
    sign = -1 if distance.is_inverted else 1
    matrix = sign * distance(rows.double(), rows.double()).numpy()
    order = [[g for g in np.argsort(row, kind="stable") if g != q] for q, row in enumerate(matrix)]
    expected = scores_by_sorting(queries, queries, [np.array(x) for x in order])
    for tile_bytes in (4096, 2**29):
        found = evaluate(queries, None, EvaluationSpec(RECALL_AT, tile_bytes=tile_bytes), distance=distance)
        assert_same(found, expected)


def test_exact_values_do_not_depend_on_the_pairs_that_are_asked_for_with_them() -> None:
    queries, distance = rows_of(60, seed=5), avsl()
    for chosen in (distance, LpDistance(normalize_embeddings=False, p=1)):
        similarity = PairwiseSearch(queries, queries, chosen, tile_bytes=2**29)
        q, g = (x.reshape(-1) for x in np.meshgrid(np.arange(60), np.arange(60), indexing="ij"))
        together = similarity.exact_pairs(q, g)
        rng = np.random.default_rng(0)
        for size in (1, 7, 200):
            some = rng.choice(3600, size, replace=False)
            np.testing.assert_array_equal(similarity.exact_pairs(q[some], g[some]), together[some])
        matrix = together.reshape(60, 60)
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_array_equal(matrix[:8], matrix[30:38])  # equal rows


def test_a_shortlist_of_all_is_the_exact_ranking_and_a_short_one_that_of_its_items() -> None:
    queries, distance = rows_of(100, seed=9, classes=20), avsl()
    exact = evaluate(queries, None, EvaluationSpec(RECALL_AT), distance=distance)
    every = evaluate(queries, None, EvaluationSpec(RECALL_AT, shortlist=100), distance=distance)
    assert_same(every, exact.per_query)
    assert (exact.search, every.search) == ("exact", "shortlist@100")
    few = evaluate(queries, None, EvaluationSpec(RECALL_AT, shortlist=12), distance=distance)
    top = queries.rows.double().view(100, 2, LEVELS, NODES)[:, 0, -1]
    top = top / top.norm(dim=1, keepdim=True)
    similarity = (top @ top.T).numpy()
    np.fill_diagonal(similarity, -np.inf)
    order = []
    for q, columns in enumerate(sorted_float64(queries, queries, distance)):
        short = np.argsort(-np.round(similarity[q], 12), kind="stable")[:12]
        order.append(columns[np.isin(columns, short)])
    assert_same(few, scores_by_sorting(queries, queries, order))
    assert not np.array_equal(few.per_query["map_at_r"], exact.per_query["map_at_r"], equal_nan=True)


def test_what_a_distance_cannot_do_is_refused_with_the_remedy() -> None:
    queries, distance = rows_of(60, seed=10), avsl()
    cases = [
        (EvaluationSpec(shortlist=5), distance, r"shortlist: got 5, expected at least \d+ places"),
        (
            EvaluationSpec(shortlist=50),
            SNRDistance(),
            "SNRDistance does not support shortlists. Set evaluation.shortlist=null",
        ),
        (EvaluationSpec(shortlist=50), None, "unit vectors does not support shortlists. Set evaluation.shortlist=null"),
        (EvaluationSpec(metrics=("nmi",)), distance, "got nmi, but AvslDistance does not compare unit vectors"),
    ]
    for spec, chosen, message in cases:
        with pytest.raises(ConfigError, match=message):
            evaluate(queries, None, spec, distance=chosen)
    with pytest.raises(ConfigError, match="map needs the whole ranking"):
        EvaluationSpec(metrics=("map",), shortlist=50)
    with pytest.raises(ConfigError, match="shortlist: got 0, expected at least 1"):
        EvaluationSpec(shortlist=0)
    spec = EvaluationSpec()
    object.__setattr__(spec, "back_end", "faiss")
    with pytest.raises(ConfigError, match=r"AvslDistance does not compare unit vectors\. Set evaluation\.back_end"):
        evaluate(queries, None, spec, distance=distance)


def test_a_damaged_distance_is_an_error() -> None:
    distance = avsl()
    with torch.no_grad():
        distance.beta[0, 0] = torch.nan
    with pytest.raises(RunError, match="AvslDistance returned NaN or infinity"):
        evaluate(rows_of(60, seed=11), distance=distance)


def test_tiles_are_halved_where_a_device_has_no_memory(limit_memory) -> None:
    queries, distance = rows_of(60, seed=12), avsl()
    expected = evaluate(queries, distance=distance).per_query
    limit_memory(AvslTiles, "__call__", lambda self, left, right: len(left) * len(right), 500)
    assert_same(evaluate(queries, distance=distance), expected)
    limit_memory(AvslTiles, "__call__", lambda self, left, right: len(left) * len(right), 0)
    with pytest.raises(RunError, match=r"out of memory for a tile of one item\. Lower tile_bytes"):
        evaluate(queries, distance=distance)


@pytest.mark.parametrize("inference", ["rectified", "reliable", "top", "concat"])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_float32_values_err_less_than_the_distance_says(variant: str, inference: str) -> None:
    distance = avsl(variant=variant)
    distance.inference = inference
    rows = rows_of(80, seed=13).rows
    relative, absolute = distance.float32_error(rows, rows)
    with torch.inference_mode():
        value = distance(rows, rows).double()
        double = copy.deepcopy(distance).double()
        exact = double.pairwise_distance(rows.double()[:, None], rows.double()[None])
    bound = relative * value + absolute
    assert bool(((value - exact).abs() <= bound / 4).all())
    assert float(bound.max()) < 1e-3  # small enough to be of use


def test_collections_rank_by_the_sum_of_float64_distances_whatever_the_tile() -> None:
    runs = [[rows_of(70, seed=20 + 2 * f + r) for r in range(2)] for f in range(2)]
    first = runs[0][0]
    members = [[EmbeddingSet(run.rows, first.labels, first.ids) for run in fold] for fold in runs]
    distances = [[avsl(2 * f + r) for r in range(2)] for f in range(2)]
    found = [
        concatenated_scores(members, spec=EvaluationSpec(RECALL_AT, tile_bytes=size), distances=distances)[0]
        for size in (60_000, 2**29)
    ]
    values = [
        [float64_values(m, m, d) for m, d in zip(*pair, strict=True)] for pair in zip(members, distances, strict=True)
    ]
    for a, b in itertools.product(range(2), repeat=2):
        total = values[0][a] + values[1][b]
        order = [[g for g in np.argsort(row, kind="stable") if g != q] for q, row in enumerate(total)]
        expected = scores_by_sorting(first, first, [np.array(x) for x in order])
        for by_tile in found:
            assert_same(by_tile[a, b], expected)


def test_memory_of_a_tile_counts_what_a_distance_expands() -> None:
    taken = []

    class Recording(SNRDistance):
        def compute_mat(self, query_emb: torch.Tensor, ref_emb: torch.Tensor) -> torch.Tensor:
            taken.append(2 * 8 * len(query_emb) * ref_emb.numel())  # the differences of all pairs, and their squares
            return super().compute_mat(query_emb, ref_emb)

    queries = rows_of(60, seed=30)
    evaluate(queries, None, EvaluationSpec(tile_bytes=2**18), distance=Recording())
    assert len(taken) > 1 and max(taken) <= 2**18 < 2 * 8 * 60 * queries.rows.numel()


def test_the_nearest_by_a_distance_are_those_of_its_sorted_values() -> None:
    distance, gallery = avsl(), rows_of(90, seed=1)
    queries = EmbeddingSet(gallery.rows[::9], gallery.labels[::9], gallery.ids[::9])
    found = nearest(queries, gallery, 4, distance=distance)
    expected = np.stack([order[:4] for order in sorted_float64(queries, gallery, distance)])
    assert found.index.tolist() == expected.tolist()
    values = np.take_along_axis(float64_values(queries, gallery, distance), expected, axis=1)
    np.testing.assert_allclose(found.distance, values, rtol=1e-9, atol=1e-12)
    of_vectors = nearest(queries, gallery, 4)
    assert torch.equal(nearest(queries, gallery, 4, distance=None).index, of_vectors.index)
    assert not torch.equal(found.index, of_vectors.index)


def test_the_hardest_queries_show_what_their_distance_finds_nearest() -> None:
    distance, queries = avsl(), rows_of(60, seed=2)
    hard = hardest_queries(
        queries, None, evaluate(queries, distance=distance), count=5, metric="map_at_r", distance=distance
    )
    first = {int(i): order[0] for i, order in zip(queries.ids, sorted_float64(queries, queries, distance), strict=True)}
    assert [query.nearest_id for query in hard] == [int(queries.ids[first[query.id]]) for query in hard]
