"""Trained models on another data set (appendix C), and features of frozen networks over splits (section 4.4)."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from dmlbench import build
from dmlbench.apps.loaded import load_run
from dmlbench.apps.tables import asked_columns
from dmlbench.components import component
from dmlbench.config import load_config
from dmlbench.data.given_splits import read_splits, rows_of_split
from dmlbench.data.protocols import Conventional
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.oodml.features import Features, features_of, write_output
from dmlbench.results.cautions import OTHER_DATA
from dmlbench.results.rules import area_under
from dmlbench.results.store import CONFIG, read_result
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable, IntArray, RetrievalSet


def transfer(cfg: DictConfig) -> Iterator[str]:
    """Score the runs of ``cfg.runs``, and the features of ``cfg.backbone``, on the test half of ``cfg.dataset``."""
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
    rows: list[dict[str, Any]] = []
    notes = features.notes
    for name, result, setup in loaded:
        own_data: ImageTable = setup.data.table
        shared = np.intersect1d(own_data.labels[setup.data.split.train], table.labels[test.rows])
        if own_data.fingerprint == table.fingerprint and len(shared):
            raise ConfigError(
                f"{name} was trained on {len(shared)} classes of the test half of {table.name}, such as "
                f"'{table.class_names[shared[0]]}'. Name another data set."
            )
        open_images = build.image_opener(cfg, table, setup.device)
        other = dataclasses.replace(
            setup,
            data=dataclasses.replace(setup.data, table=table),
            images=open_images(load_config(name / CONFIG).transform.eval),
        )
        _, _, found = other.test(test, spec)
        again = "" if setup.rerank is None else f" ({setup.rerank.description})"
        model = f"{name.parent.name}/{name.name}{again}"
        rows.append({"model": model, "trained_on": str(result["dataset"]), "scores": found.scores})
        if own_data.name != table.name:
            notes += [f"{OTHER_DATA}{own_data.name}: {note}" for note in own_data.notes]
    rows.append({"model": features.measured_by, "trained_on": "as it is", "scores": _scores(features, test, spec)})
    notes = list(dict.fromkeys(notes))
    yield from _lines(rows, table.name, asked_columns(spec))
    yield from (f"note: {note}" for note in notes)
    yield from write_output(cfg, {"dataset": table.name, "rows": rows, "notes": notes})


def _lines(rows: list[dict[str, Any]], dataset: str, names: list[str]) -> list[str]:
    """A line for each model, in percent."""
    scores = [score_named(name) for name in names]
    models = [f"{row['trained_on']} -> {dataset}: {row['model']}" for row in rows]
    width = max(map(len, models))
    wide = [max(12, len(score.label) + 2) for score in scores]
    lines = [" " * width + "".join(f"{score.label:>{w}}" for score, w in zip(scores, wide, strict=True))]
    for model, row in zip(models, rows, strict=True):
        values = [score.scale * row["scores"][score.name] for score in scores]
        lines.append(f"{model:<{width}}" + "".join(f"{value:{w}.2f}" for value, w in zip(values, wide, strict=True)))
    return lines


def _scores(features: Features, part: RetrievalSet, spec: EvaluationSpec) -> dict[str, float]:
    def of(rows: IntArray) -> EmbeddingSet:
        labels, ids = torch.from_numpy(features.table.labels[rows]), torch.from_numpy(rows)
        return EmbeddingSet(torch.from_numpy(features.rows[rows].astype("float32")), labels, ids)

    gallery = None if part.gallery is None else of(part.gallery)
    return evaluate(of(part.query), gallery, spec).scores


def frozen(cfg: DictConfig) -> Iterator[str]:
    """Score the features of ``cfg.backbone`` on the test half of every split of ``cfg.splits``."""
    if cfg.splits is None:
        raise ConfigError("name the splits: splits=<file of `dmlbench oodml splits`, or one of the study's pickles>")
    spec: EvaluationSpec = component(cfg.evaluation)
    file = read_splits(cfg.splits)
    features = features_of(cfg)
    table = features.table
    file.require_of(table, cfg.splits)
    scores = [score_named(name) for name in asked_columns(spec)]
    yield f"{table.name}: {features.measured_by}, as it is"
    yield f"{'split':>7}  {'distance':>10}" + "".join(f"{score.label:>12}" for score in scores)
    splits: list[dict[str, Any]] = []
    for split in sorted(file.splits, key=lambda split: split.distance):
        found = _scores(features, RetrievalSet(rows_of_split(split, table)["test"]), spec)
        splits.append({"split": split.name, "distance": split.distance, "scores": found})
        values = "".join(f"{score.scale * found[score.name]:12.2f}" for score in scores)
        yield f"{split.name:>7}  {split.distance:10.4f}{values}"
    at = [split["distance"] for split in splits]
    areas = {}
    if len(set(at)) > 1:
        areas = {s.name: float(area_under([split["scores"][s.name] for split in splits], at)) for s in scores}
        yield f"{'AGS':>19}" + "".join(f"{score.scale * areas[score.name]:12.2f}" for score in scores)
    yield from (f"note: {note}" for note in features.notes)
    document = {
        "dataset": table.name, "network": features.measured_by, "notes": list(table.notes),
        "distance_by": file.measured_on(table), "by_split": splits, "AGS": areas,
    }  # fmt: skip
    yield from write_output(cfg, document)
