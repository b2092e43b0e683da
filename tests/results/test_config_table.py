"""Tables of configs: what is printed, labels, notes, gains over a frozen backbone, and a short form of many tables."""

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dmlbench.results.config_table import config_labels, differing_settings, gains_over_frozen, make_table
from dmlbench.results.shared_settings import shared_settings
from dmlbench.results.table import Table, summarize_tables
from dmlbench.types import DataError, escape_latex


def _summary(mean: float, std: float | None, **changes: object) -> dict[str, object]:
    score = {"p_at_1": {"mean": mean, "std": std}, "map_at_r": {"mean": mean / 2, "std": std}}
    summary = {
        "scores": {"separated": score, "concatenated": score},
        "dimension": {"separated": 128, "concatenated": 512},
        "n_runs": 12, "n_runs_expected": 12, "missing": [], "n_collections": 81, "val_is_test": False,
        "search": "exact", "dataset_fingerprint": "f",
        "n_query": 100, "n_gallery": 100, "n_skipped_queries": 0, "scored_on": "test", "n_runs_not_started": 0,
    }  # fmt: skip
    return summary | changes


def _table(*summaries: dict[str, object]):
    return make_table(
        "glyphs under mlrc", summaries, [f"row_{i}" for i in range(len(summaries))], ["p_at_1", "map_at_r"]
    )


def test_scores_are_percent_with_two_decimals_and_the_best_is_marked() -> None:
    table = _table(_summary(0.5, 0.01), _summary(0.61234, 0.02))
    text = table.to_text()
    assert "50.00 ± 1.00 " in text
    assert "61.23 ± 2.00*" in text
    assert "**61.23 ± 2.00**" in table.to_markdown()
    assert r"\textbf{61.23 $\pm$ 2.00}" in table.to_latex()
    assert r"row\_1" in table.to_latex()
    lines = table.to_latex().splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}"
    assert r"\caption{glyphs under mlrc, percent; best of each column in bold.}" in lines
    assert r"\label{tab:glyphs-under-mlrc}" in lines
    assert lines[-1] == r"\end{table}"
    assert "separated (128-D)" in text
    assert "concatenated (512-D)" in text


def test_scores_that_print_alike_are_all_best_and_a_single_row_has_none() -> None:
    assert "**" not in _table(_summary(0.5, None)).to_markdown()
    assert "- percent\n" in _table(_summary(0.5, None)).to_markdown()
    assert "*" not in _table(_summary(0.5, None)).to_text()
    text = _table(_summary(0.500001, None), _summary(0.5, None)).to_markdown()
    assert text.count("**50.00**") == 4
    assert "- percent; best of each column in bold\n" in text


def test_concatenations_of_one_model_and_columns_without_values_are_left_out() -> None:
    one_fold = _summary(0.5, None, dimension={"separated": 128, "concatenated": 128})
    assert [kind for kind, _ in _table(one_fold, one_fold).columns] == ["separated (128-D)"] * 2
    of_queries = {"p_at_1": {"mean": 0.5, "std": None}}
    clustered = _summary(0.5, None, scores={"separated": {**of_queries, "nmi": {"mean": 0.1, "std": None}},
                                            "concatenated": of_queries})  # fmt: skip
    table = make_table("t", [clustered], ["a"], ["p_at_1", "nmi"])
    assert table.columns == [
        ("separated (128-D)", "P@1"), ("separated (128-D)", "NMI"), ("concatenated (512-D)", "P@1")
    ]  # fmt: skip
    assert len(table.higher_is_better) == 3
    one_run = {"best": of_queries, "mean": of_queries}
    only = _summary(0.5, None, scores=one_run, n_runs=1, n_collections=None)
    several = _summary(0.5, None, scores=one_run, n_collections=None)
    assert make_table("t", [only], ["a"], ["p_at_1"]).columns == [("mean", "P@1")]
    assert make_table("t", [only, several], ["a", "b"], ["p_at_1"]).columns == [("best", "P@1"), ("mean", "P@1")]
    assert "1 run, hence no std" in make_table("t", [only], ["a"], ["p_at_1"]).to_text()


