import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from written_runs import write_run

from dmlbench.apps.compare_configs import build_tables, find_configs
from dmlbench.evaluation.embeddings.embed import load_embeddings, save_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import AGGREGATE, aggregate_config, has_scores, is_current, read_aggregate
from dmlbench.results.caveats import caveats
from dmlbench.results.collections import collections
from dmlbench.results.rules import COLLECTIONS, RULES, SCORES, rule_named, scores_of_run
from dmlbench.results.store import (
    EMBEDDINGS,
    RESULT,
    RunInfo,
    find_runs,
    hashes_of,
    locked,
    make_directory,
    read_result,
    write_result,
)
from dmlbench.runtime import derive_seed, read_json, write_json
from dmlbench.types import EmbeddingSet, RunError


def _write_runs(
    root, coordinates, *, aggregation: str = "collections", folds: int = 4, **changes: object
) -> list[RunInfo]:
    """All runs in ``root``, also those of earlier calls."""
    labels = torch.arange(5).repeat_interleave(6)
    for fold, repeat in coordinates:
        path = root / "glyphs" / "mlrc" / "config-1" / f"fold{fold}_rep{repeat}"
        make_directory(path)
        rows = torch.randn(30, 8, generator=torch.Generator().manual_seed(10 * fold + repeat))
        queries = EmbeddingSet(rows + torch.eye(8)[labels], labels, torch.arange(30))
        save_embeddings(path / EMBEDDINGS, queries, None, {})
        scores = evaluate(queries).scores
        own = {"metrics": {"val": scores, "test": scores}, "monitor": "map_at_r", **hashes_of(path)}
        write_run(path, "pooling: {p: 3}\n", aggregation=aggregation, num_folds=folds, **own | changes)
    return find_runs(root)


ALL = list(itertools.product(range(4), range(3)))


def test_twelve_runs_give_81_collections_with_the_closed_form(tmp_path) -> None:
    runs = _write_runs(tmp_path, ALL)
    summary = aggregate_config(runs, progress=False)
    raw = np.array([[summary["raw"][f"fold{f}_rep{r}"]["map_at_r"] for r in range(3)] for f in range(4)])
    separated = summary["scores"]["separated"]["map_at_r"]
    assert summary["n_collections"] == 81
    assert separated["mean"] == pytest.approx(raw.mean(), abs=1e-12)
    assert separated["std"] == pytest.approx(np.sqrt(raw.var(axis=1).sum()) / 4, abs=1e-12)
    assert summary["dimension"] == {"separated": 8, "concatenated": 32}
    assert summary["scores"]["concatenated"]["map_at_r"]["mean"] > separated["mean"]
    config_dir = runs[0].path.parent
    assert len((config_dir / COLLECTIONS).read_text().splitlines()) == 82
    assert is_current(config_dir, summary, ALL)
    assert read_aggregate(config_dir) == summary


def test_two_processes_do_not_summarize_one_config_at_a_time(tmp_path) -> None:
    runs = _write_runs(tmp_path, ALL[:2], folds=1, num_repeats=2)
    with locked(runs[0].path.parent), pytest.raises(RunError, match="in use by process"):
        aggregate_config(runs, progress=False)
    aggregate_config(runs, progress=False)


def test_runs_with_distances_of_their_own_are_joined_by_these(tmp_path) -> None:
    from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, LpDistance

    runs = _write_runs(tmp_path, ALL)
    unit = aggregate_config(runs, progress=False)["scores"]["concatenated"]

    def joined(distance: BaseDistance) -> object:
        summary = aggregate_config(runs, distance_of=lambda run_dir: distance, force=True, progress=False)
        return summary["scores"]["concatenated"]

    assert joined(CosineSimilarity()) == unit
    assert joined(LpDistance(normalize_embeddings=False, p=1)) != unit


