"""Effective values of recipe=hyp_vit, hist, recall_at_k and hier against their public code.

htdt/hyp_metric c89de049 (README, train.py, model.py), ljin0429/HIST e7d650c8 (README, code/train.py, code/hist.py),
yash0307/RecallatK_surrogate ed052029 (src/main.py, netlib.py, datasets.py), tjddus9597/HIER-CVPR23 3986a744 (scripts,
hier/train.py, hier/utils.py). Batch norm and initial lengths are closed forms of what these files call.
"""

import math

import pytest
from effective import Effective, effective
from torch import nn

pytestmark = pytest.mark.slow

HYP_VIT = ("experiment=hyp_vit/table1",)
HIST = ("experiment=hist/table1",)
HIER = ("experiment=hier/table1",)
HIER_CNN = (*HIER, "backbone=resnet50", "pooling=gap_gmp")


def rates(run: Effective) -> dict[str, float]:
    """Learning rate of each part; modules of the loss by their names."""
    found: dict[str, set[float]] = {}
    for name, rate in run.rates.items():
        part = ".".join(name.split(".")[:3]) if name.startswith("objective") else name.split(".")[0]
        found.setdefault(part, set()).add(rate)
    assert all(len(values) == 1 for values in found.values())
    return {part: values.pop() for part, values in found.items()}