def test_notes_say_which_numbers_rest_on_shortlists() -> None:
    short = _summary(0.5, 0.01, search="shortlist@100", concatenated_search="exact")
    text = _table(_summary(0.5, 0.01), short).to_text()
    assert "row_0: exact search, 100 queries" in text
    caveat = "APPROXIMATE SEARCH: shortlist@100 ranks a shortlist of each query"
    assert f"row_1: {caveat}; shortlist@100 search (concatenated: exact), 100 queries" in text


def test_deviations_of_recipes_are_under_the_table_once_each_with_their_rows() -> None:
    shared, own = "recipe=gsp deviates: Proxies are clipped.", "recipe=gsp deviates: Batch norm is frozen."
    table = _table(_summary(0.5, 0.01, deviations=[shared]), _summary(0.6, 0.01, deviations=[shared, own]))
    assert [note for note in table.notes if "deviates" in note] == [shared, f"{own} (row_1)"]
    assert own in table.row_notes[1]
    assert own not in table.row_notes[0]
    assert shared in table.to_text()


def test_csv_keeps_full_precision_in_separate_columns() -> None:
    rows = list(csv.DictReader(io.StringIO(_table(_summary(0.61234567, 0.02), _summary(0.5, None)).to_csv())))
    assert float(rows[0]["separated (128-D) P@1 mean"]) == pytest.approx(61.234567)
    assert rows[1]["separated (128-D) P@1 std"] == ""


def test_numbers_with_thousands_separators_and_signs_are_numbers_in_the_csv() -> None:
    columns = {"floats": ["163,840", "1,024"], "gain": ["+3.3", "-0.5"], "words": ["1,024", "a, b"]}
    frame = Table("t", pd.DataFrame(columns, index=["a", "b"]), row_notes=((), ())).to_frame()
    assert frame["floats"].tolist() == [163840, 1024]
    assert frame["gain"].tolist() == [3.3, -0.5]
    assert frame["words"].tolist() == ["1,024", "a, b"]


def test_a_table_says_that_it_replaces_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = _table(_summary(0.5, 0.01)), _table(_summary(0.6, 0.01))
    for table, replaces in ((first, False), (first, False), (other, True)):
        table.publish(tmp_path / "t")
        line = f"written: {tmp_path}/t.md, .csv, .tex{' (replaced)' if replaces else ''}"
        assert line in capsys.readouterr().out.splitlines()


def test_partial_table_says_on_how_many_runs_it_rests_and_prints_no_std() -> None:
    partial = _summary(0.4, None, n_runs=3, missing=["fold3_rep0"], n_collections=1, n_skipped_queries=7)
    text = _table(_summary(0.5, 0.01), partial).to_text()
    assert "row_1: PARTIAL: 3 of 12 runs, without fold3_rep0; one collection, hence no std" in text
    many = partial | {"missing": [f"fold{i}_rep2" for i in range(9)]}
    text_of_many = _table(_summary(0.5, 0.01), many, many).to_text()
    said = "PARTIAL: 3 of 12 runs, without fold0_rep2, fold1_rep2, fold2_rep2, fold3_rep2 and 5 more; one collection"
    assert f"row_1, row_2: {said}" in text_of_many  # rows with the same facts share a line
    assert "40.00 " in text and "7 without a positive left out" in text
    assert "40.00 ±" not in text


