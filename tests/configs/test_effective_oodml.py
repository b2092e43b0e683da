"""What recipe=oodml amounts to, against its public code.

Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c. Recorded by running it: mean norms of
``criteria.select(...)``'s class vectors, ``len`` of datasampler/class_random_sampler.py, triplets of
batchminer/distance.py and rho_distance.py. Epochs are those of OOD-Study_ZeroShot.sh, decayed are the parameters of
``model.parameters()`` (ood_main.py:123) and none of the criteria's (criteria/__init__.py:50).
"""

import pytest
from effective import Effective, effective

pytestmark = pytest.mark.slow

RHO = "miner=rho_distance_weighted"


def of(*overrides: str) -> Effective:
    return effective("recipe=oodml", "backbone=resnet50", "protocol=conventional", *overrides)


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize(
    ("dataset", "overrides", "batch", "steps", "epochs", "warmup", "boundaries", "rate"),
    [
        ("cub200", ["loss=margin_oodml"], 112, 52, 200, 0, [1.2], 5e-4),
        ("cub200", ["loss=margin_oodml", RHO], 112, 52, 200, 0, [0.6], 5e-4),
        ("cars196", ["loss=margin_oodml", RHO], 112, 71, 200, 0, [0.6], 5e-4),
        ("sop", ["loss=margin_oodml", RHO], 112, 531, 150, 0, [0.9], 5e-4),
        ("cub200", ["loss=multi_similarity_oodml"], 112, 52, 200, 0, [], None),
        ("cub200", ["loss=arcface"], 112, 52, 200, 0, [], 5e-4),
        ("sop", ["loss=proxy_anchor"], 112, 531, 150, 531, [], 2e-2),
        ("cub200", ["loss=margin_oodml", "regularizer=uniform_prior"], 112, 52, 200, 0, [1.2], 5e-4),
        ("cub200", ["loss=margin_oodml", RHO, "regularizer=s2sd"], 112, 52, 200, 0, [0.6] * 4, 1e-5),
        ("sop", ["loss=margin_oodml", "regularizer=s2sd"], 104, 572, 150, 0, [0.9] * 4, 1e-5),
        ("cub200", ["loss=diva", "head=unit_parts"], 108, 54, 200, 0, [1.2] * 3, 5e-4),
    ],
)
def test_effective_values(dataset, overrides, batch, steps, epochs, warmup, boundaries, rate) -> None:
    found = of(f"dataset={dataset}", *overrides)
    assert {len(labels) for labels in found.batches} == {batch}
    assert (found.steps_per_epoch, found.settings.max_steps) == (steps, steps * epochs)
    assert (found.settings.patience, found.settings.warmup_steps) == (None, warmup)
    starts = [x for name, x in found.class_vectors.items() if name.endswith("beta")]
    assert [x.unique().tolist() for x in starts] == [[pytest.approx(beta)] for beta in boundaries]

    of_model = dict(found.model.named_parameters())
    assert {name: rate for name, rate in found.rates.items() if name in of_model} == dict.fromkeys(of_model, 1e-5)
    assert {rate for name, rate in found.rates.items() if name.startswith("objective.loss")} == ({rate} - {None})
    others = {rate for name, rate in found.rates.items() if name.startswith("objective.regularizers")}
    assert others <= {1e-5}
    assert found.decays == {name: 4e-4 if name in of_model else 0.0 for name in found.decays}
    assert len([name for name in of_model if ".bn1." in name and name.endswith("weight")]) > 16  # scales, too

    head = found.model.projection
    assert (*head.weight.shape, head.bias.abs().max().item()) == (512, 2048, pytest.approx(2048**-0.5, rel=2e-2))
    assert head.weight.norm(dim=1).mean().item() == pytest.approx(0.5772, rel=2e-3)  # torch.nn.Linear
    assert sum(p.numel() for p in found.model.backbone.parameters()) == (42_500_160 if batch == 104 else 23_508_032)
    if found.objective.miner is not None:
        for spread in (1.0, 0.1):
            assert found.anchors(spread=spread) == batch


@pytest.mark.slow
def test_initial_class_vectors() -> None:
    arcface = of("dataset=cars196", "loss=arcface").parameters["objective.loss.W"]  # [D, C]
    assert arcface.abs().max().item() == pytest.approx(0.04419, abs=1e-4)
    assert arcface.norm(dim=0).mean().item() == pytest.approx(0.577, abs=4e-3)
    for dataset in ("cub200", "cars196", "sop"):
        found = of(f"dataset={dataset}", "loss=proxy_anchor").mean_norms
        assert found == {"objective.loss.proxies": pytest.approx(2.826, abs=0.03)}
