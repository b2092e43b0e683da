"""``dmlbench embed``: embeddings of a folder of images by a trained model."""

import sys

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    path, images, output = cfg.model, cfg.images, cfg.output  # if missing, before torch is imported
    from dmlbench.apps.embed_folder import embed_folder
    from dmlbench.apps.loaded import load

    model = load(path, device=cfg.device, modules=cfg.modules)
    stored = embed_folder(
        model, images, output, batch_size=cfg.batch_size, num_workers=cfg.num_workers,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    gallery = "" if stored.gallery is None else f" and {len(stored.gallery)} of the gallery"
    print(f"{len(stored.queries)} images{gallery}, {model.embedding_size} numbers each")
    print(f"written: {cfg.output}")