def test_what_the_data_are_not_is_printed_under_the_table() -> None:
    notes = ["a subset: 588 of 16,185 images", "images cut to their boxes"]
    subset = _summary(0.5, None, data_notes=notes, n_query=196, n_gallery=196, n_query_published=8131)
    table = _table(subset, _summary(0.5, None))
    said = "NOT THE PUBLISHED DATA: a subset: 588 of 16,185 images; images cut to their boxes; 196 of 8,131 queries"
    for text in (table.to_text(), table.to_markdown()):
        assert f"row_0: {said}; exact search, 196 of 8,131 queries" in text
    assert "PUBLISHED" not in _table(_summary(0.5, None)).to_text()
    of_rows = {row["row"]: row["notes"] for row in csv.DictReader(io.StringIO(table.to_csv()))}
    assert said in of_rows["row_0"]
    assert (
        of_rows["row_1"]
        == "12 runs; mean ± population std over 81 collections of fold models; exact search, 100 queries"
    )


def test_a_latex_caption_leaves_out_no_caution() -> None:
    partial = _summary(0.4, None, n_runs=3, missing=["fold3_rep0"], n_collections=1, val_is_test=True)
    table = _table(partial, _summary(0.5, None, search="shortlist@100", data_notes=["a subset: 1 of 2 images"]))
    (caption,) = [line for line in table.to_latex().splitlines() if line.startswith(r"\caption")]
    assert caption == (
        r"\caption{glyphs under mlrc, percent. "
        r"row\_0: PARTIAL: 3 of 12 runs; SELECTED ON TEST: the validation set is the test set. "
        r"row\_1: NOT THE PUBLISHED DATA: a subset: 1 of 2 images; "
        r"APPROXIMATE SEARCH: shortlist@100 ranks a shortlist of each query.}"
    )
    assert r"\caption{glyphs under mlrc, percent.}" in _table(_summary(0.5, None)).to_latex()


def test_text_in_latex_is_printed_as_it_is() -> None:
    assert escape_latex("ä_ö^2 ~5 % <b>") == r"ä\_ö\textasciicircum{}2 \textasciitilde{}5 \% \textless{}b\textgreater{}"


def test_labels_name_only_what_differs() -> None:
    def config(pooling: str, **config: object):
        return {"backbone": "r", "pooling": pooling, "loss": "l"}, {"fit.max_steps": 9, "optim.lr": 1.0} | config

    assert config_labels([config("gap"), config("gsp")]) == (["gap", "gsp"], [{}, {}])
    with_rates = [config("gap"), config("gap", **{"optim.lr": 2.0}), config("gap", **{"fit.max_steps": 0})]
    assert config_labels(with_rates) == (["gap optim.lr=1.0", "gap optim.lr=2.0", "gap (no training)"], [{}] * 3)
    with_steps = [config("gap", **{"fit.max_steps": steps}) for steps in (3, 6)]
    tuned = ({"pooling": "gap", "tuning": "lora"}, {"fit.max_steps": 3, "tuning.rank": 4})
    assert config_labels([tuned, ({"pooling": "gap"}, {"fit.max_steps": 3})])[0] == ["gap lora", "gap"]
    assert config_labels(with_steps) == (["gap fit.max_steps=3", "gap fit.max_steps=6"], [{}, {}])
    with_data = [config("gap", **{"loss.num_classes": 39, "loss.m": 0.4}), config("gap", **{"loss.num_classes": 40})]
    assert config_labels(with_data) == (["gap loss.m=0.4", "gap"], [{}, {}])
    with_null = [config("gap", **{"fit.patience": patience}) for patience in (None, 5)]
    assert config_labels(with_null) == (["gap", "gap fit.patience=5"], [{}, {}])
    of_two = [config("gap", **{"fit.patience": None}), config("gsp", **{"fit.patience": 5})]
    assert config_labels(of_two) == (["gap", "gsp"], [{"fit.patience": "null"}, {"fit.patience": "5"}])


