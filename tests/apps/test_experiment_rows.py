"""Rows of tables: overrides from an experiment's ``reproduce``, beside the paper's scores."""

from pathlib import Path

import pytest

from dmlbench.apps.experiment_rows import (
    QUOTED,
    experiments,
    last_of_each,
    narrowed,
    own_rows,
    paper_tables,
    reproduce_of,
    rows_of_paper,
    state_of,
)
from dmlbench.cli.reproduce import grid
from dmlbench.config import config_folder
from dmlbench.evaluation.metrics.registry import score_labeled
from dmlbench.papers import tables
from dmlbench.types import ConfigError

COMPOSED = {"dataset": "cub200", "protocol": "conventional", "backbone": "resnet50"}
TABLE3 = {"rows": {"C1+XBM": "loss=xbm pooling=gap_gmp", "LIBC+GSP": {"needs": "LIBC"}}}


def test_a_score_belongs_to_the_config_of_its_row_on_its_data_set_and_backbone() -> None:
    rows = rows_of_paper("gsp/table3", TABLE3, COMPOSED)
    of_row = {(row.score.dataset, row.score.backbone): row for row in rows if row.score.row == "C1+XBM"}
    assert of_row["cub200", "resnet50"].overrides == ("experiment=gsp/table3", "loss=xbm", "pooling=gap_gmp")
    assert of_row["sop", "bn_inception"].overrides == (
        *("experiment=gsp/table3", "dataset=sop", "backbone=bn_inception", "loss=xbm", "pooling=gap_gmp"),
    )
    whys = {row.score.row: row.blocker for row in rows}
    assert whys["C1+XBM [18]"].startswith(QUOTED) and "loss=xbm_contrastive" in whys["C1+XBM [18]"]
    assert whys["LIBC+GSP"] == "needs LIBC"
    assert whys["C1+XBM"] == ""
    assert whys["C1+XBM+GSP"].startswith("needs a command")


def test_scores_of_others_stay_quoted_in_a_row_that_has_own_ones() -> None:
    rows = rows_of_paper("xml/table1", {"rows": {"PAnchor [7]": "loss=proxy_anchor"}}, COMPOSED)
    whys = {row.score.origin: row.blocker.partition(" ")[0] for row in rows if row.score.row == "PAnchor [7]"}
    assert whys == {"own": "", "quoted": QUOTED}


def test_a_table_may_name_our_metric_for_the_papers() -> None:
    reproduce = reproduce_of(experiments([config_folder()])["proxynca_pp/table7"])
    labels = {row.score.metric: row.metric for row in rows_of_paper("proxynca_pp/table7", reproduce, {})}
    assert labels["R@1"] == "R@1 (raw)"
    assert labels["R@8"] == "R@8 (raw)"
    assert labels["NMI"] == "NMI (raw, geometric)"
    assert all(score_labeled(label) for label in labels.values())


def test_settings_data_sets_and_sizes_add_theirs_and_the_last_of_a_key_wins() -> None:
    reproduce = {
        "rows": {"ProxyNCA (Emb: 2048)": ["loss=proxy_nca", "pooling=gap"]},
        "settings": {"GMP": "pooling=gmp"},
        "embedding_sizes": {2048: "head.out_features=2048"},
        "datasets": {"cub200": "dataset.table.root=x"},
    }
    rows = rows_of_paper("proxynca_pp/table10", reproduce, {"dataset": "cub200"})
    overrides = {row.score.setting: row.overrides for row in rows if not row.blocker}
    assert set(overrides["GMP"]) == set(overrides["GAP"]) - {"pooling=gap"} | {"pooling=gmp"}
    assert {"dataset.table.root=x", "head.out_features=2048", "protocol=two_stage"} < set(overrides["GAP"])
    assert last_of_each(["a=1", "+b=2", "a=3", "~b"]) == ("a=3", "~b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("5", "reproduce: got 5, expected"),
        ("{row: {}}", "reproduce.row is unknown"),
        ("{rows: [a]}", r"reproduce.rows: got \['a'\], expected"),
        ("{rows: {a: {override: x}}}", "reproduce.rows.a"),
        ("{rows: {a: x, a: y}}", "'a' occurs twice, on lines 1 and 1"),
        ("{commands: dmlbench}", "reproduce.commands: got 'dmlbench', expected"),
    ],
)
def test_a_reproduce_part_of_wrong_types_is_one_line(tmp_path, content: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"reproduce: {content}\n")
    with pytest.raises(ConfigError, match=rf"mine.yaml: {message}"):
        reproduce_of(tmp_path / "mine.yaml")


