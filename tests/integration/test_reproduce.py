"""``dmlbench reproduce`` on a paper's table that tiny runs on letters stand for, in a folder of their own."""

import contextlib
import csv
import io
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from forked import Process

from dmlbench import papers
from dmlbench.apps.experiment_rows import Row
from dmlbench.cli import run_table
from dmlbench.cli.main import main
from dmlbench.cli.reproduce import Table
from dmlbench.cli.tune import has_entry
from dmlbench.config import read_config
from dmlbench.external_files import load_yaml
from dmlbench.recipes import Recipe, Setting
from dmlbench.results.store import RESULT, find_runs, locked, read_result
from dmlbench.runtime import write_json
from dmlbench.training.signals import Preempted

TABLE = """
# @package _global_
defaults:
  - override /dataset: glyphs
  - override /loss: contrastive
  - _self_
dataset: {table: {num_classes: 8, images_per_class: 5, image_size: 24}}
transform: {train: {padding: 2}}
fit: {keep: none, max_steps: 2, validate_every: 2}
head: {out_features: 8}
sampler: {classes_per_batch: 2, images_per_class: 2}
protocol: {num_folds: 2, num_repeats: 1}
num_workers: 0
device: cpu
"""
ROWS = """
reproduce:
  rows:
    C2+GAP: &small dataset=glyphs backbone=resnet20_small pooling=gap
    C2+GMP: dataset=glyphs backbone=resnet20_small pooling=gmp
    C2+DeLF: dataset=glyphs backbone=resnet20_small pooling=gap optim.lr=1e30
    C2+GSP: {needs: an exact solver}
"""
GRID = """
reproduce:
  also: [pooling=gmp fit.max_steps=0]
hydra:
  mode: MULTIRUN
  sweeper:
    params: {pooling: "gap,gmp", fold: "0,1"}
"""
TUNED = """
reproduce:
  search: tuned
  references: [Contrastive]
  rows:
    No training: fit=untrained fit.max_steps=0 head=pca head.out_features=8
    Contrastive: recipe=tuned loss=contrastive
    Triplet: recipe=tuned loss=triplet
  datasets: {glyphs: dataset.table.num_classes=20 sampler.classes_per_batch=2}
"""
SEARCH = """
# @package _global_
name: tuned
train: [experiment=tuned, fit.max_steps=2]
space:
  optim.lr: {low: 1.0e-4, high: 1.0e-2, log: true, when: {fit: short}}
  loss.margin: {low: 0.1, high: 0.2, when: {loss: triplet}}
trials: 2
"""
HALF = ("dataset=cub200", "rows=C2+GAP,C2+GMP")


def _prepared(folder: Path) -> Path:
    """A folder to work in, with the configurations above in ``conf``."""
    experiments = folder / "conf" / "experiment"
    (experiments / "gsp").mkdir(parents=True)
    (experiments / "gsp" / "table2.yaml").write_text(TABLE + ROWS)
    (experiments / "gsp" / "figure3.yaml").write_text("reproduce: {needs: tokens}\n")
    (experiments / "mine.yaml").write_text(TABLE + GRID)
    tuned = TABLE.replace("protocol: {num_folds: 2, num_repeats: 1}\n", "").replace("max_steps: 2", "max_steps: 4")
    (experiments / "tuned.yaml").write_text(tuned + TUNED)
    (folder / "conf" / "search").mkdir()
    (folder / "conf" / "search" / "tuned.yaml").write_text(SEARCH)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which ``HALF`` of the table was run, and what was printed."""
    folder = _prepared(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        _enter(patch, folder)
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            main(["reproduce", "gsp/table2", *HALF, "--config-dir", "conf"])
    assert ended.value.code == 0
    return folder, out.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in where nothing has been run."""
    _enter(monkeypatch, _prepared(tmp_path))
    return tmp_path