def test_labels_without_training_name_no_loss() -> None:
    def config(pooling: str, loss: str, steps: int, **config: object):
        return {"pooling": pooling, "loss": loss}, {"fit.max_steps": steps} | config

    pairs = [config("gap", "c", 0), config("gmp", "c", 0), config("gap", "c", 9), config("gmp", "p", 9)]
    assert config_labels(pairs)[0] == ["gap (no training)", "gmp (no training)", "gap c", "gmp p"]
    of_losses = [config("gap", "c", 0), config("gap", "c", 9), config("gap", "p", 9)]
    assert config_labels(of_losses)[0] == ["(no training)", "c", "p"]
    two = [config("gap", "c", 0), config("gap", "p", 0)]  # which only the loss distinguishes
    assert config_labels(two)[0] == ["c (no training)", "p (no training)"]


def test_a_regularizer_names_rows_that_nothing_else_distinguishes() -> None:
    def config(pooling: str, regularizer: str) -> tuple[dict[str, str], dict[str, float]]:
        weight = {} if regularizer.lower() == "none" else {f"regularizer.{regularizer}.weight": 0.1}
        return {"pooling": pooling, "regularizer": regularizer}, {"fit.max_steps": 9, **weight}

    pairs = [("gap", "None"), ("gsp", "none"), ("gsp", "zsr"), ("gsp", "xml"), ("vlad", "xml")]
    configs = [config(*pair) for pair in pairs]
    assert config_labels(configs) == (["gap", "gsp", "gsp zsr", "gsp xml", "vlad xml"], [{}] * 5)
    assert config_labels([config("gap", "None"), config("gsp_zsr", "zsr")])[0] == ["gap", "gsp_zsr"]


def test_lists_ranked_again_are_said_behind_the_name() -> None:
    def config(count: int | None, **config: object):
        rerank = {"rerank._target_": "dmlbench.models.diml.DimlDistance", "rerank.grid_size": 4}
        again = {} if count is None else rerank | {"rerank.num_neighbors": count}
        return {"pooling": "gap", "rerank": "diml"}, {"optim.lr": 1.0} | again | config

    labels, notes = config_labels([config(None), config(100), config(10), config(10, **{"fit.max_steps": 0})])
    ours = "gap (DIML, 4 x 4, first {})"
    assert labels == ["gap", ours.format(100), ours.format(10), ours.format(10) + " (no training)"]
    assert notes == [{}] * 4
    assert config_labels([config(100), config(100, **{"rerank.temperature": 0.1})])[0] == [
        ours.format(100), "gap rerank.temperature=0.1 (DIML, 4 x 4, first 100)"
    ]  # fmt: skip


def test_settings_that_labels_hide_are_named_in_a_note_with_values_in_the_csv() -> None:
    def config(pooling: str, steps: int, **config: object):
        choices = {"backbone": "r", "pooling": pooling, "loss": "l"}
        return choices, {"fit.max_steps": steps, "pooling.p": len(pooling), "loss.m": 0.1} | config

    labels, settings = config_labels([config("gap", 300), config("gmean", 100), config("gap", 0)])
    assert labels == ["gap", "gmean", "gap (no training)"]
    assert settings == [{"fit.max_steps": "300"}, {"fit.max_steps": "100"}, {}]
    labels, settings = config_labels([config("gap", 9), config("gmean", 9, **{"loss.m": 0.2}), config("gmean", 9)])
    assert labels == ["gap", "gmean loss.m=0.2", "gmean loss.m=0.1"]
    augmented = config("gmean", 9, **{"transform.train.augment._target_": "Jitter", "transform.train.augment.hue": 0.1})
    plain = config("gap", 9, **{"transform.train.augment": None})
    node = {"transform.train.augment._target_": "Jitter", "transform.train.augment.hue": "0.1"}
    assert config_labels([plain, augmented])[1] == [dict.fromkeys(node, "null"), node]
    without_training = [config(pooling, 0, **{"backbone.file": pooling}) for pooling in ("gap", "gmean")]
    assert config_labels(without_training)[1] == [{"backbone.file": "gap"}, {"backbone.file": "gmean"}]
    without_effect = [config(p, 0, **{"transform.train.crop": p, "optim.lr": p}) for p in ("gap", "gmean")]
    assert config_labels(without_effect)[1] == [{}, {}]
    one, other = {"kmeans": "faiss, seed 0"}, {"kmeans": "faiss, 5 steps, seed 0"}
    scores = {"scores": {"separated": {"nmi": {"mean": 0.5, "std": None}}}}
    clustered = make_table("t", [_summary(0.5, None) | scores | way for way in (one, other)], ["a", "b"], ["nmi"])
    assert "b: clusters of nmi and ami: k-means of faiss, 5 steps, seed 0" in clustered.to_text()
    assert settings == [{"loss.m": "0.1"}, {"loss.m": "0.2"}, {"loss.m": "0.1"}]
    summary = _summary(0.5, None)
    own = [{"fit.max_steps": "3", "optim.lr": "1"}, {"fit.max_steps": "6", "optim.lr": "2"}, {}]
    table = make_table("t", [summary] * 3, ["a", "b", "c"], ["p_at_1"], settings=own)
    note = "Rows also differ in fit.max_steps, optim.lr (values: column settings of the CSV)"
    assert all(note in text for text in (table.to_text(), table.to_markdown()))
    assert table.to_frame()["settings"].tolist() == ["fit.max_steps=3; optim.lr=1", "fit.max_steps=6; optim.lr=2", ""]
    many = [{f"loss.{letter}": "1" for letter in "abcde"}, {"optim.lr": "1"}]
    assert differing_settings(many) == ["Rows also differ in 5 settings of loss, optim.lr"]
    assert differing_settings([{}, {}]) == []


