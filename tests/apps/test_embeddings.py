"""``dmlbench evaluate`` on files: what is printed, what is written, what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from composed import arguments

from dmlbench.cli import simple_commands
from dmlbench.evaluation import EvaluationSpec, evaluate_arrays
from dmlbench.types import ConfigError, RunError


def write(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 4, 20)
    rows[7] = 0
    np.savez(folder / "x.npz", rows=rows, labels=labels)
    return rows, labels


def test_scores_counts_and_settings_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, labels = write(tmp_path)
    files = [f"{name}={tmp_path}/{name}.{kind}" for name, kind in
             (("output", "json"), ("per_query", "csv"), ("per_class", "csv"))]  # fmt: skip
    simple_commands.evaluate(arguments("evaluate", *[
        f"embeddings={tmp_path}/x.npz", "evaluation.metrics=[p_at_1,recall_at_k,map,intra_class_distance]",
        "evaluation.recall_at=[1,90]", "hardest=2", "hardest_by=map", *files,
    ]))  # fmt: skip
    expected = evaluate_arrays(
        rows, labels, spec=EvaluationSpec((1, 90), metrics=("p_at_1", "recall_at_k", "map", "intra_class_distance"))
    )
    written = json.loads((tmp_path / "output.json").read_text())
    assert written["scores"] == expected.scores
    assert (written["n_query"], written["n_skipped_queries"]) == (20, 0)
    assert written["settings"]["recall_at"] == [1, 90]
    assert len(pd.read_csv(tmp_path / "per_query.csv")) == 20
    assert pd.read_csv(tmp_path / "per_class.csv")["queries"].sum() == 20
    out = capsys.readouterr().out
    assert f"map                  {expected.scores['map']:.6f}" in out
    assert "DEGENERATE EMBEDDINGS: 1 of 20 queries are zero vectors, similar to nothing" in out
    assert "recall at 90 looks at the whole gallery of 20" in out
    hardest = np.argsort(expected.per_query["map"], kind="stable")[0]
    assert "queries with the lowest map, the distance to their nearest images, and these" in out
    assert f"  id {hardest} of class {labels[hardest]}  <- " in out


def test_classes_of_labels_that_are_text_keep_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, numbers = write(tmp_path)
    names = np.array([f"bird {number}" for number in numbers])
    np.savez(tmp_path / "text.npz", rows=rows, labels=names)
    given = [f"embeddings={tmp_path}/text.npz", f"per_class={tmp_path}/c.csv", "hardest=1"]
    simple_commands.evaluate(arguments("evaluate", *given))
    assert pd.read_csv(tmp_path / "c.csv")["class"].tolist() == sorted(set(names))
    assert " of class bird " in capsys.readouterr().out


def test_scores_below_their_limits_are_named_after_all_files_are_written(tmp_path: Path) -> None:
    rows, labels = write(tmp_path)
    scores = evaluate_arrays(rows, labels).scores
    given = [f"embeddings={tmp_path}/x.npz", f"output={tmp_path}/scores.json"]
    met = f"++fail_below={{p_at_1:{scores['p_at_1']!r},map_at_r:0}}"
    simple_commands.evaluate(arguments("evaluate", *given, met))
    (tmp_path / "scores.json").unlink()
    with pytest.raises(RunError) as failed:
        simple_commands.evaluate(arguments("evaluate", *given, "++fail_below={map_at_r:1,recall_at_4:0.99,p_at_1:0}"))
    assert str(failed.value) == (
        f"map_at_r: got {scores['map_at_r']:.6f}, expected at least 1. "
        f"recall_at_4: got {scores['recall_at_4']:.6f}, expected at least 0.99."
    )
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == scores


def test_options_that_do_not_go_together_are_refused() -> None:
    base = arguments("evaluate", "embeddings=unread.npz")
    distance, nmi = ({**base.evaluation, "metrics": [name]} for name in ("intra_class_distance", "nmi"))
    for changed, error, message in (
        ({"run": "a"}, ConfigError, "either run="),
        (
            {"run": "a", "embeddings": None, "labels": "b"},
            ConfigError,
            "labels: got b with run=, expected embeddings=<file>",
        ),
        ({"output": "none/x.json"}, RunError, "the folder none does not exist"),
        ({"output": "unread.npz"}, ConfigError, "given twice"),
        ({"fail_below": {"map": 0.2}}, ConfigError, "fail_below: got map, expected one of p_at_1, rec"),
        ({"fail_below": {"map_at_r": 20}}, ConfigError, "got 20, expected a fraction"),
        ({"evaluation": distance, "fail_below": {"intra_class_distance": 1}}, ConfigError, "got intra_class_distance"),
        ({"hardest": 0}, ConfigError, "hardest: got 0, expected at least 1"),
        ({"hardest": 2, "evaluation": nmi}, ConfigError, "this evaluation has none. Add map_at_r"),
    ):
        with pytest.raises(error, match=message):
            simple_commands.evaluate(dataclasses.replace(base, **changed))
