"""Distances of given splits, or between two data sets, by the features of a network."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from scipy.stats import spearmanr

from dmlbench.config import config_folder
from dmlbench.data.given_splits import read_splits, rows_of_split
from dmlbench.oodml.features import Features, features_of, write_output
from dmlbench.oodml.frechet import Float, frechet_distance
from dmlbench.oodml.sequence import OVER
from dmlbench.oodml.splits import halves_of
from dmlbench.results.cautions import OTHER_DATA
from dmlbench.types import ConfigError, IntArray, check_choice


def measure(cfg: DictConfig) -> Iterator[str]:
    """Measure the splits of ``cfg.splits``, or the train half of ``cfg.train`` vs. the test half of ``cfg.dataset``."""
    check_choice("over", cfg.over, OVER)
    if (cfg.splits is None) == (cfg.train is None):
        raise ConfigError(
            f"name the splits: got splits={cfg.splits} and train={cfg.train}, expected one of them. splits=<file of "
            "`dmlbench oodml splits`, or one of the study's pickles>, train=<data set of the other half>."
        )
    lines, document = _splits(cfg) if cfg.train is None else _between(cfg)
    yield from lines
    yield from write_output(cfg, document)


def _splits(cfg: DictConfig) -> tuple[list[str], dict[str, Any]]:
    file = read_splits(cfg.splits)
    features = features_of(cfg)
    table = features.table
    file.require_of(table, cfg.splits)

    def half(rows: IntArray) -> Float:
        return _class_means(features, rows) if cfg.over == "class_means" else features.rows[rows]

    found = []
    for split in file.splits:
        rows = rows_of_split(split, table)
        here = frechet_distance(half(rows["train"]), half(rows["test"]))
        sizes = {"n_train": len(split.train), "n_test": len(split.test)}
        found.append({"split": split.name, **sizes, "given": split.distance, "here": here})
    correlation = None
    if len(found) > 2:
        correlation = float(spearmanr([one["given"] for one in found], [one["here"] for one in found]).statistic)
    given_by = file.measured_on(table)
    lines = [
        f"{table.name}, splits of {cfg.splits}",
        f"given: measured by {given_by}",
        f"here:  measured by {features.measured_by}, over {cfg.over.replace('_', ' ')}",
        f"{'split':>7}  {'classes':>13}  {'given':>10}  {'here':>10}",
    ]
    for one in found:
        classes = f"{one['n_train']} + {one['n_test']}"
        lines.append(f"{one['split']:>7}  {classes:>13}  {one['given']:10.4f}  {one['here']:10.4f}")
    if correlation is not None:
        lines.append(f"Spearman's rank correlation of the two: {correlation:.3f}")
    document = {
        "dataset": table.name, "splits": Path(cfg.splits).name, "given_by": given_by,
        "measured_by": features.measured_by, "over": cfg.over, "notes": list(table.notes), "distances": found,
        "spearman": correlation,
    }  # fmt: skip
    return [*lines, *(f"note: {note}" for note in features.notes)], document


def _between(cfg: DictConfig) -> tuple[list[str], dict[str, Any]]:
    """Measure two data sets (table S2)."""
    if cfg.over != "class_means":
        raise ConfigError(f"over: got {cfg.over}, expected class_means between data sets.")
    files = {path.stem: path for path in (config_folder() / "dataset").glob("*.yaml")}
    check_choice("train", str(cfg.train), list(files))
    other = copy.deepcopy(cfg)
    node = OmegaConf.load(files[cfg.train])
    other.dataset = {"name": node.name, "table": node.table}
    first, second = features_of(other), features_of(cfg)
    means = []
    for features, classes in ((first, halves_of(first.table)[0]), (second, halves_of(second.table)[1])):
        means.append(_class_means(features, np.flatnonzero(np.isin(features.table.labels, classes))))
    distance = frechet_distance(*means)
    notes = [f"{one.table.name}: {note}" for one in (first, second) for note in one.table.notes]
    document = {
        "train": first.table.name, "test": second.table.name, "measured_by": first.measured_by, "distance": distance,
        "notes": notes,
    }  # fmt: skip
    halves = f"train half of {first.table.name}, test half of {second.table.name}"
    lines = [f"{halves}: {distance:.4f}, measured by {first.measured_by}"]
    return lines + [f"note: {OTHER_DATA}{note}" for note in notes], document


def _class_means(features: Features, rows: IntArray) -> Float:
    labels = features.table.labels[rows]
    return np.stack([features.rows[rows[labels == c]].mean(axis=0) for c in np.unique(labels)])
