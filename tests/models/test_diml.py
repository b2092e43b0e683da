"""DIML is the public code in values and order, a naive loop, and one list whatever the tiles; models give its rows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.search.rerank import Reranker, nearest, rerank_nearest
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.models.diml import DimlDistance, cells_of
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, EmbeddingSet, RunError

SPEC = EvaluationSpec((1, 4, 30), metrics=("p_at_1", "recall_at_k", "map_at_r", "map"))


def test_what_lacks_a_part_that_tests_ask_for_is_no_reranker() -> None:
    parts = dict.fromkeys(("num_neighbors", "grid_size", "description"))
    parts |= {name: lambda self: None for name in ("center_rows", "reranked_similarities")}
    assert isinstance(type("Whole", (), parts)(), Reranker) and isinstance(DimlDistance(), Reranker)
    for name in parts:
        others = {key: part for key, part in parts.items() if key != name}
        assert not isinstance(type("Part", (), others)(), Reranker)


@pytest.fixture(scope="module")
def record(golden, golden_meta) -> dict[str, Any]:
    return golden("diml") | {"cases": golden_meta("diml")["cases"]}


def of_record(record: dict[str, Any], case: str) -> tuple[EmbeddingSet, DimlDistance]:
    """Rows in float64 of the recorded maps by our projection, and our distance."""
    settings = {key: value for key, value in record["cases"][case].items() if key != "recall_at_1"}
    weight = torch.tensor(record[f"{case}_weight"])
    project = Projection(weight.shape[1], weight.shape[0], bias=True).double()
    with torch.no_grad():
        project.weight.copy_(weight)
        project.bias.copy_(torch.tensor(record[f"{case}_bias"]))
        maps = torch.tensor(record[f"{case}_maps"])
        cells = cells_of(project(maps), settings["grid_size"])
        rows = torch.cat([project(maps.mean((2, 3))), cells.flatten(1)], 1)
    labels = torch.tensor(record[f"{case}_labels"])
    return EmbeddingSet(rows, labels, torch.arange(len(rows))), DimlDistance(**settings)


@pytest.mark.parametrize("case", ["e0", "e1", "e2"])
def test_values_lists_and_scores_are_those_of_the_public_code(record: dict[str, Any], case: str) -> None:
    images, distance = of_record(record, case)
    by_cosine, expected = record[f"{case}_cosine_order"], record[f"{case}_order"]
    assert not np.array_equal(by_cosine, expected)
    first = by_cosine[:, : distance.num_neighbors]
    centers = torch.nn.functional.normalize(distance.center_rows(images.rows), dim=1)
    cosine = (centers @ centers.T).gather(1, torch.tensor(first))
    known = torch.ones(first.shape, dtype=torch.bool)
    value = distance.reranked_similarities(images.rows, images.rows[torch.tensor(first)], known)
    np.testing.assert_allclose((value - cosine).numpy(), record[f"{case}_structural"], rtol=1e-9)
    everything = np.arange(len(images))
    lists = [
        columns for _, columns, _ in rerank_nearest(images, None, distance, 39, wanted=everything, tile_bytes=2**29)
    ]
    np.testing.assert_array_equal(np.concatenate(lists)[:, :39], expected)
    plain = evaluate(EmbeddingSet(centers, images.labels, images.ids), spec=SPEC).scores["p_at_1"]
    again = evaluate(images, spec=SPEC, distance=distance).scores["p_at_1"]
    np.testing.assert_allclose([plain, again], record["cases"][case]["recall_at_1"], rtol=1e-9)


def some_images(count: int = 24, size: int = 6, cells: int = 4, seed: int = 0) -> EmbeddingSet:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    rows = torch.randn(5, 1, size, generator=generator)[labels] + torch.randn(
        count, 1 + cells, size, generator=generator
    )
    return EmbeddingSet(rows.flatten(1), labels, torch.arange(count) + 100 * seed)


def unit(rows: Tensor, size: int) -> NDArray[np.float64]:
    parts = rows.double().reshape(-1, size).numpy()
    return parts / np.linalg.norm(parts, axis=1, keepdims=True)


def values_by_loops(query: Tensor, items: list[Tensor], distance: DimlDistance, size: int = 6) -> list[float]:
    """The equations, an update after the other, for one list."""
    count = distance.grid_size**2
    q = unit(query, size)
    pairs = []
    for item in items:
        x = unit(item, size)
        s = [[float(np.dot(x[1 + i], q[1 + j])) for j in range(count)] for i in range(count)]
        u = [max(0.0, float(np.dot(x[1 + i], q[0]))) for i in range(count)]
        v = [max(0.0, float(np.dot(q[1 + j], x[0]))) for j in range(count)]
        u, v = [w / (sum(u) + 1e-5) for w in u], [w / (sum(v) + 1e-5) for w in v]
        kernel = [[math.exp((w - 1) / distance.temperature) for w in line] for line in s]
        flows = sum(u) > 0 and sum(v) > 0
        pairs.append((float(np.dot(x[0], q[0])), s, kernel, u, v, [1.0] * count, [1.0] * count, flows))
    for _ in range(distance.max_iterations):
        changes = []
        for _, _, kernel, u, v, r, c, flows in pairs:
            if not flows:
                continue
            for i in range(count):
                new = u[i] / sum(kernel[i][j] * c[j] for j in range(count))
                changes.append(abs(new - r[i]))
                r[i] = new
            for j in range(count):
                c[j] = v[j] / sum(kernel[i][j] * r[i] for i in range(count))
        if changes and np.mean(changes) < distance.tolerance:
            break
    return [
        cosine + flows * sum(r[i] * c[j] * kernel[i][j] * s[i][j] for i in range(count) for j in range(count))
        for cosine, s, kernel, _, _, r, c, flows in pairs
    ]


def scores_by_loops(queries: EmbeddingSet, gallery: EmbeddingSet, distance: DimlDistance) -> dict[str, float]:
    """Of whole lists: the first by cosine plus flow, those behind by cosine."""
    x, y = (np.stack([unit(row, 6)[0] for row in part.rows]) for part in (queries, gallery))
    found: dict[str, list[float]] = {name: [] for name in SPEC.score_names}
    for q in range(len(queries)):
        others = [g for g in range(len(gallery)) if gallery.ids[g] != queries.ids[q]]
        listed = sorted(others, key=lambda g: (-float(np.dot(x[q], y[g])), g))
        first, behind = listed[: distance.num_neighbors], listed[distance.num_neighbors :]
        values = values_by_loops(queries.rows[q], [gallery.rows[g] for g in first], distance)
        first = [first[i] for i in sorted(range(len(first)), key=lambda i: -values[i])]
        marks = [bool(gallery.labels[g] == queries.labels[q]) for g in first + behind]
        total = sum(marks)
        precision = [sum(marks[: i + 1]) / (i + 1) * marks[i] for i in range(len(marks))]
        found["p_at_1"].append(marks[0])
        found["map"].append(sum(precision) / total)
        found["map_at_r"].append(sum(precision[:total]) / total)
        for k in (1, 4, 30):
            found[f"recall_at_{k}"].append(any(marks[:k]))
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("count", [3, 10, 100])
@pytest.mark.parametrize("has_gallery", [False, True])
def test_scores_are_those_of_loops(count: int, has_gallery: bool) -> None:
    distance = DimlDistance(grid_size=2, num_neighbors=count)
    queries = some_images()
    other = some_images(30, seed=1)
    # some queries lie in the gallery, so that lists differ in length
    both = EmbeddingSet(*(torch.cat([getattr(x, k) for x in (other, queries)])[:40] for k in ("rows", "labels", "ids")))
    gallery = both if has_gallery else None
    found = evaluate(queries, gallery, SPEC, distance=distance)
    expected = scores_by_loops(queries, queries if gallery is None else gallery, distance)
    assert found.scores == pytest.approx(expected, abs=1e-12)
    plain = EmbeddingSet(distance.center_rows(queries.rows), queries.labels, queries.ids)
    if gallery is None:
        assert found.scores["map"] != evaluate(plain, spec=SPEC).scores["map"]


def test_values_are_those_of_loops_and_a_shorter_list_is_left_alone() -> None:
    distance, images = DimlDistance(grid_size=2), some_images(40)
    query = images.rows[:2]
    items = torch.stack([images.rows[2:21], images.rows[21:]])
    known = torch.ones(2, 19, dtype=torch.bool)
    known[1, 12:] = False
    values = distance.reranked_similarities(query.double(), items.double(), known)
    np.testing.assert_allclose(values[0], values_by_loops(query[0], list(items[0]), distance), rtol=1e-9)
    np.testing.assert_allclose(values[1, :12], values_by_loops(query[1], list(items[1, :12]), distance), rtol=1e-9)


def test_where_nothing_flows_the_cosine_is_left() -> None:
    distance = DimlDistance(grid_size=1)
    query = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    items = torch.tensor([[[1.0, 1.0, -1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]], dtype=torch.float64)
    values = distance.reranked_similarities(query, items, torch.ones(1, 2, dtype=torch.bool))
    np.testing.assert_allclose(values, [[math.sqrt(0.5), 1 + 1 / (1 + 1e-5)]], rtol=1e-9)


def test_tiles_and_missing_memory_change_no_list(limit_memory) -> None:
    distance, images = DimlDistance(grid_size=2, num_neighbors=7), some_images(60)
    expected = evaluate(images, spec=SPEC, distance=distance)
    small = evaluate(images, spec=SPEC.replaced(tile_bytes=2**18), distance=distance)
    sizes = limit_memory(DimlDistance, "reranked_similarities", lambda self, queries, *_: len(queries), 4)
    halved = evaluate(images, spec=SPEC, distance=distance)
    assert max(sizes) > 4
    for name, values in expected.per_query.items():
        np.testing.assert_array_equal(small.per_query[name], values)
        np.testing.assert_array_equal(halved.per_query[name], values)


def test_the_nearest_are_the_first_of_the_new_lists() -> None:
    distance, images = DimlDistance(grid_size=2, num_neighbors=3), some_images(20)
    (found,) = rerank_nearest(images, None, distance, 5, wanted=np.arange(20), tile_bytes=2**29)
    neighbors = nearest(images, images, 5, distance=distance)
    np.testing.assert_array_equal(neighbors.index, found[1])
    np.testing.assert_array_equal(neighbors.distance[:, :3], found[2])
    assert (np.diff(found[2]) <= 0).all()
    assert torch.isnan(neighbors.distance[:, 3:]).all()


@pytest.mark.parametrize(("size", "grid"), [((8, 8), 4), ((7, 7), 4), ((7, 5), 2), ((1, 1), 2)])
def test_cells_are_means_of_equal_parts(size: tuple[int, int], grid: int) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = cells_of(x, grid)
    assert found.shape == (2, grid * grid, 3)
    if size[0] % grid or size[1] % grid:  # enlarged by straight lines between pixels, the corners where they are

        def line(count: int) -> NDArray[np.float64]:
            at = np.linspace(0, count - 1, 4 * grid)
            return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(count)))

        x = torch.tensor(np.einsum("ah,bw,ndhw->ndab", line(size[0]), line(size[1]), x.numpy()))
    parts = x.reshape(2, 3, grid, x.shape[2] // grid, grid, x.shape[3] // grid).mean((3, 5))
    torch.testing.assert_close(found, parts.flatten(2).transpose(1, 2))


def test_what_cannot_be_is_refused() -> None:
    for settings in (
        {"grid_size": 0},
        {"num_neighbors": 0},
        {"max_iterations": 0},
        {"temperature": 0.004},
        {"tolerance": -1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            DimlDistance(**settings)
    distance, images = DimlDistance(grid_size=2), some_images()
    with pytest.raises(RunError, match="embeddings: got 31 numbers, expected a multiple of 5"):
        evaluate(EmbeddingSet(torch.ones(4, 31), torch.zeros(4).long(), torch.arange(4)), distance=distance)
    with pytest.raises(RunError, match="does not define a pairwise distance"):
        distance(images.rows)
    with pytest.raises(ConfigError, match="shortlist: got 30, but DimlDistance does not support shortlists"):
        evaluate(images, spec=EvaluationSpec(shortlist=30), distance=distance)
    with pytest.raises(ConfigError, match="got nmi, but DimlDistance does not compare unit vectors"):
        evaluate(images, spec=EvaluationSpec(metrics=("nmi",)), distance=distance)
