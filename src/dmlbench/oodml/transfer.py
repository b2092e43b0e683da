"""Trained models on another data set (appendix C), and features of networks as they are over splits (section 4.4)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from dmlbench import build
from dmlbench.apps.tables import asked_columns
from dmlbench.apps.trained import load_run
from dmlbench.components import component
from dmlbench.config import load_config
from dmlbench.data.given_splits import read_splits, rows_of_split
from dmlbench.data.protocols import Conventional
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.oodml.features import Features, features_of
from dmlbench.results.rules import area_under
from dmlbench.results.store import CONFIG, read_result
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable, IntArray, RetrievalSet


@dataclass(frozen=True)
class Transferred:
    """Scores on the test half of a data set, a row a model.

    Attributes:
        dataset: what was tested on.
        rows: (model in words, what it was trained on, scores by name).
        notes: what a reader must know.
    """

    dataset: str
    rows: tuple[tuple[str, str, dict[str, float]], ...]
    notes: tuple[str, ...]

    def lines(self, names: Sequence[str]) -> list[str]:
        """A line a model, in percent."""
        scores = [score_named(name) for name in names]
        width = max(len(f"{trained} -> {self.dataset}: {model}") for model, trained, _ in self.rows)
        wide = [max(12, len(score.label) + 2) for score in scores]
        lines = [" " * width + "".join(f"{score.label:>{w}}" for score, w in zip(scores, wide, strict=True))]
        for model, trained, found in self.rows:
            of_row = [score.scale * found[score.name] for score in scores]
            values = "".join(f"{value:{w}.2f}" for value, w in zip(of_row, wide, strict=True))
            lines.append(f"{f'{trained} -> {self.dataset}: {model}':<{width}}{values}")
        return lines + [f"note: {note}" for note in self.notes]

    def write(self, path: str | Path) -> None:
        """The scores as JSON, fractions."""
        rows = [{"model": model, "trained_on": trained, "scores": found} for model, trained, found in self.rows]
        write_json(Path(path), {"dataset": self.dataset, "rows": rows, "notes": list(self.notes)})


def transfer(cfg: DictConfig) -> Transferred:
    """Scores of the runs of ``cfg.runs`` on the test half of ``cfg.dataset``, and of ``cfg.backbone``'s own features.

    Raises:
        ConfigError: no run is named, or one was trained on classes of this test half.
        RunError: one of them cannot be loaded. DataError: the data set has no test half.
    """
    spec: EvaluationSpec = component(cfg.evaluation)
    named = [cfg.runs] if isinstance(cfg.runs, str) else list(cfg.runs or [])
    if not named:
        raise ConfigError("name the trained models: runs=<run directory>, or several: runs=[<one>,<another>]")
    # before the work rather than after it
    loaded = [(run, read_result(run), load_run(run, {"num_workers": cfg.num_workers}, device=cfg.device))
              for run in map(Path, named)]  # fmt: skip
    features = features_of(cfg)
    table = features.table
    test = Conventional().split(table, fold=0).test
    assert test is not None
    rows = []
    notes = [f"NOT THE PUBLISHED DATA: {note}" for note in table.notes]
    for name, result, setup in loaded:
        own_data: ImageTable = setup.data.table
        shared = np.intersect1d(own_data.labels[setup.data.split.train], table.labels[test.rows])
        if own_data.fingerprint == table.fingerprint and len(shared):
            raise ConfigError(
                f"{name} was trained on {len(shared)} classes of the test half of {table.name}, such as "
                f"'{table.class_names[shared[0]]}'; name another data set"
            )
        open_images = build.image_opener(cfg, table, setup.device)
        other = dataclasses.replace(
            setup,
            data=dataclasses.replace(setup.data, table=table),
            images=open_images(load_config(name / CONFIG).transform.eval),
        )
        _, _, found = other.test(test, spec)
        again = "" if setup.rerank is None else f" ({setup.rerank.description})"
        rows.append((f"{name.parent.name}/{name.name}{again}", str(result["dataset"]), found.scores))
        if own_data.name != table.name:
            notes += [f"NOT THE PUBLISHED DATA: {own_data.name}: {note}" for note in own_data.notes]
    rows.append((features.measured_by, "as it is", _scores(features, test, spec)))
    return Transferred(table.name, tuple(rows), tuple(dict.fromkeys(notes)))


def _scores(features: Features, part: RetrievalSet, spec: EvaluationSpec) -> dict[str, float]:
    def of(rows: IntArray) -> EmbeddingSet:
        labels, ids = torch.from_numpy(features.table.labels[rows]), torch.from_numpy(rows)
        return EmbeddingSet(torch.from_numpy(features.rows[rows].astype("float32")), labels, ids)

    gallery = None if part.gallery is None else of(part.gallery)
    return evaluate(of(part.query), gallery, spec).scores


def frozen_scores(cfg: DictConfig) -> dict[str, Any]:
    """Scores of ``cfg.backbone``'s own features on the test half of every split of ``cfg.splits``, and their areas.

    Raises:
        ConfigError: no file of splits is named. DataError: the splits are of another data set.
    """
    if cfg.splits is None:
        raise ConfigError("name the splits: splits=<file of `dmlbench oodml splits`, or one of the study's pickles>")
    spec: EvaluationSpec = component(cfg.evaluation)
    file = read_splits(cfg.splits)
    features = features_of(cfg)
    table = features.table
    file.require_of(table, cfg.splits)
    splits: list[dict[str, Any]] = []
    for split in sorted(file.splits, key=lambda split: split.distance):
        scores = _scores(features, RetrievalSet(rows_of_split(split, table)["test"]), spec)
        splits.append({"split": split.name, "distance": split.distance, "scores": scores})
    at = [split["distance"] for split in splits]
    return {
        "dataset": table.name,
        "network": features.measured_by,
        "notes": list(table.notes),
        "distance_by": file.measured_on(table),
        "by_split": splits,
        "AGS": {
            name: float(area_under([split["scores"][name] for split in splits], at))
            for name in asked_columns(spec)
        } if len(set(at)) > 1 else {},
    }  # fmt: skip