def test_every_shipped_experiment_has_a_reproduce_part_of_the_schema() -> None:
    for path in experiments([config_folder()]).values():
        reproduce_of(path)


def test_what_is_none_of_the_tables_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rows: got 'C1\+XMB'.*did you mean 'C1\+XBM'"):
        rows_of_paper("gsp/table3", {"rows": {"C1+XMB": ""}}, COMPOSED)
    rows = rows_of_paper("gsp/table3", TABLE3, COMPOSED)
    with pytest.raises(ConfigError, match="rows: got 'Nothing', expected a row"):
        narrowed(rows, ["Nothing"], {})
    with pytest.raises(ConfigError, match="no scores for dataset=cub20: did you mean 'cub200'"):
        narrowed(rows, None, {"dataset": ["cub20"]})


def test_lines_are_narrowed_by_labels_patterns_and_groups() -> None:
    rows = rows_of_paper("gsp/table3", TABLE3, COMPOSED)
    kept = narrowed(rows, ["C1+XBM [18]", "LIBC*"], {"dataset": ["cub200", "sop"]})
    assert {row.score.row for row in kept} > {"C1+XBM [18]", "LIBC+GSP"}
    assert all(row.score.row == "C1+XBM [18]" or row.score.row.startswith("LIBC") for row in kept)
    assert {row.score.dataset for row in kept} == {"cub200", "sop"}


def test_a_grid_is_its_configs_with_the_command_lines_values_in_place_of_its_own() -> None:
    params = {"repeat": "0,1", "pooling": "gap,gsp", "protocol.stage": "1,2", "optim.lr": 0.1}
    configs, coordinates = grid(params, ["pooling=gmp", "fold=2"])
    assert configs == [
        ("pooling=gmp", "protocol.stage=1", "optim.lr=0.1"),
        ("pooling=gmp", "protocol.stage=2", "optim.lr=0.1"),
    ]
    assert coordinates == {"repeat": [0, 1], "fold": [2]}
    assert len(grid(params, [])[0]) == 4
    with pytest.raises(ConfigError, match="fold=x: expected numbers from 0"):
        grid(params, ["fold=x"])


def test_a_figure_without_printed_numbers_has_its_rows_by_settings_by_data_sets() -> None:
    reproduce = {
        "rows": {"m=16": "a=16", "m=32": "a=32"}, "settings": {"C2": "loss=x", "PNCA": "loss=y"},
        "datasets": {"sop": "", "inshop": {"needs": "the pictures"}},
    }  # fmt: skip
    rows = own_rows("gsp/figure10b", reproduce, None, [])
    assert (rows[0].label, rows[0].overrides) == ("m=16", ("experiment=gsp/figure10b", "dataset=sop", "a=16", "loss=x"))
    assert [row.blocker for row in rows].count("") == 4
    assert {row.blocker for row in rows} == {"", "needs the pictures"}
    assert len(own_rows("gsp/figure10b", reproduce, ["m=32"], ["sop"])) == 2


def test_rows_of_several_settings_have_them_in_their_names() -> None:
    paper = {"rows": {"ProxyNCA (Emb: 2048)": ""}, "settings": {"GAP": "pooling=gap", "GMP": "pooling=gmp"}}
    names = {row.name for row in rows_of_paper("proxynca_pp/table10", paper, {}) if not row.blocker}
    assert names == {"ProxyNCA (Emb: 2048) (GAP)", "ProxyNCA (Emb: 2048) (GMP)"}
    own = {"rows": {"GAP": ""}, "settings": {"contrastive": "loss=contrastive", "triplet": "loss=triplet"}}
    assert [row.name for row in own_rows("x", own, None, [])] == ["GAP (contrastive)", "GAP (triplet)"]
    del own["settings"]["triplet"]
    assert [row.name for row in own_rows("x", own, None, [])] == ["GAP"]


def test_the_list_has_every_table_of_the_papers_and_every_figure_with_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment" / "gsp").mkdir(parents=True)
    (tmp_path / "experiment" / "gsp" / "figure3.yaml").write_text("reproduce:\n  needs: tokens\n")
    folders = [tmp_path, config_folder()]
    names = paper_tables(folders)
    assert set(tables()) | {"gsp/figure3", "proxynca_pp/figure4a"} <= set(names)
    assert len(names) == len(set(names))
    assert not {"avsl/base", "demo"} & set(names)
    known = experiments(folders)
    assert state_of("gsp/figure3", reproduce_of(known["gsp/figure3"]), True) == "cannot be run"
    assert state_of("gsp/table3", TABLE3, True) == "1 row, 9 quoted, 2 cannot be run"
    assert state_of("gsp/table3", {}, False) == "no experiment"
