"""Small complete runs over two train-test splits, for the tests of what is made of such runs."""

from pathlib import Path

from composed import composed
from omegaconf import OmegaConf

from dmlbench.runner import run

NUM_TEST_CLASSES, IMAGES = 4, 6


def small_run(
    root: Path, *overrides: str, fold: int = 0, repeat: int = 0, choices: dict[str, str] | None = None
) -> Path:
    """A run of a few steps on drawn letters, by the protocol of ``shifted.Shifted``, with its weights."""
    cfg = composed(
        "dataset=glyphs", "dataset.table.num_classes=8", f"dataset.table.images_per_class={IMAGES}",
        "dataset.table.image_size=24", "transform.train.padding=2", "fit.max_steps=2", "fit.validate_every=2",
        "fit.keep=best", "device=cpu", "num_workers=0", "head.out_features=8", "sampler.classes_per_batch=2",
        "sampler.images_per_class=2", "optim.lr=1e-3", "protocol._target_=shifted.Shifted", "protocol.num_folds=2",
        "protocol.num_repeats=1", *overrides,
    )  # fmt: skip
    cfg.fold, cfg.repeat = fold, repeat
    cfg.paths.output_dir, cfg.paths.cache_dir = str(root / "out"), str(root / "cache")
    known = {"backbone": "resnet20", "pooling": "gap", "head": "linear", "loss": "contrastive", **(choices or {})}
    OmegaConf.update(cfg, "runtime.choices", known, force_add=True)
    return run(cfg)
