"""Scores of a whole set: recorded values of other code, loops over pairs, and what does not depend on the route."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from dmlbench.evaluation.metrics import clustering
from dmlbench.evaluation.metrics.clustering import KmeansSettings, WholeSet, class_distances, kmeans, mutual_information
from dmlbench.evaluation.metrics.registry import scores_of, set_scores
from dmlbench.evaluation.search.unit_vectors import FloatRows, unit_rows
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError


def example(seed: int, *, size: int = 60, classes: int = 7) -> tuple[FloatRows, IntArray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size)
    rows = rng.normal(size=(classes, 5))[labels] + 0.5 * rng.normal(size=(size, 5))
    return unit_rows(torch.from_numpy(rows.astype(np.float32))), labels


def test_scores_equal_recorded_values_of_other_code(golden, golden_meta) -> None:
    """golden/metrics.npz: NMI and AMI of pytorch-metric-learning 2.9.0, distances of ooDML's code."""
    compared = 0
    for case in (c["case"] for c in golden_meta("metrics")["cases"] if c["self_excluded"]):
        recorded = golden("metrics", f"{case}_")
        rows, labels = unit_rows(torch.from_numpy(recorded["query"].astype(np.float32))), recorded["query_labels"]
        found = mutual_information(labels, recorded["kmeans_labels"])
        assert found["nmi"] == pytest.approx(float(recorded["pml_NMI"]), abs=1e-12)
        assert found["ami"] == pytest.approx(float(recorded["pml_AMI"]), abs=1e-12)
        intra, inter = class_distances(rows, labels)
        # recorded in float32
        assert inter == pytest.approx(float(recorded["oodml_dists_inter"]), abs=1e-7)
        if "oodml_dists_intra" in recorded:
            assert intra == pytest.approx(float(recorded["oodml_dists_intra"]), abs=1e-12)
            compared += 1
    assert compared == 2


def test_clusters_are_of_unit_rows_and_raw_ones_of_rows_as_given_as_many_as_classes() -> None:
    """Directions form three groups, lengths three others; labels are neither."""
    rng = np.random.default_rng(0)
    directions, lengths = rng.integers(0, 3, 120), rng.integers(0, 3, 120)
    labels = np.where(rng.random(120) < 0.7, directions, np.where(rng.random(120) < 0.6, lengths, 0))
    rows = 0.05 * np.eye(4)[directions] + np.eye(4)[3] + 1e-3 * rng.normal(size=(120, 4))
    rows *= np.array([1.0, 10.0, 20.0])[lengths][:, None]
    queries = EmbeddingSet(torch.from_numpy(rows).float(), torch.from_numpy(labels), torch.arange(120))
    scores = set_scores(
        WholeSet(queries, None, kmeans_settings=KmeansSettings(restarts=10)), scores_of(["nmi", "ami", "raw_nmi"], [])
    )
    assert scores["nmi"] == pytest.approx(normalized_mutual_info_score(labels, directions))
    assert scores["ami"] == pytest.approx(adjusted_mutual_info_score(labels, directions))
    raw = normalized_mutual_info_score(labels, lengths, average_method="geometric")
    assert scores["raw_nmi"] == pytest.approx(raw) and abs(raw - scores["nmi"]) > 0.1


def test_raw_scores_equal_those_of_the_code_of_proxynca_pp(golden, golden_meta, monkeypatch) -> None:
    """golden/metrics.npz: R@K of euwern/proxynca_pp, which divides by all queries; NMI of recorded clusters."""
    for case in (c["case"] for c in golden_meta("metrics")["cases"] if c["self_excluded"]):
        recorded = golden("metrics", f"{case}_")
        rows, labels = (torch.from_numpy(recorded[name]) for name in ("query", "query_labels"))
        clusters = recorded["kmeans_labels"]
        monkeypatch.setattr("dmlbench.evaluation.metrics.clustering.kmeans", lambda *_, found=clusters, **__: found)
        queries = EmbeddingSet(rows.float(), labels, torch.arange(len(rows)))
        whole = WholeSet(queries, None, kmeans_settings=KmeansSettings())
        scores = set_scores(whole, scores_of(["raw_nmi", "raw_recall_at_k"], [1, 2, 4, 8]))
        assert scores["raw_nmi"] == pytest.approx(float(recorded["nmi_geometric"]), abs=1e-12)
        for k in (1, 2, 4, 8):
            of_all = scores[f"raw_recall_at_{k}"] * len(whole.raw_first_hits) / len(rows)
            assert of_all == pytest.approx(float(recorded[f"euwern_recall_at_{k}"]), abs=1e-12), case


