"""Features of all images of a data set by one network, kept in the cache."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dmlbench import build
from dmlbench.apps.loading import load_run
from dmlbench.components import component
from dmlbench.config import read_config
from dmlbench.data.images.image_cache import stamp_of
from dmlbench.identity import read_table
from dmlbench.oodml.frechet import Float
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.results.store import CONFIG
from dmlbench.runtime import atomic_write, seed_everything, select_device, set_strict_float32, write_json
from dmlbench.types import ImageTable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Features:
    """Features [N, d] of every image of a table, means over the last map, and what they are measured by, in words."""

    table: ImageTable
    rows: Float
    measured_by: str
    sha256: str

    @property
    def notes(self) -> list[str]:
        return [f"{OTHER_DATA}{note}" for note in self.table.notes]


def features_of(args: Any) -> Features:
    """Compute features of ``args.dataset`` by ``args.backbone``, or by the trained backbone of ``args.run``."""
    set_strict_float32()
    table = read_table(args.dataset["table"])
    device = select_device(args.device)
    if args.run is not None:
        setup = load_run(Path(args.run), {"num_workers": args.num_workers}, device=args.device)
        backbone: Any = setup.model.backbone
        of_run = read_config(Path(args.run) / CONFIG)
        node, of_images = of_run["backbone"], of_run["transform"]["eval"]
        weights = f"{setup.choices['backbone']} of {Path(args.run).parent.name}/{Path(args.run).name}"
    else:
        seed_everything(0)  # of weights that are random
        backbone = component(args.backbone)
        node, of_images = args.backbone, args.transform["eval"]
        known = "pretrained weights" if args.backbone.get("pretrained") else "RANDOM weights"
        if args.backbone.get("weights_file") is not None:
            known = f"the weights of {Path(args.backbone['weights_file']).name}"
        elif known == "RANDOM weights":
            log.warning("%s has random weights, so its distances mean little", args.backbone["_target_"])
        weights = f"{network_name(args)} with {known}"
    size = getattr(component(of_images), "crop", None)
    measured_by = weights + (f", images of {size} pixels" if size else "")
    weights_digest = hashlib.sha256()
    for name, tensor in sorted(backbone.state_dict().items()):
        weights_digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    about = {
        "data": table.fingerprint,
        "files": None if table.pixels is not None else stamp_of(table),
        "weights": weights_digest.hexdigest(),
        # the same weights make other features with another stride, other levels, other means of colors
        "network": {key: value for key, value in node.items() if key not in ("pretrained", "weights_file")},
        "colors": [getattr(backbone, name).flatten().tolist() for name in ("mean", "std") if hasattr(backbone, name)],
        "transform": of_images,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    path = Path(args.paths.cache_dir) / "features" / f"{table.name}-{key[:16]}.safetensors"
    try:
        rows = load_file(path)["rows"]
        if rows.ndim != 2 or len(rows) != len(table):
            raise KeyError("rows")
        log.info("features from %s", path)
    except (OSError, SafetensorError, KeyError):
        backbone.to(device).eval()

        def pooled(images: torch.Tensor) -> torch.Tensor:
            pooled_map: torch.Tensor = backbone(backbone.preprocess(images))[-1].mean(dim=(2, 3))
            return pooled_map

        every = np.arange(len(table))
        rows = build.embedded(args, table, every, pooled, device, transform=of_images, describe="features").rows.numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, save({"rows": rows}))
    return Features(table, rows.astype("float64"), measured_by, hashlib.sha256(rows.tobytes()).hexdigest())


def network_name(args: Any) -> str:
    """The chosen option, or the name of a timm network."""
    return str(args.backbone.get("name") or args.network)


def write_output(args: Any, document: dict[str, Any]) -> list[str]:
    """Write a JSON document to ``args.output``, if that is given; return the lines to print."""
    if args.output is None:
        return []
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)
    return [f"written: {args.output}"]
