"""Effective values of recipe=libc beside dvl-tum/intra_batch a1ae3de8."""

import math

import pytest
from effective import effective

EPOCHS = {  # steps, of combine_sampler.py run on classes of these sizes; CUB: mean of its numbers of classes
    "cub200": 123,
    "cars196": 118,
    "sop": 1510,
    "inshop": 571,
}
DECAY = {"cub200": 6.059722614369727e-6, "cars196": 2.551918610962277e-9, "sop": 2.7650277063275255e-13,
         "inshop": 1.0554824926510768e-7}  # fmt: skip


@pytest.mark.parametrize(
    "dataset", ["cub200", "cars196", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sop", "inshop"))]
)
def test_epochs_decay_and_class_vectors_are_those_of_the_code(dataset: str) -> None:
    """config/config_*_train.yaml, net/resnet.py:187 and net/load_trained_net.py:70 (torch's linear layers),
    net/gnn_base.py:85-90 and net/utils.py:162-165 (normal, 0.001), trainer.py:88-94 (one group of all parameters) and
    145 (70 epochs)."""
    found = effective("experiment=gsp_conventional", "recipe=libc", f"dataset={dataset}", "loss=libc", "pooling=gmp")
    steps = EPOCHS[dataset]
    assert (found.steps_per_epoch, found.settings.max_steps) == (steps, 70 * steps)
    assert (found.settings.validate_every, found.settings.warmup_steps) == (steps, 0)
    wanted = {"objective.loss.classifier.weight": 1 / math.sqrt(3), "objective.loss.refined_classifier.weight":
              0.001 * math.sqrt(512 * (2 if dataset == "cars196" else 1))}  # fmt: skip
    assert found.mean_norms == pytest.approx(wanted, rel=0.02)
    assert set(found.decays) == set(found.parameters)
    assert set(found.decays.values()) == {DECAY[dataset]}
    for name in ("projection.weight", "projection.bias"):
        assert found.parameters[name].abs().max().item() == pytest.approx(1 / math.sqrt(2048), rel=0.02)


def test_gsp_on_libc_starts_and_pools_as_its_port() -> None:
    """yetigurbuz/generalized-sum-pooling b765b889, pytorch/gsp/embed_layer.py:28-29 and 187-191: He normal over the
    classes, a bias of 0; pytorch/gsp/zsr_loss.py:13-22."""
    given = ("experiment=gsp_conventional", "recipe=libc", "dataset=cub200", "loss=libc", "pooling=gmp_gsp")
    found = effective(*given)
    norms = found.mean_norms
    assert norms["objective.loss.classifier.weight"] == pytest.approx(math.sqrt(2 * 512 / 100), rel=0.02)
    assert not found.parameters["objective.loss.classifier.bias"].any()
    assert norms["objective.regularizers.zsr.label_embeddings"] == pytest.approx(math.sqrt(2 * 512 / 100), rel=0.02)
    assert (found.model.pooling.combine, found.model.pooling.smoothing) == ("weighted_gmp", 0.1)
    assert found.objective.regularizers["zsr"].softmax_scale == 9.5
    paper = effective(*given, "recipe.side=paper")
    assert paper.objective.regularizers["zsr"].softmax_scale == 1.0  # equation 4.4
    assert (paper.model.pooling.combine, paper.model.pooling.smoothing) == ("gmp", 0.5)
