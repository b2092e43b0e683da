"""Effective values of recipe=musgrave, recipe=libc and recipe=proxynca_pp against their public code.

KevinMusgrave/powerful-benchmarker v0.9.33 (b8a58ad2), which has pytorch-metric-learning 0.9.92, whose initial norms
were recorded by running its losses; dvl-tum/intra_batch a1ae3de8; euwern/proxynca_pp 217233d2, whose values were
recorded by running its samplers and initial values outside of the project.
"""

import math

import pytest
from composed import composed
from effective import effective

from dmlbench import build
from dmlbench.components import component
from dmlbench.training.stage_plan import Plan

# Losses by their names here: mean norm of class vectors in 128 dimensions for the 75 training classes of CUB (None:
# there are none), images a class, and learning rate of their parameters on CUB (docs/papers/mlrc.md:37-50).
LOSSES = {
    "contrastive": (None, 4, None),
    "triplet": (None, 4, None),
    "multi_similarity": (None, 4, None),
    "margin": (None, 4, 1.31e-3),
    "proxy_nca": (11.270, 1, 6.04e-3),
    "norm_softmax": (11.229, 1, 4.46e-3),
    "arcface": (11.320, 1, 5.13e-3),
    "soft_triple": (0.2385, 1, 5.37e-5),
}
EPOCHS = {  # steps, of combine_sampler.py run on classes of these sizes; CUB: mean of its numbers of classes
    "cub200": 123,
    "cars196": 118,
    "sop": 1510,
    "inshop": 571,
}
DECAY = {"cub200": 6.059722614369727e-6, "cars196": 2.551918610962277e-9, "sop": 2.7650277063275255e-13,
         "inshop": 1.0554824926510768e-7}  # fmt: skip
# dataset/utils.py: batches of BalancedBatchSampler and RandomBatchSampler(drop_last=True), over the classes of stage 1
# (half of the training classes) or of stage 2.
ROWS = {
    ("cub200", "protocol.stage=1"): (92, 45),  # 2,950 images
    ("cub200", "protocol.stage=2"): (183, 45),
    ("cars196", "protocol.stage=2"): (251, 45),
    ("sop", "protocol.stage=2"): (310, 85),
    ("inshop", "protocol=conventional"): (134, 85),
}
RANDOM = ("loss=proxy_nca", "sampler=proxynca_pp_random", "pooling=gap")


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_train_as_in_the_public_code(loss: str) -> None:
    run = effective("experiment=mlrc_musgrave", "dataset=cub200", "fold=0", f"loss={loss}")
    norm, images_per_class, rate = LOSSES[loss]
    own = {name: x for name, x in run.parameters.items() if name.startswith("objective.")}
    if norm is not None:
        (vectors,) = own.values()
        across = 0 if vectors.shape[0] == 128 else -1  # weights of a classifier are [D, C]
        assert vectors.norm(dim=across).mean().item() == pytest.approx(norm, rel=0.02)
    assert {round(run.rates[name], 12) for name in own} == ({rate} if rate else set())
    assert {round(run.rates[name], 12) for name in run.rates.keys() - own.keys()} == {1e-6}
    counts = run.batches[0].bincount()
    assert (len(run.batches[0]), set(counts[counts > 0].tolist())) == (32, {images_per_class})
    # config_optimizers/default.yaml: RMSprop with weight decay of all parameters; plots of margin are
    # "margin_no_weight_decay" (mlrc.md:19)
    assert set(run.decays.values()) == ({1e-4, 0.0} if loss == "margin" else {1e-4})
    assert {name for name, decay in run.decays.items() if not decay} == (own.keys() if loss == "margin" else set())
    # misc_models.py:77, torch.nn.Linear(1024, 128); freeze_trunk_batchnorm keeps scale and shift trained
    assert run.parameters["projection.weight"].std().item() == pytest.approx(0.018057, rel=0.02)
    assert run.parameters["projection.bias"].abs().max() <= 1024**-0.5
    assert any("bn" in name for name in run.decays)