def test_settings_that_are_not_those_of_their_option_are_settings_of_the_row_or_shared() -> None:
    configs = [({"pooling": p}, config) for p, config in (("gap", {}), ("gsp", {"pooling.m": 7}))]
    by_hand = {"pooling.m": "by hand"}
    assert config_labels(configs, [{}, by_hand]) == (["gap", "gsp"], [{}, {"pooling.m": "7 (by hand)"}])
    sized = [({"pooling": "gap"}, {}), ({"pooling": "netvlad"}, {"pooling.feature_size": None})]
    remarks = [{}, {"pooling.feature_size": "by hand"}]
    assert config_labels(sized, remarks)[1] == [{}, {"pooling.feature_size": "null (by hand)"}]
    two = [*configs, ({"pooling": "gsp"}, {"pooling.m": 9})]  # whose labels say it
    assert config_labels(two, [{}, by_hand, by_hand]) == (["gap", "gsp pooling.m=7", "gsp pooling.m=9"], [{}] * 3)
    alike = [({"pooling": pooling}, {"pooling.m": 7}) for pooling in ("gsp", "gsp_zsr")]  # which the caption says
    assert config_labels(alike, [by_hand, by_hand])[1] == [{}, {}]


def _stored(pooling: str, steps: int, **choices: str) -> dict[str, Any]:
    return {
        "backbone": {"pretrained": True, "frozen_until": "all", "weights_file": None},
        "pooling": {"m": 7}, "sampler": {"classes_per_batch": 8, "images_per_class": 4}, "feature_cache": {"views": 8},
        "optim": {"lr": 0.001, "weight_decay": None}, "fit": {"max_steps": steps, "patience": 5},
        "runtime": {
            "image_size": [64, 48], "embedding_size": 128,
            "choices": {"backbone": "net", "pooling": pooling, "loss": "contrastive", "miner": "None"} | choices,
        },
    }  # fmt: skip