def test_summaries_of_shortlists_say_that_collections_rank_everything(tmp_path) -> None:
    _write_runs(tmp_path, ALL, search="shortlist@100")
    summary = aggregate_config(find_runs(tmp_path), progress=False)
    assert (summary["search"], summary["concatenated_search"]) == ("shortlist@100", "exact")
    _write_runs(tmp_path, ALL[:1])
    with pytest.raises(RunError, match=r"differ in search \(exact in fold0_rep0, shortlist@100 in fold0_rep1\)"):
        aggregate_config(find_runs(tmp_path), force=True, progress=False)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (((1, 2), (3, 0)), r"incomplete: 10 of 12 runs, without fold1_rep2, fold3_rep0\. Run the missing ones, or set"),
        (ALL, "incomplete: no complete run"),
        ((), r"differ in dataset_fingerprint \(f in fold0_rep0, other in fold3_rep2\)"),
    ],
)
def test_runs_that_cannot_be_summarized_are_named(tmp_path, missing, message: str) -> None:
    _write_runs(tmp_path, [c for c in ALL if c not in missing])
    if missing == ALL:
        make_directory(tmp_path / "glyphs" / "mlrc" / "config-1" / "fold0_rep0")
    elif not missing:
        _write_runs(tmp_path, ALL[-1:], dataset_fingerprint="other")
    with pytest.raises(RunError, match=message):
        aggregate_config(find_runs(tmp_path), progress=False)


def test_partial_summary_says_what_it_rests_on(tmp_path) -> None:
    _write_runs(tmp_path, [(0, 0), (1, 0), (2, 0), (3, 0)])
    summary = aggregate_config(find_runs(tmp_path), allow_partial=True, progress=False)
    assert (summary["n_runs"], summary["n_runs_expected"], summary["n_collections"]) == (4, 12, 1)
    assert summary["scores"]["separated"]["p_at_1"]["std"] is None
    assert summary["interval_95"]["p_at_1"] is None
    assert len(summary["missing"]) == 8


def test_collections_of_a_partial_config_name_its_folds_and_repeats(tmp_path) -> None:
    runs = _write_runs(tmp_path, [(0, 2), (2, 1), (2, 2), (3, 2)])
    aggregate_config(runs, allow_partial=True, progress=False)
    frame = pd.read_csv(runs[0].path.parent / COLLECTIONS)
    assert [name for name in frame if name.startswith("repeat_")] == ["repeat_fold0", "repeat_fold2", "repeat_fold3"]
    assert frame[["repeat_fold0", "repeat_fold2", "repeat_fold3"]].to_numpy().tolist() == [[2, 1, 2], [2, 2, 2]]


def test_summary_is_made_again_when_a_run_is_added(tmp_path) -> None:
    _write_runs(tmp_path, ALL[:-1])
    first = aggregate_config(find_runs(tmp_path), allow_partial=True, progress=False)
    _write_runs(tmp_path, ALL[-1:])
    assert not is_current(find_runs(tmp_path)[0].path.parent, first, ALL)
    second = aggregate_config(find_runs(tmp_path), progress=False)
    assert (first["n_collections"], second["n_collections"]) == (54, 81)


def test_collapsed_and_copied_embeddings_are_told_under_the_table(tmp_path) -> None:
    runs = _write_runs(tmp_path, ALL)
    shutil.copy(runs[0].path / EMBEDDINGS, runs[1].path / EMBEDDINGS)
    write_result(runs[1].path, read_result(runs[1].path) | hashes_of(runs[1].path) | {"degenerate": ["3 zero vectors"]})
    summary = aggregate_config(find_runs(tmp_path), progress=False)
    told = "DEGENERATE EMBEDDINGS: 3 zero vectors (fold0_rep1); the same embeddings in fold0_rep0, fold0_rep1"
    assert told in caveats(summary)


def test_variants_and_deviations_of_a_recipe_reach_the_printed_table(tmp_path) -> None:
    recipe = {"name": "gsp", "deviations": ["Proxies are clipped."]}
    _write_runs(tmp_path, ALL, recipe=recipe, variants={"miner.variant": "the code's, which the paper does not print"})
    aggregate_config(find_runs(tmp_path), progress=False)
    spec = EvaluationSpec(metrics=("p_at_1",))
    (table,) = build_tables(find_configs(str(tmp_path), "**", spec), spec).values()
    for note in (
        "miner.variant: the code's, which the paper does not print",
        "recipe=gsp deviates: Proxies are clipped.",
    ):
        assert all(note in text for text in (table.to_text(), table.to_markdown(), table.to_csv(), table.to_latex()))


