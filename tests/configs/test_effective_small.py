"""What losses with class vectors begin with under ``recipe=small``: batches, warm-up, learning rates, first vectors."""

import pytest
from dmlbench.cli.front import compose
from omegaconf import DictConfig

WITH_CLASS_VECTORS = (
    "arcface",
    "norm_softmax",
    "proxy_anchor",
    "proxy_nca",
    "proxy_nca_gsp",
    "proxy_nca_pp",
    "soft_triple",
)
BIRDS = ("experiment=photographs", "dataset=cub200_2010")
# Training classes: a fold of mlrc has three quarters of the training half, hpo four fifths.
SETTINGS = {
    BIRDS: (75, 80),
    ("experiment=photographs", "dataset=cars196"): (73, 79),
    ("experiment=losses_omniglot",): (51, 55),
    ("experiment=losses",): (22, 24),
}
AVSL = ("loss=layered_proxy_anchor", "head=avsl", "pooling=none", "backbone.out_indices=[1,2,3]")


def sampler(cfg: DictConfig) -> tuple[int, int]:
    return cfg.sampler.classes_per_batch, cfg.sampler.images_per_class


@pytest.mark.parametrize("experiment", SETTINGS)
def test_no_class_vector_is_without_images_in_more_than_seven_of_ten_steps(experiment: tuple[str, ...]) -> None:
    fewest, most = SETTINGS[experiment]
    for loss in WITH_CLASS_VECTORS:
        cfg = compose("train", [*experiment, f"loss={loss}"])
        classes, images = sampler(cfg)
        assert most * 0.3 <= classes <= fewest, loss
        assert 22 <= classes * images <= 32, loss


@pytest.mark.parametrize("overrides", [*([f"loss={loss}"] for loss in WITH_CLASS_VECTORS), list(AVSL)])
def test_class_vectors_train_as_in_the_gsp_study(overrides: list[str]) -> None:
    # Supplement 1.6.7 (ProxyAnchor, ProxyNCA++): 32 classes x 1 image, warm-up of the embedding layer, proxies x 100;
    # yetigurbuz/generalized-sum-pooling b765b889, model_utils.py:317: all but the embedding head rests in the warm-up.
    cfg = compose("train", [*BIRDS, *overrides])
    assert sampler(cfg) == (32, 1)
    assert cfg.optim.lr_multipliers.loss == 100.0
    assert cfg.fit.warmup_steps == 20 < cfg.fit.max_steps / 4
    assert set(cfg.fit.warmup_frozen) == {"backbone", "pooling"}


def test_losses_that_compare_images_keep_several_of_a_class() -> None:
    for overrides in (["loss=contrastive"], ["loss=multi_similarity"], ["loss=xbm"]):
        cfg = compose("train", [*BIRDS, *overrides])
        assert (sampler(cfg), cfg.fit.warmup_steps, cfg.optim.lr_multipliers.loss) == ((8, 4), 0, 1.0)