def test_the_caption_says_what_all_rows_and_all_trained_rows_share() -> None:
    trained = [_stored("gap", 3000), _stored("gsp", 3000)]
    of_all = "net backbone (frozen), 64 x 48 pixels in 8 cached views, 128-D embeddings"
    of_trained = "contrastive loss, batches of 8 classes x 4 images, learning rate 0.001, at most 3,000 steps"
    assert shared_settings(trained, [{}, {}]) == f"All rows: {of_all}, {of_trained}."
    with_frozen = [*trained, _stored("gap", 0, loss="triplet")]
    assert shared_settings(with_frozen, [{}] * 3) == f"All rows: {of_all}. Trained rows: {of_trained}."
    changed = [{"pooling.m": "by hand", "optim.lr": "by hand", "backbone.frozen_until": "by hand"}, {}]
    assert shared_settings(trained, changed) == f"All rows: {of_all}, pooling.m=7, {of_trained}."
    sized = [{**config, "pooling": pooling} for config, pooling in zip(trained, ({}, {"size": None}), strict=True)]
    assert "size" not in shared_settings(sized, [{}, {"pooling.size": "by hand"}])  # only one pooling has it
    assert shared_settings([_stored("gap", 9)], [{}]).startswith("net backbone (frozen), ")
    whole = _stored("gap", 3000)
    whole["backbone"] = {**whole["backbone"], "frozen_until": None}
    assert shared_settings([trained[0], whole], [{}, {}]).startswith("All rows: net backbone, 64 x 48 pixels")
    assert shared_settings([_stored("gap", 9, backbone="a"), _stored("gsp", 9, loss="x")], [{}, {}]) == (
        "All rows: 64 x 48 pixels in 8 cached views, 128-D embeddings, batches of 8 classes x 4 images, "
        "learning rate 0.001, at most 9 steps."
    )
    assert shared_settings([_stored("gap", 9)], [{}], whole=False).startswith(
        "All rows but imported ones: net backbone"
    )
    table = make_table("t", [_summary(0.5, None)], ["a"], ["p_at_1"], shared="All rows: net backbone.")
    assert table.to_text().startswith("t: All rows: net backbone.\n")
    assert "### t\nAll rows: net backbone.\n" in table.to_markdown()
    assert r"\caption{t, percent. All rows: net backbone.}" in table.to_latex()


def test_class_distances_are_printed_as_they_are_and_none_is_best() -> None:
    summaries = [_summary(0.5, 0.1), _summary(0.7, 0.1)]
    for summary, mean in zip(summaries, (0.25, 0.5), strict=True):
        summary["scores"] = {
            "mean": {"intra_class_distance": {"mean": mean, "std": 0.01}, "nmi": {"mean": mean, "std": None}}
        }
    text = make_table("t", summaries, ["a", "b"], ["intra_class_distance", "nmi"]).to_text()
    assert "0.25 ± 0.01 " in text
    assert "0.50 ± 0.01 " in text
    assert "50.00*" in text


def test_partial_rows_and_those_scored_on_other_images_are_never_best() -> None:
    on_validation = _summary(0.9, None, scored_on="validation", n_query=0, n_gallery=0)
    partial = _summary(0.8, None, missing=["fold3_rep0"], n_runs=3)
    table = _table(_summary(0.5, 0.01), _summary(0.6, 0.01), partial, on_validation)
    assert table.competes == (True, True, False, False)
    assert table.best() == [60.0, 30.0, 60.0, 30.0]
    text = table.to_markdown()
    assert text.count("**") == 2 * 4
    assert "**60.00 ± 1.00**" in text
    other = _table(_summary(0.5, None), _summary(0.4, None), _summary(0.9, None, dataset_fingerprint="g" * 64))
    assert other.competes == (True, True, False)
    assert "row_2: OTHER DATA than other rows: fingerprint gggggggggggg" in other.to_text()
    only = _table(on_validation, on_validation | {"scores": _summary(0.95, None)["scores"]})
    assert only.competes == (True, True)
    assert _table(partial, partial).competes == (False, False)


def summary(head: str, test: float, *, val: float, dimension: int, trained: int = 0, **changes: Any) -> dict[str, Any]:
    return _summary(0.0, None) | {
        "choices": {"head": head},
        "training": {"frozen_until": "all", "trained_parameters": trained, "image_size": [224, 224], "views": 8},
        "validation": {"map_at_r": val},
        "dimension": {"separated": dimension},
        "scores": {"separated": {"map_at_r": {"mean": test, "std": 0.0}}},
    } | changes  # fmt: skip