def test_conventional_gives_best_and_mean_and_hpo_the_mean_of_validation(tmp_path) -> None:
    repeats = [(0, r) for r in range(3)]
    _write_runs(tmp_path / "a", repeats, aggregation="best_and_mean", folds=1)
    summary = aggregate_config(find_runs(tmp_path / "a"), progress=False)
    values = [scores["p_at_1"] for scores in summary["raw"].values()]
    best = max(summary["raw"].values(), key=lambda scores: scores["map_at_r"])
    assert summary["scores"]["best"]["map_at_r"] == {"mean": best["map_at_r"], "std": None}
    assert summary["scores"]["best"]["p_at_1"] == {"mean": best["p_at_1"], "std": None}
    assert summary["scores"]["mean"]["p_at_1"]["std"] == pytest.approx(np.std(values))
    _write_runs(tmp_path / "b", repeats, aggregation="mean", folds=1)
    hpo = aggregate_config(find_runs(tmp_path / "b"), progress=False)
    assert list(hpo["scores"]) == ["mean"]
    assert hpo["scored_on"] == "validation"


def test_validation_scores_select_and_are_the_means_of_hpo(tmp_path) -> None:
    for repeat, (val, test) in enumerate(((0.2, 0.7), (0.6, 0.5), (0.4, 0.9))):
        metrics = {part: {"map_at_r": x, "p_at_1": x} for part, x in (("val", val), ("test", test))}
        for rule in ("mean", "best_and_mean"):
            _write_runs(tmp_path / rule, [(0, repeat)], aggregation=rule, folds=1, metrics=metrics)
    spec = EvaluationSpec(metrics=("p_at_1", "map_at_r"))
    hpo, conventional = (
        aggregate_config(find_runs(tmp_path / rule), spec, progress=False) for rule in ("mean", "best_and_mean")
    )
    assert hpo["scores"]["mean"]["p_at_1"]["mean"] == pytest.approx(0.4)
    assert conventional["best_run"] == "fold0_rep1"
    assert [conventional["scores"][of]["p_at_1"]["mean"] for of in ("best", "mean")] == pytest.approx([0.5, 0.7])
    assert conventional["validation"]["p_at_1"] == pytest.approx(0.4)


def test_the_best_run_is_that_of_its_validation_whatever_kmeans_is_asked_for(tmp_path) -> None:
    for repeat, score in enumerate((0.2, 0.9, 0.3)):
        of_run = {"metrics": {part: {"nmi": score, "p_at_1": 0.5} for part in ("val", "test")}}
        _write_runs(tmp_path, [(0, repeat)], aggregation="best_and_mean", folds=1, monitor="nmi",
                    kmeans="faiss, seed 1", **of_run)  # fmt: skip
    assert aggregate_config(find_runs(tmp_path), EvaluationSpec(metrics=("p_at_1",)), progress=False)["best_run"] == (
        "fold0_rep1"
    )


def test_a_table_without_a_shortlist_does_not_print_the_scores_of_one(tmp_path) -> None:
    _write_runs(tmp_path, ALL, search="shortlist@100")
    summary = aggregate_config(find_runs(tmp_path), progress=False)
    assert has_scores(summary, EvaluationSpec(shortlist=100))
    assert not has_scores(summary, EvaluationSpec())
    ((config,),) = find_configs(tmp_path, "**", EvaluationSpec()).values()  # the runs' own search
    assert config.summary["search"] == "shortlist@100"


