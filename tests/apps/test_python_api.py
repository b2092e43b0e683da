"""The package's own functions do what the commands do, from anywhere, and cost nothing before they are used."""

import ast
import json
import logging
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dmlbench as db
from dmlbench.cli.main import main
from dmlbench.config import read_config
from dmlbench.evaluation import evaluate_arrays
from dmlbench.results.store import read_result
from dmlbench.types import ConfigError, RunError

SHORT = (
    *("fit.max_steps=2", "fit.validate_every=2", "fit.warmup_steps=0", "device=cpu", "protocol=held_out"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "transform.train.padding=2"),
    *(f"dataset.table.{key}" for key in ("num_classes=12", "images_per_class=4", "image_size=32")),
)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, dmlbench; dir(dmlbench); print([m for m in ('torch', 'hydra', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert set(db.__all__) == set(dir(db)) and issubclass(db.ConfigError, db.DmlbenchError)
    with pytest.raises(AttributeError, match="module 'dmlbench' has no attribute 'lode'"):
        db.lode  # noqa: B018


def test_run_evaluate_and_table_agree_with_the_commands(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    place = [f"paths.output_dir={tmp_path}/out", f"paths.cache_dir={tmp_path}/cache"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    run_dir = db.run(*SHORT, *place, "metrics=p_at_1,map_at_r", progress=True)
    shown = capsys.readouterr().err
    assert re.search(r"\d\d:\d\d:\d\d .*fold0_rep0 on cpu: \d+ training images of .*random initial weights", shown)
    assert "0/2" in shown and logging.getLogger("dmlbench").handlers == []
    db.run(*SHORT, *place, "metrics=p_at_1,map_at_r", progress=False)  # complete
    assert capsys.readouterr().err == ""
    db.run(*SHORT, *place, f"paths.output_dir={tmp_path}/None")  # the error stream of a test is no terminal
    assert "0/2" not in (shown := capsys.readouterr().err) and "training images" not in shown
    with pytest.raises(SystemExit) as info:
        main(["train", *SHORT, *place, "metrics=p_at_1,map_at_r"])
    assert info.value.code == 0 and "is complete: nothing to do" in capsys.readouterr().err  # the same config
    scores = read_result(run_dir)["metrics"]["test"]
    assert db.evaluate(run_dir, metrics=("p_at_1", "map_at_r")).scores == scores
    assert (
        db.evaluate(run_dir / "embeddings.safetensors", metrics=["map_at_r"]).scores["map_at_r"] == scores["map_at_r"]
    )
    with pytest.raises(RunError, match="incomplete: 1 of 3 runs"):
        db.table(output_dir=tmp_path / "out")
    frame = db.table(output_dir=tmp_path / "out", allow_partial=True)
    assert frame.loc[0, "mean MAP@R mean"] == pytest.approx(100 * scores["map_at_r"])
    assert "PARTIAL: 1 of 3 runs" in frame.loc[0, "notes"]
    other = read_result(db.run(*SHORT, *place, "metrics=p_at_1,map_at_r", "pooling=gmp"))["metrics"]["test"]
    pair = ["**/*-gap-*", "**/*-gmp-*"]
    difference = db.table(compare=pair, metrics=["map_at_r"], output_dir=tmp_path / "out", allow_partial=True)
    assert difference.loc[0, "difference"] == pytest.approx(100 * (other["map_at_r"] - scores["map_at_r"]))
    with pytest.raises(ConfigError, match=r"compare: got 1 config, expected two or more\."):
        db.table(compare=pair[:1], output_dir=tmp_path / "out")
    assert db.evaluate(run_dir, metrics="map_at_r").scores == {"map_at_r": scores["map_at_r"]}
    with pytest.raises(ConfigError, match=r"run: got \['pooling=gsp'\], expected strings"):
        db.run(["pooling=gsp"])  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"has no config\.yaml\. Load one of its runs, such as .*fold0_rep0"):
        db.load(run_dir.parent)
    with pytest.raises(ConfigError, match="did you mean 'pooling"):
        db.run("poolin=gsp")
    rows, labels = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    assert db.evaluate(rows, labels).scores == evaluate_arrays(rows, labels).scores
    assert db.evaluate(rows, np.array(["b", "a", "c"])[labels]).scores == evaluate_arrays(rows, labels).scores
    with pytest.raises(TypeError, match=r"labels: got None, expected an array \[Q\]"):
        db.evaluate(rows)


def test_evaluate_searches_a_gallery_of_arrays_or_of_a_file(tmp_path) -> None:
    rows, labels = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    found = db.evaluate(rows[:5], labels[:5], gallery=rows[5:], gallery_labels=labels[5:])
    assert (found.n_query, found.n_gallery) == (5, 7)
    expected = evaluate_arrays(rows[:5], labels[:5], gallery_rows=rows[5:], gallery_labels=labels[5:])
    assert found.scores == expected.scores
    np.savez(tmp_path / "queries.npz", rows=rows[:5], labels=labels[:5])
    np.save(tmp_path / "gallery.npy", rows[5:])
    np.save(tmp_path / "labels.npy", labels[5:])
    files = {"gallery": tmp_path / "gallery.npy", "gallery_labels": tmp_path / "labels.npy"}
    assert db.evaluate(tmp_path / "queries.npz", **files).scores == expected.scores
    with pytest.raises(TypeError, match=r"gallery: got an array, expected a path, because the source .* is a path\."):
        db.evaluate(tmp_path / "queries.npz", gallery=rows)
    with pytest.raises(TypeError, match=r"model: got 'run', which needs a file as source\."):
        db.evaluate(rows, labels, model="run")
    with pytest.raises(
        RunError, match=r"a gallery needs embeddings and labels\. Give both gallery and gallery_labels\."
    ):
        db.evaluate(rows, labels, gallery=rows)


def test_tune_returns_the_trials_and_writes_the_recipe_that_run_takes(tmp_path, capsys) -> None:
    (tmp_path / "conf" / "search").mkdir(parents=True)
    (tmp_path / "conf" / "search" / "tiny.yaml").write_text(
        "# @package _global_\nname: tiny\nspace: {optim.lr: {low: 1.0e-4, high: 1.0e-2, log: true}}\ntrials: 2\n"
    )
    place = [f"paths.output_dir={tmp_path}/out", f"paths.cache_dir={tmp_path}/cache"]
    short = [each for each in SHORT if not each.startswith("protocol")]
    frame = db.tune("tiny", *short, *place, config_dir=tmp_path / "conf", progress=False)
    assert list(frame.columns) == ["trial", "state", "score", "steps", "optim.lr", "runs", "note"]
    best, second = frame["score"]
    assert len(set(frame["optim.lr"])) == 2 and 0 <= second <= best <= 1
    scores = read_result(tmp_path / "out" / frame.loc[0, "runs"])["metrics"]
    assert scores["val"]["map_at_r"] == best and "test" not in scores
    again = db.tune("tiny", *short, *place, config_dir=tmp_path / "conf", progress=False)
    assert again.equals(frame) and capsys.readouterr().out == ""
    run_dir = db.run(
        *place, "recipe=tiny", *short, "protocol=held_out",
        config_dir=tmp_path / "out" / "tuning" / "tiny",
    )  # fmt: skip
    assert read_config(run_dir / "config.yaml")["optim"]["lr"] == frame.loc[0, "optim.lr"]
    with pytest.raises(ConfigError, match=r"tine"):
        db.tune("tine", config_dir=tmp_path / "conf")
    with pytest.raises(ConfigError, match=r"tune: got 3, expected strings"):
        db.tune("tiny", 3)  # type: ignore[arg-type]


def _without_numbers(text: str) -> str:
    """An output without its numbers, which differ between CPUs (docs/collections.md, "Reproducibility")."""
    return re.sub(r"\s+|-?\d+(\.\d*)?(e-?\d+)?", "", text)


@pytest.mark.slow
def test_the_notebook_of_the_docs_runs(tmp_path, monkeypatch, repository) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    for cell in json.loads((repository / "docs" / "first_steps.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = ast.parse("".join(cell["source"]))
            shown = code.body.pop() if isinstance(code.body[-1], ast.Expr) else ast.parse("None").body[0]
            exec(ast.unparse(code), names)
            value = eval(ast.unparse(shown), names)
            stored = "".join(line for output in cell["outputs"] for line in output["data"]["text/plain"])
            assert _without_numbers(stored) == _without_numbers("" if value is None else repr(value))
    assert list(names["table"]["row"]) == ["gap", "gsp_small"]
    assert set(names["scores"].scores) == {"p_at_1", "map_at_r", "ndcg_at_10"}
    assert names["rows"].shape == (4, 128)
