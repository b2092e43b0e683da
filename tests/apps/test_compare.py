"""Two configs compared from their result files."""

from pathlib import Path

import pytest
from written_runs import write_run

from dmlbench.apps.tables import compare_configs
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import ConfigError, RunError

P_AT_1 = EvaluationSpec(metrics=("p_at_1",))


def write(root: Path, config: str, fold: int, repeat: int, p_at_1: float, **changes: object) -> None:
    scores = {"p_at_1": p_at_1, "intra_class_distance": 2 * p_at_1}
    own = {"metrics": {"test": scores, "val": {}}, "choices": {"pooling": config.split("-")[1]}}
    settings = f"fit: {{max_steps: {300 if 'gsp' in config else 100}}}\npooling: {{p: {len(config)}}}\n"
    write_run(root / "glyphs" / "mlrc" / config / f"fold{fold}_rep{repeat}", settings, **own | changes)


def configs(root: Path) -> None:
    for fold in range(2):
        for repeat in range(2):
            write(root, "net-gap-1", fold, repeat, 0.5 + 0.1 * fold)
            write(root, "net-gsp-2", fold, repeat, 0.52 + 0.1 * fold + 0.01 * repeat)


def test_the_difference_is_of_the_second_less_the_first(tmp_path: Path) -> None:
    configs(tmp_path)
    found = compare_configs(
        str(tmp_path), ["*gap*", "*gsp*"], EvaluationSpec(metrics=("p_at_1", "intra_class_distance"))
    )
    assert found.differences["p_at_1"].difference == pytest.approx(0.025)
    text = found.to_text()
    # d = 0.02, 0.03 in both folds: t(0.975, 2) sqrt(2 * 5e-5) / (2 sqrt(2)) = 4.3027 * 0.0035355
    assert "P@1                       55.00    57.50    +2.50  [+0.98, +4.02]" in text
    assert "intra-class distance       1.10     1.15    +0.05" in text
    assert "4 pairs" in text
    assert "DIFFERENT SETTINGS: fit.max_steps: 100 (gap); 300 (gsp)" in text


def test_partial_configs_are_refused_or_said(tmp_path: Path) -> None:
    configs(tmp_path)
    write(tmp_path, "net-gsp-2", 2, 0, 0.9)
    with pytest.raises(RunError, match=r"only one has fold2_rep0 \(net-gsp-2\); set allow_partial=true"):
        compare_configs(str(tmp_path), ["*gap*", "*gsp*"], P_AT_1)
    found = compare_configs(str(tmp_path), ["*gap*", "*gsp*"], P_AT_1, allow_partial=True)
    assert "PARTIAL: without fold2_rep0 (net-gsp-2)" in found.to_text()
    assert found.differences["p_at_1"].n_pairs == 4


def test_configs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    configs(tmp_path)
    write(tmp_path, "net-other-3", 0, 0, 0.5, dataset_fingerprint="g")
    write(tmp_path, "net-late-4", 5, 0, 0.5)
    root = str(tmp_path)
    for patterns, error, message in (
        (["*gap*", "*gap-1"], ConfigError, "expected two configs"),
        (["*net*", "*gsp*"], RunError, r"'\*net\*' must match one config under .* it matches .*net-gap-1, "),
        (["*gap*", "*other*"], RunError, "differ in dataset_fingerprint"),
        (["*gap*", "*late*"], RunError, "no run in common"),
    ):
        with pytest.raises(error, match=message):
            compare_configs(root, patterns, P_AT_1, allow_partial=True)
    write(tmp_path, "net-gap-1", 2, 0, 0.5, metrics={"test": {"p_at_1": 0.5}})
    write(tmp_path, "net-gsp-2", 2, 0, 0.5)
    with pytest.raises(RunError, match=r"fold2_rep0 has no embeddings.safetensors, so nothing more can be computed"):
        compare_configs(root, ["*gap*", "*gsp*"], EvaluationSpec(metrics=("intra_class_distance",)))
