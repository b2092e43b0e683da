"""Studies that train: their numbers by loops and closed forms, and each in miniature."""

from pathlib import Path

import numpy as np
import pytest
import torch
from composed import arguments
from PIL import Image
from scipy.optimize import linprog

from dmlbench.data.image_table import Listing, table_of
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.studies import gsp_tokens, gsp_weights, prototypes
from dmlbench.studies.models import Described, entropy, halves, tied_to_classes
from dmlbench.studies.record import conduct_study
from dmlbench.studies.same_classes import SameClasses
from dmlbench.types import DataError

TINY = "dataset.table.check_counts=false,backbone=resnet20_small,fit.max_steps=3,head.out_features=8"


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of each class of CIFAR-10 as a tree, six to train."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    from dmlbench.data.readers.cifar import CLASSES_10

    for label, name in enumerate(CLASSES_10):
        for part, count in (("train", 6), ("test", 4)):
            folder = root / "cifar10" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(25 * label, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def places(root: Path, tmp_path: Path) -> list[str]:
    return [f"paths.data_dir={root}", f"paths.cache_dir={root}/cache", f"paths.output_dir={tmp_path}", "device=cpu"]


def training(*more: str) -> str:
    return "training=[" + ",".join(f"'{override}'" for override in [*TINY.split(","), *more]) + "]"


# XML, figures 3 and 4


def test_lemma_2_1_holds_for_the_nearest_prototype() -> None:
    torch.manual_seed(0)
    features = torch.randn(20, 9, 3, dtype=torch.float64)
    centers, delta = prototypes.cover(features.flatten(0, 1), 7)
    assert delta == pytest.approx(max(min(float((x - p).norm()) for p in centers) for x in features.flatten(0, 1)))
    apart = prototypes.discrepancy(features, centers)
    for i, image in enumerate(features):  # by a loop
        nearest = [min(centers, key=lambda p, x=x: float((x - p).norm())) for x in image]
        assert apart["nearest"][i] == pytest.approx(float((sum(nearest) / 9 - image.mean(dim=0)).norm()))
    assert float(apart["nearest"].max()) <= delta


def test_largest_product_finds_a_far_prototype_unless_lengths_are_equal() -> None:
    features = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    unequal = prototypes.discrepancy(features, torch.tensor([[1.0, 0.0], [5.0, 5.0]]))
    assert float(unequal["nearest"]) == 0 and float(unequal["product"]) == pytest.approx(41**0.5)
    equal = prototypes.discrepancy(features, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert float(equal["product"]) == 0


def test_greedy_centers_are_the_farthest_ones() -> None:
    line = torch.tensor([[0.0], [1.0], [10.0], [4.0]])
    centers, delta = prototypes.cover(line, 3)
    assert centers.flatten().tolist() == [0.0, 10.0, 4.0] and delta == 1.0
    assert prototypes.cover(line, 1)[1] == 10.0


def test_a_map_that_serves_all_classes_scores_as_well_across_them() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 5)
    histogram = rng.dirichlet(np.ones(4), 6)[labels] + 0.001 * rng.random((30, 4))
    true = rng.normal(size=(4, 7))
    described = Described(histogram @ true, histogram, labels, np.arange(30))
    splits = halves(6, 5, seed=0)
    found = prototypes.cross_class(described, splits, ridge=1e-9, metric="map_at_r")
    assert found["own"] == pytest.approx(1) and found["fitted"] == pytest.approx(1)
    assert found["same"] == pytest.approx([1] * 5)
    # three classes in four dimensions do not determine the map: scores lie below, or at, those of the classes' own
    assert all(score <= 1 + 1e-12 for score in found["crossed"])


@pytest.mark.slow  # three trainings
def test_xml_prototypes_in_miniature(cifar: Path, tmp_path: Path) -> None:
    small = ["images=4", "centers=3", "prototypes=4", "splits=3", "eval_images=4"]
    args = arguments("study_xml_prototypes", training(), *small, *places(cifar, tmp_path))
    findings, written = conduct_study("xml_prototypes", args, prototypes.xml)
    assert [row[0] for row in findings.rows] == ["without XML", "with XML"]
    assert findings.claims[0].holds  # lemma 2.1
    assert all(path.exists() for path in written)


# GSP, figure 5


def test_zero_shot_prediction_by_a_loop() -> None:
    rng = np.random.default_rng(1)
    histograms, means = rng.dirichlet(np.ones(3), 6), rng.normal(size=(6, 4))
    splits = halves(6, 4, seed=1)
    found = prototypes.zero_shot(histograms, means, splits, ridge=0.05)
    for i, (fitted, other) in enumerate(splits):
        z, y = histograms[fitted].T, means[fitted].T
        a = y @ z.T @ np.linalg.inv(z @ z.T + 0.05 * np.eye(3))
        ranks = []
        for label in other:
            predicted = a @ histograms[label]
            order = sorted(other, key=lambda c, p=predicted: float(np.linalg.norm(p - means[c])))
            ranks.append(1 + order.index(label))
        assert found["l2"]["map"][i] == pytest.approx(np.mean([1 / rank for rank in ranks]))
        assert found["l2"]["accuracy"][i] == pytest.approx(np.mean([rank == 1 for rank in ranks]))
    exact = prototypes.zero_shot(histograms, histograms @ rng.normal(size=(3, 4)), splits, ridge=1e-12)
    assert np.mean(exact["cosine"]["accuracy"]) == 1.0  # three classes determine a map from three attributes


@pytest.mark.slow
def test_zero_shot_prediction_in_miniature(cifar: Path, tmp_path: Path) -> None:
    started = training("pooling.memory_rows=32", "loss=proxy_nca_gsp")
    small = ["prototypes=4", "splits=3", "eval_images=4"]
    args = arguments("study_zero_shot_prediction", started, *small, *places(cifar, tmp_path))
    findings, _ = conduct_study("zero_shot_prediction", args, prototypes.zero_shot_prediction)
    assert [row[0] for row in findings.rows] == ["without ZSR", "with ZSR"]
    assert "by chance: MAP 45.7 %, nearest 20.0 % of 5 classes" in findings.notes


def test_halves_are_halves_and_entropies_have_closed_forms() -> None:
    for first, second in halves(7, 20, seed=3):
        assert len(first) == 3 and sorted([*first, *second]) == list(range(7))
    assert entropy(np.array([[0.5, 0.5, 0, 0], [1, 0, 0, 0]])) == pytest.approx(0.5)
    assert tied_to_classes(np.eye(4)) == pytest.approx(2) and tied_to_classes(np.full((4, 4), 0.25)) == pytest.approx(0)


def test_the_published_parts_need_the_same_classes(caplog: pytest.LogCaptureFixture) -> None:
    def table(*paths: str, labels: list[int]):
        names = [f"c{i}" for i in range(max(labels) + 1)]
        return table_of(Listing("", paths, np.array(labels), names, np.full(len(labels), "train"), digest="x"))

    split = SameClasses().split(table("train/a", "test/b", "test/c", labels=[0, 0, 0]), fold=0)
    assert split.train.tolist() == [0] and split.test is not None and split.test.query.tolist() == [1, 2]
    with pytest.raises(DataError, match="same classes in train/ and test/"):
        SameClasses().split(table("train/a", "test/b", labels=[0, 1]), fold=0)
    with pytest.raises(DataError, match=r"no query in the test set of .* has a positive"):
        SameClasses().split(table("train/a", "test/b", labels=[0, 0]), fold=0)
    SameClasses().split(table("Train/a", "Test/b", "test/c", "val/d", labels=[0, 0, 0, 0]), fold=0)
    assert "1 image of '' outside of train/ and test/ not used" in caplog.text


# GSP, figure 3a


def test_bags_hold_tokens_of_their_class_and_of_the_background() -> None:
    numbers, labels = gsp_tokens.bags(30, np.random.default_rng(0))
    own = numbers // 4 == labels[:, None]
    assert ((own) | (numbers >= 64)).all() and int(numbers.max()) == 67
    assert float(own.double().mean()) == pytest.approx(0.5, abs=0.02)
    alone, _ = gsp_tokens.bags(2, np.random.default_rng(0), mixing_mean=1.0, mixing_std=0.0)
    assert (alone < 64).all()


def test_average_pooling_weighs_background_tokens_by_their_share() -> None:
    model = gsp_tokens.TokenModel(Gap(), 2, limit=0.3)
    numbers, _ = gsp_tokens.bags(2, np.random.default_rng(1))
    expected = model.tokens[numbers].mean(dim=1)
    assert torch.allclose(model(numbers).embedding, expected, atol=1e-7)
    share = float((numbers >= 64).double().mean())
    assert gsp_tokens.weight_of_background(model, numbers) == pytest.approx(share)


def test_hulls_that_overlap_are_seen() -> None:
    square = np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]])
    points = np.concatenate([square, square + 1, square + 10])
    labels = [0] * 4 + [1] * 4 + [2] * 4
    assert gsp_tokens.share_in_other_hulls(points, labels) == pytest.approx(2 / 12)
    assert gsp_tokens.share_in_other_hulls(square, [0, 1, 2, 3]) == 0


