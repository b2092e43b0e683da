"""Test vectors for other libraries: dmlbench gives every score, the script gives the file, the page its table."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fenced_blocks import blocks

from dmlbench.evaluation import EvaluationSpec, evaluate_arrays
from dmlbench.types import RunError

FOLDER = "outputs/published/test_vectors"
LIBRARIES = ("pml", "torchmetrics", "pytrec_eval")


@pytest.fixture(scope="module")
def contents(repository) -> dict[str, Any]:
    return json.loads((repository / FOLDER / "vectors.json").read_text(encoding="utf-8"))


def _arrays(part: dict[str, list]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(part["rows"], dtype=np.float32), np.array(part["labels"]), np.array(part["ids"])


def _scores(case: dict[str, Any], *, gallery: dict[str, list] | None) -> tuple[dict[str, float], int]:
    rows, labels, ids = _arrays(case["query"])
    others = _arrays(gallery) if gallery else (None, None, None)
    found = evaluate_arrays(
        rows, labels, ids=ids, gallery_rows=others[0], gallery_labels=others[1], gallery_ids=others[2],
        spec=EvaluationSpec(metrics=tuple(case["expected"])),
    )  # fmt: skip
    return found.scores, found.n_skipped_queries


def _assert_expected(case: dict[str, Any], scores: dict[str, float], skipped: int) -> None:
    assert skipped == case["n_skipped_queries"]
    expected = {name: value["decimal"] for name, value in case["expected"].items()}
    assert scores == pytest.approx(expected, rel=0, abs=1e-15), case["name"]


def test_dmlbench_gives_every_expected_score(contents) -> None:
    alone = 0
    for case in contents["cases"]:
        if case["name"] == "duplicate_ids":
            continue
        _assert_expected(case, *_scores(case, gallery=case["gallery"]))
        if case["search"] == "the queries among themselves":
            assert case["query"] == case["gallery"]
            _assert_expected(case, *_scores(case, gallery=None))
            alone += 1
    assert alone >= 3


def test_duplicate_ids_raise_an_error_and_the_expected_scores_are_those_without_them(contents) -> None:
    (case,) = (case for case in contents["cases"] if case["name"] == "duplicate_ids")
    gallery = case["gallery"]
    with pytest.raises(RunError, match="ids"):
        _scores(case, gallery=gallery)
    first = [i for i, number in enumerate(gallery["ids"]) if number not in gallery["ids"][:i]]
    _assert_expected(case, *_scores(case, gallery={key: [values[i] for i in first] for key, values in gallery.items()}))


def test_the_script_writes_the_published_file(repository, tmp_path, monkeypatch, capsys) -> None:
    output = tmp_path / "vectors.json"
    monkeypatch.setattr(sys, "argv", ["test_vectors.py", "--output", str(output)])
    runpy.run_path(str(repository / "scripts/test_vectors.py"), run_name="__main__")
    assert output.read_bytes() == (repository / FOLDER / "vectors.json").read_bytes()
    assert output.stat().st_size < 50_000
    assert capsys.readouterr() == ("", "")


def _deviations(repository: Path, library: str) -> set[str]:
    """Cases that the page's table names for a library."""
    lines = [line for line in (repository / "docs/test_vectors.md").read_text("utf-8").splitlines() if line[:1] == "|"]
    header, _, *rows = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in lines]
    (column,) = (i for i, cell in enumerate(header) if cell.lower().startswith(library))
    return {row[0] for row in rows if row[column] != "equal"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_scripts_of_the_page_give_its_table(repository, contents, library, tmp_path, monkeypatch, capsys) -> None:
    (script,) = (b for b in blocks(repository / "docs/test_vectors.md") if b.title == f"{library}_vectors.py")
    (tmp_path / "vectors.json").write_bytes((repository / FOLDER / "vectors.json").read_bytes())
    (tmp_path / script.title).write_text(script.text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(script.title)
    differ: dict[str, set[str]] = {}
    lines = capsys.readouterr().out.splitlines()
    for name, score, value, expected in map(str.split, lines):
        if float(value) != pytest.approx(float(expected), rel=0, abs=1e-6):
            differ.setdefault(name, set()).add(score)
    # MAP@2 has another divisor everywhere, which the table says once.
    cases = {name for name, scores in differ.items() if name == "r_larger_than_k" or scores != {"map_at_2"}}
    assert cases == _deviations(repository, library)
    assert {line.split()[0] for line in lines} == {case["name"] for case in contents["cases"]}
