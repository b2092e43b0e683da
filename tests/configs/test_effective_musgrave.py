"""Effective values of recipe=musgrave against KevinMusgrave/powerful-benchmarker v0.9.33 (b8a58ad2), which has
pytorch-metric-learning 0.9.92; initial norms were recorded by running its losses."""

import pytest
from effective import effective

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
