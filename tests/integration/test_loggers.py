"""Whole runs with loggers: they show what the run's own files have, and change none of its numbers."""

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import composed
from killed_runs import killed_after
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dmlbench import build as build_module
from dmlbench import runner as run_module
from dmlbench.experiment import Setup
from dmlbench.identity import config_sha256, run_sha256
from dmlbench.training.nearest_images import draw_nearest

TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=6", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "fit.max_steps=6", "fit.validate_every=3",
    "fit.log_every=2", "fit.checkpoint_every=4", "fit.keep=both", "device=cpu", "num_workers=0",
)  # fmt: skip


def config(folder: Path, *overrides: str) -> DictConfig:
    cfg = composed(*TINY, *overrides)
    OmegaConf.update(cfg, "paths.output_dir", str(folder))
    OmegaConf.update(cfg, "paths.cache_dir", str(folder / "cache"))
    return cfg


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without loggers, for which nothing is drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Setup, "nearest_picture")
        return run_module.run(config(tmp_path_factory.mktemp("plain")))


def shown(run_dir: Path) -> Any:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="extra tensorboard"
    )
    guidance = {"scalars": 0, "images": 0, "tensors": 0}
    return accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance=guidance).Reload()


def assert_same_numbers(ours: Path, theirs: Path) -> None:
    for name in ("history.csv", "embeddings.safetensors", "per_query.csv"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    results = [json.loads((path / "result.json").read_text()) for path in (ours, theirs)]
    assert results[0]["metrics"] == results[1]["metrics"]
    last, other = (torch.load(path / "last.ckpt", weights_only=True) for path in (ours, theirs))
    assert str(last["random"]["python"]) == str(other["random"]["python"])
    assert torch.equal(last["random"]["torch"], other["random"]["torch"])
    assert torch.equal(last["random"]["numpy"][1], other["random"]["numpy"][1])


@pytest.mark.slow
def test_tensorboard_has_the_history_and_pictures_of_an_interrupted_run(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []  # of every validation: the sets that it computed, and the picture

    def spied(setup: Setup, queries: Any, gallery: Any) -> Any:
        picture = draw(setup, queries, gallery)
        drawn.append((queries, picture))
        return picture

    draw = Setup.nearest_picture
    monkeypatch.setattr(Setup, "nearest_picture", spied)
    embedded = []
    embed = Setup.embed
    monkeypatch.setattr(Setup, "embed", lambda *given: (embedded.append(given[1]), embed(*given))[1])
    killed_after(5, monkeypatch, config(tmp_path, "logger=tensorboard"))  # one after its last checkpoint
    time.sleep(1.1)  # files of TensorBoard are named by the second
    assert len(embedded) == 1
    run_dir = run_module.run(config(tmp_path, "logger=tensorboard"))
    assert len(embedded) == 4  # the validations at steps 3 and 6, test, validation of the best: none for a picture
    assert_same_numbers(run_dir, plain)

    events = shown(run_dir)
    with (run_dir / "history.csv").open() as file:
        history = [(row["name"], int(row["step"]), float(row["value"])) for row in csv.DictReader(file)]
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    result = json.loads((run_dir / "result.json").read_text())
    for name in {name for name, _, _ in history}:
        expected = [(step, value) for other, step, value in history if other == name]
        assert [step for step, _ in curves[name]] == [step for step, _ in expected]
        np.testing.assert_allclose(curves.pop(name), expected, rtol=1e-6)
    for part, scores in result["metrics"].items():
        for name, score in scores.items():
            ((step, value),) = curves.pop(f"final/{part}/{name}")
            assert step == 6
            assert value == pytest.approx(score, rel=1e-6)
    for name, least in (("images_per_s", 0), ("peak_memory_bytes", 1e8)):
        assert [step for step, _ in curves[name]] == [2, 4, 6]
        assert all(value > least for _, value in curves.pop(name))
    assert curves == {}

    images = events.Images("val/nearest")
    assert [image.step for image in images] == [3, 6]
    table = build_module.build_data(config(tmp_path)).table
    assert table.pixels is not None
    for image, (queries, picture) in zip(images, drawn, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), picture)
        unit = torch.nn.functional.normalize(queries.rows.double())
        far = (2 - 2 * unit @ unit.T).fill_diagonal_(9)
        pages = []
        for query in range(len(queries)):
            near = far[query].argsort(stable=True)[:5]
            right = (queries.labels[near] == queries.labels[query])[None].numpy()
            line = draw_nearest(
                queries.ids[query : query + 1].numpy(), queries.ids[near][None].numpy(), right,
                lambda rows: np.repeat(np.asarray(table.pixels)[rows][..., None], 3, axis=-1),
            )  # fmt: skip
            pages.append(line)
        height = pages[0].shape[0] - 4  # without the gap below
        lines = [picture[top : top + height] for top in range(0, len(picture) - 4, height)]
        found = [next(i for i, page in enumerate(pages) if np.array_equal(page[:height], line)) for line in lines]
        assert len(set(found)) == 5


def test_loggers_and_their_options_change_no_hash(tmp_path: Path) -> None:
    plain = config(tmp_path)
    logged = config(
        tmp_path, "logger=[tensorboard,wandb,mlflow]", "logger.wandb.entity=team", "logger.wandb.tags=[a,b]",
        "+logger.wandb.init.notes=second try", "logger.mlflow.tracking_uri=http://localhost:5000",
    )  # fmt: skip
    assert logged.logger.wandb.init.notes == "second try"
    assert (config_sha256(logged), run_sha256(logged)) == (config_sha256(plain), run_sha256(plain))


@pytest.mark.slow
def test_wandb_and_tensorboard_follow_one_run(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = config(tmp_path, "logger=[tensorboard,wandb]")
    assert both.logger.wandb.mode == "offline"
    killed_after(5, monkeypatch, both)
    time.sleep(1.1)  # folders of W&B are named by the second, too
    run_dir = run_module.run(config(tmp_path, "logger=[tensorboard,wandb]"))
    assert_same_numbers(run_dir, plain)
    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    assert len(list(run_dir.glob("wandb/offline-run-*/files/media/images/val/*.png"))) == 2
    assert len(shown(run_dir).Images("val/nearest")) == 2
