"""Submissions: twelve files of other code become a config; broken folders are rejected with their reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dmlbench.apps.submission import Checked, check_submission, read_submission
from dmlbench.data.protocols import Mlrc
from dmlbench.results.store import find_runs, read_result
from dmlbench.types import ImageTable, RunError

DESCRIPTION = {
    "method": "theirs", "backbone": "small CNN", "pretraining_data": "none", "trained_parameters": 1234,
    "image_size": 32, "tuning_budget": "one setting", "selected": "last step", "dataset": "glyphs_collage",
}  # fmt: skip


@pytest.fixture
def folder(table: ImageTable, tmp_path: Path) -> Path:
    place = tmp_path / "submission"
    place.mkdir()
    (place / "submission.yaml").write_text(yaml.safe_dump(DESCRIPTION), "utf-8")
    for fold in range(4):
        for repeat in range(3):
            save(place, table, fold, repeat)
    return place


@pytest.fixture
def check(folder: Path, import_arguments: Any) -> Callable[[], Checked]:
    return lambda: check_submission(import_arguments, read_submission(folder), folder)


def save(place: Path, table: ImageTable, fold: int, repeat: int, **changed: np.ndarray) -> None:
    test = Mlrc().split(table, fold=fold).test.query
    rng = np.random.default_rng(3 * fold + repeat)
    rows = rng.normal(size=(len(test), 12)).astype("f4") + 3 * np.eye(12, dtype="f4")[table.labels[test]]
    np.savez(
        place / f"fold{fold}_rep{repeat}.npz", **({"rows": rows, "labels": table.labels[test], "ids": test} | changed)
    )


def test_twelve_files_are_scored_and_their_training_is_not_verified(check, tmp_path: Path) -> None:
    found = check()
    assert len(found.imported.scores) == 12 and found.flags == ()
    told = read_result(find_runs(tmp_path / "out")[0].path)["imported"]
    assert told["trained"].startswith("TRAINING NOT VERIFIED, small CNN, pretrained on none; 1,234 trained parameters")
    assert told["selected"] == "last step"


def rotated(rows: np.ndarray) -> np.ndarray:
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))
    return (3 * rows @ turn).astype("f4")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", r"1 of the 12 files of protocol 'mlrc' are missing: fold2_rep1"),
        ("copied", r"fold3_rep0\.npz is a copy of fold1_rep0\.npz"),
        ("rotated", r"fold3_rep0\.npz is a copy of fold1_rep0\.npz"),
        ("labels", r"the labels do not match the test images of glyphs_collage"),
        ("nan", r"(?s)fold0_rep0.*(NaN|finite).*fold0_rep1"),
        ("split", r"has the id 0|lacks the id"),
        ("pattern", r"got the placeholder \{fold\.x\}"),
        ("method", r"method: got '.*', expected letters, digits"),
        ("key", r"papr"),
    ],
)
def test_a_broken_folder_is_rejected_with_its_reason(folder, table, check, tmp_path, change: str, reason: str) -> None:
    description = dict(DESCRIPTION)
    test = Mlrc().split(table, fold=0).test.query
    with np.load(folder / "fold1_rep0.npz") as file:
        other = dict(file)
    if change == "missing":
        (folder / "fold2_rep1.npz").unlink()
    elif change == "copied":
        order = np.random.default_rng(1).permutation(len(test))
        np.savez(folder / "fold3_rep0.npz", **{key: value[order] for key, value in other.items()})
    elif change == "rotated":
        np.savez(folder / "fold3_rep0.npz", **(other | {"rows": rotated(other["rows"])}))
    elif change == "labels":
        save(folder, table, 0, 0, labels=np.roll(table.labels[test], 1))
    elif change == "nan":
        for repeat in (0, 1):  # both are told
            save(folder, table, 0, repeat, rows=np.full((len(test), 6), np.nan, dtype="f4"))
    elif change == "split":
        save(folder, table, 0, 0, ids=np.arange(len(test)))
    elif change == "pattern":
        description["embeddings"] = "fold{fold.x}.npz"
    elif change == "method":
        description["method"] = "a/b"
    elif change == "key":
        description["papr"] = "x"
    (folder / "submission.yaml").write_text(yaml.safe_dump(description), "utf-8")
    with pytest.raises(Exception, match=reason) as caught:
        check()
    assert type(caught.value).__name__ in ("RunError", "ConfigError")
    assert not list((tmp_path / "out").rglob("result.json"))


def test_perfect_scores_are_flagged(folder: Path, table: ImageTable, check) -> None:
    for fold in range(4):
        test = Mlrc().split(table, fold=fold).test.query
        for repeat in range(3):
            noise = np.random.default_rng(3 * fold + repeat).normal(size=(len(test), 12)) * 0.05
            save(folder, table, fold, repeat, rows=(np.eye(12)[table.labels[test]] + noise).astype("f4"))
    (flag,) = check().flags
    assert flag.startswith("P@1 reaches 100.00")


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"submission\.yaml is missing"):
        read_submission(tmp_path)
