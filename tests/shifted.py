"""A protocol and a rule of another package, as CONTRIBUTING.md says to add them: what test_extending.py runs."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from dmlbench.data.protocols import Mlrc, Protocol
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.rules import ConfigRuns
from dmlbench.types import ImageTable, Split


@dataclass(frozen=True)
class Shifted(Protocol):
    """Two splits, the second further from its training classes."""

    num_folds: int = 2
    num_repeats: int = 1
    name: ClassVar[str] = "shifted"
    aggregation: ClassVar[str] = "shifted.area"

    def split(self, table: ImageTable, *, fold: int) -> Split:
        split = Mlrc(self.num_folds, self.num_repeats).split(table, fold=fold)
        return replace(split, facts={"distance": 1.5 + fold, "kind": "made up"})


@dataclass(frozen=True)
class Area:
    """Area under score over the splits' distance."""

    scored_on: Literal["test", "val"] = "test"
    spread: str = "splits"

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        tested = config.tested(spec)
        distance = [config.results[key]["facts"]["distance"] for key in tested]
        scores = {
            name: {"mean": float(np.trapezoid([run[name] for run in tested.values()], distance)), "std": None}
            for name in spec.score_names
        }
        return {"scores": {"mean": scores}, "n_collections": None, "raw": {}}


area = Area()
