"""A plan recorded from a training and repeated on another number of steps per epoch."""

import pytest
import torch

from dmlbench.training.stage_plan import Plan, load_plan, plan_of, replayed, save_plan
from dmlbench.types import RunError

RATES = {10: 0.5, 20: 0.25, 30: 0.25, 40: 0.125, 50: 0.0625}
HISTORY = [(10, "train/loss", 1.0), *((step, "lr", rate) for step, rate in RATES.items())]


def test_a_plan_holds_the_changes_before_the_best_step_in_epochs() -> None:
    plan = plan_of(HISTORY, first_rate=0.5, best_step=50, steps_per_epoch=10)
    assert plan == Plan(5.0, ((2.0, 0.5), (4.0, 0.25)))
    assert plan_of(HISTORY, first_rate=0.5, best_step=20, steps_per_epoch=10) == Plan(2.0)
    assert plan.steps(7) == 35


def test_replayed_rates_are_those_of_the_plan_on_another_number_of_steps() -> None:
    plan = Plan(5.0, ((2.0, 0.5), (4.0, 0.1)))
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 8.0}], lr=1.0)
    schedule = replayed(optimizer, plan, steps_per_epoch=3)
    rates = []
    for _ in range(plan.steps(3)):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates == [[1.0, 8.0]] * 6 + [[0.5, 4.0]] * 6 + [[0.1, 0.8]] * 3


def test_plans_are_read_as_written_and_their_absence_names_the_remedy(tmp_path) -> None:
    plan = Plan(1 / 3, ((0.1, 0.5),))
    save_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json") == plan
    with pytest.raises(RunError, match=r"Run stage 1 .*protocol.stage=1"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text('{"epochs": 1}')
    with pytest.raises(RunError, match="is not a training plan"):
        load_plan(tmp_path / "plan.json")


def test_steps_are_rounded_where_epochs_times_steps_is_not_exact() -> None:
    assert 0.29 * 100 < 29
    assert Plan(0.29).steps(100) == 29
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = replayed(optimizer, Plan(1.0, ((0.29, 0.5),)), steps_per_epoch=100)
    assert [schedule.lr_lambdas[0](step) for step in (28, 29)] == [1.0, 0.5]
