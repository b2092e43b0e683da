"""The papers' tables as data: whole, well-formed, and in agreement wherever a paper says a thing twice."""

import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import pytest

from dmlbench import papers
from dmlbench.evaluation.metrics import registry as metrics
from dmlbench.papers import PaperScore, describe_table, load_table, tables, why_quoted
from dmlbench.types import DataError

# Labels of rows and scores of each table, counted in the papers: lines x columns, less the dashes.
SIZES = {
    "gsp/table1": (4, 4 * 8), "gsp/table2": (25, 25 * 16), "gsp/table3": (12, 7 * 4 - 3 + 2 * 4 + 11 * 4 - 5 + 11),
    "gsp/table4": (2, 2 * 16), "gsp/table5": (4, 4 * 3), "gsp/table6": (21, 21 * 4), "gsp/table7": (9, 9 * 2),
    "gsp/figure8": (2, 2),
    "xml/table1": (10, 7 * 8 + 4 * 4),
    "proxynca_pp/table3": (8, 11 * 5 - 4), "proxynca_pp/table4": (8, 11 * 5 - 4),
    "proxynca_pp/table5": (8, 11 * 4 - 5), "proxynca_pp/table6": (6, 9 * 5 - 2),
    "proxynca_pp/table7": (7, 7 * 5), "proxynca_pp/table8": (7, 7 * 2), "proxynca_pp/table9": (10, 10 * 2),
    "proxynca_pp/table10": (11, 11 * 2), "proxynca_pp/table11": (5, 6 * 2), "proxynca_pp/table12": (8, 8 * 5),
    "proxynca_pp/table13": (8, 8 * 5), "proxynca_pp/table14": (2, 2 * 4), "proxynca_pp/table15": (2, 2 * 4),
    "proxynca_pp/appendix_d": (1, 1), "proxynca_pp/figure1": (2, 2),
    "avsl/table1": (19, 19 * 11 - 2 - 3 - 3 - 2), "avsl/table2": (5, 5 * 4), "avsl/table3": (4, 4 * 4),
    "avsl/table4": (3, 3 * 4), "avsl/figure5b": (1, 1),
    "oodml/table1": (2, 6), "oodml/table_s1": (1, 9 + 8 + 8), "oodml/table_s2": (1, 8),
    "oodml/table_s3": (8, 8 * 6), "oodml/table_s4": (8, 8 * 2 * 9), "oodml/table_s5": (8, 8 * 2 * 8),
    "hyp_vit/table1": (3, 3 * 4 * 3), "hyp_vit/table2": (9, 4 * (3 * 3 + 6 * 4)), "hist/table1": (2, 6),
    "recall_at_k/table1": (2, 4), "hier/table1": (5, 4 + 10 * 4 * 3),
    "oodml/table_s6": (8, 8 * 2 * 8), "oodml/table_s7": (4, 4 * 2 * 2 * 2 * 9), "oodml/table_s8": (3, 3 * 8),
}  # fmt: skip
MISSING = tuple(f"oodml/table_s{number}" for number in range(3, 9))


