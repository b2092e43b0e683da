"""The whole way through real processes: train, skip, interrupt, resume, aggregate, table, report, status, clean."""

import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import ONE_THREAD, Process
from PIL import Image

from dmlbench.runtime import write_json

TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "head.out_features=16", "fit.max_steps=12",
    "fit.validate_every=4", "fit.log_every=1", "device=cpu", "optim.lr=1e-3",
)  # fmt: skip
GSP = ("pooling=gsp", "pooling.num_prototypes=8", "pooling.memory_rows=48")  # starts at step 3
PROXIES = ("loss=proxy_anchor", "optim.lr_multipliers.loss=100", "fit.warmup_steps=5")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def dmlbench(tmp_path, cache_dir):
    """Run ``dmlbench`` in ``tmp_path`` as a process of its own."""

    started = []
    environment = {**os.environ, "DMLBENCH_CACHE": str(cache_dir)}
    environment.pop("DMLBENCH_OUTPUT", None)

    def start(*arguments: str, largest_file: int | None = None) -> Process:
        started.append(Process(arguments, folder=tmp_path, environment=environment, largest_file=largest_file))
        return started[-1]

    def checked(arguments: tuple[str, ...], expected: int, code: int, out: str, error: str) -> str:
        assert code == expected, f"{arguments}: exit code {code}\n{out}\n{error}"
        assert "Traceback" not in error or expected == 0, error
        return out + error

    def run(*arguments: str, code: int = 0) -> str:
        return checked(arguments, code, *start(*arguments).wait())

    def run_anew(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dmlbench", *arguments],
            cwd=tmp_path, env={**environment, **ONE_THREAD, "PYTHONHASHSEED": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        return checked(arguments, code, done.returncode, done.stdout, done.stderr)

    run.start = start
    run.anew = run_anew  # an interpreter of its own, in which sets and hashes have another order
    yield run
    for process in started:
        process.kill()


def run_dirs(folder: Path) -> list[Path]:
    return sorted((folder / "outputs").glob("*/*/*/fold*_rep*"))


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "collections"), [("0", 1), ("0,1,2", 81)])
def test_grid_becomes_collections_a_table_and_a_picture(dmlbench, tmp_path, repeats: str, collections: int) -> None:
    num_repeats = len(repeats.split(","))
    runs = 4 * num_repeats
    grid = ("fold=0,1,2,3", f"repeat={repeats}", "fit.max_steps=4", "fit.validate_every=4")
    few = f"protocol.num_repeats={num_repeats}"
    assert "initialized 8 prototypes from 48 embeddings" in dmlbench("train", "-m", *TINY, *GSP, *grid, few)
    dmlbench("train", "-m", *TINY, "fit=untrained", "fit.max_steps=0", "fold=0,1", few)
    assert len(run_dirs(tmp_path)) == runs + 2
    result = json.loads((run_dirs(tmp_path)[0] / "result.json").read_text())
    written = "config_id dataset_fingerprint seed run_sha256 git_commit versions best_step val_is_test metrics n_query"
    assert set(written.split()) <= set(result)
    assert not list((tmp_path / "outputs").glob("*/*/*/*/last.ckpt"))

    assert "map_at_r" in dmlbench("aggregate", "configs=*gsp*")
    partly = dmlbench("aggregate")  # exit code 0: one config is complete
    assert "aggregated: 1 of 2 configs" in partly and f"incomplete: 2 of {runs} runs" in partly
    assert "FAILED" not in partly
    assert "no config is complete" in dmlbench("aggregate", "configs=*untrained*", code=1)
    left_out = dmlbench("table")
    assert f": incomplete: 2 of {runs} runs." in left_out and "(no training)" not in left_out
    dmlbench("aggregate", "allow_partial=true")
    aggregates = [json.loads(p.read_text()) for p in (tmp_path / "outputs").glob("*/*/*/aggregate.json")]
    assert sorted(a["n_collections"] for a in aggregates) == [1, collections]
    table = dmlbench("table", "allow_partial=true")
    assert "gsp" in table
    assert "(no training)" in table
    assert (f"{collections} collections" if collections > 1 else "one collection") in table
    names = {path.name for path in (tmp_path / "outputs" / "tables").iterdir()}
    assert names == {"runs.csv", *(f"glyphs_collage-mlrc.{suffix}" for suffix in ("md", "csv", "tex"))}
    listed = list(csv.DictReader((tmp_path / "outputs" / "tables" / "runs.csv").open()))
    assert all(row["run"] == f"fold{row['fold']}_rep{row['repeat']}" for row in listed) and len(listed) == runs + 2
    dmlbench("report", "queries=2", "allow_partial=true")
    assert "glyphs_collage under mlrc" in (tmp_path / "outputs" / "tables" / "report.html").read_text()
    dmlbench("report", "--picture", "queries=2", "allow_partial=true")
    assert (tmp_path / "outputs" / "tables" / "glyphs_collage-mlrc.png").stat().st_size > 10_000
    assert f"{runs + 2} runs: {runs + 2} done" in dmlbench("status")

    out = dmlbench("evaluate", f"run={run_dirs(tmp_path)[0]}", "hardest=1")
    assert "as in result.json" in out
    assert "(U+" in out.split("<-")[0]  # the name of the hardest query's image
    compared = dmlbench("table", "compare=[*/mlrc/*untrained*,*/mlrc/*-????????]", "metrics=[map_at_r]", code=1)
    assert "expected one config" in compared
    configs = sorted({path.parent.name for path in run_dirs(tmp_path)})
    compared = dmlbench("table", f"compare=[*/*/{configs[0]},*/*/{configs[1]}]", "allow_partial=true")
    assert "2 pairs of runs" in compared
    assert "written: outputs/tables/glyphs_collage-mlrc-differences.md, .csv, .tex" in compared
    assert "2 pairs of runs" in (tmp_path / "outputs/tables/glyphs_collage-mlrc-differences.md").read_text()
    trained = next(p for p in run_dirs(tmp_path) if (p / "best.ckpt").exists())
    again = dmlbench("evaluate", f"run={trained}", "from_checkpoint=true", "device=cpu")
    assert again.count("as in result.json") == 7

    run_dirs(tmp_path)[1].joinpath("result.json").unlink()
    of_gsp = "gsp" in run_dirs(tmp_path)[1].parent.name
    left = f"incomplete: {runs - 1 if of_gsp else 1} of {runs} runs"
    assert left in dmlbench("aggregate", code=1 if of_gsp else 0)
    damaged = next(run for run in run_dirs(tmp_path)[2:] if "gsp" in run.parent.name) / "result.json"
    whole = damaged.read_text()
    damaged.write_text(whole[:40])
    assert "configs cannot be aggregated: " in dmlbench("aggregate", code=1)
    damaged.write_text(whole)
    assert "nothing was removed" in dmlbench("clean", "*", "state=interrupted", code=1)
    assert "removed 1 run" in dmlbench("clean", "*", "state=interrupted", "ask=false")
    assert len(run_dirs(tmp_path)) == runs + 1