def test_scores_by_other_metrics_are_kept(tmp_path) -> None:
    _write_runs(tmp_path, ALL)
    usual = aggregate_config(find_runs(tmp_path), progress=False)
    _write_runs(tmp_path, ALL, metrics={"test": {"nmi": 0.25}, "val": {}}, kmeans=EvaluationSpec().kmeans)
    summary = aggregate_config(find_runs(tmp_path), progress=False)
    assert summary["scores"]["separated"].pop("nmi") == {"mean": 0.25, "std": 0.0}
    assert summary["interval_95"].pop("nmi") == [0.25, 0.25]
    assert summary["scores"] == usual["scores"]
    assert summary["interval_95"] == usual["interval_95"]


def test_scores_requested_later_are_computed_once(tmp_path, monkeypatch) -> None:
    runs = _write_runs(tmp_path, ALL)
    usual = aggregate_config(runs, progress=False)
    later = EvaluationSpec(metrics=("map_at_r", "ndcg_at_10", "precision_at_10", "map_at_10"))
    summary = aggregate_config(runs, later, progress=False)
    whole = collections(
        [[load_embeddings(tmp_path / f"glyphs/mlrc/config-1/fold{f}_rep{r}" / EMBEDDINGS).queries for r in range(3)]
         for f in range(4)],
        metrics=(*DEFAULT_METRICS, *later.metrics[1:]),
    )  # fmt: skip
    written = pd.read_csv(runs[0].path.parent / COLLECTIONS)
    pd.testing.assert_frame_equal(written, whole, rtol=1e-15)
    for kind, scores in usual["scores"].items():
        assert {name: summary["scores"][kind][name] for name in scores} == scores
    assert json.loads((runs[0].path / SCORES).read_text())["scores"]["exact"].keys() == set(later.metrics[1:])

    def never(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("dmlbench.results.rules.evaluate", never)
    monkeypatch.setattr("dmlbench.results.collections.concatenated_scores", never)
    assert aggregate_config(runs, later, progress=False) == summary
    (runs[0].path.parent / AGGREGATE).unlink()
    with pytest.raises(AssertionError, match="computed again"):  # of the runs all is kept, the collections were lost
        aggregate_config(runs, later, progress=False)


def test_kept_scores_of_other_embeddings_are_not_used(tmp_path) -> None:
    (run,) = _write_runs(tmp_path, ALL[:1])
    result = read_result(run.path)
    del result["embeddings_sha256"]  # as of versions that did not know it
    write_result(run.path, result)
    spec = EvaluationSpec(metrics=("ndcg_at_10",))

    def scores() -> dict[str, float]:
        return scores_of_run(run.path, read_result(run.path), spec, distance_of=lambda run_dir: None)

    first = scores()
    (tmp_path / "other").mkdir()
    _write_runs(tmp_path / "other", [(1, 1)])
    shutil.copy(find_runs(tmp_path / "other")[0].path / EMBEDDINGS, run.path / EMBEDDINGS)
    assert scores() != first
    (run.path / SCORES).write_text("{")  # damaged
    assert scores() != first
    (run.path / EMBEDDINGS).unlink()
    with pytest.raises(RunError, match="has no embeddings"):
        scores()


def test_a_rule_of_another_package_is_found_by_its_name() -> None:
    assert rule_named("dmlbench.results.rules.RULES") is RULES
    with pytest.raises(RunError, match=r"aggregation 'collectons' is unknown .*did you mean 'collections'"):
        rule_named("collectons")


def test_clusters_of_another_seed_are_computed_again(tmp_path) -> None:
    runs = _write_runs(tmp_path, ALL[:2], folds=1, num_repeats=2, kmeans="faiss, seed 7",
                       metrics={"test": {"nmi": 0.111, "p_at_1": 0.5}, "val": {}})  # fmt: skip
    spec = EvaluationSpec(metrics=("nmi",))
    summary = aggregate_config(runs, spec, progress=False)
    stored = load_embeddings(runs[0].path / EMBEDDINGS).queries
    assert summary["raw"]["fold0_rep0"]["nmi"] == evaluate(stored, None, spec).scores["nmi"] != 0.111
    assert summary["raw"]["fold0_rep0"]["p_at_1"] == 0.5
    assert "concatenated_search" not in summary


def test_all_runs_of_a_config_are_clustered_as_the_first(tmp_path) -> None:
    other = EvaluationSpec(kmeans_init="k-means++", kmeans_restarts=10).kmeans
    runs = _write_runs(tmp_path, ALL[:2], folds=1, num_repeats=2, kmeans=EvaluationSpec().kmeans,
                       metrics={"test": {"nmi": 0.111, "p_at_1": 0.5}, "val": {}})  # fmt: skip
    write_json(runs[1].path / RESULT, read_json(runs[1].path / RESULT) | {"kmeans": other})
    raw = aggregate_config(runs, EvaluationSpec(metrics=("nmi",)), progress=False)["raw"]
    assert raw["fold0_rep0"]["nmi"] == 0.111 != raw["fold0_rep1"]["nmi"]


def test_a_run_keeps_its_own_kmeans_unless_another_one_is_asked_for(tmp_path) -> None:
    own = EvaluationSpec(kmeans_library="scikit-learn", kmeans_init="k-means++", kmeans_restarts=10)
    runs = _write_runs(tmp_path, ALL[:2], folds=1, num_repeats=2, kmeans=own.kmeans,
                       metrics={"test": {"nmi": 0.111, "p_at_1": 0.5}, "val": {}})  # fmt: skip
    kept = aggregate_config(runs, EvaluationSpec(metrics=("nmi",)), progress=False)
    assert (kept["raw"]["fold0_rep0"]["nmi"], kept["kmeans"]) == (0.111, own.kmeans)
    asked = EvaluationSpec(metrics=("nmi",), kmeans_library="scikit-learn", kmeans_max_steps=5)
    other = aggregate_config(runs, asked, progress=False)
    stored = load_embeddings(runs[0].path / EMBEDDINGS).queries
    assert other["raw"]["fold0_rep0"]["nmi"] == evaluate(stored, None, asked).scores["nmi"]
    assert other["kmeans"] == "scikit-learn, 5 steps, seed 0"


def test_a_summary_keeps_what_was_asked_for_before(tmp_path) -> None:
    _write_runs(tmp_path, ALL[:2], folds=1, num_repeats=2)
    for metric in ("ndcg_at_10", "map_at_10"):
        summary = aggregate_config(find_runs(tmp_path), EvaluationSpec(metrics=(metric,)), progress=False)
    for kind in ("separated", "concatenated"):
        assert {"ndcg_at_10", "map_at_10"} <= summary["scores"][kind].keys()


def test_runs_that_were_copied_or_exchanged_are_refused(tmp_path) -> None:
    _write_runs(tmp_path, [(0, 0), (1, 0)], folds=2, num_repeats=1)
    aggregate_config(find_runs(tmp_path), progress=False)
    config_dir = find_runs(tmp_path)[0].path.parent
    kept = tmp_path / "kept"
    shutil.copytree(config_dir, kept)

    def refused(match: str) -> None:
        with pytest.raises(RunError, match=match):
            aggregate_config(find_runs(tmp_path), progress=False)
        shutil.rmtree(config_dir)
        shutil.copytree(kept, config_dir)

    shutil.copytree(config_dir / "fold0_rep0", config_dir / "fold1_rep0", dirs_exist_ok=True)
    refused("fold1_rep0 holds the result of fold0_rep0")
    shutil.copy(config_dir / "fold0_rep0" / EMBEDDINGS, config_dir / "fold1_rep0" / EMBEDDINGS)
    refused(f"{EMBEDDINGS}: got SHA-256 .* as in {RESULT}")
    write_result(config_dir / "fold1_rep0", read_result(config_dir / "fold1_rep0") | {"seed": 7})
    refused("got seed 7, expected .* for fold1_rep0 with base_seed 0")
    shutil.copytree(config_dir / "fold0_rep0", config_dir / "fold7_rep0")
    strange = read_result(config_dir / "fold7_rep0") | {"fold": 7, "seed": derive_seed(0, 7, 0)}
    write_result(config_dir / "fold7_rep0", strange)
    refused("fold7_rep0 is not a fold of its protocol, which has 2")
    aggregate_config(find_runs(tmp_path), progress=False)


@pytest.mark.parametrize("content", ["[]", '{"schema": 1}', "\xff", ""])
def test_a_damaged_summary_is_said_and_made_again(tmp_path, caplog, monkeypatch, content) -> None:
    runs = _write_runs(tmp_path, [(0, 0)], folds=1, num_repeats=1)
    config_dir = runs[0].path.parent
    summary = aggregate_config(runs, progress=False)
    (config_dir / AGGREGATE).write_bytes(content.encode("latin-1"))
    assert read_aggregate(config_dir) is None
    assert f"{AGGREGATE} is damaged (" in caplog.text
    write_json(config_dir / AGGREGATE, {key: value for key, value in summary.items() if key != "missing"})
    assert read_aggregate(config_dir) is None and "it lacks missing" in caplog.text
    monkeypatch.setattr("dmlbench.apps.compare_configs.distance_of_run", lambda run_dir: None)
    (((found,),),) = [find_configs(str(tmp_path), "**", EvaluationSpec()).values()]
    assert found.summary == summary == read_aggregate(config_dir)


def test_what_killed_summaries_left_is_removed(tmp_path) -> None:
    runs = _write_runs(tmp_path, [(0, 0)], folds=1, num_repeats=1)
    aggregate_config(runs, progress=False)
    left = [runs[0].path.parent / f".{AGGREGATE}.0badcafe.tmp", runs[0].path / f".{SCORES}.0badcafe.tmp"]
    for file in left:
        file.touch()
    aggregate_config(runs, progress=False)  # although there is nothing to do
    assert not any(file.exists() for file in left)


def test_a_summary_of_fewer_scores_than_its_runs_have_stays_as_it_is(tmp_path) -> None:
    runs = _write_runs(tmp_path, ALL[:4], folds=2)
    spec = EvaluationSpec(metrics=("p_at_1",))
    first = aggregate_config(runs, spec, progress=False, allow_partial=True)
    assert first["scores"]["separated"].keys() > first["scores"]["concatenated"].keys() == {"p_at_1"}
    assert aggregate_config(runs, spec, progress=False, allow_partial=True) == first


@pytest.mark.parametrize("damage", ["missing", "cut off", "no table", "another digit"])
def test_collections_that_are_missing_or_damaged_are_made_again(tmp_path, damage: str) -> None:
    runs = _write_runs(tmp_path, ALL[:4], folds=2)
    aggregate_config(runs, progress=False, allow_partial=True)
    file = runs[0].path.parent / COLLECTIONS
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        last = str(9 - int(whole[-2:-1])).encode()
        others = {"cut off": whole[:-30], "no table": b"\xff\x00", "another digit": whole[:-2] + last + whole[-1:]}
        file.write_bytes(others[damage])
    aggregate_config(runs, progress=False, allow_partial=True)
    assert file.read_bytes() == whole


def test_stored_collections_keep_their_bits(tmp_path) -> None:
    """2 folds x 2 repeats, written by an earlier version."""
    shutil.copytree(Path(__file__).resolve().parents[1] / "fixtures" / "stored_results", tmp_path / "out")
    runs = find_runs(tmp_path / "out", "glyphs/mlrc/resnet20_small-gap-multi_similarity-5b7b7316")
    config_dir = runs[0].path.parent
    before, written = read_aggregate(config_dir), (config_dir / COLLECTIONS).read_bytes()
    again = aggregate_config(runs, force=True, progress=False)
    assert before is not None
    assert (again["scores"], again["interval_95"]) == (before["scores"], before["interval_95"])
    assert (config_dir / COLLECTIONS).read_bytes() == written


def test_notes_on_the_data_of_runs_reach_the_summary(tmp_path) -> None:
    _write_runs(tmp_path, ALL[:6])
    notes = ["a subset", "images cut to their boxes"]
    _write_runs(tmp_path, ALL[6:], data_notes=notes)
    assert aggregate_config(find_runs(tmp_path), progress=False)["data_notes"] == notes
