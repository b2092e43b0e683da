"""Training on cached features: the same weights as on images, exact resume, damage, and the model that is loaded."""

import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from killed_runs import killed_after
from omegaconf import DictConfig

import dmlbench as db
from dmlbench.checks import check
from dmlbench.cli.main import main
from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.data.batches.loaders import TrainBatches
from dmlbench.data.images import feature_cache
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.models.backbones import Backbone
from dmlbench.results.store import EMBEDDINGS, read_result
from dmlbench.runner import run
from dmlbench.runtime import derive_seed
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.types import ConfigError, DataError

VIEWS = 3
HEAD = "head.out_features=8"
SMALL = [
    *("dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=6", "backbone=resnet20_small"),
    *("dataset.table.image_size=24", "transform.train.padding=2", "fit.max_steps=20", "fit.validate_every=10"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "device=cpu", "fit.keep=both"),
]
MAPS = ["feature_cache=maps", f"feature_cache.views={VIEWS}", "feature_cache.dtype=float32"]
POOLED = ["feature_cache=pooled", f"feature_cache.views={VIEWS}", "feature_cache.dtype=float32"]


def config(tmp_path: Path, *overrides: str) -> DictConfig:
    paths = [f"paths.output_dir={tmp_path / 'out'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    head = [] if "head=avsl" in overrides else [HEAD]
    return compose("train", [*SMALL, *head, *paths, f"paths.data_dir={tmp_path}", *overrides])


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(run_dir / "last.ckpt")["model"]
    return weights


def read_the_cached_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches of images draw the views that a feature cache stores."""
    request_of = TrainBatches._request

    def of_views(self: TrainBatches, index: Any) -> Any:
        request = request_of(self, index)
        rows_and_seeds = zip(request.rows.tolist(), request.seeds, strict=True)
        return replace(request, seeds=[derive_seed(0, "view", row, seed % VIEWS) for row, seed in rows_and_seeds])

    monkeypatch.setattr(TrainBatches, "_request", of_views)


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    "choices",
    [
        ["backbone.frozen_until=all", *MAPS, "pooling=gsp_zsr", "pooling.memory_rows=8", "pooling.num_prototypes=4"],
        ["backbone.frozen_until=layer2", *MAPS],
        ["backbone.frozen_until=all", *POOLED, "loss=proxy_anchor"],
        ["backbone.frozen_until=all", *POOLED, "loss=xbm_contrastive"],
        ["backbone.frozen_until=all", *MAPS, "backbone=resnet20_levels", "head=avsl", "head.level_size=8",
         "head.top_k=4", "pooling=none", "loss=layered_proxy_anchor"],
        ["backbone.frozen_until=all", *MAPS, "loss=diva", "head=unit_parts", "regularizer=diva"],
        ["backbone.frozen_until=all", *MAPS, "regularizer=s2sd", "regularizer.s2sd.sizes=[16]"],
    ],
    ids=["gsp_zsr", "layer2", "proxy_anchor", "xbm", "avsl", "diva_second_views", "s2sd"],
)  # fmt: skip
def test_weights_are_those_of_training_on_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: Sequence[str]
) -> None:
    cached = run(config(tmp_path, *choices))
    read_the_cached_views(monkeypatch)
    plain = [choice for choice in choices if not choice.startswith("feature_cache")]
    on_images = run(config(tmp_path, *plain))
    assert cached != on_images
    one, other = weights_of(cached), weights_of(on_images)
    moved = [name for name in one if not torch.equal(one[name], other[name])]
    for name in moved:
        assert torch.linalg.norm((one[name] - other[name]).double()) <= 1e-6 * torch.linalg.norm(other[name].double())
    rows, expected = (load_embeddings(folder / EMBEDDINGS).queries.rows for folder in (cached, on_images))
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_killed_run_and_a_killed_build_resume_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = ["backbone.frozen_until=layer2", *MAPS[:2], "fit.checkpoint_every=7"]
    whole = run(config(tmp_path / "a", *choices))
    with monkeypatch.context() as patch:
        patch.setattr("dmlbench.build._CACHE_BATCH", 5)
        as_stored, calls = feature_cache._as_stored, []

        def dying(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return as_stored(*arguments)

        patch.setattr(feature_cache, "_as_stored", dying)
        with pytest.raises(KeyboardInterrupt):
            run(config(tmp_path / "b", *choices))
    (part,) = (tmp_path / "b" / "cache").glob("*.part")
    assert not list(part.parent.glob("*.features"))
    killed_after(9, monkeypatch, config(tmp_path / "b", *choices))
    resumed = run(config(tmp_path / "b", *choices))
    one, other = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_result(whole)["metrics"] == read_result(resumed)["metrics"]


def test_pooled_features_are_the_same_bits_from_stored_maps_as_from_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ["backbone.frozen_until=all", "fit=untrained", "fit.max_steps=0", f"feature_cache.views={VIEWS}"]
    run(config(tmp_path / "images", *half, "feature_cache=pooled"))
    run(config(tmp_path / "maps", *half, "feature_cache=maps"))
    with monkeypatch.context() as patch:
        frozen_outputs = Backbone.frozen_outputs

        def of_the_sample_alone(self: Backbone, images: torch.Tensor) -> Any:
            assert len(images) == 1, "the backbone embeds images although their maps are stored"
            return frozen_outputs(self, images)

        patch.setattr(Backbone, "frozen_outputs", of_the_sample_alone)
        run(config(tmp_path / "maps", *half, "feature_cache=pooled"))
    one, other = (next((tmp_path / part / "cache").glob("*-pooled-*")) for part in ("images", "maps"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("level", "changed"), [("maps", "backbone"), ("pooled", "backbone"), ("pooled", "pooling")])
def test_other_code_of_an_own_backbone_or_pooling_is_other_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, changed: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"own_{changed}.py"
    module, base = {"backbone": ("resnet_cifar", "ResNet20"), "pooling": ("pooling.global_pooling", "Gmp")}[changed]
    choices = ["backbone.frozen_until=all", f"feature_cache={level}", "fit=untrained", "fit.max_steps=0", "pooling=gmp"]
    for scale in (1.0, 2.0):
        path.write_text(
            f"from dmlbench.models.{module} import {base}\n"
            f"class Own({base}):\n"
            f"    def forward(self, x, *rest):\n"
            f"        return super().forward({scale} * x, *rest)\n"
        )
        run(config(tmp_path, *choices, f"{changed}._target_=own_{changed}.Own"))
        monkeypatch.delitem(sys.modules, path.stem)
    assert len(list((tmp_path / "cache").glob("*.features"))) == 2


def test_other_runs_share_the_file_and_damage_is_named(tmp_path: Path) -> None:
    choices = ["backbone.frozen_until=all", *MAPS, "backbone.weights_file=null", "fit=untrained", "fit.max_steps=0"]
    run(config(tmp_path, *choices))
    run(config(tmp_path, *choices, "head.out_features=4"))
    (path,) = (tmp_path / "cache").glob("*.features")
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(len(content) - half)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"feature cache .* is damaged"):
        run(config(tmp_path, *choices, "head.out_features=5", "fit.max_steps=200", "fit.validate_every=200"))


def command(*line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(line))
    assert not ended.value.code


def small_cache(path: Path) -> feature_cache.FeatureCache:
    """3 images, of which one has 2 random views: 5 records of 4 numbers."""
    settings = feature_cache.FeatureCacheSettings(views=2, dtype="float32")
    return feature_cache.FeatureCache(path, 3, np.array([1]), settings, 4, {"fingerprint": "test"})


def test_of_two_builders_one_waits_and_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    calls: list[str] = []

    def build(name: str) -> None:
        def records(positions: np.ndarray) -> Iterator[torch.Tensor]:
            calls.append(name)
            time.sleep(1)
            yield torch.arange(4.0 * len(positions)).view(-1, 4, 1, 1)

        cache = small_cache(tmp_path / "cache.features")
        feature_cache.complete_cache(cache, records, progress=False, check=lambda: None, name=name)
        assert cache.read(np.array([1]), np.array([1])).flatten().tolist() == [16.0, 17.0, 18.0, 19.0]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, ["a", "b"]))
    assert len(calls) == 1
    assert "another process is building" in caplog.text


def test_a_full_disk_is_an_error_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    cache = small_cache(tmp_path / "cache.features")
    with pytest.raises(DataError, match=r"feature cache of 'x' takes .* GB, .* has 0\.00 GB free\. Free some space"):
        feature_cache.complete_cache(cache, lambda _: iter([]), progress=False, check=lambda: None, name="x")
    assert not list(tmp_path.glob("*.part"))


def test_runs_on_a_cache_are_exported_explained_and_reported(tmp_path: Path) -> None:
    run_dir = run(config(tmp_path, "backbone.frozen_until=layer2", *MAPS, "pooling=gsp_small"))
    command("export", f"run={run_dir}", f"output={tmp_path / 'folder'}", "formats=[]")
    images = np.random.default_rng(0).integers(0, 256, (3, 24, 24, 3), dtype=np.uint8)
    rows = db.load(run_dir).embed(images)
    torch.testing.assert_close(db.load(tmp_path / "folder").embed(images), rows, rtol=0, atol=0)
    command("explain", f"run={run_dir}", f"output={tmp_path / 'weights.png'}")
    report, results = tmp_path / "report.html", f"paths.output_dir={tmp_path / 'out'}"
    command("report", "allow_partial=true", results, f"output={report}")
    assert (tmp_path / "weights.png").is_file()
    assert run_dir.parent.name in report.read_text()


@pytest.mark.slow
def test_a_dry_run_builds_no_cache_beside_those_of_other_settings(tmp_path: Path, capsys) -> None:
    run(config(tmp_path, "backbone.frozen_until=all", *MAPS, "fit=untrained"))
    before = sorted((tmp_path / "cache").iterdir())
    paths = [f"paths.output_dir={tmp_path / 'out'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    command("train", *SMALL, HEAD, *paths, "backbone.frozen_until=all", *MAPS, "feature_cache.views=4", "--dry-run")
    out = capsys.readouterr().out
    assert re.search(r"about \d+ s per run \(2 training steps .*\), plus about \d+ s to build the feature cache", out)
    assert sorted((tmp_path / "cache").iterdir()) == before


# Largest difference of embeddings relative to their length, as docs/frozen.md states.
ROUNDING = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("level", ["maps", "pooled"])
def test_the_loaded_model_embeds_images_to_the_stored_vectors_up_to_rounding(
    tmp_path: Path, level: str, dtype: str
) -> None:
    cfg = config(tmp_path, "backbone.frozen_until=all", f"feature_cache={level}", f"feature_cache.dtype={dtype}")
    run_dir = run(cfg)
    embeddings = load_embeddings(run_dir / EMBEDDINGS).queries
    images = component(cfg.dataset.table).pixels
    model = db.load(run_dir)
    rows = model.embed([np.asarray(images[i]) for i in embeddings.ids.tolist()])
    difference = ((rows - embeddings.rows).norm(dim=1) / embeddings.rows.norm(dim=1)).max()
    assert difference <= ROUNDING[dtype]
    assert dtype == "float32" or difference > ROUNDING["float32"]


@pytest.mark.parametrize("pooling", ["tsmk", "gsp_small"])  # which add to the projection, or project before they pool
def test_a_closed_form_head_goes_with_every_order_of_pooling_and_projection(tmp_path: Path, pooling: str) -> None:
    choices = [f"pooling={pooling}", "head=pca", "fit=untrained", "fit.keep=none"]
    cfg = compose("train", [*SMALL, *choices, HEAD, "fit.max_steps=0", f"paths.output_dir={tmp_path}"])
    assert read_result(run(cfg))["stop_reason"] == "untrained"


def test_a_test_on_cached_maps_is_ranked_again_as_on_images(tmp_path: Path) -> None:
    untrained = ("backbone.frozen_until=all", "fit=untrained", "fit.max_steps=0", "fit.keep=none")
    plain = run(config(tmp_path, *untrained, *MAPS))
    on_maps, on_images = (run(config(tmp_path, *untrained, "rerank=diml", *cache)) for cache in (MAPS, ()))
    scores = [read_result(folder)["metrics"]["test"] for folder in (on_maps, on_images, plain)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and scores[0] != scores[2]


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize(
    "choices, message",
    [
        (MAPS, "backbone.frozen_until: got null, expected a stage or all"),
        (["backbone.frozen_until=layer2", *POOLED], "backbone.frozen_until: got layer2, expected all"),
        (["backbone.frozen_until=all", *POOLED, "pooling=gem"], r"parameters or a state. Set pooling\.learn_power"),
        (["backbone.frozen_until=all", *POOLED, "rerank=diml"], "rerank: got feature_cache.level=pooled"),
        (["backbone.frozen_until=layer3", *MAPS], "frozen_until: .*'layer3'"),
        (["backbone.frozen_until=all", "fit.warmup_steps=5", "fit.warmup_frozen=[backbone]"], "fit.warmup_frozen"),
        (["backbone.frozen_until=all", *MAPS, "fit.warmup_steps=5"], "fit.warmup_frozen: got backbone, pooling, exp"),
        (["backbone.frozen_until=all", *MAPS, "regularizer=xml"], "regularizer 'xml' needs the pooling's side output"),
        (["backbone.frozen_until=all", *POOLED, "regularizer=xml"], "'xml' needs feature maps. Set feature_cache"),
        (["backbone.frozen_until=all", *MAPS, "schedule=plateau", "schedule.mode=min"], "schedule.mode: got min"),
    ],
)
def test_combinations_without_meaning_are_errors(tmp_path: Path, choices: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(tmp_path, *choices))
    assert not list(tmp_path.rglob("*.features*"))  # before anything is cached


def test_the_images_of_a_cache_have_one_size() -> None:
    cfg = compose("train", ["dataset=cub200", "transform=mlrc", "backbone.frozen_until=all", "feature_cache=maps"])
    check(cfg)
    cfg.transform.eval.crop = 192
    native = compose("train", ["dataset=cub200", "transform=mlrc", "backbone.frozen_until=all", "feature_cache=pooled",
                               "backbone=resnet50", "pooling=native", "transform.eval.crop=192"])  # fmt: skip
    check(native)  # its records have one size whatever the images' is
    with pytest.raises(ConfigError, match=r"eval\.crop: got 192, expected 227 .* because feature_cache needs one size"):
        check(cfg)