def test_gains_are_over_the_untrained_rows_that_validation_chooses() -> None:
    rows = [
        summary("linear", 0.25, val=0.5, dimension=128, trained=163840),
        summary("identity", 0.20, val=0.3, dimension=1280),
        summary("identity", 0.23, val=0.2, dimension=1280),  # better on the test, not on validation
        summary("learned_whitening", 0.26, val=0.4, dimension=1280),
        summary("learned_whitening", 0.22, val=0.1, dimension=128),
    ]
    gains = gains_over_frozen(rows, ["p_at_1", "map_at_r"])
    assert "frozen" not in gains  # the same in all rows, which the caption says
    assert gains["trained"] == ["163,840", "0", "0", "0", "0"]
    assert gains["MAP@R over frozen"] == ["+5.0", "+0.0", "+3.0", "+6.0", "+2.0"]
    assert gains["over whitened"] == ["+3.0", "-6.0", "-3.0", "+0.0", "+0.0"]


def test_gains_are_over_rows_of_the_same_network_image_size_and_test() -> None:
    row = summary("linear", 0.25, val=0.5, dimension=128, trained=163840, weights_sha256="one")
    frozen = summary("identity", 0.20, val=0.3, dimension=1280, weights_sha256="one")
    better: dict[str, Any] = {"test": 0.24, "val": 0.4, "dimension": 1280}
    others = [
        summary("identity", **better, weights_sha256="other"),
        summary("identity", **better, weights_sha256="one", choices={"head": "identity", "backbone": "other"}),
        summary("identity", **better, weights_sha256="one", missing=["fold3_rep0"]),
        summary("identity", **better, weights_sha256="one", training=row["training"] | {"image_size": [96, 96]}),
        summary("identity", **better, weights_sha256="one", dataset_fingerprint="g"),
    ]
    assert gains_over_frozen([row, frozen, *others], ["map_at_r"])["MAP@R over frozen"][:2] == ["+5.0", "+0.0"]
    assert gains_over_frozen([row, *others], ["map_at_r"])["MAP@R over frozen"][0] is None


def test_a_gain_that_rounds_to_zero_has_no_minus() -> None:
    rows = [summary("linear", 0.19996, val=0.5, dimension=8, trained=8), summary("identity", 0.2, val=0.3, dimension=8)]
    assert gains_over_frozen(rows, ["map_at_r"])["MAP@R over frozen"] == ["+0.0", "+0.0"]


def test_gains_need_untrained_rows_and_their_columns_need_frozen_layers() -> None:
    trained = summary("linear", 0.25, val=0.5, dimension=128, trained=163840)
    assert set(gains_over_frozen([trained], ["map_at_r"])) == {"trained"}
    trained["training"]["frozen_until"] = None
    assert gains_over_frozen([trained], ["map_at_r"]) == {}


def test_tuned_rows_have_columns_of_the_method_and_of_trained_parameters() -> None:
    tuned, full = (summary("linear", 0.25, val=0.5, dimension=128, trained=count) for count in (5000, 22_000_000))
    for row, method in ((tuned, "lora"), (full, None)):
        row["training"] |= {"frozen_until": None, "tuning": method}
    columns = gains_over_frozen([tuned, full], ["map_at_r"])
    assert columns["tuning"] == ["lora", None] and "frozen" not in columns
    assert columns["trained"] == ["5,000", "22,000,000"]


def test_imported_rows_have_no_number_of_parameters_and_no_seconds() -> None:
    ours = summary("linear", 0.25, val=0.5, dimension=128, trained=163840, wall_s=24.0)
    imported = _summary(0.5, None, choices={}, imported={"trained": "unknown"}, wall_s=0.0)
    columns = gains_over_frozen([ours, imported], ["map_at_r"])
    assert (columns["trained"], columns["s/run"]) == (["163,840", None], ["2", None])


