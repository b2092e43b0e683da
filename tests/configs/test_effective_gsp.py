"""Effective values of recipe=gsp, gsp_collage and xml beside the GSP study's code and supplement.

Files are those of yetigurbuz/generalized-sum-pooling b765b889 (tensorflow/framework); sections those of the supplement.
Norms are closed forms: He normal over C classes has rows of length sqrt(2 D / C).
"""

import math
from collections import Counter

import numpy as np
import pytest
from composed import composed
from effective import Effective, effective

from dmlbench.data.image_table import Listing, table_of
from dmlbench.types import ImageTable

pytestmark = pytest.mark.slow

PROXIES = ("proxy_anchor", "proxy_nca_gsp")
CLASSES = 16
TRAIN, TEST = 3 * 600, 2 * 600
"""Images of a class (datasets/cifar_collage.py, create_collage_sources)."""
# he_normal of Keras over (classes, D) has a standard deviation of sqrt(2 / classes): utilities/proxy_utils.py line 35
# and losses/zsr_loss.py line 51.
NORM = (128 * 2 / CLASSES) ** 0.5


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


@pytest.mark.fast_sample(2)
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


def keras_plateau(validations: int, *, patience: int, cooldown: int) -> list[float]:
    """Rates after validations of equal scores, 1 before the first: keras.callbacks.ReduceLROnPlateau, naively.

    Its factor is 0.5, and its min_lr a tenth of the first rate (configs/conventional_*_default.yaml).
    """
    rate, best, wait, resting, rates = 1.0, -math.inf, 0, 0, []
    for _ in range(validations):
        if resting:
            resting, wait = resting - 1, 0
        if best == -math.inf:
            best, wait = 0.5, 0
        elif not resting:
            wait += 1
            if wait >= patience:
                rate, resting, wait = max(0.5 * rate, 0.1), cooldown, 0
        rates.append(rate)
    return rates


@pytest.mark.parametrize(("dataset", "patience"), [("cub200", 4), ("sop", 3)])
def test_learning_rates_fall_when_those_of_keras_fall(dataset: str, patience: int) -> None:
    found = effective("experiment=gsp_conventional", f"dataset={dataset}", "loss=proxy_anchor", "optim.lr=1e-5")
    groups = found.schedule.optimizer.param_groups
    first = [group["lr"] for group in groups]
    expected = keras_plateau(30, patience=patience, cooldown=2)
    assert expected[patience - 1 : patience + 1] == [1.0, 0.5] and expected[-1] == 0.1
    for factor in expected:
        found.schedule.step(0.5)
        # AdamLRM multiplies after the callback's min_lr: proxies keep 100 times the rate (solvers/adamlrm.py).
        assert [group["lr"] for group in groups] == pytest.approx([factor * lr for lr in first], rel=1e-6)


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


def collages() -> ImageTable:
    """Labels and roles of the public layout, without pixels."""
    counts = [TRAIN] * CLASSES + [TEST] * CLASSES
    labels = np.repeat(np.arange(2 * CLASSES), counts)
    paths, names = [f"{row}.png" for row in range(len(labels))], [f"class_{c}" for c in range(2 * CLASSES)]
    pixels = np.zeros((len(labels), 1, 1, 3), np.uint8)
    return table_of(Listing("", paths, labels, names, name="cifar100_collage", pixels=pixels, digest="none"))


@pytest.mark.parametrize("loss", ["contrastive", "proxy_nca_gsp"])
@pytest.mark.parametrize("side", ["code", "paper"])
def test_collages_train_as_in_code_and_supplement(side: str, loss: str) -> None:
    run = effective("experiment=cifar100_collage", "fit.max_steps=${epochs:40}", "fit.validate_every=${epochs:1}",
                    "pooling=gsp", f"loss={loss}", f"recipe/side={side}", table=collages())  # fmt: skip
    # Batches: 16 classes x 4 images, each image once an epoch (cifar_collage.py lines 217-243).
    assert run.steps_per_epoch == 450
    assert all(Counter(batch.tolist()) == dict.fromkeys(range(CLASSES), 4) for batch in run.batches)
    assert (run.settings.validate_every, run.settings.monitor, run.settings.warmup_steps) == (450, "map_at_r", 0)
    # "Default Adam" (2.2) has no weight decay; proxies have 100 times the rate (losses/proxy_nca_loss.py line 12).
    assert set(run.decays.values()) == {0.0}
    of_loss = {rate for name, rate in run.rates.items() if name.startswith("objective.loss")}
    assert of_loss == ({0.1} if loss == "proxy_nca_gsp" else set())
    assert {rate for name, rate in run.rates.items() if not name.startswith("objective.loss")} == {1e-3}
    label_embeddings = run.parameters["objective.regularizers.zsr.label_embeddings"]
    assert label_embeddings.norm(dim=1).mean().item() == pytest.approx(NORM, rel=0.05)
    # Halves of ZSR on two batches: fixed to every other label in the code, random in the paper (4.3).
    zsr = run.objective.regularizers["zsr"]
    (first, _), (again, _) = (zsr.splits(batch)[0] for batch in run.batches[:2])
    halves = [set(batch[rows].tolist()) for batch, rows in zip(run.batches, (first, again), strict=False)]
    assert all(len(half) == 8 for half in halves)
    assert (halves == [set(range(0, 16, 2))] * 2) == (side == "code")
    # 2.2; losses/zsr_loss.py lines 17 and 40. Equation 4.4 has no scale.
    assert (zsr.weight, zsr.ridge, zsr.softmax_scale) == (0.5, 0.05, 9.5 if side == "code" else 1.0)


def test_collages_have_adam_plateau_and_images_of_the_code() -> None:
    cfg = composed("experiment=cifar100_collage", "pooling=gsp")
    # solvers/adamlrm.py lines 34-38; cifar_collage.py, to_batch; configs/learning_rate_schedulers.py lines 13-17
    assert cfg.optim.optimizer == {
        "_target_": "torch.optim.Adam", "_partial_": True, "betas": [0.9, 0.999], "eps": 1e-7, "amsgrad": False,
    }  # fmt: skip
    assert (cfg.transform.train.padding, cfg.transform.train.flip) == (0, 0.0)
    assert {key: cfg.schedule[key] for key in ("factor", "patience", "threshold", "min_lr", "cooldown")} == {
        "factor": 0.5, "patience": 4, "threshold": 1e-3, "min_lr": 1e-6, "cooldown": 1,
    }  # fmt: skip


def test_proxies_start_as_in_the_code() -> None:
    run = effective("experiment=cifar100_collage", "loss=proxy_nca_gsp", table=collages())
    (proxies,) = (value for name, value in run.parameters.items() if name.startswith("objective.loss"))
    assert proxies.shape == (128, CLASSES)
    assert proxies.norm(dim=0).mean().item() == pytest.approx(NORM, rel=0.05)
