"""The search space: keys in YAML, and errors."""

import pytest

from dmlbench.tuning.space import Dimension, corners, make_space, override
from dmlbench.types import ConfigError

CHOSEN = {"loss": "triplet", "pooling": "gap", "miner": None}
LR = {"low": 1e-6, "high": 1e-3, "log": True}


def test_keys_are_dotted_or_nested_and_may_depend_on_options() -> None:
    space = make_space(
        {
            "optim.lr": LR,
            "loss": {"margin": [{"low": 0, "high": 60, "when": {"loss": "arcface"}},
                                {"low": 0, "high": 1, "when": {"loss": ["triplet", "margin"]}}],
                     "neg_margin": {"low": 0, "high": 1, "when": {"loss": "contrastive"}}},
            "sampler.images_per_class": {"low": 2, "high": 9, "step": 3, "integer": True},
            "pooling": {"choices": ["gap", "gsp"]},
        },
        CHOSEN,
    )  # fmt: skip
    assert space == (
        Dimension("optim.lr", 1e-6, 1e-3, log=True),
        Dimension("loss.margin", 0.0, 1.0),
        Dimension("sampler.images_per_class", 2, 8, step=3, integer=True),
        Dimension("pooling", choices=("gap", "gsp")),
    )
    assert corners(space)[0] == {"optim.lr": 1e-6, "loss.margin": 0.0, "sampler.images_per_class": 2, "pooling": "gap"}
    assert corners(space)[1] == {"optim.lr": 1e-3, "loss.margin": 1.0, "sampler.images_per_class": 8, "pooling": "gsp"}


def test_a_run_gets_four_digits_within_the_bounds() -> None:
    dimension = Dimension("optim.lr", 1.23456e-6, 1.23456e-3, log=True)
    assert dimension.value(3.141592e-4) == 3.142e-4
    assert dimension.value(1.23456e-6) >= 1.23456e-6 and dimension.value(1.23456e-3) <= 1.23456e-3
    assert [override("a", value) for value in (None, True, 1e-05, 3, "gap")] == [
        "a=null", "a=true", "a=1e-05", "a=3", "a=gap"
    ]  # fmt: skip
    edges = [Dimension("x", 1.0, 100.0, log=True).is_at_edge(value) for value in (1.2, 10.0, 99.0)]
    assert edges == [True, False, True]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, r"space has nothing to search. Name keys of a run, such as space=\{optim.lr: "),
        ({"loss.margin": {**LR, "when": {"loss": "margin"}}}, "space has nothing to search"),
        ({"optim.lr": 0.1}, "space.optim.lr: got 0.1, expected bounds such as .* or choices such as"),
        ({"optim.lr": {"low": 1}}, "got low=1.0 and high=None, expected low < high"),
        ({"optim.lr": {"low": "1e-6", "high": 1}}, "space.optim.lr: low: got '1e-6', expected a valid number"),
        ({"optim.lr": {"low": 1, "hihg": 2}}, "space.optim.lr: hihg is unknown: did you mean 'high'"),
        ({"optim.lr": {"low": 2, "high": 1}}, "got low=2.0 and high=1.0, expected low < high"),
        ({"optim.lr": {"low": 0, "high": 1, "log": True}}, "got low=0.0 .* both positive with log: true"),
        ({"optim.lr": {**LR, "log": "yes"}}, "space.optim.lr: log: got 'yes', expected a valid boolean"),
        ({"optim.lr": {**LR, "step": 1e-5}}, "step: got 1e-05, expected .* no log: true"),
        ({"loss.margin": {"low": 0, "high": 1, "step": 2}}, "step: got 2.0, expected at most 1.0"),
        ({"loss.k": {"low": 0.5, "high": 3, "integer": True}}, "low: got 0.5, expected a whole number"),
        ({"pooling": {"choices": []}}, "choices: got .* at least 1 item"),
        ({"pooling": {"choices": ["gap", "gap"]}}, "expected each value once"),
        ({"pooling": {"choices": ["gap", ["gsp"]]}}, r"choices.1: got \['gsp'\], expected a valid number"),
        ({"pooling": {"choices": ["gap", "gsp"], "low": 1}}, "has choices and low. Leave one out"),
        ({"fold": {"choices": [0, 1]}}, "space.fold: fold must be the same in all trials"),
        ({"fit.monitor": {"choices": ["p_at_1", "nmi"]}}, "fit.monitor must be the same in all trials"),
        ({"dataset.table.seed": {"choices": [0, 1]}}, "dataset must be the same in all trials"),
        ({"optim.lr": {**LR, "when": {"pool": "gap"}}}, "when 'pool' is unknown: did you mean 'pooling'"),
        ({"loss": {"choices": ["margin", "avsl"]}, "loss.nu": {"low": 0, "high": 1}}, "got both loss and loss.nu"),
    ],
)  # fmt: skip
def test_errors_of_spaces(space, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_space(space, CHOSEN)