def test_raw_recall_counts_what_is_nearer_by_rows_of_any_length() -> None:
    rng = np.random.default_rng(3)
    rows, labels = rng.normal(size=(30, 4)) * rng.uniform(0.1, 5, (30, 1)), rng.integers(0, 6, 30)
    rows[7] = rows[3]  # a tie
    part = {
        name: EmbeddingSet(torch.from_numpy(rows[a:b]).float(), torch.from_numpy(labels[a:b]), torch.arange(a, b))
        for name, a, b in (("queries", 0, 20), ("gallery", 10, 30))
    }
    given = torch.from_numpy(rows).float().double().numpy()
    expected = []
    for i in range(20):
        others = [j for j in range(10, 30) if j != i]
        order = sorted(others, key=lambda j: (((given[i] - given[j]) ** 2).sum(), j))
        hits = [rank for rank, j in enumerate(order) if labels[j] == labels[i]]
        expected += hits[:1]
    assert clustering.first_hits(part["queries"], part["gallery"]).tolist() == expected


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_class_distances_equal_means_over_pairs(scale: float) -> None:
    rows, labels = example(0)
    labels[3] = 99  # a class of one image takes part between classes only
    rows = unit_rows(
        torch.from_numpy(np.float32(1) + np.float32(scale) * rows)
    )  # down to a model that nearly collapsed
    x = rows.astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    within, means = [], []
    for label in np.unique(labels):
        part = x[labels == label]
        pairs = [(part[i] - part[j]) @ (part[i] - part[j]) / 2 for i in range(len(part)) for j in range(i)]
        within += [np.mean(pairs)] if pairs else []
        means.append(part.mean(axis=0) / np.linalg.norm(part.mean(axis=0)))
    between = [(a - b) @ (a - b) / 2 for i, a in enumerate(means) for b in means[:i]]
    intra, inter = class_distances(rows, labels)
    assert intra == pytest.approx(np.mean(within), abs=1e-14)
    assert inter == pytest.approx(np.mean(between), abs=1e-14)


def test_zero_rows_are_at_distance_one_from_everything() -> None:
    rows = np.array([[1, 0], [1, 0], [0, 0], [0, 0], [0, 0]], dtype=np.float32)
    assert class_distances(rows, np.array([0, 0, 1, 1, 1])) == (0.5, 1.0)


def test_distances_are_refused_where_there_is_nothing_to_compare() -> None:
    rows, _ = example(0, size=4)
    for labels in (np.zeros(4, dtype=np.int64), np.arange(4)):
        with pytest.raises(RunError, match=r"expected at least two classes, one of them with two items\. Leave both"):
            class_distances(rows, labels)


@pytest.mark.parametrize("library", ["faiss", "scikit-learn"])
def test_kmeans_finds_classes_that_lie_apart_and_repeats_itself(library: str) -> None:
    if library == "faiss":
        pytest.importorskip("faiss", reason="extra faiss-cpu")

    def found(rows: FloatRows, count: int, seed: int) -> IntArray:
        return kmeans(rows, count, KmeansSettings(seed, library))

    labels = np.repeat([0, 1], 20)
    rows = np.random.default_rng(1).normal(size=(40, 3)) * 0.1 + np.where(labels, 1, -1)[:, None]
    unit = unit_rows(torch.from_numpy(rows.astype(np.float32)))
    assert mutual_information(labels, found(unit, 2, 3)) == pytest.approx({"nmi": 1.0, "ami": 1.0})
    unit, _ = example(2)
    assert np.array_equal(found(unit, 9, 5), found(unit, 9, 5))
    assert any(not np.array_equal(found(unit, 9, 5), found(unit, 9, other)) for other in (6, 7))


def test_every_item_counts_once_where_query_and_gallery_overlap() -> None:
    rows, labels = example(4)
    everything = EmbeddingSet(torch.from_numpy(rows), torch.from_numpy(labels), torch.arange(len(rows)))
    queries, gallery = (
        EmbeddingSet(everything.rows[part], everything.labels[part], everything.ids[part])
        for part in (slice(0, 40), slice(20, 60))
    )
    metrics = ("nmi", "ami", "intra_class_distance", "inter_class_distance")
    scores = scores_of((*metrics, "map_at_r"))
    expected = set_scores(WholeSet(everything, None, kmeans_settings=KmeansSettings()), scores)
    assert list(expected) == list(metrics)
    assert set_scores(WholeSet(queries, gallery, kmeans_settings=KmeansSettings()), scores) == expected


