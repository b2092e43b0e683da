"""What features of a network say of splits: their distances and scores, also beside those of trained models."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from dmlbench import build
from dmlbench.apps.compare_configs import asked_columns
from dmlbench.apps.loading import load_run
from dmlbench.components import component
from dmlbench.config import config_folder, listed, read_config, table_node
from dmlbench.data.protocols import Conventional
from dmlbench.data.split_file import SplitFile, read_splits, rows_of_split
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.registry import Score, score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.oodml.features import Features, features_of, write_output
from dmlbench.oodml.frechet import Float, frechet_distance
from dmlbench.oodml.split_sequence import OVER
from dmlbench.oodml.splits import halves_of
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.results.rules import area_under
from dmlbench.results.store import CONFIG, read_result
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable, IntArray, RetrievalSet, check_choice, counted


def measure(args: Any) -> Iterator[str]:
    """Measure the splits of a file, or the train half of one data set vs. the test half of another."""
    check_choice("over", args.over, OVER)
    if (args.splits is None) == (args.train is None):
        raise ConfigError(
            f"got splits={args.splits} and train={args.train}, expected one of them. Set splits=<file of `dmlbench "
            "oodml splits`, or one of the study's pickles>, or train=<data set of the train half>."
        )
    lines, document = _splits(args) if args.train is None else _between(args)
    yield from lines
    yield from write_output(args, document)


def _splits(args: Any) -> tuple[list[str], dict[str, Any]]:
    file, features = _given(args)
    table = features.table
    found = []
    for split in file.splits:
        rows = rows_of_split(split, table)
        train, test = (
            _class_means(features, half) if args.over == "class_means" else features.rows[half]
            for half in (rows["train"], rows["test"])
        )
        sizes = {"n_train": len(split.train), "n_test": len(split.test)}
        here = frechet_distance(train, test)
        found.append({"split": split.name, **sizes, "given": split.distance, "here": here})
    correlation = None
    if len(found) > 2:
        correlation = float(spearmanr([one["given"] for one in found], [one["here"] for one in found]).statistic)
    given_by = file.measured_on(table)
    lines = [
        f"{table.name}, splits of {args.splits}",
        f"given: measured by {given_by}",
        f"here:  measured by {features.measured_by}, over {args.over.replace('_', ' ')}",
        f"{'split':>7}  {'classes':>13}  {'given':>10}  {'here':>10}",
    ]
    for one in found:
        classes = f"{one['n_train']} + {one['n_test']}"
        lines.append(f"{one['split']:>7}  {classes:>13}  {one['given']:10.4f}  {one['here']:10.4f}")
    if correlation is not None:
        lines.append(f"Spearman's rank correlation of the two: {correlation:.3f}")
    document = {
        "dataset": table.name, "splits": Path(args.splits).name, "given_by": given_by,
        "measured_by": features.measured_by, "over": args.over, "notes": list(table.notes), "distances": found,
        "spearman": correlation,
    }  # fmt: skip
    return [*lines, *(f"note: {note}" for note in features.notes)], document


def _given(args: Any) -> tuple[SplitFile, Features]:
    """The file of splits, and the features of its data set."""
    file, features = read_splits(args.splits), features_of(args)
    file.require_of(features.table, args.splits)
    return file, features


def _between(args: Any) -> tuple[list[str], dict[str, Any]]:
    """Measure two data sets (table S2)."""
    if args.over != "class_means":
        raise ConfigError(f"over: got {args.over}, expected class_means with train=<data set>.")
    files = {path.stem: path for path in (config_folder() / "dataset").glob("*.yaml")}
    check_choice("train", str(args.train), list(files))
    other = dataclasses.replace(args, dataset={"table": table_node(args.train, args.paths)})
    first, second = features_of(other), features_of(args)
    train, test = (
        _class_means(features, np.flatnonzero(np.isin(features.table.labels, halves_of(features.table)[half])))
        for half, features in enumerate((first, second))
    )
    distance = frechet_distance(train, test)
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


def transfer(args: Any) -> Iterator[str]:
    """Score the runs of ``args.runs``, and the features of ``args.backbone``, on the test half of ``args.dataset``."""
    spec: EvaluationSpec = component(args.evaluation)
    if not (named := listed(args.runs)):
        raise ConfigError("runs is missing: expected runs=<run directory>, or several: runs=[<one>,<another>].")
    loaded = [(run, read_result(run), load_run(run, {"num_workers": args.num_workers}, device=args.device))
              for run in map(Path, named)]  # fmt: skip
    features = features_of(args)
    table = features.table
    test = Conventional().split(table, fold=0).test
    assert test is not None
    rows: list[dict[str, Any]] = []
    notes = features.notes
    for name, result, setup in loaded:
        own_data: ImageTable = setup.data.table
        shared = np.intersect1d(own_data.labels[setup.data.split.train], table.labels[test.rows])
        names = {own_data.class_names[c] for c in own_data.labels[setup.data.split.train]}
        if both := sorted(names & {table.class_names[c] for c in table.labels[test.rows]}):
            notes += [f"{name} was trained on {counted(len(both), 'class')} named as test classes, such as '{both[0]}'"]
        if own_data.fingerprint == table.fingerprint and len(shared):
            raise ConfigError(
                f"{name} was trained on {len(shared)} classes of the test half of {table.name}, such as "
                f"'{table.class_names[shared[0]]}'. Name another data set."
            )
        open_images = build.image_opener(args, table, setup.device)
        other = dataclasses.replace(
            setup,
            data=dataclasses.replace(setup.data, table=table),
            images=open_images(read_config(name / CONFIG)["transform"]["eval"]),
        )
        _, _, found = other.test(test, spec)
        again = "" if setup.rerank is None else f" ({setup.rerank.description})"
        model = f"{name.parent.name}/{name.name}{again}"
        rows.append({"model": model, "trained_on": str(result["dataset"]), "scores": found.scores})
        if own_data.name != table.name:
            notes += [f"{OTHER_DATA}{own_data.name}: {note}" for note in own_data.notes]
    rows.append({"model": features.measured_by, "trained_on": "as it is", "scores": _scores(features, test, spec)})
    notes = list(dict.fromkeys(notes))
    yield from _lines(rows, table.name, [score_named(name) for name in asked_columns(spec)])
    yield from (f"note: {note}" for note in notes)
    yield from write_output(args, {"dataset": table.name, "rows": rows, "notes": notes})


def _lines(rows: Sequence[dict[str, Any]], dataset: str, scores: Sequence[Score]) -> list[str]:
    """A line for each model, in percent."""
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


def _width(score: Score) -> int:
    return max(12, len(score.label) + 2)


def frozen(args: Any) -> Iterator[str]:
    """Score the features of ``args.backbone`` on the test half of every split of ``args.splits``."""
    if args.splits is None:
        raise ConfigError(
            "splits is missing: expected splits=<file of `dmlbench oodml splits`, or one of the study's pickles>."
        )
    spec: EvaluationSpec = component(args.evaluation)
    file, features = _given(args)
    table = features.table
    scores = [score_named(name) for name in asked_columns(spec)]
    yield f"{table.name}: {features.measured_by}, as it is"
    yield f"{'split':>7}  {'distance':>10}" + "".join(f"{score.label:>{_width(score)}}" for score in scores)
    splits: list[dict[str, Any]] = []
    for split in sorted(file.splits, key=lambda split: split.distance):
        found = _scores(features, RetrievalSet(rows_of_split(split, table)["test"]), spec)
        splits.append({"split": split.name, "distance": split.distance, "scores": found})
        values = "".join(f"{score.scale * found[score.name]:{_width(score)}.2f}" for score in scores)
        yield f"{split.name:>7}  {split.distance:10.4f}{values}"
    at = [split["distance"] for split in splits]
    areas = {}
    if len(set(at)) > 1:
        areas = {s.name: float(area_under([split["scores"][s.name] for split in splits], at)) for s in scores}
        yield f"{'AGS':>19}" + "".join(f"{score.scale * areas[score.name]:{_width(score)}.2f}" for score in scores)
    yield from (f"note: {note}" for note in features.notes)
    document = {
        "dataset": table.name, "network": features.measured_by, "notes": list(table.notes),
        "distance_by": file.measured_on(table), "by_split": splits, "AGS": areas,
    }  # fmt: skip
    yield from write_output(args, document)