@pytest.fixture
def done(whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder in which ``HALF`` of the table was run."""
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    _enter(monkeypatch, tmp_path)
    return tmp_path


def _enter(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.chdir(folder)
    patch.setenv("DMLBENCH_OUTPUT", "out")
    patch.setenv("DMLBENCH_CACHE", str(folder / "cache"))


def reproduce(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What ``dmlbench reproduce`` prints on both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *arguments, "--config-dir", "conf"])
    out, error = capsys.readouterr()
    assert ended.value.code == code, error[-3000:]
    return out, error


def test_a_dry_run_tells_states_comparability_and_time_and_runs_nothing(folder: Path, capsys) -> None:
    out, error = reproduce(capsys, "gsp/table2", *HALF, "--dry-run")
    gap, gmp, total, *reasons, to_run, time_of_kind = out.splitlines()
    assert gap.startswith("C2+GAP  glyphs/mlrc/resnet20_small-gap-contrastive-") and gap.endswith("  2 missing")
    assert gmp.startswith("C2+GMP  glyphs/mlrc/resnet20_small-gmp-contrastive-")
    assert total == "2 configs, 4 runs: 4 missing"
    assert "will not be comparable with the paper: data set glyphs instead of cub200" in reasons
    assert "will not be comparable with the paper: backbone resnet20_small instead of bn_inception" in reasons
    assert to_run.startswith("to run here: 4, about ")
    assert time_of_kind.startswith("  glyphs/mlrc/resnet20_small: 4 runs, about ")
    assert time_of_kind.endswith(" per run (2 training steps and 1 embedding batch of C2+GAP)")
    assert "planning gsp/table2" in error and "timing C2+GAP" in error
    assert "training images" not in error
    assert not (folder / "out").exists()


def test_a_table_is_run_once_printed_and_written(whole: tuple[Path, str], done: Path, capsys) -> None:
    first = whole[1]
    assert "  8 not comparable\n" in first
    assert "C2+GAP, C2+GMP: rows of your own experiment: " in first
    assert "; data set glyphs instead of cub200; backbone resnet20_small instead of bn_inception" in first
    tables = done / "out" / "tables" / "gsp"
    assert not (tables / "table2.csv").exists()  # what was asked for is a part of it
    (written_csv,) = tables.glob("table2-cub200-C2+GAP,C2+GMP-*.csv")
    assert f"written: {written_csv.relative_to(done).with_suffix('.md')}, .csv, .tex" in first
    assert "a part of the table: dataset=cub200; row=C2+GAP,C2+GMP\n" in first
    rows = list(csv.DictReader(written_csv.open()))
    assert {(row["row"], row["verdict"]) for row in rows} == {(r, "not comparable") for r in ("C2+GAP", "C2+GMP")}
    run = find_runs("out", "*gap*")[0].path
    assert read_result(run)["choices"]["backbone"] == "resnet20_small"
    assert "reproduce" not in (run / "config.yaml").read_text()

    written = {path: path.read_bytes() for path in tables.iterdir()}
    again, error = reproduce(capsys, "gsp/table2", *HALF)
    assert "training images" not in error
    assert "to run here: 0\n" in again
    assert again.partition("gsp/table2: ")[2] == first.partition("gsp/table2: ")[2] != ""
    assert {path: path.read_bytes() for path in tables.iterdir()} == written
    assert {path.suffix for path in written} == {".md", ".csv", ".tex"}


@pytest.mark.slow
def test_what_is_narrowed_has_files_of_its_own_and_folds_narrow_no_table(done: Path, capsys, monkeypatch) -> None:
    tables = done / "out" / "tables" / "gsp"
    reproduce(capsys, "gsp/table2", "run_missing=false")
    before = {path: path.read_bytes() for path in tables.iterdir()}
    assert len(before) == 6
    names = set()
    for rows in ("rows=C2+GAP", "rows=C2+GMP", "rows='C2+G[M]P'", "rows=C2+GMP,C2+GAP", "rows=C2+GA*,C2+GMP"):
        out, _ = reproduce(capsys, "gsp/table2", "dataset=cub200", rows, "run_missing=false")
        names.add(out.partition("written: ")[2].partition(",")[0])
    assert len(names) == 3
    by_hand, _ = reproduce(capsys, "gsp/table2", *HALF, "fit.max_steps=1", "run_missing=false")
    assert "written: out/tables/gsp/table2-cub200-C2+GAP,C2+GMP-own-" in by_hand
    out, _ = reproduce(capsys, "gsp/table2", "fold=0", "run_missing=false")
    assert "written: out/tables/gsp/table2.md, .csv, .tex" in out
    assert {path: path.read_bytes() for path in before} == before

    listed, _ = reproduce(capsys, "--list")
    (line,) = [line for line in listed.splitlines() if line.startswith("gsp/table2 ")]
    assert line.split(maxsplit=1)[1] == "3 rows, 22 cannot be run"
    states = dict(line.split(maxsplit=1) for line in listed.partition("\n\n")[0].splitlines())
    assert re.fullmatch("cannot be run +Needs tokens[.]", states["gsp/figure3"])
    assert re.match("rows without scores +R@1 over the temperature", states["proxynca_pp/figure4a"])
    assert max(map(len, states.values())) > 200  # whole titles for a file or a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    listed, _ = reproduce(capsys, "--list")
    assert max(map(len, listed.partition("\n\n")[0].splitlines())) == 100


@pytest.mark.slow
def test_a_failed_run_is_listed_and_stops_nothing(done: Path, capsys) -> None:
    rows = ("dataset=cub200", "rows=C2+GAP,C2+DeLF", "fold=0")
    _, error = reproduce(capsys, "gsp/table2", *rows, code=1)
    assert sorted(run.state for run in find_runs("out")) == ["done"] * 4 + ["failed"]
    assert "1 of 1 runs failed: C2+DeLF on glyphs, fold 0, repeat 0. " in error.splitlines()[-1]
    assert "training stopped at step" in error.splitlines()[-2]
    (written,) = (done / "out/tables/gsp").glob("table2-cub200-C2+DeLF,C2+GAP-*.csv")
    verdicts = {row["row"]: row["verdict"] for row in csv.DictReader(written.open())}
    assert verdicts == {"C2+GAP": "not comparable", "C2+DeLF": "not run"}
    out, _ = reproduce(capsys, "gsp/table2", *rows, "run_missing=false")
    assert "failed: out/glyphs/mlrc/resnet20_small-gap-contrastive-" in out


def _with_rows(folder: Path, rows: dict[str, str], table: str = TABLE) -> None:
    text = "".join(f"    {label}: {overrides}\n" for label, overrides in rows.items())
    (folder / "conf/experiment/gsp/table2.yaml").write_text(f"{table}\nreproduce:\n  rows:\n{text}")


@pytest.mark.slow
def test_rows_whose_weights_are_missing_are_listed_once_and_the_others_are_run(done: Path, capsys) -> None:
    small = "dataset=glyphs backbone=resnet20_small fit.max_steps=1"
    gone = f"{small} backbone.weights_file=gone.pth"
    _with_rows(done, {"C2+GAP": gone, "C2+DeLF": f"{gone} pooling=gmp", "C2+GMP": f"{small} pooling=gmp"})
    out, error = reproduce(capsys, "gsp/table2", "dataset=cub200", "fold=0", code=1)
    assert error.count("weights file 'gone.pth' does not exist") == 1
    assert error.splitlines()[-1].startswith("dmlbench: error: 2 of 3 runs did not start: weights file 'gone.pth'")
    assert "run 1 of 1: C2+GMP on glyphs, fold 0, repeat 0\n" in error
    assert out.count("weights file 'gone.pth' does not exist") == 1
    assert "  C2+GAP, C2+DeLF: weights file" in out
    assert error.count("training images of") == 1
    assert {run.state for run in find_runs("out")} == {"done"}


@pytest.mark.slow
def test_a_dry_run_fails_where_something_is_missing(folder: Path, capsys) -> None:
    small = "dataset=glyphs backbone=resnet20_small fit.max_steps=1"
    gone = f"{small} backbone.weights_file=gone.pth"
    _with_rows(folder, {"C2+GAP": gone, "C2+DeLF": f"{gone} pooling=gmp", "C2+GMP": f"{small} fit.max_steps=-1"})
    (folder / "file").touch()
    line = ("gsp/table2", "dataset=cub200", "fold=0", "--dry-run")
    out, error = reproduce(capsys, *line, code=1)
    assert "to run here: 2\n  glyphs/mlrc/resnet20_small: 2 runs, time unknown: weights missing\n" in out
    assert "not planned: fit.max_steps: got -1" in out
    last = error.splitlines()[-1]
    assert last.startswith("dmlbench: error: 2 of 2 runs cannot start: fit.max_steps: got -1")
    assert "weights file 'gone.pth' does not exist" in last and last.endswith(" Affects C2+GAP, C2+DeLF.")
    _, error = reproduce(capsys, *line, "rows=C2+GAP", "paths.output_dir=file/out", code=1)
    assert "paths.output_dir: got file/out, but " in error.splitlines()[-1]
    out, _ = reproduce(capsys, *line, "rows=C2+GAP", "hydra/launcher=submitit_slurm")
    assert "data, weights and time were not checked: the launcher uses other machines" in out


ONE = ("gsp/table2", "dataset=cub200", "rows=C2+GAP")


@pytest.mark.slow
def test_what_cannot_be_used_gets_one_message_and_nothing_is_deleted(done: Path, capsys) -> None:
    first, second = find_runs("out", "*gap*")
    before = set(Path("out").rglob("*"))
    shutil.move(first.path / "embeddings.safetensors", "elsewhere")
    out, _ = reproduce(capsys, *ONE)
    assert f"note: {first.path} has lost its embeddings.safetensors" in out
    assert "4 not comparable" in out  # its scores are known
    shutil.move("elsewhere", first.path / "embeddings.safetensors")

    (second.path / RESULT).write_text((second.path / RESULT).read_text()[:40])
    out, error = reproduce(capsys, *ONE)
    assert "1 done, 1 unusable" in out
    assert f"cannot be used: {second.path}/result.json is damaged" in out
    assert "1 of 2 runs" in out
    assert "training images" not in error
    assert before <= set(Path("out").rglob("*"))


@pytest.mark.slow
def test_runs_of_different_code_are_refused_unless_allowed_and_then_marked(done: Path, capsys) -> None:
    run = find_runs("out", "*gap*")[1].path
    write_json(run / RESULT, {**read_result(run), "git_commit": "another"})
    _, error = reproduce(capsys, *ONE, code=2)
    assert "gsp/table2: MIXED CODE: " in error
    assert "another (1 run). Set allow_mixed=true" in error
    out, _ = reproduce(capsys, *ONE, "allow_mixed=true")
    assert "C2+GAP: MIXED CODE: " in out
    out, _ = reproduce(capsys, *ONE, "--dry-run")
    assert "MIXED CODE: " in out


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gsp/tabel2"], "no table or experiment is called 'gsp/tabel2': did you mean 'gsp/table2'?"),
        ([], "table is missing: expected a name, such as dmlbench reproduce gsp/table2"),
        (["oodml/table_s1", "rows=FID"], "rows: oodml/table_s1 is made by commands without this key."),
        (["oodml/table_s1", "tune=true"], "tune: got true, but oodml/table_s1 is made by commands"),
        (["oodml/table_s1", "fit.max_steps=3"], "fit.max_steps=3: got an override that no command of oodml/table_s1"),
        (["gsp/table2", "metrics=foo"], "'foo' is not a score"),
        (["oodml/table_s1", "dataset=inshop"], "oodml/table_s1 has no command for dataset=inshop"),
        (["gsp/table2", "fold=7"], "fold: got 7, expected 0 to 1"),
        (["gsp/figure3"], "gsp/figure3 cannot be run: it needs tokens"),
        (["gsp/table2", "rows=C9*"], "rows: got 'C9*', expected a row"),
        (["gsp/table2", "rows=C2+GSP"], "no requested row can be run (C2+GSP: needs an exact solver)."),
        (["gsp/table2", "--shard", "5/4"], "shard: got 5/4, expected i/n"),
        (["gsp/table2", "gsp/table3"], "table: got 'gsp/table2', 'gsp/table3', expected one word"),
        (["-m", "gsp/table2"], "Leave -m out."),
        (["mine", "rows=a"], "rows: mine is a grid without row names"),
        (["tuned", "--dry-run"], "recipe=tuned does not exist: tuned is not tuned yet. Add tune=true"),
        (["gsp/table2", "tune=maybe"], "tune: got maybe, expected true or false."),
        (["gsp/table2", "fold=a"], "fold[0]: got a, expected a whole number."),
        (["gsp/table2", *HALF, "fit.max_step=1"], "has no key 'fit.max_step': did you mean 'fit.max_steps'"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_message(folder: Path, capsys, arguments: list[str], said: str) -> None:
    _, error = reproduce(capsys, *arguments, code=2)
    assert said in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (folder / "out").exists()


def test_rows_without_an_entry_in_the_recipe_are_named(folder: Path, capsys) -> None:
    (folder / "conf" / "recipe").mkdir()
    (folder / "conf" / "recipe" / "tuned.yaml").write_text(
        "settings: [{when: {dataset: glyphs, loss: contrastive}, set: {optim.lr: 0.001}, source: a test}]\n"
    )
    _, error = reproduce(capsys, "tuned", "--dry-run", code=2)
    remedy = "Add tune=true to tune them first, or choose other rows: 'rows=Contrastive'."
    assert f"not tuned yet: Triplet. {remedy}" in error
    _, error = reproduce(capsys, "tuned", "dataset=glyhps", "--dry-run", code=2)
    assert "dataset=glyhps is unknown: did you mean 'glyphs'?" in error


def test_an_entry_is_for_rows_that_restate_defaults_but_not_for_those_with_a_regularizer() -> None:
    recipe = Recipe(settings=[Setting(when={"dataset": "cub200", "loss": "xbm"}, source="a test")])
    options = ("dataset=cub200", "loss=xbm")
    assert has_entry(recipe, Row("", (*options, "backbone=resnet50")))
    assert not has_entry(recipe, Row("", (*options, "regularizer=s2sd")))
    assert not has_entry(recipe, Row("", ("dataset=cub200", "loss=libc")))


def test_averages_of_figure_1_follow_from_the_written_tables(folder: Path, capsys) -> None:
    line = ("proxynca_pp/figure1", "run_missing=false")
    out, _ = reproduce(capsys, *line)
    assert "ProxyNCA 60.8 in the paper, not run" in out and "2 not run" in out
    for k in range(3, 7):
        scores = [score for score in papers.load_table(f"proxynca_pp/table{k}") if score.origin == "own"]
        lines = [(s.row, s.embedding_size, s.metric, (s.mean or 0) + k * (s.row == "ProxyNCA"), "") for s in scores]
        path = folder / f"out/tables/proxynca_pp/table{k}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("row", "embedding_size", "metric", "ours", "verdict"), *lines])
    out, _ = reproduce(capsys, *line)
    assert "ProxyNCA++ 83.7 in the paper, 83.7 here; ProxyNCA 60.8 in the paper, 65.3 here" in out
    (difference,) = [line.split() for line in out.splitlines() if line.startswith("ProxyNCA++ minus ProxyNCA ")]
    assert difference[4:6] == ["18.38", "22.9"]  # 83.65 - 65.275


@pytest.mark.slow
def test_runs_of_other_processes_are_skipped_and_named(done: Path, capsys) -> None:
    run = find_runs("out", "*gap*")[0].path
    (run / RESULT).unlink()
    with locked(run):
        out, error = reproduce(capsys, *ONE)
    assert "training images" not in error
    assert error.count("skipped: ") == 1 and f"{run}" in error
    assert f"running in other processes: 1 run ({run})" in out
    out, error = reproduce(capsys, *ONE)
    assert "running in other processes" not in out
    assert error.count("training images of") == 1


@pytest.mark.slow
def test_a_grid_is_a_table_with_its_additional_configs(done: Path, capsys) -> None:
    out, _ = reproduce(capsys, "mine", "--shard", "2/2", "--dry-run")
    assert "3 configs, 6 runs: 2 missing, 4 done\nto run here: 1, about 1 s\n" in out
    assert "untrained: 1 run, about 1 s per run (1 embedding batch of pooling=gmp fit.max_steps=0)" in out
    out, error = reproduce(capsys, "mine", "fold=0")
    assert error.count("training images of") == 1
    text = (done / "out/tables/mine.md").read_text()
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| g")] == [
        *("| gmp (no training)", "| gap", "| gmp")
    ]
    assert "gmp (no training): PARTIAL: 1 of 2 runs" in text


def test_commands_of_a_table_are_run_once_and_compared_with_the_paper(folder: Path, capsys, monkeypatch) -> None:
    started: list[list[str]] = []

    def exit_code(words: list[str]) -> int:
        started.append(words[3:])
        if len(started) == 3:
            return 1
        given = dict(word.split("=", 1) for word in words if "=" in word)
        measured = {"train": given["train"], "test": given["dataset"], "distance": 349.1, "notes": []}
        write_json(Path(given["output"]), measured)
        return 0

    monkeypatch.setattr("dmlbench.cli.run_table._exit_code", exit_code)
    out, _ = reproduce(capsys, "oodml/table_s2", "--dry-run")
    assert out.count("to run: dmlbench oodml distances train=") == 6
    assert not started
    _, error = reproduce(capsys, "oodml/table_s2", "device=cpu", code=1)
    assert "ended with exit code 1. Start the same command again to resume." in error
    out, _ = reproduce(capsys, "oodml/table_s2", "device=cpu")
    assert out.count("] done: ") == 2 and len(started) == 3 + 4
    assert all("device=cpu" in words for words in started)
    rows = list(csv.DictReader((folder / "out/tables/oodml/table_s2.csv").open()))
    assert [row["verdict"] for row in rows] == ["reproduced", *["differs"] * 5, *["not run"] * 2]
    out, _ = reproduce(capsys, "oodml/table_s2", "backbone=efficientnet_lite0", "dataset=sop", "run_missing=false")
    assert "8 not run" in out
    out, _ = reproduce(capsys, "oodml/figure_s3", "dataset=sop", "--dry-run")  # commands name several data sets
    assert out.count("dmlbench train") == out.count("dataset=sop backbone=resnet50 repeat") == 6


def test_rows_of_several_settings_have_labels_of_their_own() -> None:
    rows = (Row("m=16", ("loss=a",), setting="C2"), Row("m=16", ("loss=b",), setting="PNCA"), Row("", ("loss=c",)))
    table = Table("a", Path("a.yaml"), {}, rows, {}, ())
    assert table.labels == {("loss=a",): "m=16 (C2)", ("loss=b",): "m=16 (PNCA)", ("loss=c",): ""}


@pytest.mark.parametrize("stopped_by", [Preempted(75), KeyboardInterrupt()])
def test_a_command_of_a_table_saves_its_checkpoint_before_a_signal_ends_both(tmp_path: Path, stopped_by) -> None:
    saved = tmp_path / "saved"
    script = f"""
import os, pathlib, signal, time
def save(number, frame):
    time.sleep(0.6)
    pathlib.Path({str(saved)!r}).touch()
    raise SystemExit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
pathlib.Path({str(tmp_path / "ready")!r}).write_text(str(os.getpid()))
time.sleep(60)
"""

    def stop(number: int, frame: object) -> None:
        while not ((tmp_path / "ready").exists() and (child := (tmp_path / "ready").read_text())):
            time.sleep(0.01)
        if isinstance(stopped_by, KeyboardInterrupt):  # a terminal sends it to the whole group
            os.kill(int(child), signal.SIGINT)
        raise stopped_by

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(type(stopped_by)):
            run_table._exit_code([sys.executable, "-c", script])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert saved.exists()


@pytest.mark.slow
def test_killed_at_random_points_it_completes_to_the_same_table(folder: Path) -> None:
    for _ in range(2):  # the second says how long it takes where modules are compiled and files are read already
        started = time.monotonic()
        code, whole, error = _start(folder).wait(timeout=240)
        took = time.monotonic() - started
        assert code == 0, error
        shutil.rmtree(folder / "whole", ignore_errors=True)
        shutil.move(folder / "out", folder / "whole")
        shutil.rmtree(folder / "cache")
    rng, kills = random.Random(0), 0
    for _ in range(12):
        process = _start(folder)
        deadline = time.monotonic() + took * rng.uniform(0.1, 0.7)
        while time.monotonic() < deadline and not process.has_ended():
            time.sleep(0.02)
        if process.has_ended():
            break
        process.kill()
        kills += 1
    code, out, error = _start(folder).wait(timeout=240)
    assert code == 0, error
    assert kills > 0
    assert out.partition("gsp/table2: ")[2] == whole.partition("gsp/table2: ")[2] != ""
    written = sorted((folder / "out/tables/gsp").iterdir())
    assert [path.suffix for path in written] == [".csv", ".md", ".tex"]
    for path in written:
        assert path.read_bytes() == (folder / "whole/tables/gsp" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers_with_processes_of_their_own_run_the_rows(folder: Path, capsys, launcher: str) -> None:
    plugin = launcher.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason="extra sweeps")
    own = {"joblib": "hydra.launcher.n_jobs=2", "submitit": "hydra.launcher.timeout_min=5"}[plugin]
    out, _ = reproduce(capsys, "gsp/table2", *HALF, f"hydra/launcher={launcher}", own)
    assert "8 not comparable" in out
    assert [run.state for run in find_runs("out")] == ["done"] * 4


def _start(folder: Path, *arguments: str) -> Process:
    given = arguments or ("gsp/table2", *HALF)
    return Process(("reproduce", *given, "--config-dir", "conf"), folder=folder, environment=dict(os.environ))


@pytest.mark.slow
def test_rows_are_tuned_in_shards_and_compared_with_their_references(folder: Path, capsys) -> None:
    out, _ = reproduce(capsys, "tuned", "tune=true", "--dry-run")
    assert "searches left: 2 of 2\n2 trials of each; the first ones:\nglyphs-contrastive" in out
    assert re.search(r"to run here: 2, (about|at most) ", out)
    made = folder / "conf" / "recipe" / "tuned.yaml"
    made.parent.mkdir()
    made.write_text("covers: []\n")
    _, error = reproduce(capsys, "tuned", "tune=true", code=2)
    assert "conf/recipe/tuned.yaml: tune=true would overwrite this recipe written by hand. Rename the file." in error
    made.write_text(
        "# Written by `dmlbench reproduce`.\nsettings: [{when: {dataset: cub200}, set: {}, source: kept}]\n"
    )
    second = _start(folder, "tuned", "tune=true", "--shard", "2/2")
    out, error = reproduce(capsys, "tuned", "tune=true", "--shard", "1/2")
    assert second.wait(timeout=240)[0] == 0
    assert re.findall(r"search \d of \d: \S+", error) == ["search 1 of 1: glyphs-contrastive"]
    assert "written: conf/recipe/tuned.yaml" in out
    assert "3 configs, 36 runs: " in out
    recipe = load_yaml(made)
    assert [entry["when"] for entry in recipe["settings"]] == [
        {"dataset": "cub200"}, {"dataset": "glyphs", "loss": "contrastive"}, {"dataset": "glyphs", "loss": "triplet"},
    ]  # fmt: skip
    trials = list(csv.DictReader((folder / "out" / "tuning" / "tuned" / "trials.csv").open()))
    best = max((t for t in trials if t["search"] == "glyphs-triplet"), key=lambda trial: float(trial["score"]))
    found = recipe["settings"][2]["set"]
    assert best["values"] == f"optim.lr={found['optim.lr']} loss.margin={found['loss.margin']}"
    assert {trial["steps"] for trial in trials} == {"2"}

    out, _ = reproduce(capsys, "tuned")
    assert "3 configs, 36 runs: 36 done" in out
    for metric in ("P@1", "MAP@R"):
        assert f"glyphs, {metric}: no significant difference from Contrastive: " in out
    config = read_config(find_runs("out", "glyphs/mlrc/*triplet*")[0].path / "config.yaml")
    assert (config["optim"]["lr"], config["loss"]["margin"]) == (found["optim.lr"], found["loss.margin"])
    assert config["fit"]["max_steps"] == 4
    tables = folder / "out" / "tables"
    lines = list(csv.DictReader((tables / "tuned-glyphs-map_at_r-differences.csv").open()))
    assert [line["row"] for line in lines] == ["No training", "Triplet"]
    assert (tables / "tuned.png").exists()
    assert (tables / "tuned-ranks.png").exists()
    assert "| Contrastive |" in (tables / "tuned.md").read_text()


def test_references_are_rows(folder: Path, capsys) -> None:
    path = folder / "conf" / "experiment" / "tuned.yaml"
    path.write_text(path.read_text().replace("[Contrastive]", "[Contrastve]"))
    _, error = reproduce(capsys, "tuned", "--dry-run", code=2)
    assert "references: got Contrastve, expected a row: did you mean 'Contrastive'?" in error
    path.write_text(path.read_text().replace("[Contrastve]", "[Contrastive]\n  settings: {a: seed=1, b: seed=2}"))
    _, error = reproduce(capsys, "tuned", "--dry-run", code=2)
    assert "references: got several settings, expected one. Make rows of them." in error
    path.write_text(path.read_text().replace("No training:", "no:"))
    _, error = reproduce(capsys, "tuned", "--dry-run", code=2)
    assert "reproduce.rows: got the name False, expected text. Write it in quotes." in error


def test_only_a_table_with_a_search_is_tuned(folder: Path, capsys) -> None:
    _, error = reproduce(capsys, "mine", "tune=true", code=2)
    assert "tune: got true, but mine defines no search. Use `dmlbench tune` instead." in error