@pytest.mark.slow
def test_explain_draws_runs_side_by_side_and_says_what_it_cannot_draw(dmlbench, tmp_path) -> None:
    dmlbench("train", *TINY, *GSP, "fit.max_steps=6")
    dmlbench("train", *TINY, "fit.max_steps=1")
    gap, gsp = sorted(run_dirs(tmp_path), key=lambda run: "gsp" in run.parent.name)
    assert f"written: {gsp}/explain.png" in dmlbench("explain", f"run={gsp}", "num_images=2")
    dmlbench("explain", f"run=[{gap},{gsp}]", "images=[0,5]", "output=both.png")
    with Image.open(gsp / "explain.png") as one, Image.open(tmp_path / "both.png") as both:
        assert one.height == both.height
        assert one.width < both.width  # image, weights, prototypes; another column of weights
        pixels = np.asarray(both.convert("RGB")).reshape(-1, 3)
        assert len(np.unique(pixels, axis=0)) > 1000  # images and maps, not empty axes
    for bad, message in (
        ([], "run is missing: expected run="),
        ([f"run={gsp}", "images=[500]"], "image: got 500, expected a row from 0 to 127 of glyphs_collage."),
        ([f"run={gsp}", "images=[U+41/01]"], "expected a path in glyphs_collage: did you mean"),
        ([f"run={gsp}", "output=picture.txt"], "output: got picture.txt, expected a .png file."),
    ):
        assert message in dmlbench("explain", *bad, code=2)


@pytest.mark.slow
def test_complete_run_is_skipped_and_another_seed_in_its_place_refused(dmlbench, tmp_path) -> None:
    dmlbench("train", *TINY, *PROXIES[:2], "fit.max_steps=2")
    before = {p: p.stat().st_mtime_ns for p in run_dirs(tmp_path)[0].iterdir()}
    assert "is complete: nothing to do" in dmlbench("train", *TINY, *PROXIES[:2], "fit.max_steps=2")
    assert {p: p.stat().st_mtime_ns for p in run_dirs(tmp_path)[0].iterdir()} == before
    late = dmlbench("train", *TINY, *PROXIES[:2], "fit.max_steps=2", "logger=tensorboard")
    assert "logger=tensorboard logs nothing" in late
    assert "remove the run with `dmlbench clean` and train it again" in late
    refused = dmlbench("train", *TINY, *PROXIES[:2], "fit.max_steps=2", "base_seed=1", code=1)
    assert "was made with base_seed=0, not 1" in refused


