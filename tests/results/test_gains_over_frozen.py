"""Columns of tables with a frozen backbone: validation chooses the references, at native and at the row's width."""

from typing import Any

from dmlbench.results.config_table import gains_over_frozen


def summary(head: str, test: float, *, val: float, dimension: int, trained: int = 0) -> dict[str, Any]:
    return {
        "choices": {"head": head},
        "training": {"frozen_until": "all", "trained_parameters": trained, "image_size": [224, 224], "views": 8},
        "validation": {"map_at_r": val},
        "dimension": {"separated": dimension},
        "scores": {"separated": {"map_at_r": {"mean": test, "std": 0.0}}},
    }


def test_gains_are_over_the_untrained_rows_that_validation_chooses() -> None:
    rows = [
        summary("linear", 0.25, val=0.5, dimension=128, trained=163840),
        summary("identity", 0.20, val=0.3, dimension=1280),
        summary("identity", 0.23, val=0.2, dimension=1280),  # better on the test, not on validation
        summary("learned_whitening", 0.26, val=0.4, dimension=1280),
        summary("learned_whitening", 0.22, val=0.1, dimension=128),
    ]
    gains = gains_over_frozen(rows, ["p_at_1", "map_at_r"])
    assert gains["frozen"] == ["all"] * 5
    assert gains["trained"] == ["163,840", "0", "0", "0", "0"]
    assert gains["MAP@R over frozen"] == ["+5.0", "+0.0", "+3.0", "+6.0", "+2.0"]
    assert gains["over whitened"] == ["+3.0", "-6.0", "-3.0", "+0.0", "+0.0"]


def test_without_untrained_rows_gains_are_unknown_and_without_frozen_layers_columns_are_absent() -> None:
    trained = summary("linear", 0.25, val=0.5, dimension=128, trained=163840)
    assert gains_over_frozen([trained], ["map_at_r"])["MAP@R over frozen"] == [None]
    trained["training"]["frozen_until"] = None
    assert gains_over_frozen([trained], ["map_at_r"]) == {}
