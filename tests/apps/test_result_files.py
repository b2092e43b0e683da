"""Two configs compared from result files; files of another run, or damaged ones, which every reader refuses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import arguments
from written_runs import write_run

from dmlbench.apps.compare_configs import ConfigSummary, compare_configs, compare_with_first, comparison_table
from dmlbench.apps.loading import load_run
from dmlbench.apps.report.page import draw_report
from dmlbench.cli import simple_commands
from dmlbench.evaluation.embeddings.embed import save_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import DISTANCE, EMBEDDINGS, find_runs, hashes_of, read_result, write_result
from dmlbench.runtime import derive_seed
from dmlbench.training.checkpoint import save_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, EmbeddingSet, RunError

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
    table = comparison_table([found])
    text = table.to_text()
    # d = 0.02, 0.03 in both folds: t(0.975, 2) sqrt(2 * 5e-5) / (2 sqrt(2)) = 4.3027 * 0.0035355
    assert table.title == "Differences from gap"
    head, row = (
        "config B      A      B  B - A   95 % interval      p",
        "gsp       55.00  57.50  +2.50  [+0.98, +4.02]  0.019",
    )
    assert f"P@1\n{head}\n{row}" in text
    assert "intra-class distance\n" in text and ["gsp", "1.10", "1.15", "+0.05"] in [
        s.split()[:4] for s in text.split("\n")
    ]
    assert "4 pairs of runs with the same fold, repeat and seed, t over repeats within folds" in text
    assert "different fit.max_steps: 100 (gap), 300 (gsp)" in text
    assert f"gsp: {tmp_path}/glyphs/mlrc/net-gsp-2" in text
    assert table.to_frame()["settings"].tolist() == ["fit.max_steps=300"] * 2
    assert table.to_frame()["difference"][0] == pytest.approx(2.5)


def test_several_configs_are_compared_with_the_first(tmp_path: Path) -> None:
    configs(tmp_path)
    for fold in range(2):
        for repeat in range(2):
            write(tmp_path, "net-gem-3", fold, repeat, 0.5 + 0.1 * fold + 0.01 * (repeat - 1))
    table = comparison_table([compare_configs(str(tmp_path), ["*gap*", other], P_AT_1) for other in ("*gsp*", "*gem*")])
    text = table.to_text()
    # two degrees of freedom, t = 0.025 / 0.0035355 and 0.005 / 0.0035355: p 0.0194 and 0.2929, times 2 and 1
    assert "gsp       55.00  57.50  +2.50  [+0.98, +4.02]  0.039" in text
    assert "gem       55.00  54.50  -0.50  [-2.02, +1.02]   0.29" in text
    assert "corrected over 2 configs (Holm)" in text and "4 pairs of runs" in text
    assert "Rows also differ in fit.max_steps (values: column settings of the CSV)" in text
    assert table.to_frame()["settings"].tolist() == ["fit.max_steps=300", "fit.max_steps=100"]
    by_label = compare_with_first(str(tmp_path), ["gap", "gsp", "gem"], P_AT_1, allow_partial=True)
    assert comparison_table(by_label).to_text() == text
    with pytest.raises(ConfigError, match=r"compare: got net-gsp-2 twice, expected each config once\."):
        compare_with_first(str(tmp_path), ["*gap*", "gsp", "*gsp*"], P_AT_1, allow_partial=True)
    with pytest.raises(RunError, match=r"'gmp' matches none .* Known rows: gap, gem, gsp"):
        compare_with_first(str(tmp_path), ["gap", "gmp"], P_AT_1, allow_partial=True)
    write(tmp_path, "net-few-4", 0, 0, 0.5)
    few = [compare_configs(str(tmp_path), ["*gap*", other], P_AT_1, allow_partial=True) for other in ("*gsp*", "*few*")]
    table = comparison_table(few)
    text = table.to_text()
    assert "1 pair of runs with the same fold, repeat and seed, t over folds (few)" in text
    assert table.to_frame()["p_holm"].isna().tolist() == [False, True]
    assert "p of a two-sided paired t test\n" in text  # a single one needs no correction


def test_partial_configs_are_refused_or_said(tmp_path: Path) -> None:
    configs(tmp_path)
    write(tmp_path, "net-gsp-2", 2, 0, 0.9)
    with pytest.raises(RunError, match=r"only one config has fold2_rep0 \(net-gsp-2\), .*\. Set allow_partial=true"):
        compare_configs(str(tmp_path), ["*gap*", "*gsp*"], P_AT_1)
    found = compare_configs(str(tmp_path), ["*gap*", "*gsp*"], P_AT_1, allow_partial=True)
    assert "PARTIAL: without fold2_rep0 (net-gsp-2)" in comparison_table([found]).to_text()
    assert found.differences["p_at_1"].n_pairs == 4


def test_configs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    configs(tmp_path)
    write(tmp_path, "net-other-3", 0, 0, 0.5, dataset_fingerprint="g")
    write(tmp_path, "net-late-4", 5, 0, 0.5)
    root = str(tmp_path)
    for patterns, error, message in (
        (["*gap*", "*gap-1"], ConfigError, "expected two different configs"),
        (["*net*", "*gsp*"], RunError, r"compare: '\*net\*' matches .*net-gap-1, .*expected one config"),
        (["*gap*", "*other*"], RunError, "different values of dataset_fingerprint"),
        (["*gap*", "*late*"], RunError, "no run in common"),
    ):
        with pytest.raises(error, match=message):
            compare_configs(root, patterns, P_AT_1, allow_partial=True)
    write(tmp_path, "net-gap-1", 2, 0, 0.5, metrics={"test": {"p_at_1": 0.5}})
    write(tmp_path, "net-gsp-2", 2, 0, 0.5)
    with pytest.raises(
        RunError, match=r"fold2_rep0 has no embeddings.safetensors, so no further scores can be computed"
    ):
        compare_configs(root, ["*gap*", "*gsp*"], EvaluationSpec(metrics=("intra_class_distance",)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two configs of one run each."""
    labels = torch.arange(4).repeat_interleave(3)
    for number, config in enumerate(("net-gap-1", "net-gsp-2")):
        path = tmp_path / "glyphs/mlrc" / config / "fold0_rep0"
        path.mkdir(parents=True)
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        save_embeddings(path / EMBEDDINGS, EmbeddingSet(rows, labels, torch.arange(12)), None, {})
        (path / DISTANCE).write_bytes(b"state %d" % number)
        save_checkpoint(path / BEST, {"model": {"w": rows}})
        own = {"num_folds": 1, "num_repeats": 1, "choices": {"pooling": config}}
        write_run(path, "backbone: {}\nfit: {keep: best}\n", **own, **hashes_of(path, (EMBEDDINGS, DISTANCE, BEST)))
    return tmp_path