PROXYNCA_PP = KmeansSettings(library="scikit-learn", init="k-means++", restarts=10, max_steps=300)


def test_settings_of_proxynca_pp_are_scikit_learns_of_its_time() -> None:
    """euwern/proxynca_pp 217233d2, evaluation/normalized_mutual_information.py:9: KMeans(nb_clusters), by its defaults
    of then: n_init=10, max_iter=300, init="k-means++" (scikit-learn 0.22, sklearn/cluster/_kmeans.py)."""
    from sklearn.cluster import KMeans

    rows, _ = example(7)
    theirs = KMeans(6, n_init=10, max_iter=300, init="k-means++", random_state=2).fit(rows).labels_
    assert np.array_equal(kmeans(rows, 6, dataclasses.replace(PROXYNCA_PP, seed=2)), theirs)


@pytest.mark.parametrize(("seed", "max_steps"), [(0, 1), (3, 5)])
def test_faiss_takes_so_many_steps_over_all_rows_from_the_rows_that_the_seed_draws(seed: int, max_steps: int) -> None:
    """Against a loop of Lloyd's algorithm. By default, faiss would sample 1,024 of the 1,200 rows."""
    faiss = pytest.importorskip("faiss", reason="extra faiss-cpu")
    rows = np.random.default_rng(0).uniform(size=(1200, 2)).astype(np.float32)
    start = faiss.Kmeans(2, 4, niter=0, seed=seed, max_points_per_centroid=1200)
    start.train(rows)
    centers = start.centroids.astype(np.float64)
    for step in range(max_steps + 1):
        nearest = ((rows[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
        if step < max_steps:
            centers = np.stack([rows[nearest == i].mean(axis=0, dtype=np.float64) for i in range(4)])
    assert np.array_equal(kmeans(rows, 4, KmeansSettings(seed, "faiss", max_steps=max_steps)), nearest)


@pytest.mark.parametrize("library", ["faiss", "scikit-learn"])
def test_more_starts_and_steps_and_kmeans_plus_plus_find_tighter_clusters(library: str) -> None:
    if library == "faiss":
        pytest.importorskip("faiss", reason="extra faiss-cpu")
    random = np.random.default_rng(0)
    centers = random.normal(size=(40, 16)) * 2
    labels = np.repeat(np.arange(40), 15)
    rows = (centers[labels] + random.normal(size=(600, 16))).astype(np.float32)
    nmi = {}
    for settings in (KmeansSettings(library=library), dataclasses.replace(PROXYNCA_PP, library=library)):
        found = [mutual_information(labels, kmeans(rows, 40, dataclasses.replace(settings, seed=s))) for s in range(4)]
        nmi[settings.init] = np.mean([scores["nmi"] for scores in found])
    assert nmi["k-means++"] > nmi["random"] + 0.01


@pytest.mark.parametrize("settings", [KmeansSettings(library="faiss"), dataclasses.replace(PROXYNCA_PP, seed=3)])
def test_results_name_settings_so_that_they_can_be_read_again(settings: KmeansSettings) -> None:
    assert clustering.kmeans_of(str(settings)) == settings == clustering.kmeans_of(f"{settings} on a GPU")
    with pytest.raises(ConfigError, match="kmeans: got 'something else'"):
        clustering.kmeans_of("something else")
    assert str(PROXYNCA_PP) == "scikit-learn, k-means++, 10 starts, 300 steps, seed 0"


@pytest.mark.parametrize(
    "changes", [{"seed": -1}, {"library": "cuml"}, {"init": "first"}, {"restarts": 0}, {"max_steps": 0}]
)
def test_impossible_settings_of_kmeans_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"kmeans_{next(iter(changes))}"):
        KmeansSettings(**changes)


def test_faiss_clusters_on_a_gpu_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = pytest.importorskip("faiss", reason="extra faiss-cpu")
    rows, _ = example(6)
    asked = []

    class OnGpu(faiss.Kmeans):
        """Kmeans that notes the GPUs it is asked to use, and uses none."""

        def __init__(self, *arguments: object, gpu: int, **options: object) -> None:
            asked.append(gpu)
            super().__init__(*arguments, **options)

    expected = kmeans(rows, 5, KmeansSettings(1))
    monkeypatch.setattr(faiss, "Kmeans", OnGpu)
    assert np.array_equal(kmeans(rows, 5, KmeansSettings(1), on_gpu=True), expected)
    kmeans(rows, 5, KmeansSettings(1))
    assert asked == [1, 0]
