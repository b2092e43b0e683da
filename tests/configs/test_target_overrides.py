"""Components named by ``_target_`` alone on the command line."""

import pytest

from dmlbench.checks import check
from dmlbench.identity import config_id

LOSSES = "pytorch_metric_learning.losses."
PROXIES = ("loss.num_classes=${runtime.num_classes}", "loss.embedding_size=${runtime.embedding_size}")


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path, command):
    """Configurations as ``dmlbench train`` would run them."""
    monkeypatch.chdir(tmp_path)
    found = []

    def take(cfg) -> str:
        check(cfg)
        found.append(cfg.copy())
        return "nowhere"

    monkeypatch.setattr("dmlbench.runner.run", take)

    def run(*arguments: str):
        found.clear()
        command("train", *arguments)
        return found[0] if len(found) == 1 else list(found)

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CircleLoss", ("loss.m=0.3", "loss.gamma=64")),
        ("ContrastiveLoss", ("loss.neg_margin=0.7",)),
        ("SignalToNoiseRatioContrastiveLoss", ()),
        ("CosFaceLoss", (*PROXIES, "loss.scale=30")),
    ],
)
def test_a_loss_of_another_library_takes_its_own_arguments_alone(composed, name: str, arguments) -> None:
    cfg = composed(f"loss._target_={LOSSES}{name}", *arguments)

    expected = {argument.partition("=")[0].removeprefix("loss.") for argument in arguments}
    assert set(cfg.loss) - {"_target_"} == expected

    assert cfg.runtime.choices.loss == name
    assert f"-{name}-" in config_id(cfg)


def test_reducers_and_miners_come_by_their_names_as_well(composed) -> None:
    cfg = composed(
        "loss=triplet", "loss.reducer._target_=pytorch_metric_learning.reducers.ThresholdReducer",
        "loss.reducer.low=0.1", "miner._target_=pytorch_metric_learning.miners.TripletMarginMiner", "miner.margin=0.1",
    )  # fmt: skip
    assert cfg.loss.reducer.low == 0.1
    assert "margin" in cfg.loss  # the option's own component stays
    assert cfg.runtime.choices.loss == "triplet"
    assert dict(cfg.miner) == {"_target_": "pytorch_metric_learning.miners.TripletMarginMiner", "margin": 0.1}
    assert cfg.runtime.choices.miner == "TripletMarginMiner"


@pytest.mark.slow
def test_interpolated_values_and_the_option_s_own_component_stay(composed) -> None:
    cfg = composed("loss=proxy_anchor", f"loss._target_={LOSSES}ArcFaceLoss")
    assert set(cfg.loss) == {"_target_", "num_classes", "embedding_size"}
    own = composed("pooling=gsp")
    again = composed("pooling=gsp", f"pooling._target_={own.pooling._target_}")
    assert again.pooling == own.pooling
    assert again.runtime.choices.pooling == "gsp"


@pytest.mark.slow
def test_sweeps_exchange_components_and_timm_s_models_have_their_names(composed) -> None:
    configs = composed("-m", f"loss._target_={LOSSES}CircleLoss,{LOSSES}NTXentLoss", "fold=0")
    assert [cfg.runtime.choices.loss for cfg in configs] == ["CircleLoss", "NTXentLoss"]
    cfg = composed("backbone=timm", "backbone.name=resnet10t.c3_in1k", "backbone.pretrained=false")
    assert cfg.runtime.choices.backbone == "resnet10t.c3_in1k"
