"""What losses with class vectors start with under ``recipe=small``: batches, warm-up, learning rates, first vectors."""

import math

import pytest
from composed import composed
from effective import Effective, effective

# Mean length of the first class vectors, D = 128, C = 75 classes.
LENGTHS = {
    "arcface": math.sqrt(128),  # pytorch-metric-learning 2.9.0, losses/mixins.py:14, N(0, 1)
    "norm_softmax": math.sqrt(128),  # the same
    "proxy_anchor": math.sqrt(2 * 128 / 75),  # tjddus9597/Proxy-Anchor-CVPR2020 51db5703, code/losses.py:31, fan-out
    "proxy_nca": math.sqrt(128) / 8,  # euwern/proxynca_pp 217233d2, loss.py:24, randn / 8
    "proxy_nca_gsp": math.sqrt(2 * 128 / 75),  # yetigurbuz/generalized-sum-pooling b765b889, proxy_utils.py:32-36
    "proxy_nca_pp": math.sqrt(128) / 8,  # euwern/proxynca_pp 217233d2, loss.py:55
    "soft_triple": math.sqrt(128),
}
AVSL = "loss=layered_proxy_anchor head=avsl pooling=none backbone.out_indices=[1,2,3] head.level_size=128"
PRETRAINED = (
    "dataset=cub200_2010 backbone=efficientnet_lite0 sampler=gsp_balanced fit=brief recipe=small optim=adam "
    "optim.lr=3e-4 optim.lr_multipliers.head=10 transform.train.crop=112 transform.eval.crop=112"
)
# Fewest and most training classes of a fold, by mlrc and hpo: of 68 characters, and of 30 letters.
FROM_RANDOM_WEIGHTS = {"experiment=losses_omniglot": (51, 55), "experiment=losses": (22, 24)}


def started(*overrides: str) -> Effective:
    return effective(*(one for each in overrides for one in each.split()))


def share_of_classes(found: Effective) -> float:
    """Mean share of the training classes that have an image in a batch; the others' vectors only repel."""
    present = [len(batch.unique()) / found.num_classes for batch in found.batches]
    return sum(present) / len(present)


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("loss", LENGTHS)
def test_losses_with_class_vectors_start_as_in_the_gsp_study(loss: str) -> None:
    # Supplement 1.6.7 (ProxyAnchor, ProxyNCA++): 32 classes x 1 image, proxies at 100 times the learning rate, warm-up;
    # yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework/utilities/model_utils.py:317-318: all but the
    # embedding layer is frozen in it.
    found = started(PRETRAINED, f"loss={loss}")
    assert found.num_classes == 75
    assert all(len(batch) == len(batch.unique()) == 32 for batch in found.batches)
    assert share_of_classes(found) > 0.4
    (vectors,) = (name for name in found.parameters if name.startswith("objective.loss"))
    assert found.rates[vectors] == pytest.approx(100 * min(found.rates.values()))
    first = found.parameters[vectors]
    first = first.T if first.shape == (128, 75) else first  # pytorch-metric-learning has columns
    assert first.flatten(0, -2).norm(dim=1).mean().item() == pytest.approx(LENGTHS[loss], rel=0.05)
    assert found.settings.warmup_steps == 20 <= found.settings.max_steps / 6
    assert found.trained_in_warmup == {vectors, "projection.weight"}


def test_avsl_starts_as_other_losses_with_class_vectors() -> None:
    found = started(PRETRAINED, AVSL)
    assert all(len(batch.unique()) == 32 for batch in found.batches)
    assert found.settings.warmup_steps == 20
    assert found.rates["objective.loss.proxies"] == pytest.approx(100 * min(found.rates.values()))


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("experiment", FROM_RANDOM_WEIGHTS)
@pytest.mark.parametrize("loss", LENGTHS)
def test_a_third_of_the_class_vectors_is_attracted_in_each_step(experiment: str, loss: str) -> None:
    cfg = composed(experiment, f"loss={loss}")
    fewest, most = FROM_RANDOM_WEIGHTS[experiment]
    assert most / 3 <= cfg.sampler.classes_per_batch <= fewest
    assert cfg.sampler.classes_per_batch * cfg.sampler.images_per_class == 32
    assert cfg.fit.warmup_steps == 0  # nothing is pretrained


def test_libc_keeps_two_images_of_a_class_and_learns_more_slowly_than_proxies() -> None:
    # dvl-tum/intra_batch a1ae3de8: one learning rate (trainer.py:90-91), 6 x 9 images (config_cub_train.yaml:59-60).
    found = started(PRETRAINED, "loss=libc")
    assert all(batch.unique(return_counts=True)[1].tolist() == [2] * 16 for batch in found.batches)
    assert found.rates["objective.loss.classifier.weight"] == pytest.approx(10 * min(found.rates.values()))
    assert found.settings.warmup_steps == 20


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("experiment", [PRETRAINED, *FROM_RANDOM_WEIGHTS, "experiment=poolings"])
@pytest.mark.parametrize("loss", ["contrastive", "multi_similarity", "xbm"])
def test_losses_that_compare_images_keep_four_of_a_class(experiment: str, loss: str) -> None:
    cfg = composed(*experiment.split(), f"loss={loss}")
    assert (cfg.sampler.classes_per_batch, cfg.sampler.images_per_class, cfg.fit.warmup_steps) == (8, 4, 0)