@pytest.fixture(params=sorted(SIZES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def find(table: str, **wanted: object) -> dict[tuple[str, ...], Decimal]:
    """Means of the scores whose fields are as wanted, by data set, kind and metric."""
    scores = [s for s in load_table(table) if all(getattr(s, field) == value for field, value in wanted.items())]
    found = {(s.dataset, s.kind, s.metric): s.mean for s in scores}
    assert len(found) == len(scores) > 0, (table, wanted)
    return found


def lists(scores: Iterable[PaperScore], *names: str) -> dict[tuple[object, ...], list[PaperScore]]:
    """Scores that differ in nothing but what is not named."""
    groups: dict[tuple[object, ...], list[PaperScore]] = {}
    for score in scores:
        groups.setdefault(tuple(getattr(score, each) for each in names), []).append(score)
    return groups


LINE = ("row", "setting", "dataset", "backbone", "embedding_size", "protocol")


def test_every_table_is_listed_and_every_file_is_a_table() -> None:
    assert set(tables()) == set(SIZES)
    folder = Path(papers.__file__).parent
    assert {str(file.relative_to(folder).with_suffix("")) for file in folder.glob("*/*.csv")} == set(SIZES)


def test_a_table_has_the_labels_and_scores_of_the_paper(name: str) -> None:
    scores = load_table(name)
    assert (len({score.row for score in scores}), len(scores)) == SIZES[name]


def test_every_quoted_row_says_what_it_lacks_or_what_runs_its_method(name: str) -> None:
    for row, dataset in {(score.row, score.dataset) for score in load_table(name) if score.origin == "quoted"}:
        assert re.search("lacks .|the method is `loss[=.]", why_quoted(name, row, dataset)), row
        assert "LIBC" not in row or f"recipe=libc dataset={dataset} " in why_quoted(name, row, dataset)


def test_no_score_stands_twice(name: str) -> None:
    assert all(len(group) == 1 for group in lists(load_table(name), *LINE, "kind", "metric").values())


def test_every_number_is_possible(name: str) -> None:
    unit = describe_table(name).unit
    assert unit in ("percent", "FID", "ms")
    for score in load_table(name):
        if name in MISSING:
            assert score.mean is None and score.std is None and "missing" in score.note
            continue
        if score.mean is None:
            assert score.note.startswith("not printed")
            continue
        assert score.mean > 0
        assert unit != "percent" or score.mean <= 100
        assert score.std is None or 0 <= score.std < score.mean


def test_every_word_is_one_of_the_project(name: str, repository: Path) -> None:
    groups = {
        group: {file.stem for file in (repository / "conf" / group).glob("*.yaml")} for group in ("dataset", "protocol")
    }
    backbones = {file.stem for file in (repository / "conf/backbone").glob("*.yaml")}
    labels = {metric.label for metric in metrics.TABLE} | {
        f"R@{k}" for k in (1, 2, 4, 8, 10, 20, 30, 40, 50, 100, 1000)
    }
    for score in load_table(name):
        assert score.dataset in groups["dataset"] | {"cifar100_collage", "imagenet", ""}
        assert score.protocol in groups["protocol"] | {"oodml", ""}
        assert score.backbone in backbones | {"googlenet", "inception_v3", "resnet50_v2", "efficientnet_v2_b3", ""}
        assert score.metric in labels | {"FID", "accuracy", "ms per image"}
        assert score.kind in ("separated", "concatenated", "")
        assert score.origin in ("own", "quoted", "unknown")


def test_recall_never_falls_with_more_neighbors(name: str) -> None:
    for scores in lists((s for s in load_table(name) if s.metric.startswith("R@") and s.mean), *LINE).values():
        ordered = sorted(scores, key=lambda score: int(score.metric[2:]))
        assert [s.mean for s in ordered] == sorted(s.mean for s in ordered)


def test_joined_models_are_better_and_precision_is_above_map_at_r(name: str) -> None:
    scores = [s for s in load_table(name) if s.kind]
    for group in lists(scores, "row", "dataset", "metric").values():
        by_kind = {s.kind: s.mean for s in group}
        assert len(by_kind) == 1 or by_kind["concatenated"] > by_kind["separated"]
    for group in lists([s for s in load_table(name) if s.metric in ("P@1", "R@1", "MAP@R")], *LINE, "kind").values():
        by_metric = {s.metric: s.mean for s in group}
        if len(by_metric) == 2:
            assert by_metric.pop("MAP@R") < by_metric.popitem()[1]


OF_ALL, CARS = {"row": "ProxyNCA++", "embedding_size": 2048}, {"dataset": "cars196"}
SAME = [
    *(("gsp/table1", {"row": row}, "gsp/table2", {"row": row, "metric": "MAP@R"}) for row in ("C2+GAP", "C2+GSP")),
    *(("gsp/table4", {"row": row, "metric": "R@1"}, "gsp/table3", {"row": c, "backbone": "resnet50", "metric": "R@1"})
      for row, c in (("LIBC+GSP", "LIBC+GSP"), ("XBM+GSP", "C1+XBM+GSP"))),
    *(("xml/table1", {"row": row, "protocol": "mlrc"}, "gsp/table2", {"row": of_gsp, "metric": "MAP@R"})
      for row, of_gsp in (("Triplet [2]", "Triplet+GAP"), ("MS [3]", "MS+GAP"), ("Contrastive [1]", "C2+GAP"),
                          ("PAnchor [7]", "PAnchor+GAP"))),
    *(("xml/table1", {"row": row, "protocol": "conventional"}, "gsp/table3", {"row": of_gsp, "backbone": "resnet50"})
      for row, of_gsp in (("MS+Metrix [6]", "MS+Metrix [6]"), ("LIBC [11]", "LIBC [24]"),
                          ("PAnchor [7]", "ProxyAnchor [70]"))),
    ("proxynca_pp/table7", {"row": "ProxyNCA++ (Emb: 2048)"}, "proxynca_pp/table3", OF_ALL),
    *((f"proxynca_pp/table{number}", {"row": row}, f"proxynca_pp/table{of_all}", wanted)
      for number, of_all in ((12, 3), (13, 4))
      for row, wanted in (("ProxyNCA++", OF_ALL), ("-max -fast", {"row": "ProxyNCA++ (-max, -fast)"}))),
    *((f"avsl/table{number}", {"row": row}, "avsl/table1", {"row": "ProxyAnchor [13]", **CARS})
      for number, row in ((2, "ProxyAnchor"), (3, "PA"), (4, "PA"))),
    *((f"avsl/table{number}", {"row": row}, "avsl/table1", {"row": "ProxyAnchor-AVSL", **CARS})
      for number, row in ((3, "PA-AVSL (gamma=0.50)"), (4, "PA-AVSL"))),
]  # fmt: skip


@pytest.mark.parametrize(("table", "wanted", "other", "wanted_of_other"), SAME)
def test_scores_that_two_tables_print_are_the_same(table: str, wanted: dict, other: str, wanted_of_other: dict) -> None:
    assert find(table, **wanted) == find(other, **wanted_of_other)


def test_oodml_rounds_the_distances_of_the_usual_splits_to_three_of_its_own() -> None:
    usual = find("oodml/table1", row="Default - different classes train/test")
    splits = {(s.dataset, s.setting): s.mean for s in load_table("oodml/table_s1")}
    for dataset, split in (("cub200", 3), ("cars196", 1), ("sop", 1)):
        assert round(usual[dataset, "", "FID"], 1) == splits[dataset, f"split {split}"]


@pytest.mark.parametrize(
    ("name", "printed", "said"),
    [("gsp/table2", "45.53", "slip"), ("gsp/table2", "57.43", "57.58"), ("xml/table1", "57.58", "57.43"),
     ("avsl/table1", "95.0", "94.8"), ("avsl/table1", "97.0", "96.9"), ("avsl/table2", "94.8", "95.0"),
     ("avsl/table2", "96.9", "97.0"), ("proxynca_pp/table15", "84.2", "84.1"), ("proxynca_pp/table12", "67.6", "2.2")],
)  # fmt: skip
def test_a_known_slip_is_kept_as_printed_and_marked(name: str, printed: str, said: str) -> None:
    assert any(str(score.mean) == printed and said in score.note for score in load_table(name))


def test_an_unknown_table_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(DataError, match=r"'gsp/tabel2': did you mean 'gsp/table2'\?$"):
        load_table("gsp/tabel2")
