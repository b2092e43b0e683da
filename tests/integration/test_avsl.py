"""AVSL from training to collections: resumed to the same bits, evaluated from files alone, joined by sums."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from composed import arguments
from killed_runs import killed_after
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dmlbench import runner as run_module
from dmlbench.apps.embeddings import evaluate_from
from dmlbench.apps.loading import distance_of_run
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.rules import COLLECTIONS
from dmlbench.results.store import find_runs, runs_by_config
from dmlbench.types import RunError

AVSL = ("head=avsl", "pooling=none", "backbone=resnet20_levels", "head.level_size=12", "head.top_k=4")
TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "fit.max_steps=6", "fit.validate_every=3",
    "fit.checkpoint_every=1", "fit.log_every=1", "device=cpu", "optim.lr=1e-3", "num_workers=0",
)  # fmt: skip
CHOICES = {"backbone": "resnet20_levels", "pooling": "none", "head": "avsl", "loss": "layered"}


def config(folder: Path, *overrides: str) -> DictConfig:
    cfg = compose(
        "train", [*AVSL, *TINY, f"paths.output_dir={folder}", f"paths.cache_dir={folder / 'cache'}", *overrides]
    )
    OmegaConf.update(cfg, "runtime.choices", CHOICES, force_add=True)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["layered_proxy_anchor", "layered"])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path, monkeypatch, loss) -> None:
    whole = run_module.run(config(tmp_path / "whole", f"loss={loss}", "fit.keep=both"))
    killed_after(4, monkeypatch, config(tmp_path / "parts", f"loss={loss}", "fit.keep=both"))
    resumed = run_module.run(config(tmp_path / "parts", f"loss={loss}", "fit.keep=both"))
    for name in ("best.ckpt", "last.ckpt"):
        ours, theirs = (torch.load(path / name, weights_only=True) for path in (resumed, whole))
        for part in ("model", "objective"):
            assert ours[part].keys() == theirs[part].keys()
            assert all(torch.equal(value, theirs[part][key]) for key, value in ours[part].items())
    assert int(ours["model"]["distance.updates"]) == 6
    assert (resumed / "history.csv").read_text() == (whole / "history.csv").read_text()
    first, second = (json.loads((path / "result.json").read_text())["metrics"] for path in (resumed, whole))
    assert first == second


@pytest.mark.slow
def test_runs_are_evaluated_from_files_and_joined_into_collections(tmp_path) -> None:
    folder = tmp_path / "outputs"
    short = ("loss=layered_proxy_anchor", "fit.max_steps=2", "fit.validate_every=2", "fit.checkpoint_every=null")
    runs = {
        (fold, repeat): run_module.run(config(folder, *short, f"fold={fold}", f"repeat={repeat}"))
        for fold in range(2) for repeat in range(2)
    }  # fmt: skip
    path = runs[0, 0]
    args = arguments("evaluate", f"run={path}")
    again = evaluate_from(args)
    assert again.evaluation.scores == again.stored

    ((_, members),) = runs_by_config(find_runs(folder, "**")).items()
    distances = {key: distance_of_run(run) for key, run in runs.items()}
    later = EvaluationSpec(
        metrics=("p_at_1", "ndcg_at_10", "precision_at_10", "map_at_10")
    )  # not asked for in training
    summary = aggregate_config(members, later, distance_of=distance_of_run, allow_partial=True, progress=False)
    assert summary["n_collections"] == 4
    for scores in summary["scores"].values():
        assert all(0 < scores[name]["mean"] <= 1 for name in later.metrics)

    # a naive collection: P@1 by the sum of the members' own distances
    frame = np.genfromtxt(path.parent / COLLECTIONS, delimiter=",", names=True)
    total = 0.0
    for fold, repeat in ((0, 0), (1, 1)):
        stored = load_embeddings(runs[fold, repeat] / "embeddings.safetensors").queries
        distance = distances[fold, repeat].double()
        with torch.no_grad():
            total = total + distance(stored.rows.double(), stored.rows.double())
    total.fill_diagonal_(torch.inf)
    nearest = stored.labels[total.argmin(1)]
    row = frame[(frame["repeat_fold0"] == 0) & (frame["repeat_fold1"] == 1)]
    assert row["concatenated_p_at_1"][0] == pytest.approx(float((nearest == stored.labels).double().mean()))

    (path / "distance.safetensors").unlink()
    with pytest.raises(RunError, match="cannot be compared"):
        evaluate_from(args)


def test_photographs_of_any_shape_of_map_train_and_are_evaluated(tmp_path) -> None:
    """Maps of unequal height and width from a folder of images, with a network of timm."""
    generator = np.random.default_rng(0)
    for label in range(8):
        folder = tmp_path / "images" / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(4):
            Image.fromarray(generator.integers(0, 256, (40, 56, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    cfg = compose(
        "train",
        [
            *AVSL, "dataset=folder", "dataset.name=photos", f"dataset.table.root={tmp_path / 'images'}",
            "protocol=conventional", "backbone=timm", "backbone.name=resnet10t", "backbone.pretrained=false",
            "+backbone.out_indices=[2,3,4]", "transform.train.crop=64", "transform.train.resize=72",
            "transform.eval.crop=64", "transform.eval.resize=72", "loss=layered_proxy_anchor", "image_cache=false",
            "sampler.classes_per_batch=4", "sampler.images_per_class=2", "fit.max_steps=2", "fit.validate_every=2",
            "device=cpu", "num_workers=0", f"paths.output_dir={tmp_path / 'outputs'}",
        ],
    )  # fmt: skip
    OmegaConf.update(cfg, "runtime.choices", CHOICES | {"backbone": "timm"}, force_add=True)
    result = json.loads((run_module.run(cfg) / "result.json").read_text())
    assert result["n_query"] == 16
