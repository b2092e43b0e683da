"""Embeddings of other code as configs: checked against the data, scored by the same engine, marked where they stand."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlbench.apps.compare_configs import build_tables, find_configs
from dmlbench.apps.import_embeddings import Imported, _of_table, import_config
from dmlbench.apps.loading import distance_of_run, load
from dmlbench.data.protocols import Mlrc
from dmlbench.evaluation import EvaluationSpec, evaluate_arrays
from dmlbench.evaluation.embeddings.embed import OWN_DISTANCE, read_embeddings, save_embeddings
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import find_runs, read_result, runs_by_config
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable, RetrievalSet, RunError

PATTERN = "fold{fold}_rep{repeat}.npz"


@pytest.fixture
def taken(import_arguments, tmp_path):
    def run(**changed) -> Imported:
        given = {"name": "theirs", "embeddings": str(tmp_path / PATTERN), **changed}
        return import_config(dataclasses.replace(import_arguments, **given))

    return run


def write(place: Path, table, **changed) -> dict[tuple[int, int], np.ndarray]:
    """Twelve files whose rows stand in any order, with labels of their own; the rows in the data set's order."""
    rng, found = np.random.default_rng(0), {}
    for fold in range(4):
        test = Mlrc().split(table, fold=fold).test.query
        for repeat in range(3):
            rows = rng.normal(size=(len(test), 6)).astype(np.float32) + np.eye(12, 6)[table.labels[test]].astype("f4")
            order = rng.permutation(len(test))
            arrays = {"rows": rows[order], "labels": 100 - table.labels[test][order], "ids": test[order], **changed}
            np.savez(
                place / PATTERN.format(fold=fold, repeat=repeat), **{k: v for k, v in arrays.items() if v is not None}
            )
            found[fold, repeat] = rows
    return found


@pytest.mark.slow
def test_twelve_files_become_a_config_of_81_collections(table, taken, tmp_path) -> None:
    rows = write(tmp_path, table)
    imported = taken(selected="last step")
    test = Mlrc().split(table, fold=0).test.query
    for at, found in rows.items():
        assert imported.scores[at] == evaluate_arrays(found, table.labels[test], ids=test).scores
    again = taken(selected="last step")  # complete runs stay
    assert again.scores == imported.scores and again.config == imported.config
    (runs,) = runs_by_config(find_runs(tmp_path / "out")).values()
    summary = aggregate_config(runs, EvaluationSpec(), distance_of=distance_of_run, progress=False)
    assert (summary["n_runs"], summary["n_collections"], summary["missing"]) == (12, 81, [])
    mean = np.mean([scores["map_at_r"] for scores in imported.scores.values()])
    assert summary["scores"]["separated"]["map_at_r"]["mean"] == pytest.approx(mean)
    spec = EvaluationSpec(metrics=("map_at_r",))
    text = next(iter(build_tables(find_configs(str(tmp_path / "out"), "**", spec), spec).values())).to_text()
    assert "theirs (imported)" in text
    assert "IMPORTED: embeddings of other code; trained: unknown; selected: last step" in text
    with pytest.raises(RunError, match="was imported: it has embeddings, but no model"):
        load(runs[0].path)
    write(tmp_path, table, rows=np.ones((24, 6), np.float32))
    with pytest.raises(RunError, match=r"has other embeddings of the same name\. Choose another name"):
        taken(selected="last step")


def test_files_of_other_images_labels_or_counts_are_refused(table, taken, tmp_path) -> None:
    test = Mlrc().split(table, fold=0).test.query
    in_order = table.labels[test]
    write(tmp_path, table, ids=None, labels=in_order)
    notes = taken().notes
    assert notes == ("the files have no ids: images of one class are assumed to be in the data set's order",)
    run = next(iter(find_runs(tmp_path / "out"))).path
    assert read_result(run)["imported"]["ids"] == "by order"
    result = read_result(run)
    write_json(run / "result.json", result | {"imported": result["imported"] | {"ids": "given"}})
    summary = aggregate_config(find_runs(tmp_path / "out"), EvaluationSpec(), progress=False)
    assert summary["imported"]["ids"] == "by order"  # of the other runs
    write_json(run / "result.json", result)
    for changed, message in (
        ({"ids": None, "labels": np.roll(in_order, 1)}, r"label \d+ has 2 classes, expected 1\. Add ids"),
        ({"ids": None, "labels": np.arange(24)}, r"class \d+ has 4 labels, expected 1"),
        ({"ids": None, "labels": np.zeros(24, int)}, r"label 0 has \d+ classes"),
        ({"labels": np.roll(in_order, 1)}, r"label \d+ has \d+ classes, expected 1\. Correct the labels, or the ids"),
        ({"ids": np.arange(10, 34)}, r"has the id 10, expected the row of each test image of .*: here 24 to 47"),
        (
            {"rows": np.ones((5, 2), np.float32), "ids": np.arange(5), "labels": np.arange(5)},
            "got 5 query rows, expected 24, the test half of",
        ),
        (
            {"ids": None, "labels": [*in_order, 0]},
            r"npz \(and 11 more files\): query labels: got shape \(25,\), expected \(24,\)",
        ),
        ({"ids": None, "labels": in_order[1:]}, r"query labels: got shape \(23,\)"),
        ({"rows": np.full((24, 2), np.nan, np.float32)}, r"holds NaN or infinity \(24 of 24"),
    ):
        write(tmp_path, table, **changed)
        with pytest.raises(RunError, match=message):
            taken(name="others")
    assert {run.config.split("-")[0] for run in find_runs(tmp_path / "out")} == {"theirs"}  # nothing of those came in


