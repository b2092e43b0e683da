"""Rows against references, from runs that the test writes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dmlbench.apps.compare_configs import ConfigSummary
from dmlbench.apps.reference_comparison import (
    complete_rows,
    conclusions,
    differences_of,
    rank_figure,
    reference_table,
    score_figure,
)
from dmlbench.results.collections import holm, paired_difference
from dmlbench.results.store import Coordinates, RunInfo
from dmlbench.types import ConfigError

LABELS = np.repeat(np.arange(10), 4)
AT = [(fold, repeat) for fold in range(4) for repeat in range(3)]


def config(
    folder: Path, label: str, base: float, seed: int, missing: tuple[str, ...] = (), at: Sequence[Coordinates] = AT
) -> ConfigSummary:
    """A config of twelve runs whose scores of queries lie around ``base``."""
    rng = np.random.default_rng(seed)
    runs, raw = [], {}
    for fold, repeat in at:
        path = folder / label / f"fold{fold}_rep{repeat}"
        path.mkdir(parents=True)
        scores = base + 0.01 * fold + 0.01 * rng.normal(size=len(LABELS))
        pd.DataFrame({"id": range(len(LABELS)), "label": LABELS, "map_at_r": scores}).to_csv(path / "per_query.csv")
        raw[path.name] = {"map_at_r": float(scores.mean())}
        runs.append(RunInfo(path, "glyphs", "mlrc", label, fold, repeat))
    summary = {"raw": raw, "missing": list(missing), "training": {"trained_parameters": seed}}
    return ConfigSummary(folder / label, tuple(runs), summary, label)


@pytest.fixture
def configs(tmp_path: Path) -> list[ConfigSummary]:
    return [
        config(tmp_path, *given)
        for given in (("base", 0.5, 0), ("same", 0.5, 1), ("better", 0.6, 2), ("worse", 0.4, 3))
    ]


def test_differences_are_paired_corrected_and_bootstrapped(configs) -> None:
    found = differences_of(configs, ["base"], ["map_at_r"])["map_at_r"]["base"]
    assert [one.label for one in found] == ["same", "better", "worse"]
    raw = [{at: c.summary["raw"][f"fold{at[0]}_rep{at[1]}"]["map_at_r"] for at in AT} for c in configs]
    expected = [paired_difference(raw[0], other) for other in raw[1:]]
    assert [one.paired for one in found] == expected
    assert [one.p_value for one in found] == holm([pair.p_value for pair in expected])
    for one in found:
        assert one.classes[0] <= one.paired.difference <= one.classes[1]
    assert [one.is_ahead for one in found] == [False, True, False]
    assert [one.is_significant for one in found] == [False, True, True]


def test_runs_that_not_all_rows_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    configs = [config(tmp_path, "base", 0.5, 0), config(tmp_path, "more", 0.6, 1, at=[*AT, (0, 3)])]
    differences = differences_of(configs, ["base"], ["map_at_r"])["map_at_r"]
    (found,) = differences["base"]
    assert found.paired.n_pairs == 12
    assert "differences leave out fold0_rep3, which not all rows have" in caplog.text
    notes = reference_table("title", configs, differences, "map_at_r").notes
    assert notes[0] == "differences: 12 runs of each row, which all rows have; MAP@R: all runs of a row"


def test_conclusions_name_what_is_alike_and_what_is_not_ahead(configs) -> None:
    found = differences_of(configs, ["base", "better"], ["map_at_r"])["map_at_r"]
    assert conclusions(found, "map_at_r") == [
        "MAP@R: no significant difference from base: same",
        "MAP@R: not ahead of better: base, same, worse",
    ]


def test_the_table_has_a_row_for_each_config_and_its_csv_each_difference(configs) -> None:
    found = differences_of(configs, ["base"], ["map_at_r"])["map_at_r"]
    table = reference_table("title", configs, found, "map_at_r")
    assert list(table.frame.index) == ["base", "same", "better", "worse"]
    assert table.frame["− base"]["base"] == ""
    assert table.notes[0].startswith("points, with 95 % t intervals")
    assert table.frame["− base"]["better"].startswith("+9.98 [")
    assert len(table.to_frame()) == 3


def test_an_unknown_reference_is_an_error(configs) -> None:
    with pytest.raises(ConfigError, match=r"got 'bsae', expected a row: .*base"):
        differences_of(configs, ["bsae"], ["map_at_r"])


def test_figures_rank_the_best_rows_first_and_leave_incomplete_ones_out(configs, tmp_path: Path) -> None:
    partial = config(tmp_path, "partial", 0.9, 4, missing=("fold0_rep0",))
    assert complete_rows([*configs, partial]) == configs
    scores = score_figure({"glyphs": configs}, ["base"], "map_at_r").axes[0]
    assert [tick.get_text() for tick in scores.get_yticklabels()][-1] == "better"
    ranks = rank_figure({"glyphs": configs}, "map_at_r").axes[0]
    assert [tick.get_text() for tick in ranks.get_yticklabels()][::-1][0] == "better"
    assert ranks.texts[-1].get_text() == "1.0"


def test_one_pair_of_runs_tells_nothing(tmp_path: Path) -> None:
    both = [
        config(tmp_path, label, base, seed, at=AT[:1]) for label, base, seed in (("one", 0.5, 0), ("other", 0.6, 1))
    ]
    found = differences_of(both, ["one"], ["map_at_r"])["map_at_r"]
    assert (found["one"][0].p_value, found["one"][0].is_significant) == (None, False)
    assert conclusions(found, "map_at_r") == ["MAP@R: not tested, as each difference is from one pair of runs"]


def test_runs_of_different_queries_cannot_be_compared(configs) -> None:
    path = configs[1].runs[3].path / "per_query.csv"
    pd.read_csv(path, index_col=0).iloc[:-1].to_csv(path)
    with pytest.raises(ConfigError, match="got runs of different queries"):
        differences_of(configs, ["base"], ["map_at_r"])


def test_rows_that_no_seed_changes_have_no_p_value_and_are_told_apart_by_classes(tmp_path: Path) -> None:
    fixed = [config(tmp_path, label, base, 5) for label, base in (("one", 0.5), ("other", 0.6))]
    (found,) = differences_of(fixed, ["one"], ["map_at_r"])["map_at_r"]["one"]
    assert found.paired.difference == pytest.approx(0.1)
    assert (found.p_value, found.is_significant, found.is_ahead) == (None, True, True)
