"""What a run says at its end."""

import pytest

from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.runner import warn_at_chance


@pytest.mark.parametrize(
    ("steps", "random", "remedy"),
    [(0, False, "Check the backbone"), (100, False, "Look for a setting"), (100, True, "Look for a setting")],
)
@pytest.mark.parametrize(("score", "warns"), [(0.001, True), (0.013, True), (0.015, False)])
def test_a_test_score_that_is_not_above_chance_is_warned_of(
    caplog, score: float, warns: bool, steps: int, random: bool, remedy: str
) -> None:
    test = Evaluation({"p_at_1": score}, {}, 100, 100, 0, p_at_1_by_chance=(0.01, 0.002))
    warn_at_chance(test, steps=steps, random=random)
    expected = (
        "test P@1 is within two standard deviations of chance: "
        f"got {100 * score:.2f} %, random rankings have 1.00 %. {remedy}"
    )
    assert (expected in caplog.text) == warns


def test_an_untrained_network_with_random_weights_may_be_at_chance(caplog) -> None:
    test = Evaluation({"p_at_1": 0.01}, {}, 100, 100, 0, p_at_1_by_chance=(0.01, 0.002))
    warn_at_chance(test, steps=0, random=True)
    assert not caplog.text
