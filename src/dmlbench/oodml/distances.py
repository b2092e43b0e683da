"""The splits of a file, measured by a network."""

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from scipy.stats import spearmanr

from dmlbench.config import config_folder
from dmlbench.data.given_splits import GivenSplit, read_splits, rows_of_split
from dmlbench.oodml.features import Features, features_of
from dmlbench.oodml.frechet import Float, frechet_distance
from dmlbench.oodml.sequence import OVER
from dmlbench.oodml.splits import halves_of
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError, IntArray, check_choice


@dataclass(frozen=True)
class Measured:
    """Distances of given splits.

    Attributes:
        source: the file.
        dataset: what they are splits of.
        given_by: by what the file's distances were measured.
        measured_by: by what they are measured now.
        over: means of classes or images.
        splits: as given.
        distances: measured now.
        notes: how the data differ from the published ones.
    """

    source: str
    dataset: str
    given_by: str
    measured_by: str
    over: str
    splits: tuple[GivenSplit, ...]
    distances: tuple[float, ...]
    notes: tuple[str, ...]

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, between the given and the measured distances; None for fewer than three splits."""
        if len(self.splits) < 3:
            return None
        found: Any = spearmanr([split.distance for split in self.splits], self.distances)
        return float(found.statistic)

    def lines(self) -> list[str]:
        """A line for each split, and how alike the two rankings are."""
        lines = [
            f"{self.dataset}, splits of {self.source}",
            f"given: measured by {self.given_by}",
            f"here:  measured by {self.measured_by}, over {self.over.replace('_', ' ')}",
            f"{'split':>7}  {'classes':>13}  {'given':>10}  {'here':>10}",
        ]
        for split, distance in zip(self.splits, self.distances, strict=True):
            sizes = f"{len(split.train)} + {len(split.test)}"
            lines.append(f"{split.name:>7}  {sizes:>13}  {split.distance:10.4f}  {distance:10.4f}")
        if self.rank_correlation is not None:
            lines.append(f"Spearman's rank correlation of the two: {self.rank_correlation:.3f}")
        return lines + [f"note: NOT THE PUBLISHED DATA: {note}" for note in self.notes]

    def write(self, path: str | Path) -> None:
        """The numbers as JSON."""
        write_json(
            Path(path),
            {
                "dataset": self.dataset,
                "splits": Path(self.source).name,
                "given_by": self.given_by,
                "measured_by": self.measured_by,
                "over": self.over,
                "notes": list(self.notes),
                "distances": [
                    {"split": s.name, "n_train": len(s.train), "n_test": len(s.test), "given": s.distance, "here": here}
                    for s, here in zip(self.splits, self.distances, strict=True)
                ],
                "spearman": self.rank_correlation,
            },
        )


@dataclass(frozen=True)
class BetweenDataSets:
    """Distance between the train half of one data set and the test half of another (table S2).

    Attributes:
        train, test: names of the data sets.
        measured_by: the network, in words.
        distance: squared Fréchet distance over the means of classes.
        notes: how the data differ from the published ones.
    """

    train: str
    test: str
    measured_by: str
    distance: float
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """One line, and the notes."""
        halves = f"train half of {self.train}, test half of {self.test}"
        return [f"{halves}: {self.distance:.4f}, measured by {self.measured_by}"] + [
            f"note: NOT THE PUBLISHED DATA: {note}" for note in self.notes
        ]

    def write(self, path: str | Path) -> None:
        """The number as JSON."""
        write_json(Path(path), asdict(self))


def measure_between(cfg: DictConfig) -> BetweenDataSets:
    """The distance between the train half of ``cfg.train`` and the test half of ``cfg.dataset``.

    Raises:
        ConfigError: ``cfg.train`` is no data set, or both a file of splits and a data set are named.
    """
    if cfg.splits is not None:
        raise ConfigError(f"splits={cfg.splits} and train={cfg.train} ask for different distances; give one of them")
    if cfg.over != "class_means":
        raise ConfigError(f"over={cfg.over}: distances between data sets are over class_means")
    files = {path.stem: path for path in (config_folder() / "dataset").glob("*.yaml")}
    check_choice("train", str(cfg.train), list(files))
    other = copy.deepcopy(cfg)
    node = OmegaConf.load(files[cfg.train])
    other.dataset = {"name": node.name, "table": node.table}
    features = [features_of(one) for one in (other, cfg)]
    halves = []
    for one, half in zip(features, (0, 1), strict=True):
        classes = halves_of(one.table)[half]
        halves.append(_class_means(one, np.flatnonzero(np.isin(one.table.labels, classes))))
    notes = tuple(f"{one.table.name}: {note}" for one in features for note in one.table.notes)
    first, second = features
    return BetweenDataSets(
        first.table.name, second.table.name, first.measured_by, frechet_distance(*halves), notes
    )  # fmt: skip


def _class_means(features: Features, rows: IntArray) -> Float:
    labels = features.table.labels[rows]
    return np.stack([features.rows[rows[labels == c]].mean(axis=0) for c in np.unique(labels)])


def measure_splits(cfg: DictConfig) -> Measured:
    """Distances of the splits of ``cfg.splits`` by the features that ``cfg`` names.

    Raises:
        ConfigError: no file is named. DataError: the splits are of another data set.
    """
    check_choice("over", cfg.over, OVER)
    if cfg.splits is None:
        raise ConfigError(
            "name the splits: splits=<file of `dmlbench oodml splits`, or one of the study's pickles>, or the "
            "data set of the other half: train=cub200"
        )
    file = read_splits(cfg.splits)
    features = features_of(cfg)
    table = features.table
    file.require_of(table, cfg.splits)

    def half(rows: IntArray) -> Float:
        return _class_means(features, rows) if cfg.over == "class_means" else features.rows[rows]

    distances = []
    for split in file.splits:
        rows = rows_of_split(split, table)
        distances.append(frechet_distance(half(rows["train"]), half(rows["test"])))
    return Measured(
        str(cfg.splits), table.name, file.measured_on(table), features.measured_by, cfg.over, file.splits,
        tuple(distances), table.notes,
    )  # fmt: skip
