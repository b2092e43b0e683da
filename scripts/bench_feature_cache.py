"""Steps of a frozen EfficientNet-Lite0 on a CPU: no cache, cached maps and pooled features; and building a cache.

Images are random JPEGs of 500 x 400 pixels in a temporary folder, crops have 224 pixels, batches 64 images; GAP, a
linear head and contrastive loss. Weights are random, which costs the same. "Floor" is reading the records plus the same
arithmetic without the loader: head, loss, gradients and optimizer. Everything runs in turns in one process; ratios are
of medians. Short steps are timed after as many untimed ones. Building also decodes, crops and writes; its ratio is to
the forward passes of the same images, each timed right before.

python scripts/bench_feature_cache.py [--images 256] [--rounds 5] [--threads 1]
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmlbench.build import make_experiment
from dmlbench.checks import check
from dmlbench.config import compose
from dmlbench.experiment import Experiment
from dmlbench.models.backbones import Backbone
from dmlbench.runtime import device_name, select_device
from dmlbench.training.large_batch import accumulate_gradients

CLASSES = 32


def write_images(folder: Path, count: int) -> None:
    drawn = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"class{i % CLASSES:02d}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = drawn.integers(0, 256, (25, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((400, 500), Image.Resampling.BICUBIC).save(path, quality=75)


def experiment(folder: Path, *choices: str) -> Experiment:
    overrides = [
        *("dataset=folder", f"dataset.table.root={folder / 'images'}", "backbone=efficientnet_lite0", "pooling=gap"),
        *("backbone.pretrained=false", "loss=contrastive", "transform.train.crop=224", "transform.eval.crop=224"),
        *("sampler.classes_per_batch=16", "sampler.images_per_class=4", "feature_cache=none", "num_workers=0"),
        *("protocol=conventional", f"paths.cache_dir={folder / 'cache'}", f"paths.output_dir={folder}"),
    ]
    cfg = compose("train", [*overrides, f"paths.data_dir={folder}", *choices])
    check(cfg)
    return make_experiment(cfg, folder, select_device("cpu"))


def step_of(run: Experiment) -> Callable[[], Any]:
    model = run.setup.model

    def step() -> None:
        model.train()
        run.optimizer.zero_grad(set_to_none=True)
        accumulate_gradients(model, run.objective, lambda: next(run.batches), step=1, forward=model)
        run.optimizer.step()

    return step


def floor_of(run: Experiment) -> Callable[[], Any]:
    """Reading random records and the arithmetic of head and loss."""
    model, cache = run.setup.model, run.setup.images.cache
    rows, drawn = run.setup.data.split.train, np.random.default_rng(0)
    labels = run.setup.data.class_index[run.setup.data.table.labels]

    def step() -> None:
        chosen = drawn.choice(rows, 64)
        records = cache.read(chosen, drawn.integers(0, cache.settings.views, 64)).to(run.setup.device)
        run.optimizer.zero_grad(set_to_none=True)
        output = model(records)
        run.objective(output, torch.from_numpy(labels[chosen]), step=1)["loss"].backward()
        run.optimizer.step()

    return step


def built_maps(folder: Path) -> tuple[Experiment, float]:
    """An experiment on cached maps, and the time of building them over that of the plain forward passes alone.

    Each block of images passes twice, once for the build and once plainly, as the machine's speed drifts.
    """
    plain, frozen_outputs = 0.0, Backbone.frozen_outputs

    def both(backbone: Backbone, images: Tensor) -> tuple[Tensor, ...]:
        nonlocal plain
        with torch.inference_mode():
            plain += seconds(lambda: frozen_outputs(backbone, images), 1)
        return frozen_outputs(backbone, images)

    began = time.perf_counter()
    with patch.object(Backbone, "frozen_outputs", both):
        maps = experiment(folder, "backbone.frozen_until=all", "feature_cache=maps")
    return maps, (time.perf_counter() - began - plain) / plain


def seconds(step: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder / "images", arguments.images)
        frozen = experiment(folder, "backbone.frozen_until=all")
        maps, build_ratio = built_maps(folder)
        pooled = experiment(folder, "backbone.frozen_until=all", "feature_cache=pooled")
        last = "backbone.frozen_until=blocks.4"
        steps = {
            "frozen, no cache": (step_of(frozen), 1),
            "frozen, maps": (step_of(maps), 10),
            "frozen, maps: floor": (floor_of(maps), 10),
            "frozen, pooled": (step_of(pooled), 100),
            "frozen, pooled: floor": (floor_of(pooled), 100),
            "all layers train": (step_of(experiment(folder)), 1),
            "last blocks train, no cache": (step_of(experiment(folder, last)), 1),
            "last blocks train, maps": (step_of(experiment(folder, last, "feature_cache=maps")), 1),
        }
        for step, count in steps.values():
            seconds(step, count)  # compiles, and checks the records once
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, (step, count) in steps.items():
                if count > 1:
                    seconds(step, count)  # the first ones after a long step find the processor's caches cold
                times[name].append(seconds(step, count))
    median = {name: statistics.median(found) for name, found in times.items()}
    print(f"{device_name(frozen.setup.device)}, 64 images a step")
    for name, value in median.items():
        print(f"{name:30} {1e3 * value:9.2f} ms")
    print(f"without a cache / maps: {median['frozen, no cache'] / median['frozen, maps']:.0f}")
    print(f"without a cache / pooled: {median['frozen, no cache'] / median['frozen, pooled']:.0f}")
    print(f"maps / floor: {median['frozen, maps'] / median['frozen, maps: floor']:.2f}")
    print(f"pooled / floor: {median['frozen, pooled'] / median['frozen, pooled: floor']:.2f}")
    print(f"all layers / last blocks on maps: {median['all layers train'] / median['last blocks train, maps']:.1f}")
    print(f"building / its forward passes: {build_ratio:.2f}")


if __name__ == "__main__":
    main()
