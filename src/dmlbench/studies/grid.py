"""Runs over values of a pooling, with their test scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig

from dmlbench.results.store import read_result
from dmlbench.studies.record import Parts
from dmlbench.studies.trained import run_of

Scores = dict[str, list[float]]
"""By metric, a value for each run."""


def scores_of(configs: Mapping[str, Sequence[str]], cfg: DictConfig, parts: Parts) -> dict[str, Scores]:
    """Test scores of configs over ``cfg.folds`` and ``cfg.repeats``, each run trained where it is missing.

    Args:
        configs: overrides by name.
        cfg: of the study.
        parts: one for each run.
    """
    coordinates = [(fold, repeat) for fold in cfg.folds for repeat in range(cfg.repeats)]
    names = {
        f"{config}, fold {fold}, repeat {repeat}": (config, f"fold={fold}", f"repeat={repeat}")
        for config in configs
        for fold, repeat in coordinates
    }

    def compute(name: str) -> dict[str, float]:
        config, *where = names[name]
        result: dict[str, Any] = read_result(run_of(cfg, [*configs[config], *where]))
        parts.bind(data=result["dataset_fingerprint"])
        return {metric: result["metrics"]["test"][metric] for metric in ("p_at_1", "map_at_r")}

    found = parts.get(list(names), compute, describe="runs")
    return {
        config: {
            metric: [found[name][metric] for name, (of, *_) in names.items() if of == config]
            for metric in ("p_at_1", "map_at_r")
        }
        for config in configs
    }


def mean(scores: Scores, metric: str = "map_at_r") -> float:
    """In percent."""
    return 100 * float(np.mean(scores[metric]))


def where_from(cfg: DictConfig) -> tuple[str, ...]:
    """Notes on the runs."""
    return (
        f"runs: {' '.join([*cfg.train, *(cfg.training or ())])}",
        f"test scores of folds {', '.join(map(str, cfg.folds))}, {cfg.repeats} repeats each; mean ± population "
        "deviation over these runs, which share their seeds from row to row",
    )
