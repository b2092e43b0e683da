"""Values of several steps come from the device together, and a bad one is told by its step."""

import pytest
import torch

from dmlbench.training.deferred_metrics import BatchValues, DeferredMetrics
from dmlbench.types import RunError


def batch(loss: float, **noted: float) -> BatchValues:
    return BatchValues({"loss": torch.tensor(loss)}, {name: torch.tensor(x) for name, x in noted.items()})


def test_last_values_are_means_over_the_batches_that_have_them() -> None:
    readings = DeferredMetrics()
    readings.add(1, [batch(5.0)], torch.tensor(1.0))
    readings.add(2, [batch(0.1), batch(0.4, change=3.0)], torch.tensor(1.0))
    assert readings.last == {}
    readings.read()
    as_float = [float(torch.tensor(x)) for x in (0.1, 0.4)]
    assert readings.last == {"loss": sum(as_float) / 2, "change": 3.0}
    readings.read()  # nothing new
    assert readings.last["change"] == 3.0


@pytest.mark.parametrize(
    ("bad", "norm", "message"),
    [
        (torch.nan, 1.0, "step 2: loss = nan"),
        (torch.inf, torch.nan, "step 2: loss = inf"),
        (1.0, torch.nan, "step 2: gradient norm = nan"),
    ],
)
def test_the_first_step_that_is_not_finite_is_named(bad: float, norm: float, message: str) -> None:
    readings = DeferredMetrics()
    readings.add(1, [batch(1.0)], torch.tensor(1.0))
    readings.add(2, [batch(1.0), batch(bad)], torch.tensor(norm))
    readings.add(3, [batch(torch.nan)], torch.tensor(torch.nan))
    with pytest.raises(RunError, match=message):
        readings.read()