def batch_norms(run: Effective) -> tuple[bool, bool]:
    """Whether the backbone's batch norm has batch statistics in training, and whether its weights are trained."""
    run.model.train()
    layers = [m for m in run.model.backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    (training,), (trained,) = {m.training for m in layers}, {m.weight.requires_grad for m in layers}
    return training, trained


def classes_by_images(run: Effective) -> tuple[int, int]:
    (shape,) = {(len(batch.unique()), int(batch.bincount().max())) for batch in run.batches}
    assert all(len(batch) == shape[0] * shape[1] for batch in run.batches)
    return shape


@pytest.mark.parametrize(
    ("dataset", "backbone", "rate", "batch", "steps"),
    [
        ("cub200", "vit_small", 3e-5, (100, 9), 50),  # --bs 900 --num_samples 9 --ep 50: a step an epoch
        ("cars196", "dino_vit_small", 1e-5, (98, 9), 300),  # --bs 882 --ep 300
        pytest.param("sop", "deit_small", 3e-5, (450, 2), 200 * (11_318 * 2 // 900), marks=pytest.mark.slow),
        pytest.param("inshop", "vit_small", 3e-5, (450, 2), 400 * (3_997 * 2 // 900), marks=pytest.mark.slow),
    ],
)
def test_hyp_vit(dataset: str, backbone: str, rate: float, batch: tuple[int, int], steps: int) -> None:
    run = effective(*HYP_VIT, f"dataset={dataset}", f"backbone={backbone}", num_batches=1)
    assert classes_by_images(run) == batch
    # UniqueClassSempler: an epoch is one pass over the classes; eval_ep is the last epoch.
    assert (run.settings.max_steps, run.settings.validate_every, run.settings.patience) == (steps, steps, None)
    assert (run.settings.warmup_steps, run.settings.clip_norm, run.settings.clip_value) == (0, 3.0, None)
    # AdamW(model.parameters(), lr): one group, with torch's weight decay of 1e-2.
    assert rates(run) == {"backbone": rate, "projection": rate}
    assert set(run.decays.values()) == {1e-2}
    # --freeze 0: patch_embed alone; class token and position embeddings are trained.
    frozen = {name for name, p in run.model.named_parameters() if not p.requires_grad}
    assert {name.rpartition("patch_embed.")[2] for name in frozen} == {"proj.weight", "proj.bias"}
    assert any(name.endswith("pos_embed") for name in run.parameters)
    # nn.init.orthogonal_ of [128, 384], bias 0
    weight = run.parameters["projection.weight"]
    assert (weight @ weight.T - weight.new_ones(128).diag()).abs().max() < 1e-5
    assert not run.parameters["projection.bias"].any()


@pytest.mark.parametrize(
    ("dataset", "rate", "of_network", "of_distributions", "decay", "steps", "epochs"),
    [
        ("cub200", 1.2e-4, 6e-4, 1e-1, 5e-5, 5_864 // 32, 40),
        ("cars196", 1e-4, 1e-3, 1e-1, 1e-4, 8_054 // 32, 50),
        pytest.param("sop", 1e-4, 1e-3, 1e-2, 1e-4, 59_551 // 32, 60, marks=pytest.mark.slow),
    ],
)
def test_hist(dataset, rate, of_network, of_distributions, decay, steps, epochs) -> None:
    run = effective(*HIST, f"dataset={dataset}", num_batches=1)
    assert {len(labels) for labels in run.batches} == {32}
    wanted = {"backbone": rate, "projection": rate, "objective.loss.network": of_network}
    wanted |= dict.fromkeys(("objective.loss.means", "objective.loss.log_variances"), of_distributions)
    assert rates(run) == pytest.approx(wanted)
    assert set(run.decays.values()) == {decay}  # Adam's, of all groups
    # --warm 1: a first epoch in which param_groups[0], all but the embedding layer, rests; the scheduler rests, too.
    assert run.steps_per_epoch == run.settings.warmup_steps == run.settings.validate_every == steps
    assert (run.settings.max_steps, run.settings.patience) == (steps * (1 + epochs), None)
    assert (run.settings.warmup_schedule, run.settings.reset_after_warmup) == ("rests", False)
    assert not any(name.startswith(("backbone", "pooling")) for name in run.trained_in_warmup)
    assert any(name.startswith("projection") for name in run.trained_in_warmup)
    # --bn-freeze 1 takes the weights out, too, but train.py:464 puts them in again after the warm-up; with 0 (SOP)
    # model.train() moves the statistics, also in the warm-up.
    is_frozen = dataset != "sop"
    assert batch_norms(run) == (not is_frozen, True)
    assert run.settings.warmup_batch_norm == ("frozen" if is_frozen else "updated")
    # kaiming_normal_(mode="fan_out"): of [classes, 512], and of the layer [512, 2048]
    length = math.sqrt(2 * 512 / run.num_classes)
    for name in ("means", "log_variances"):
        assert run.mean_norms[f"objective.loss.{name}"] == pytest.approx(length, rel=0.02)
    assert run.parameters["projection.weight"].std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.01)
    assert not run.parameters["projection.bias"].any()


@pytest.mark.parametrize(
    ("dataset", "batch", "in_parts", "rate", "steps", "epochs"),
    [
        # reshuffle: every class gives each batch 4 images, until one has fewer left (of 58 and 82 images)
        ("cub200", (100, 4), 100, 1e-4, 58 // 4, 40),
        ("cars196", (98, 4), 98, 1e-4, 82 // 4, 170),
        pytest.param("sop", (1000, 4), 200, 2e-4, 11_318 // 1000, 55, marks=pytest.mark.slow),  # of 5 or 6 images
    ],
)
def test_recall_at_k(dataset, batch, in_parts, rate, steps, epochs) -> None:
    run = effective("experiment=recall_at_k/table1", f"dataset={dataset}", num_batches=2)
    assert (classes_by_images(run), run.settings.forward_batch) == (batch, in_parts)
    # --fc_lr_mul 0: one group of all parameters, GeM's power included
    assert rates(run) == {"backbone": rate, "pooling": rate, "projection": rate}
    assert set(run.decays.values()) == {4e-4}
    assert (run.steps_per_epoch, run.settings.max_steps) == (steps, steps * epochs)
    assert (run.settings.validate_every, run.settings.patience, run.settings.warmup_steps) == (5 * steps, None, 0)
    assert (run.settings.clip_norm, run.settings.clip_value) == (None, None)
    assert batch_norms(run) == (False, True)  # module.train = lambda _: None
    assert run.parameters["pooling.power"].item() == 3.0
    # torch.nn.Linear
    weight, bias = run.parameters["projection.weight"], run.parameters["projection.bias"]
    assert weight.norm(dim=1).mean().item() == pytest.approx(math.sqrt(1 / 3), rel=0.01)
    assert 0.9 * 2048**-0.5 < bias.abs().max().item() <= 2048**-0.5


@pytest.mark.parametrize(
    ("options", "dataset", "rate", "of_head", "decay", "steps", "epochs", "warmup"),
    [
        ((*HIER, "backbone=deit_small"), "cub200", 1e-5, 1e-5, 1e-2, 32, 100, 1),
        ((*HIER, "backbone=vit_small"), "inshop", 1e-5, 1e-3, 1e-4, 143, 150, 5),
        (HIER_CNN, "cars196", 1e-4, 1e-4, 1e-2, 44, 100, 1),
        (HIER_CNN, "inshop", 6e-4, 6e-4, 1e-4, 143, 150, 5),
        pytest.param((*HIER, "backbone=dino_vit_small"), "sop", 5e-6, 5e-4, 1e-4, 330, 150, 5, marks=pytest.mark.slow),
    ],
)
def test_hier(options, dataset, rate, of_head, decay, steps, epochs, warmup) -> None:
    run = effective(*options, f"dataset={dataset}", num_batches=1)
    assert len(run.batches[0]) == 180  # of 90 classes, images with replacement: UniqueClassSampler
    assert len(run.batches[0].unique()) == 90
    # utils.get_params_groups, lr_scale
    of_proxies = {"objective.loss.proxies": 1e4 * rate, "objective.regularizers.hier": 50 * rate}
    assert rates(run) == pytest.approx({"backbone": rate, "projection": of_head} | of_proxies)
    assert set(run.decays.values()) == {decay}
    assert (run.steps_per_epoch, run.settings.max_steps) == (steps, steps * epochs)
    assert (run.settings.validate_every, run.settings.patience) == (steps * (5 if dataset == "sop" else 1), None)
    # pretrained_params have rate 0 for --warmup_epochs, all else its own
    assert (run.settings.warmup_steps, run.settings.warmup_schedule) == (warmup * steps, "runs")
    assert run.trained_in_warmup == {name for name in run.rates if not name.startswith("backbone")}
    assert (run.settings.clip_norm, run.settings.clip_value) == (None, 10.0)  # whatever --clip_grad
    if options == HIER_CNN:
        assert batch_norms(run) == (False, True)  # type=bool: "--bn_freeze False" is true
    else:
        frozen = {name for name, p in run.model.named_parameters() if not p.requires_grad}
        assert {name.rpartition("patch_embed.")[2] for name in frozen} == {"proj.weight", "proj.bias"}
    # losses.py: kaiming_normal_(mode="fan_out") of [classes, D], and randn / sqrt(D) x 2.3 x 0.9 of [512, D]
    size = 512 if options == HIER_CNN else 128
    length = math.sqrt(2 * size / run.num_classes)
    assert run.mean_norms["objective.loss.proxies"] == pytest.approx(length, rel=0.02)
    proxies = run.parameters["objective.regularizers.hier.proxies"]
    assert proxies.shape == (512, size)
    assert proxies.norm(dim=1).mean().item() == pytest.approx(2.07, rel=0.01)
