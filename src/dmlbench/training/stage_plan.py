"""Plan of a two-stage training: number of epochs and learning rates of stage 1, repeated on other data."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dmlbench.runtime import read_json, write_json
from dmlbench.types import RunError

RATE = "lr"  # in history.csv: of the first parameter group that has a rate above 0


@dataclass(frozen=True)
class Plan:
    """Length and learning rates of a training, in epochs.

    Attributes:
        changes: (epoch, factor) by epoch: from that epoch on the rate of all groups is factor * the first rate.
    """

    epochs: float
    changes: tuple[tuple[float, float], ...] = ()

    def steps(self, steps_per_epoch: int) -> int:
        """Length in optimizer steps."""
        return round(self.epochs * steps_per_epoch)


def plan_of(
    history: Sequence[tuple[int, str, float]], *, first_rate: float, best_step: int, steps_per_epoch: int
) -> Plan:
    """The plan that a training followed up to its best step, by the rates after each validation in its history."""
    changes: list[tuple[float, float]] = []
    rate = first_rate
    for step, name, value in history:
        if name == RATE and step < best_step and value != rate:
            rate = value
            changes.append((step / steps_per_epoch, value / first_rate))
    return Plan(best_step / steps_per_epoch, tuple(changes))


def save_plan(path: Path, plan: Plan) -> None:
    write_json(path, asdict(plan))


def load_plan(path: Path) -> Plan:
    """Read what ``save_plan`` wrote."""
    try:
        values = read_json(path)
        changes = tuple((float(epoch), float(factor)) for epoch, factor in values["changes"])
        return Plan(float(values["epochs"]), changes)
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist. Run stage 1 of this config and repeat first: set protocol.stage=1 and change "
            "nothing else."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a training plan ({error}). Delete its run and run stage 1 again.") from error


def replayed(optimizer: Optimizer, plan: Plan, *, steps_per_epoch: int) -> LambdaLR:
    """A schedule, advanced at every step, that gives ``optimizer`` the plan's rates."""
    starts = [round(epoch * steps_per_epoch) for epoch, _ in plan.changes]
    factors = [1.0, *(factor for _, factor in plan.changes)]
    return LambdaLR(optimizer, lambda step: factors[bisect_right(starts, step)])
