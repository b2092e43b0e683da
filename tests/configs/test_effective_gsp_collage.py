"""What recipe=gsp_collage trains with equals recorded values of the GSP study's code and supplement.

Files are those of yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework; sections those of the supplement.
"""

from collections import Counter

import numpy as np
import pytest
from composed import composed
from effective import effective

from dmlbench.data.image_table import Listing, table_of
from dmlbench.types import ImageTable

CLASSES = 16
TRAIN, TEST = 3 * 600, 2 * 600
"""Images of a class (datasets/cifar_collage.py, create_collage_sources)."""
# he_normal of Keras over (classes, D) has a standard deviation of sqrt(2 / classes): utilities/proxy_utils.py line 35
# and losses/zsr_loss.py line 51.
NORM = (128 * 2 / CLASSES) ** 0.5


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
        "factor": 0.5, "patience": 5, "threshold": 1e-3, "min_lr": 1e-6, "cooldown": 2,
    }  # fmt: skip


def test_proxies_start_as_in_the_code() -> None:
    run = effective("experiment=cifar100_collage", "loss=proxy_nca_gsp", table=collages())
    (proxies,) = (value for name, value in run.parameters.items() if name.startswith("objective.loss"))
    assert proxies.shape == (128, CLASSES)
    assert proxies.norm(dim=0).mean().item() == pytest.approx(NORM, rel=0.05)