def test_training_ends_as_in_the_public_code() -> None:
    """config_general/default.yaml: 1,000 epochs of 100 steps, save_interval 2, patience 9; logging_presets.py:202 ends
    at the first validated epoch that is more than 9 after the best one."""
    settings = effective("experiment=mlrc_musgrave", "dataset=cub200", "fold=0", "loss=triplet").settings
    best, ends = 2, 2
    while not ends - best > 9:
        ends += 2
    assert (settings.max_steps, settings.validate_every, settings.min_improvement) == (100_000, 200, 0.0)
    assert settings.patience * settings.validate_every == (ends - best) * 100
    assert (settings.clip_norm, settings.clip_value, settings.warmup_steps) == (None, None, 0)


@pytest.mark.parametrize(
    "dataset", ["cars196", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cub200", "sop", "inshop"))]
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


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("method", [(), RANDOM], ids=["ProxyNCA++", "ProxyNCA"])
@pytest.mark.parametrize(("dataset", "stage"), ROWS)
def test_runs_train_as_the_public_code(dataset: str, stage: str, method: tuple[str, ...]) -> None:
    run = effective("experiment=proxynca_pp/table14", "head.out_features=2048", f"dataset={dataset}", stage, *method)
    steps, epochs = ROWS[dataset, stage]
    assert run.steps_per_epoch == steps
    assert run.settings.max_steps == epochs * steps  # config/*.json, nb_epochs after 5 of warm-up
    assert run.mean_norms["objective.loss.proxies"] == pytest.approx(5.6537, rel=0.01)  # loss.py:25 and 52, randn / 8
    # train.py:101, torch.nn.Linear(2048, 2048)
    assert run.parameters["projection.weight"].std().item() == pytest.approx(0.012760, rel=0.02)
    assert run.parameters["projection.bias"].std().item() == pytest.approx(0.012757, rel=0.05)
    assert set(run.decays.values()) == {0.0}  # config/*.json
    # train.py:263-312 and 403-418: a second optimizer warms up the linear layer and the proxies
    assert run.trained_in_warmup == {"projection.weight", "projection.bias", "objective.loss.proxies"}
    assert run.settings.warmup_steps == 5 * steps
    assert run.settings.reset_after_warmup
    assert (run.settings.warmup_schedule, run.settings.warmup_batch_norm) == ("rests", "updated")


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("table", ["3", "4", "7", "12", "13"])
@pytest.mark.parametrize("side", ["code", "paper"])
def test_clusters_of_nmi_are_those_of_the_public_code(table: str, side: str) -> None:
    """evaluation/normalized_mutual_information.py:9: sklearn.cluster.KMeans(nb_clusters), whose defaults then were
    n_init=10, max_iter=300 and init="k-means++"."""
    cfg = composed(f"experiment=proxynca_pp/table{table}", f"recipe.side={side}")
    assert component(cfg.evaluation).kmeans == "scikit-learn, k-means++, 10 starts, 300 steps, seed 0"
    assert ("raw_nmi" if side == "code" else "nmi") in cfg.evaluation.metrics


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(("table", "dataset"), [("5", "sop"), ("6", "inshop")])
def test_sop_and_inshop_have_no_nmi(table: str, dataset: str) -> None:
    """train.py:72-77 sets eval_nmi for CUB and Cars196 alone; evaluate_inshop(with_nmi=False), utils.py:138."""
    for side in ("code", "paper"):
        metrics = composed(f"experiment=proxynca_pp/table{table}", f"recipe.side={side}").evaluation.metrics
        assert not {"nmi", "raw_nmi"} & set(metrics)


def test_the_second_stage_repeats_rates_that_count_from_the_start_of_the_warm_up() -> None:
    cfg = composed("experiment=proxynca_pp/table3")
    cfg.runtime.steps_per_epoch = 10
    settings = build.build_fit_settings(cfg, Plan(epochs=20.0, changes=((12.0, 0.1),)))
    assert (settings.max_steps, settings.warmup_steps, settings.warmup_schedule) == (200, 50, "runs")
