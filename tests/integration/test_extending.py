"""What CONTRIBUTING.md says of metrics, rules and splits, followed by a package outside of the project."""

from pathlib import Path

import pytest

from dmlbench.apps.compare_configs import build_tables, find_configs
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import EMBEDDINGS, find_runs, read_result
from dmlbench.runner import run
from dmlbench.types import ConfigError

SMALL = [
    *("dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "fit.max_steps=0"),
    *("dataset.table.image_size=24", "transform.train.padding=2", "fit.keep=none", "device=cpu"),
    *("head.out_features=8", "sampler.classes_per_batch=2", "sampler.images_per_class=2"),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("extending")
    for fold in range(2):
        cfg = compose("train", [
            *SMALL, f"fold={fold}", "protocol._target_=shifted.Shifted", "protocol.num_folds=2",
            "protocol.num_repeats=1", f"paths.output_dir={root}/out", f"paths.cache_dir={root}/cache",
        ])  # fmt: skip
        run(cfg)
    return root / "out"


def test_facts_of_a_split_are_in_the_result_and_columns_of_tables(output: Path) -> None:
    runs = find_runs(output)
    assert [read_result(run.path)["facts"]["distance"] for run in runs] == [1.5, 2.5]
    summary = aggregate_config(runs, progress=False)
    assert summary["facts"]["fold1_rep0"] == {"distance": 2.5, "kind": "made up"}
    spec = EvaluationSpec(metrics=("p_at_1",))
    (table,) = build_tables(find_configs(str(output), "**", spec), spec, facts=["distance", "kind"]).values()
    assert table.columns[:2] == [("", "distance"), ("", "kind")]
    for text in (table.to_text(), table.to_markdown(), table.to_csv(), table.to_latex()):
        assert "1.5, 2.5" in text and "made up" in text
    with pytest.raises(ConfigError, match="facts: got 'size', which no split of these results has"):
        build_tables(find_configs(str(output), "**", spec), spec, facts=["size"])


def test_a_rule_of_another_package_sums_up_the_runs(output: Path) -> None:
    ndcg = EvaluationSpec(metrics=("ndcg_at_10",))
    summary = aggregate_config(find_runs(output), ndcg, progress=False)
    assert (summary["aggregation"], summary["spread"]) == ("shifted.area", "splits")
    scores = [evaluate(load_embeddings(run.path / EMBEDDINGS).queries, None, ndcg).scores["ndcg_at_10"]
              for run in find_runs(output)]  # fmt: skip
    assert summary["scores"]["mean"]["ndcg_at_10"]["mean"] == pytest.approx(sum(scores) / 2)