def _run(root: Path, config: str = "net-gap-1") -> Path:
    return root / "glyphs/mlrc" / config / "fold0_rep0"


def _aggregate(root: Path) -> object:
    return aggregate_config(find_runs(root, "*gap*"), progress=False)


def _compare(root: Path) -> object:
    return compare_configs(str(root), ["*gap*", "*gsp*"], EvaluationSpec(metrics=("ndcg_at_10",)))


def _report(root: Path) -> object:
    summary = {"scores": {"separated": {"p_at_1": {"mean": 0.5, "std": None}}}, "n_runs": 1}
    config = ConfigSummary(_run(root).parent, tuple(find_runs(root, "*gap*")), summary, "gap")
    return draw_report([config], root / "x.png", title="x", metrics=["p_at_1"], num_queries=5, num_nearest=5)


def _evaluate(root: Path) -> object:
    return simple_commands.evaluate(arguments("evaluate", f"run={_run(root)}"))


def _load(root: Path) -> object:
    return load_run(_run(root), {}, device="cpu")


READERS = [
    *((reader, name) for reader in (_aggregate, _compare, _report, _evaluate) for name in (EMBEDDINGS, DISTANCE)),
    (_load, BEST),
]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)


def _swap(path: Path) -> None:
    shutil.copy(_run(path.parents[4], "net-gsp-2") / path.name, path)


@pytest.mark.parametrize("damage", [_flip, _swap])
@pytest.mark.parametrize(("reader", "name"), READERS)
def test_files_that_a_result_was_not_computed_from_are_refused(
    root: Path, name: str, reader: Callable[[Path], object], damage: Callable[[Path], None]
) -> None:
    damage(_run(root) / name)
    with pytest.raises(RunError, match=rf"gap-1/fold0_rep0/{name}: got SHA-256 .* as in result.json"):
        reader(root)


def test_a_result_that_was_copied_into_another_run_is_not_compared(root: Path) -> None:
    result = read_result(_run(root))
    write_result(_run(root), result | {"fold": 1, "seed": derive_seed(0, 1, 0)})
    with pytest.raises(RunError, match="fold0_rep0 holds the result of fold1_rep0"):
        compare_configs(str(root), ["*gap*", "*gsp*"], EvaluationSpec(metrics=("p_at_1",)))


def test_aggregate_leaves_out_the_trials_of_searches_unless_they_are_asked_for(tmp_path: Path, command) -> None:
    for protocol in ("hpo", "mlrc"):
        write_run(tmp_path / "glyphs" / protocol / "gap" / "fold0_rep0")
    error = command("aggregate", f"paths.output_dir={tmp_path}", code=1)
    assert "no config is complete: " in error and "hpo" not in error.splitlines()[-1]
    assert "glyphs/hpo/gap" in command("aggregate", f"paths.output_dir={tmp_path}", "configs=*/hpo/*", code=1)


def test_status_names_the_settings_of_configs_that_differ_in_them_alone(tmp_path: Path, capsys) -> None:
    mlrc = tmp_path / "glyphs" / "mlrc"
    write_run(mlrc / "net-gap-1a" / "fold0_rep0", "optim: {lr: 0.1}\nloss: {margin: 1}\n")
    write_run(mlrc / "net-gap-2b" / "fold0_rep0", "optim: {lr: 0.2}\nloss: {margin: 1}\n")
    (write_run(mlrc / "net-gap-3c" / "fold0_rep0") / "config.yaml").write_text("a: [")
    write_run(mlrc / "net-gsp-4d" / "fold0_rep0", "optim: {lr: 0.3}\n")
    simple_commands.status(arguments("status", f"paths.output_dir={tmp_path}"))
    assert capsys.readouterr().out.splitlines() == [
        f"{mlrc}/net-gap-1a (optim.lr=0.1): 1 done",
        f"{mlrc}/net-gap-2b (optim.lr=0.2): 1 done",
        f"{mlrc}/net-gap-3c: 1 done",
        f"{mlrc}/net-gsp-4d: 1 done",
        "4 runs: 4 done, 0 running, 0 failed, 0 interrupted",
    ]
