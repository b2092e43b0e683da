"""Results of the version in which evaluation was part of a cell: found, read, summed up and never trained again.

``fixtures/stored_results`` and ``fixtures/identities.json`` were written by commit 4eeeb9f: one cell evaluated by the
default metrics (2 folds x 2 repeats), the same one by others (2 folds x 1 repeat), and names of configurations.
Names and digests of ``experiment=cub200_2010`` are those of runs that commit 1820ac8 made.
"""

import json
import logging
import shutil
from pathlib import Path

import pytest

from dmlbench.apps.tables import find_cells
from dmlbench.cli.main import main
from dmlbench.config import cell_id, compose, config_sha256, load_config
from dmlbench.data.readers.glyphs import glyphs
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.one_run import directory_of, run
from dmlbench.results.aggregate import aggregate_cell
from dmlbench.results.store import find_runs, read_result
from dmlbench.signatures import imported

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CELL = [
    *("dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "fit.max_steps=2"),
    *("dataset.table.image_size=24", "transform.train.padding=2", "fit.validate_every=2", "fit.keep=none"),
    *("head.out_features=8", "protocol.num_folds=2", "protocol.num_repeats=2", "sampler.classes_per_batch=2"),
    *("sampler.images_per_class=2", "paths.cache_dir=cache", "paths.data_dir=data", "device=cpu"),
]
USUAL, OTHERWISE = "resnet20_small-gap-multi_similarity-5b7b7316", "resnet20_small-gap-multi_similarity-775d4584"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FIXTURES / "stored_results", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def configured(stored: Path, *overrides: str):
    cfg = compose("train", [*CELL, f"paths.output_dir={stored}", *overrides])
    choices = read_result(FIXTURES / f"stored_results/glyphs/mlrc/{USUAL}/fold0_rep0")["choices"]
    cfg.runtime.choices = choices
    return cfg


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_configurations_keep_their_names(every: int) -> None:
    identities = list(json.loads((FIXTURES / "identities.json").read_text()).items())
    for overrides, (name, digest) in identities[::every]:
        cfg = compose("train", overrides.split())
        assert (cell_id(cfg), config_sha256(cfg)) == (name, digest), overrides


def test_a_run_of_equal_settings_finds_the_stored_one_and_does_not_train(stored: Path) -> None:
    for overrides in ([], ["evaluation.metrics=[p_at_1,map_at_r,nmi]", "evaluation.recall_at=[1,3]"]):
        cfg = configured(stored, "fold=1", *overrides)
        before = (stored / f"glyphs/mlrc/{USUAL}/fold1_rep0/result.json").read_bytes()
        lock = stored / f"glyphs/mlrc/{USUAL}/fold1_rep0/run.lock"
        lock.touch()  # of a process that was killed
        assert run(cfg) == stored / f"glyphs/mlrc/{USUAL}/fold1_rep0"
        assert (stored / f"glyphs/mlrc/{USUAL}/fold1_rep0/result.json").read_bytes() == before
        assert not lock.exists()


def test_a_cell_of_another_former_name_is_found_by_its_settings(stored: Path, caplog) -> None:
    shutil.rmtree(stored / f"glyphs/mlrc/{USUAL}")
    with caplog.at_level(logging.INFO):
        assert directory_of(configured(stored)) == stored / f"glyphs/mlrc/{OTHERWISE}/fold0_rep0"
    assert f"{OTHERWISE} is the cell of these settings" in caplog.text
    assert directory_of(configured(stored, "optim.lr=0.5")).parent.name not in (USUAL, OTHERWISE)
    done = run(configured(stored))
    assert "nmi" in read_result(done)["metrics"]["test"]


def test_a_cell_that_cannot_be_summarized_does_not_keep_the_others_from_it(stored: Path, capsys) -> None:
    for path in stored.glob("*/*/*/aggregate.json"):
        path.unlink()
    damaged = stored / f"glyphs/mlrc/{USUAL}/fold0_rep0/result.json"
    damaged.write_text("{")
    with pytest.raises(SystemExit) as exited:
        main(["aggregate", f"paths.output_dir={stored}", "evaluation.metrics=[p_at_1]", "allow_partial=true"])
    out, error = capsys.readouterr()
    assert exited.value.code == 1
    assert out.index(f"{USUAL}\n      FAILED: {damaged} is damaged") < out.index(f"{OTHERWISE}\n      PARTIAL: 2 of 4")
    assert f"1 of 2 cells could not be summarized: {damaged} is damaged" in error
    assert [path.parent.name for path in stored.glob("*/*/*/aggregate.json")] == [OTHERWISE]


def test_of_two_former_cells_that_are_one_the_tables_say_which_is_used(stored: Path, caplog) -> None:
    spec = EvaluationSpec(metrics=("p_at_1", "nmi"))
    for cell in (USUAL, OTHERWISE):
        aggregate_cell(find_runs(stored, f"glyphs/mlrc/{cell}"), allow_partial=True, progress=False)
    (cells,) = find_cells(str(stored), "**", spec, allow_partial=True).values()
    assert [cell.path.name for cell in cells] == [USUAL]
    assert f"{OTHERWISE} and {USUAL} are one cell" in caplog.text
    assert "nmi" in cells[0].summary["scores"]["separated"]  # of runs that were not evaluated by it


def test_stored_collections_keep_their_bits(stored: Path) -> None:
    cell = stored / f"glyphs/mlrc/{USUAL}"
    before, written = json.loads((cell / "aggregate.json").read_text()), (cell / "collections.csv").read_bytes()
    again = aggregate_cell(find_runs(stored, f"glyphs/mlrc/{USUAL}"), force=True, progress=False)
    assert again["scores"] == before["scores"]
    assert again["interval_95"] == before["interval_95"]
    assert (cell / "collections.csv").read_bytes() == written


def test_stored_configurations_name_what_moved_by_its_present_name(stored: Path) -> None:
    config = load_config(stored / f"glyphs/mlrc/{USUAL}/fold0_rep0/config.yaml")
    assert imported(config.dataset.table._target_, "dataset.table") is glyphs