def _write_table(path: Path, *rows: str, kinds: tuple[str, ...] = ("separated",)) -> None:
    names = [f"{kind} (8-D) {metric}" for kind in kinds for metric in ("P@1", "MAP@R")]
    head = ",".join(["row", *(f"{name} {what}" for name in names for what in ("mean", "std")), "notes"])
    path.parent.mkdir()
    path.write_text("\n".join([head, *rows, ""]))


def test_a_table_of_one_repeat_of_every_fold_says_so(tmp_path: Path) -> None:
    note = "PARTIAL: 4 of 12 runs, without fold0_rep1; one collection, hence no std of fold models; exact search"
    _write_table(tmp_path / "cars" / "cars-mlrc.csv", f'a,10.0,,2.345,,"{note}"')
    text = summarize_tables(tmp_path)
    assert f"({tmp_path}/cars/cars-mlrc.md), `mlrc`, 4 of 12 runs | a | **10.00** | **2.35** |" in text


def test_only_tables_with_deviations_are_taken_and_the_best_are_bold(tmp_path: Path) -> None:
    for name, std, notes in (("whole", "0.25", "exact search; NOT THE PUBLISHED DATA: cut"), ("one_run", "", "")):
        rows = f"a,10.0,{std},2.345,{std},{notes}", f"b,9.0,{std},3,{std},{notes}"
        _write_table(tmp_path / name / f"{name}-mlrc.csv", *rows)
    (tmp_path / "whole" / "other-mlrc.csv").write_text("claim,value\nis no table of configs,1\n")
    text = summarize_tables(tmp_path)
    assert f"| [whole]({tmp_path}/whole/whole-mlrc.md), `mlrc` | a | **10.00 ± 0.25** | 2.35 ± 0.25 |" in text
    assert "|  | b | 9.00 ± 0.25 | **3.00 ± 0.25** |" in text
    assert "\nwhole: NOT THE PUBLISHED DATA: cut\n" in text
    assert "one_run" not in text
    with pytest.raises(DataError, match="no table whose rows have standard deviations"):
        summarize_tables(tmp_path / "one_run")


def test_partial_rows_beside_complete_ones_are_never_best_and_caveats_name_their_rows(tmp_path: Path) -> None:
    partial = "PARTIAL: 11 of 12 runs, without fold0_rep1; mean ± population std over 54 collections of fold models"
    rows = "a,6,1,6,1,12 runs; exact search", f'b,7,1,7,1,"{partial}; SELECTED ON TEST: yes"', "c,5,1,5,1,"
    _write_table(tmp_path / "mixed" / "mixed-mlrc.csv", *rows)
    text = summarize_tables(tmp_path)
    assert "`mlrc` | a | **6.00 ± 1.00** | **6.00 ± 1.00** |" in text
    assert "|  | b | 7.00 ± 1.00 | 7.00 ± 1.00 |" in text
    assert "\nmixed: PARTIAL: 11 of 12 runs, without fold0_rep1 (b)\n\nmixed: SELECTED ON TEST: yes (b)\n" in text
    (tmp_path / "mixed" / "mixed-mlrc.csv").write_text(
        "row,separated (8-D) P@1 mean,separated (8-D) P@1 std,notes\na,5,1,12 runs\n"
        'b,7,,"PARTIAL: 4 of 12 runs, without fold0_rep1; one collection, hence no std of fold models"\n'
    )
    with pytest.raises(DataError, match="no table whose rows have standard deviations"):
        summarize_tables(tmp_path)


def test_a_row_without_concatenated_models_shows_a_dash(tmp_path: Path) -> None:
    rows = "a,1,.5,2,.5,3,.5,4,.5,", "b,5,.5,6,.5,,,,,"
    _write_table(tmp_path / "methods" / "birds-mlrc.csv", *rows, kinds=("separated", "concatenated"))
    assert "|  | b | **5.00 ± 0.50** / – | **6.00 ± 0.50** / – |" in summarize_tables(tmp_path)
