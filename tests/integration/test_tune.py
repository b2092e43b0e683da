"""``dmlbench tune`` in real processes on the embedded glyphs: killed in a trial, resumed, and its recipe used."""

import csv
import os
import shlex
import time
from pathlib import Path

import hydra
import pytest
from forked import Process

from dmlbench.cli.train import composed_run
from dmlbench.config import compose, composing
from dmlbench.identity import config_sha256
from dmlbench.results.store import read_result
from dmlbench.types import ConfigError

pytest.importorskip("optuna", reason="extra tune")

TINY = (
    "dataset=glyphs", "dataset.table.num_classes=20", "dataset.table.images_per_class=5", "dataset.table.image_size=24",
    "transform.train.padding=2", "head.out_features=8", "sampler.classes_per_batch=4", "sampler.images_per_class=2",
    "loss=contrastive", "fit.max_steps=8", "fit.validate_every=2", "optim=adamw",
)  # fmt: skip
PLACE = ("device=cpu", "num_workers=0")
SPACE = ("space.pooling={choices: [gap, gmp]}", "name=tiny", "train=[]", "trials=4", "startup_trials=2")
PRUNER = ("pruner.startup_trials=1", "pruner.warmup_steps=0")


def start(folder: Path, *arguments: str) -> Process:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "DMLBENCH_CACHE": str(folder / "cache"), "DMLBENCH_OUTPUT": str(folder / "out")}
    return Process(("tune", "demo", *TINY, *PLACE, *SPACE, *PRUNER, *arguments), folder=folder, environment=environment)


def trials(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "tuning" / "tiny" / "trials.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_dry_run_shows_the_search_and_checks_a_run_without_training(tmp_path: Path) -> None:
    code, out, error = start(tmp_path, "--dry-run").wait()
    assert code == 0, error
    assert "tiny: 4 trials (tpe) of 1 run each, 0 done" in out and "pooling: gap, gmp" in out and "1 missing" in out
    assert not (tmp_path / "out").exists()
    missing = ("tune", "demo", *SPACE, "dataset=cub200", "loss=contrastive", f"paths.data_dir={tmp_path}", "--dry-run")
    code, _, error = Process(missing, folder=tmp_path, environment=dict(os.environ)).wait()
    assert code == 1 and "1 of 1 runs cannot start: CUB-200-2011 is not in" in error


@pytest.mark.slow
def test_two_processes_share_the_trials_of_a_folder(tmp_path: Path) -> None:
    ended = [process.wait() for process in [start(tmp_path, "trials=3"), start(tmp_path, "trials=3")]]
    assert [code for code, _, _ in ended] == [0, 0], ended
    begun = [line.split(": ")[0] for _, _, error in ended for line in error.splitlines() if "optim.lr=" in line]
    assert sorted(line.split(" ", 1)[1] for line in begun) == [f"trial {i} of 3" for i in (1, 2, 3)]
    assert start(tmp_path, "trials=3").wait()[0] == 0
    assert {row["state"] for row in trials(tmp_path)} <= {"complete", "pruned"} and len(trials(tmp_path)) == 3


@pytest.mark.slow
def test_a_group_may_be_searched_with_and_without_an_option(tmp_path: Path) -> None:
    of_search = ("trials=6", "startup_trials=6", "space.schedule={choices: [null, cosine]}")
    code, said, error = start(tmp_path, *of_search).wait()
    assert code == 0, error
    assert {row["schedule"] for row in trials(tmp_path)} == {"", "cosine"}
    assert "to train with it: dmlbench train" in said


@pytest.mark.slow
def test_tune_is_resumed_to_the_same_trials_and_a_recipe_of_the_best(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed twice"
    assert start(whole).wait()[0] == 0
    for validations in (2, 7):
        process = start(killed)
        while process.output().count(": loss ") < validations and not process.has_ended():
            time.sleep(0.005)
        process.kill()
    code, said, _ = start(killed).wait()
    assert code == 0 and str(killed / "out" / "tuning" / "tiny") in shlex.split(said.splitlines()[-1])
    assert trials(killed) == trials(whole)
    assert {row["state"] for row in trials(whole)} <= {"complete", "pruned"}

    folder = killed / "out" / "tuning" / "tiny"
    best = trials(killed)[0]
    asked = ["dataset=glyphs", "loss=contrastive", "backbone=resnet20_small", f"pooling={best['pooling']}"]
    with composing(folder):
        made = composed_run([*asked, "protocol=hpo", "recipe=tiny"])
        assert hydra.compose("train", [*asked, "recipe=tiny"]).protocol._target_.endswith("Mlrc")
    result = read_result(killed / "out" / best["runs"])
    assert config_sha256(made) == result["config_sha256"]
    assert result["metrics"]["val"]["map_at_r"] == float(best["score"])
    with composing(folder), pytest.raises(ConfigError, match="recipe=tiny has no settings for loss=triplet"):
        composed_run([*asked[:1], "loss=triplet", *asked[2:], "recipe=tiny"])
    assert compose("train", asked).optim.lr != made.optim.lr
