"""What a run says at its end."""

import pytest

from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.runner import warn_at_chance


@pytest.mark.parametrize(("steps", "remedy"), [(0, "Check the backbone"), (100, "Look for a setting")])
@pytest.mark.parametrize(("score", "warns"), [(0.001, True), (0.013, True), (0.015, False)])
def test_a_test_score_that_is_not_above_chance_is_warned_of(
    caplog, score: float, warns: bool, steps: int, remedy: str
) -> None:
    warn_at_chance(Evaluation({"p_at_1": score}, {}, 100, 100, 0, p_at_1_by_chance=(0.01, 0.002)), steps=steps)
    expected = (
        "test P@1 is within two standard deviations of chance: "
        f"got {100 * score:.2f} %, random rankings have 1.00 %. {remedy}"
    )
    assert (expected in caplog.text) == warns
