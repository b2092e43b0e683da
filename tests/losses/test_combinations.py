"""Every loss, plain and with XBM, Metrix, ZSR and XML, over GAP and GSP trains on letters; every part is at work."""

import itertools
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dmlbench import build
from dmlbench.checks import check
from dmlbench.config import compose, config_folder
from dmlbench.data.batches.loaders import TrainBatches
from dmlbench.experiment import Data
from dmlbench.losses.metrix import Metrix
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.training.fit import HISTORY, fit
from dmlbench.training.log import read_history
from dmlbench.types import Batch, ConfigError

# Losses of vectors; those of AVSL's levels have tests of their own.
LOSSES = sorted(path.stem for path in (config_folder() / "loss").glob("*.yaml") if "layered" not in path.stem)
OF_PAIRS = ("contrastive", "contrastive_c1", "margin", "margin_gsp", "multi_similarity", "supcon", "triplet")
MEMORIES = ("xbm", "xbm_contrastive")
MIXED = ("contrastive", "multi_similarity", "proxy_anchor")
STEPS = 3
SMALL = (
    "dataset=glyphs", "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=2", "head.out_features=16", "fit.log_every=1",
    f"fit.max_steps={STEPS}", "fit.validate_every=100", "optim.lr=1e-3", "num_workers=0", "device=cpu",
)  # fmt: skip
MEMORY = ("loss.memory_size=16", "loss.start_step=0")
GSP = ("pooling=gsp", "pooling.num_prototypes=4", "pooling.memory_rows=8")
# ZSR and XML need histograms over prototypes; of average pooling gap_histogram gives them.
REGULARIZED = ("pooling=gap_histogram", "pooling.num_prototypes=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    cfg = compose("train", [*SMALL, f"paths.cache_dir={tmp_path_factory.mktemp('cache')}"])
    return build.build_data(cfg)


def compose_small(data: Data, *overrides: str) -> DictConfig:
    cfg = compose("train", [*SMALL, *overrides])
    check(cfg)
    OmegaConf.update(cfg, "runtime.num_classes", int(data.class_index.max()) + 1)
    OmegaConf.update(cfg, "runtime.image_size", [32, 32])
    return cfg


def train(
    data: Data, run_dir: Path, *overrides: str
) -> tuple[torch.nn.Module, torch.nn.Module, dict[str, list[float]]]:
    """The model and the objective after a few steps, and every logged value by name."""
    cfg = compose_small(data, *overrides)
    torch.manual_seed(0)
    model = build.build_model(cfg)
    objective = build.build_objective(cfg, model)
    optimizer, _ = build.build_optimizer(cfg, model, objective)
    device = torch.device("cpu")
    images = build.image_opener(cfg, data.table, device)(cfg.transform.train)
    wants_keys = objective.key_momentum is not None
    batches = build.build_train_batches(cfg, data, images, seed=0, device=device, second_views=wants_keys)
    run_dir.mkdir(exist_ok=True)
    fit(model, objective, batches, None, optimizer, build.build_fit_settings(cfg), run_dir, device=device)
    values: dict[str, list[float]] = {}
    for _, name, value in read_history(run_dir / HISTORY):
        values.setdefault(name, []).append(value)
    return model, objective, values


# Regularizers of pooled features, which every pooling has.
OF_FEATURES = {
    "uniform_prior": ("regularizer.uniform_prior.chunk_size=16", "regularizer.uniform_prior.discriminator_interval=2"),
    "s2sd": ("regularizer.s2sd.sizes=[24,32]", "regularizer.s2sd.feature_delay=1"),
}


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("pooling", [("pooling=gap",), GSP], ids=["gap", "gsp"])
@pytest.mark.parametrize("name", OF_FEATURES)
def test_regularizer_of_features_trains_over_both_poolings(data: Data, tmp_path: Path, name: str, pooling) -> None:
    loss = ("loss=margin_oodml", "miner=rho_distance_weighted")
    _, objective, values = train(data, tmp_path / name, *loss, f"regularizer={name}", *OF_FEATURES[name], *pooling)
    share = 0.5 if name == "s2sd" else 1.0
    weight = objective.regularizers[name].weight
    for whole, dml, part in zip(*(values[f"train/{x}"] for x in ("loss", "dml", name)), strict=True):
        assert whole == pytest.approx(share * dml + weight * part, rel=1e-5)
    cfg = compose_small(data, *loss, f"regularizer={name}", *OF_FEATURES[name], *pooling)
    torch.manual_seed(0)
    fresh = build.build_objective(cfg, build.build_model(cfg))  # as it started
    for key, parameter in objective.regularizers[name].named_parameters():
        start = fresh.regularizers[name].get_parameter(key)
        assert not torch.equal(parameter, start), key


def test_s2sd_refuses_a_head_whose_embeddings_have_their_own_distance(data: Data) -> None:
    cfg = compose_small(data, "head=hyperbolic", "pooling=gap", "regularizer=s2sd")
    with pytest.raises(ConfigError, match=r"S2SD compares .* but got a head with PoincareDistance"):
        build.build_objective(cfg, build.build_model(cfg))


DIVA = ("head=unit_parts", "loss=diva", "regularizer=diva", "regularizer.decorrelation.weight=5",
        "regularizer.decorrelation.hidden_size=8", "regularizer.self_similarity.queue_size=12",
        "regularizer.self_similarity.temperature=0.5")  # fmt: skip


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("triplets", [(), ("loss.shared=across_classes", "loss.intra=permuted")], ids=["own", "others"])
@pytest.mark.parametrize("pooling", [("pooling=gap",), GSP], ids=["gap", "gsp"])
def test_diva_trains_every_part_over_both_poolings(data: Data, tmp_path: Path, pooling, triplets) -> None:
    model, objective, values = train(data, tmp_path / "run", *DIVA, *pooling, *triplets)
    named = zip(*(values[f"train/{x}"] for x in ("loss", "dml", "decorrelation", "self_similarity")), strict=True)
    for whole, dml, decorrelation, similarity in named:
        assert whole == pytest.approx(dml + 5 * decorrelation + 0.3 * similarity, rel=1e-5)
        assert decorrelation < 0
    assert values["train/self_similarity"][0] == 0
    assert min(values["train/self_similarity"][1:]) > 0
    assert objective.regularizers["self_similarity"].filled == 12
    fresh = build.build_objective(cfg := compose_small(data, *DIVA, *pooling), build.build_model(cfg))
    start = dict(fresh.loss.named_parameters())
    assert all(not torch.equal(beta, start[name]) for name, beta in objective.loss.named_parameters())
    if pooling is GSP:
        assert model.pooling.prototypes.grad.abs().sum() > 0


INTERRUPTED = {
    **{name: ("loss=margin_oodml", "miner=rho_distance_weighted", f"regularizer={name}", *more)
       for name, more in OF_FEATURES.items()},
    **{f"metrix-{loss}": ("loss=metrix", f"loss@loss.loss={loss}") for loss in MIXED},
    "libc": ("loss=libc", "loss.dropout=0.5"),
    "diva": DIVA,
    "hist": ("loss=hist", "loss.hidden_size=8", "head=layer_normalized", "+optim.lr_multipliers.network=5"),
    "hier": ("loss=proxy_anchor", "head=hyperbolic", "head.riemannian_gradient=true", "regularizer=hier",
             "regularizer.hier.num_proxies=8", "regularizer.hier.num_neighbors=4"),
    "hyperbolic": ("loss=pairwise_cross_entropy", "head=hyperbolic"),
    "simix": ("loss=recall_at_k_surrogate", "loss.simix=true"),
}  # fmt: skip


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_training_ends_in_the_same_bits(data: Data, tmp_path: Path, monkeypatch, name: str) -> None:
    overrides = (*INTERRUPTED[name], "pooling=gap", "fit.checkpoint_every=1")
    whole = train(data, tmp_path / "whole", *overrides)

    class Killed(Exception):
        pass

    draw, draws = TrainBatches.__next__, itertools.count(1)

    def fragile(batches: TrainBatches) -> Batch:
        if next(draws) == STEPS:
            raise Killed
        return draw(batches)

    with monkeypatch.context() as patch:
        patch.setattr(TrainBatches, "__next__", fragile)
        with pytest.raises(Killed):
            train(data, tmp_path / "resumed", *overrides)
    resumed = train(data, tmp_path / "resumed", *overrides)
    assert resumed[2] == whole[2]
    for ours, theirs in zip(whole[:2], resumed[:2], strict=True):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


QUICK = ("proxy_anchor",)  # the others take a minute together


@pytest.mark.parametrize("loss", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in LOSSES])
def test_loss_with_every_addition_over_both_poolings(data: Data, tmp_path: Path, loss: str) -> None:
    memory = MEMORY if loss in MEMORIES else ()
    kinds: dict[str, tuple[str, ...]] = {
        "plain": (f"loss={loss}", *memory),
        "zsr": (f"loss={loss}", "regularizer=zsr", *memory),
        "xml": (f"loss={loss}", "regularizer=xml", *memory),
    }
    if loss in OF_PAIRS:
        kinds["xbm"] = ("loss=xbm", f"loss@loss.loss={loss}", *MEMORY)
    if loss in MIXED:
        kinds["metrix"] = ("loss=metrix", f"loss@loss.loss={loss}")
    for kind, overrides in kinds.items():
        average = REGULARIZED if kind in ("zsr", "xml") else ("pooling=gap",)
        for pooling in (average, GSP):
            model, objective, values = train(data, tmp_path / f"{kind}-{pooling[0]}", *overrides, *pooling)
            assert len(values["train/dml"]) == STEPS
            assert model.pooling.started
            if pooling is GSP:
                assert model.pooling.prototypes.grad is not None
                assert model.pooling.prototypes.grad.abs().sum() > 0
            if kind in ("zsr", "xml"):
                # GSP's prototypes start in the first step, after the forward pass.
                assert len(values[f"train/{kind}"]) == (STEPS - 1 if pooling is GSP else STEPS)
                weight = objective.regularizers[kind].weight
                expected = (1 - weight) * values["train/dml"][-1] + weight * values[f"train/{kind}"][-1]
                assert values["train/loss"][-1] == pytest.approx(expected, rel=1e-5, abs=1e-6)
            if isinstance(objective.loss, CrossBatchMemory):
                assert objective.loss.is_active
                assert objective.loss.filled == 16
            if isinstance(objective.loss, Metrix):
                assert objective.loss.draws == STEPS