def test_memory_of_the_token_study_starts_as_in_the_public_code() -> None:
    """yetigurbuz/generalized-sum-pooling b765b889: tensorflow/framework/models/token_embedding.py:58,
    tensorflow/framework/datasets/experimental.py:26, 53."""
    args = arguments("study_gsp_tokens")
    assert (args.pooling["start_step"], args.pooling["memory_rows"]) == (4096, 1024)
    assert (args.steps_per_epoch, args.validation_samples) == (512, 128)


def test_token_study_in_miniature(tmp_path: Path) -> None:
    small = ["epochs=2", "steps_per_epoch=3", "repeats=1", "validation_samples=2", "test_samples=3",
             "pooling.num_prototypes=4", "pooling.memory_rows=64", "pooling.start_step=1"]  # fmt: skip
    args = arguments("study_gsp_tokens", *small, f"paths.output_dir={tmp_path}")
    findings, _ = conduct_study("gsp_tokens", args, gsp_tokens.conduct)
    assert [row[0] for row in findings.rows] == ["GAP", "GSP"]
    assert not list((tmp_path / "studies").glob("*.running/*"))


# GSP, figure 2


def test_the_linear_program_is_solved() -> None:
    rng = np.random.default_rng(0)
    cost, ratio = rng.random((2, 7)), 0.37
    weights = gsp_weights.linear_program(cost, ratio)
    # variables: pi [2, 7], rho [7]; rho_j + sum_i pi_ij = 1/7, sum pi = ratio
    rows = np.array([[float(k % 7 == j) for k in range(21)] for j in range(7)] + [[1.0] * 14 + [0.0] * 7])
    solved = linprog(np.concatenate([cost.ravel(), np.zeros(7)]), A_eq=rows, b_eq=[1 / 7] * 7 + [ratio])
    assert weights == pytest.approx((1 / 7 - solved.x[14:]) / ratio, abs=1e-9)
    assert weights.sum() == pytest.approx(1)


def test_smoothing_uses_more_of_the_informative_pixels(tmp_path: Path) -> None:
    args = arguments("study_gsp_weights", f"paths.output_dir={tmp_path}")
    findings, _ = conduct_study("gsp_weights", args, gsp_weights.conduct)
    shares = {row[0]: row[1:] for row in findings.rows}
    assert shares["linear program"][:2] == ("100.0", "40.0") and shares["GAP"][3] == "0.0"
    assert [claim.holds for claim in findings.claims] == [True] * 4
