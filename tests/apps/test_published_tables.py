"""Published tables in short: which are taken, and what is said of them."""

from pathlib import Path

import pytest

from dmlbench.apps.published_tables import summarize_tables
from dmlbench.types import DataError


def test_a_table_of_one_repeat_of_every_fold_says_so(tmp_path: Path) -> None:
    (tmp_path / "cars").mkdir()
    note = "PARTIAL: 4 of 12 runs, without fold0_rep1; one collection, hence no std of fold models; exact search"
    (tmp_path / "cars" / "cars-mlrc.csv").write_text(
        "row,separated (8-D) P@1 mean,separated (8-D) P@1 std,separated (8-D) MAP@R mean,separated (8-D) MAP@R std,"
        f'notes\na,10.0,,2.345,,"{note}"\n'
    )
    text = summarize_tables(tmp_path)
    assert f"({tmp_path}/cars/cars-mlrc.md), `mlrc`, 4 of 12 runs | a | **10.00** | **2.35** |" in text


def test_only_tables_with_deviations_are_taken_and_the_best_are_bold(tmp_path: Path) -> None:
    head = "row,separated (8-D) P@1 mean,separated (8-D) P@1 std,separated (8-D) MAP@R mean,separated (8-D) MAP@R std"
    for name, std, notes in (("whole", "0.25", "exact search; NOT THE PUBLISHED DATA: cut"), ("one_run", "", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}-mlrc.csv").write_text(
            f"{head},notes\na,10.0,{std},2.345,{std},{notes}\nb,9.0,{std},3,{std},{notes}\n"
        )
    (tmp_path / "whole" / "other-mlrc.csv").write_text("claim,value\nis no table of configs,1\n")
    text = summarize_tables(tmp_path)
    assert f"| [whole]({tmp_path}/whole/whole-mlrc.md), `mlrc` | a | **10.00 ± 0.25** | 2.35 ± 0.25 |" in text
    assert "|  | b | 9.00 ± 0.25 | **3.00 ± 0.25** |" in text
    assert "\nwhole: NOT THE PUBLISHED DATA: cut\n" in text
    assert "one_run" not in text
    with pytest.raises(DataError, match="no table whose rows have deviations"):
        summarize_tables(tmp_path / "one_run")


def test_a_row_without_concatenated_models_shows_a_dash(tmp_path: Path) -> None:
    (tmp_path / "methods").mkdir()
    kinds = [f"{kind} (8-D) {metric}" for kind in ("separated", "concatenated") for metric in ("P@1", "MAP@R")]
    head = ",".join(f"{name} {what}" for name in kinds for what in ("mean", "std"))
    (tmp_path / "methods" / "birds-mlrc.csv").write_text(
        f"row,{head},notes\na,1,.5,2,.5,3,.5,4,.5,\nb,5,.5,6,.5,,,,,\n"
    )
    assert "|  | b | **5.00 ± 0.50** / – | **6.00 ± 0.50** / – |" in summarize_tables(tmp_path)
