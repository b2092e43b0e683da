"""Effective values of recipe=gsp and recipe=xml beside yetigurbuz/generalized-sum-pooling b765b889 (tensorflow/).

Norms are closed forms: He normal over C classes has rows of length sqrt(2 D / C).
"""

import math

import pytest
from effective import Effective, effective

PROXIES = ("proxy_anchor", "proxy_nca_gsp")


def class_vectors(found: Effective) -> dict[str, float]:
    """Mean lengths; PML keeps the proxies of the normalized softmax in columns."""
    columns = {name: x.T for name, x in found.parameters.items() if name == "objective.loss.W"}
    return found.mean_norms | {name: x.norm(dim=1).mean().item() for name, x in columns.items()}


@pytest.mark.parametrize("dataset", ["cub200", pytest.param("sop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", PROXIES)
def test_all_class_vectors_start_he_normal_over_the_classes(dataset: str, loss: str) -> None:
    """framework/utilities/proxy_utils.py:32-36 and framework/losses/zsr_loss.py:48-52: (classes, D), Keras' he_normal,
    whose fan in is the first dimension."""
    found = effective("experiment=gsp_fair", f"dataset={dataset}", f"loss={loss}", "pooling=gsp", num_batches=1)
    name = {"proxy_anchor": "objective.loss.proxies", "proxy_nca_gsp": "objective.loss.W"}[loss]
    expected = math.sqrt(2 * 128 / found.num_classes)
    wanted = {name: expected, "objective.regularizers.zsr.label_embeddings": expected}
    assert class_vectors(found) == pytest.approx(wanted, rel=0.02)


CASES = [  # experiment, data set, loss, classes x images; steps between validations, of the warm-up and at most
    ("gsp_fair", "cub200", "contrastive", (8, 4), 100, 0, 1_000_000),  # dml_small.yaml
    ("gsp_fair", "cub200", "proxy_nca_gsp", (32, 1), 100, 100, 1_000_100),
    ("gsp_fair", "sop", "triplet", (8, 4), 1000, 0, 10_000_000),  # dml_large.yaml
    ("gsp_fair", "inshop", "proxy_anchor", (32, 1), 1000, 1000, 10_001_000),
    ("gsp_conventional", "cars196", "xbm_contrastive", (28, 4), 25, 0, 250_000),  # resnet50_small.yaml
    ("gsp_conventional", "sop", "proxy_anchor", (112, 1), 250, 250, 2_500_250),  # resnet50_large.yaml
]


@pytest.mark.parametrize(("experiment", "dataset", "loss", "batch", "interval", "warmup", "last"), CASES)
def test_length_batches_and_decay_are_those_of_the_code(
    experiment: str, dataset: str, loss: str, batch: tuple[int, int], interval: int, warmup: int, last: int
) -> None:
    """configs/*.yaml (max_epochs 10,000), trainModel.py:131-143 (warm_start and batches of proxies),
    framework/solvers/model_trainer.py:358-433, framework/configs/default.py:52 and
    framework/solvers/gradient_transformers.py:61 (names with bn do not decay: the backbone's frozen batch norm)."""
    found = effective(f"experiment={experiment}", f"dataset={dataset}", f"loss={loss}", "pooling=gsp")
    settings = found.settings
    assert (settings.validate_every, settings.warmup_steps, settings.max_steps) == (interval, warmup, last)
    for labels in found.batches[:1]:
        assert labels.shape == (batch[0] * batch[1],) and len(labels.unique()) == batch[0]
    weight_decay = 4e-4 if experiment == "gsp_conventional" else 1e-4
    assert set(found.decays) == set(found.parameters)
    assert set(found.decays.values()) == {weight_decay}
    biases = {name for name in found.decays if name.endswith("bias")}
    assert biases if experiment == "gsp_fair" else not biases  # convolutions of BN-Inception have them
    assert not any("bn" in name for name in found.decays)
    rates = {
        name for name, rate in found.rates.items() if rate == pytest.approx(100 * found.rates["projection.weight"])
    }
    assert rates == ({"objective.loss.W" if loss == "proxy_nca_gsp" else "objective.loss.proxies"} if warmup else set())


def test_the_warm_up_trains_the_whole_head_and_begins_a_new_optimizer() -> None:
    """framework/configs/default.py:73 (exclude_freeze: EmbeddingHead; conventional_*_default.yaml freezes nothing)
    and framework/solvers/model_trainer.py:368-420 (two optimizers)."""
    given = ("dataset=cub200", "loss=proxy_anchor", "pooling=gem_gsp")
    fair = effective("experiment=gsp_fair", *given)
    head = {name for name in fair.parameters if not name.startswith("backbone.")}
    assert fair.trained_in_warmup == head >= {"pooling.prototypes", "pooling.power", "projection.weight"}
    conventional = effective("experiment=gsp_conventional", *given)
    assert conventional.trained_in_warmup == set(conventional.parameters)
    assert fair.settings.reset_after_warmup and conventional.settings.reset_after_warmup


def test_xml_has_the_effective_values_of_gsp() -> None:
    """Its pooling: framework/layers/pooling/generalized_sum_pooling.py:385-389 (glorot_uniform over D and m)."""
    found = effective("experiment=xml/table1", "dataset=cub200", "loss=proxy_anchor", "pooling=gap_histogram")
    assert class_vectors(found) == pytest.approx({"objective.loss.proxies": math.sqrt(256 / 75)}, rel=0.02)
    assert found.parameters["pooling.prototypes"].abs().max().item() == pytest.approx(
        math.sqrt(6 / (128 + 64)), rel=0.01
    )
    assert (found.settings.max_steps, found.settings.warmup_steps) == (1_000_100, 100)
    assert set(found.decays.values()) == {1e-4}
    assert any("GSP study" in text for text in found.deviations)