def _wait_for_step(process: Process, folder: Path, step: int) -> bool:
    """Until the run has logged ``step``; False if it ended before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for history in (folder / "outputs").glob("*/*/*/*/history.csv"):
            lines = history.read_text().splitlines()
            if len(lines) > 1 and int(lines[-1].split(",")[0] or 0) >= step:
                return True
        if process.has_ended():
            return False
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached in 120 s")


WITH_WORKERS = (*GSP, "num_workers=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_kills"),
    [
        pytest.param(GSP, 3, id="gsp"),
        pytest.param(PROXIES, 3, id="proxies"),
        pytest.param(WITH_WORKERS, 3, id="gsp_with_workers"),
        pytest.param(GSP, 1, id="gsp_once"),
    ],
)
def test_run_killed_at_random_points_ends_in_the_same_bits(dmlbench, tmp_path, method, num_kills) -> None:
    length = ("fit.max_steps=24", "fit.validate_every=8", "fit.checkpoint_every=3", "fit.keep=both")
    arguments = ["train", *TINY, *method, *length]
    whole = dmlbench(*arguments, "paths.output_dir=whole")
    assert (" prototypes from " if "pooling=gsp" in method else "warm-up over") in whole

    draw = random.Random(str(method))
    targets = sorted(draw.sample(range(4, 22), num_kills))  # behind the first checkpoint
    kills = 0
    for target in targets:
        process = dmlbench.start(*arguments)
        if _wait_for_step(process, tmp_path, target):
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            kills += 1
        process.wait()
    assert kills >= (num_kills + 1) // 2
    resumed = dmlbench.anew(*arguments)
    assert "resumed at step" in resumed
    ours = run_dirs(tmp_path)[0]
    theirs = next((tmp_path / "whole").glob("*/*/*/fold0_rep0"))
    results = [json.loads((path / "result.json").read_text()) for path in (ours, theirs)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["best_step"] == results[1]["best_step"]
    assert (ours / "history.csv").read_text() == (theirs / "history.csv").read_text()
    for name in ("best.ckpt", "last.ckpt"):
        states = [torch.load(path / name, weights_only=True) for path in (ours, theirs)]
        for part in ("model", "objective"):
            assert states[0][part].keys() == states[1][part].keys()
            assert all(torch.equal(value, states[1][part][key]) for key, value in states[0][part].items())
        if name == "last.ckpt" and "pooling=gsp" in method:
            assert bool(states[0]["model"]["pooling.prototypes_started"])


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_75_and_a_second_process_is_refused(dmlbench, tmp_path) -> None:
    arguments = ["train", *TINY, "fit.max_steps=100000", "fit.validate_every=100000"]
    process = dmlbench.start(*arguments)
    assert _wait_for_step(process, tmp_path, 3)
    refused = dmlbench(*arguments, code=1)
    assert f"in use by process {process.pid}" in refused
    assert "1 running" in dmlbench("status")
    process.terminate()
    code, _, error = process.wait(timeout=60)
    assert code == 75, error
    assert error.splitlines()[-1] == "dmlbench: stopped. Start the same command again to resume."
    saved = torch.load(run_dirs(tmp_path)[0] / "last.ckpt", weights_only=True)
    assert saved["progress"]["step"] >= 3
    assert "1 interrupted" in dmlbench("status")


@pytest.mark.slow
def test_other_data_under_the_same_configuration_is_refused(dmlbench, tmp_path) -> None:
    for folder in "AB":
        for label in range(16):
            for i in range(4):
                path = tmp_path / folder / "folder" / f"class{label:02d}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                size = (40, 40) if folder == "A" else (44, 40)
                Image.new("RGB", size, (10 * label, 60 * i, 0)).save(path)
    photos = [
        *("train", "dataset=folder", "num_workers=0", "transform.train.resize=36", "transform.train.crop=32"),
        *("transform.eval.resize=36", "transform.eval.crop=32", "fit.log_every=1", "device=cpu"),
        *("sampler.classes_per_batch=4", "sampler.images_per_class=4", "fit.max_steps=8", "fit.checkpoint_every=1"),
    ]
    process = dmlbench.start(*photos, "paths.data_dir=A")
    assert _wait_for_step(process, tmp_path, 2)
    process.kill()
    process.wait()
    assert "was trained on other data" in dmlbench(*photos, "paths.data_dir=B", code=1)
    dmlbench(*photos, "paths.data_dir=A")
    assert "holds the result of other data" in dmlbench(*photos, "paths.data_dir=B", code=1)
    (tmp_path / "A").rename(tmp_path / "moved")
    assert "is complete: nothing to do" in dmlbench(*photos, "paths.data_dir=moved")


@pytest.mark.slow
def test_pooling_that_never_started_is_said_in_log_result_and_table(dmlbench, tmp_path) -> None:
    out = dmlbench("train", *TINY, "pooling=gsp", "fit.max_steps=2")
    assert "are from before the pooling's prototypes started" in out
    assert json.loads((run_dirs(tmp_path)[0] / "result.json").read_text())["pooling_started"] is False
    assert "PARTIAL: 1 of 12 runs" in dmlbench("aggregate", "allow_partial=true")
    assert "NOT STARTED: in 1 run " in dmlbench("table", "allow_partial=true")


@pytest.mark.slow
def test_full_disk_while_writing_a_checkpoint_is_one_message(dmlbench, tmp_path) -> None:
    dmlbench("train", *TINY, "fit.max_steps=2")
    finished = run_dirs(tmp_path)[0]
    content = (finished / "result.json").read_bytes()
    # No file may grow beyond 100 kB, which ends a write as a full disk does.
    process = dmlbench.start("train", *TINY, "fold=1", "fit.max_steps=2", largest_file=100_000)
    code, _, error = process.wait()
    assert code == 1
    assert "cannot write the checkpoint" in error
    assert "Traceback" not in error
    assert (finished / "result.json").read_bytes() == content


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (
            ["sampler.classes_per_batch=7"],
            2,
            "sampler.classes_per_batch: got 7, expected at most 6, the training classes",
        ),
        (["dataset.table.images_per_class=1"], 1, "at least two images"),
        (["schedule=cosine", "schedule.T_max=${epochs:0}"], 2, "schedule.T_max: got 0, expected at least 1 step"),
        (["dataset=omniglot", "paths.data_dir=nowhere"], 1, "nowhere"),
        (["backbone=resnet20", "backbone.weights_file=nowhere.pth"], 2, "nowhere.pth"),
    ],
)
def test_bad_input_ends_in_one_message(command, cache_dir, tmp_path, monkeypatch, overrides, code, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_CACHE", str(cache_dir))
    monkeypatch.delenv("DMLBENCH_OUTPUT", raising=False)
    tiny = [t for t in TINY if not (t.startswith("dataset.table") and overrides[0].startswith("dataset="))]
    error = command("train", *tiny, *overrides, code=code)
    assert message in error
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("dmlbench: error:")]) == 1


@pytest.mark.slow
def test_second_stage_follows_the_plan_of_the_first_and_is_tested_once(dmlbench, tmp_path) -> None:
    two_stage = (
        "train", *TINY, "protocol=two_stage", "fit.validate_every=${epochs:1}", "fit.max_steps=${epochs:4}",
        "schedule=plateau", "schedule.patience=0", "schedule.threshold=1.0", "schedule.min_lr=0.0",
    )  # fmt: skip
    assert "Run stage 1 of this config and repeat first" in dmlbench(*two_stage, "protocol.stage=2", code=1)
    dmlbench(*two_stage, "-m", "protocol.stage=1,2", "repeat=0,1")
    runs = {2 if (path / "embeddings.safetensors").exists() else 1: path for path in run_dirs(tmp_path)}
    first, second = (json.loads((runs[stage] / "result.json").read_text()) for stage in (1, 2))
    assert (set(first["metrics"]), set(second["metrics"])) == ({"val"}, {"test"})
    plan = json.loads((runs[1] / "plan.json").read_text())
    assert first["steps"] == 4 * 2  # 4 classes x 8 images in batches of 16
    assert plan["epochs"] == first["best_step"] / 2
    assert second["steps"] == second["best_step"] == plan["epochs"] * 4  # 8 classes
    assert all(change in ([2.0, 0.5], [3.0, 0.25]) for change in plan["changes"])
    assert json.loads((runs[2] / "plan.json").read_text()) == plan
    without = {key: value for key, value in plan.items() if key != "checksum"}
    write_json(runs[1] / "plan.json", without | {"epochs": 1.0})
    assert "uses a plan that stage 1 has since replaced" in dmlbench(
        *two_stage, "protocol.stage=2", f"repeat={runs[1].name[-1]}", code=1
    )
    (runs[1] / "plan.json").write_text(json.dumps(plan))
    assert "was made with base_seed=0, not 1" in dmlbench(*two_stage, "protocol.stage=2", "base_seed=1", code=1)
    dmlbench("aggregate", "allow_partial=true")
    table = dmlbench("table", "allow_partial=true")
    assert table.count("mean") >= 2
    assert "the test half was not looked at" in table
