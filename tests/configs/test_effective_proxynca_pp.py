"""Effective values of recipe=proxynca_pp against the public code, euwern/proxynca_pp 217233d2.

Recorded by running its samplers and initial values outside of the project.
"""

import pytest
from composed import composed
from effective import effective

from dmlbench import build
from dmlbench.components import component
from dmlbench.training.stage_plan import Plan

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


@pytest.mark.parametrize("table", ["3", "4", "7", "12", "13"])
@pytest.mark.parametrize("side", ["code", "paper"])
def test_clusters_of_nmi_are_those_of_the_public_code(table: str, side: str) -> None:
    """evaluation/normalized_mutual_information.py:9: sklearn.cluster.KMeans(nb_clusters), whose defaults then were
    n_init=10, max_iter=300 and init="k-means++"."""
    cfg = composed(f"experiment=proxynca_pp/table{table}", f"recipe.side={side}")
    assert component(cfg.evaluation).kmeans == "scikit-learn, k-means++, 10 starts, 300 steps, seed 0"
    assert ("raw_nmi" if side == "code" else "nmi") in cfg.evaluation.metrics


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