def test_patterns_that_cannot_name_all_runs_are_refused(table, taken, tmp_path) -> None:
    for pattern, message in (
        ("{fold}.npz", r"embeddings: got .*{fold}.npz, expected a different file for each of 4 {fold} and 3 {repeat}"),
        ("{fold}_{seed}.npz", "embeddings: got the placeholder {seed}, expected only {fold} and {repeat}"),
        ("f{fold:s}r{repeat}.npz", "embeddings: got the placeholder {fold:s}, expected only {fold} and {repeat}"),
        ("{fold}{repeat:>100000000}.npz", "embeddings: got the placeholder {repeat:>100000000}, expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            taken(embeddings=pattern)
    with pytest.raises(RunError, match="12 of the 12 files of protocol 'mlrc' are missing"):
        taken()
    write(tmp_path, table)
    (tmp_path / PATTERN.format(fold=3, repeat=2)).unlink()
    with pytest.raises(RunError, match="1 of the 12 files"):
        taken()
    assert len(taken(allow_partial=True).scores) == 11


def test_queries_and_gallery_are_checked_each_with_and_without_ids(tmp_path) -> None:
    labels = np.array([0, 0, 1, 1, 2, 2, 3, 3, 2, 3])
    role = np.array([*["train"] * 4, *["query"] * 4, *["gallery"] * 2])
    table = ImageTable(
        name="shop", root="", paths=np.array([f"{i}.jpg" for i in range(10)]), labels=labels,
        class_names=("a", "b", "c", "d"), role=role,
    )  # fmt: skip
    test = RetrievalSet(np.arange(4, 8), np.array([8, 9]))
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    for order, ids in (([0, 1, 2, 3], None), ([2, 0, 3, 1], [6, 4, 7, 5])):
        with_ids = {} if ids is None else {"ids": np.array(ids)}
        np.savez(tmp_path / "q.npz", rows=rows[order], labels=labels[4:8][order], **with_ids)
        np.savez(
            tmp_path / "g.npz", rows=rows[4:], labels=labels[8:], **({} if ids is None else {"ids": np.array([8, 9])})
        )
        stored = read_embeddings(tmp_path / "q.npz", gallery=tmp_path / "g.npz")
        found, is_by_order = _of_table(stored, table, test, "files")
        assert is_by_order == (ids is None) and found.gallery is not None
        assert found.queries.rows.numpy().tolist() == rows[:4].tolist()
        assert found.queries.ids.tolist() == [4, 5, 6, 7] and found.gallery.ids.tolist() == [8, 9]
        assert found.gallery.labels.tolist() == [2, 3]
    one = EmbeddingSet(torch.ones(4, 2), torch.tensor([0, 0, 1, 1]), torch.tensor([4, 4, 6, 7]))
    save_embeddings(tmp_path / "twice.safetensors", one, None, {})
    with pytest.raises(RunError, match="lacks the id 5, expected the row of each test image of shop once"):
        _of_table(read_embeddings(tmp_path / "twice.safetensors"), table, RetrievalSet(np.arange(4, 8)), "files")
    save_embeddings(tmp_path / "own.safetensors", one, None, {OWN_DISTANCE: "PoincareDistance"})
    with pytest.raises(RunError, match="compares embeddings by PoincareDistance"):
        _of_table(read_embeddings(tmp_path / "own.safetensors"), table, RetrievalSet(np.arange(4, 8)), "files")
    with pytest.raises(RunError, match=r"the test half of shop has a gallery\. Add gallery="):
        _of_table(read_embeddings(tmp_path / "q.npz"), table, test, "files")


@pytest.mark.slow
def test_the_loop_of_the_docs_writes_files_that_are_imported(import_arguments, taken, repository, tmp_path) -> None:
    place = importlib.util.spec_from_file_location("pml_loop", repository / "docs" / "pml_loop.py")
    loop = importlib.util.module_from_spec(place)
    place.loader.exec_module(loop)
    loop.main(tmp_path, steps=2, classes=24, images=4, size=32)
    dataset = import_arguments.dataset
    imported = taken(dataset={**dataset, "table": {**dataset["table"], "num_classes": 24}})
    assert len(imported.scores) == 12 and imported.notes == ()
