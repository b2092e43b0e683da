"""Images of a page: retrieved ones, and what poolings look at, as data within the page."""

import base64
import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from dmlbench.apps.explain import Explained, explain_run, greatest_weight, overlay
from dmlbench.apps.report.retrievals import chosen_queries, first_run, image, retrieved, that_can_be_shown
from dmlbench.apps.tables import ConfigSummary
from dmlbench.apps.trained import load_run
from dmlbench.types import DmlbenchError, ImageTable

_SIDE = 96  # pixels of a longer side in the page
_QUALITY = 80


def galleries(
    configs: Sequence[ConfigSummary], table: ImageTable, *, num_queries: int, num_nearest: int
) -> tuple[dict[str, Any], list[int]]:
    """The same queries of every trained config and what is nearest to them, in its first run.

    Returns:
        By config the nearest images' rows, images and names of classes by row; and the queries' rows in the table.
    """
    shown = that_can_be_shown(configs)
    if not shown:
        return {"configs": {}, "why": "no trained config has kept its embeddings"}, []
    chosen, num_drawn = chosen_queries(shown, num_queries)
    found: dict[str, Any] = {}
    used: dict[int, None] = {}
    rows: list[int] = []
    for config in shown:
        lines = retrieved(config, chosen, num_nearest)
        rows = [row for row, _ in lines]
        found[str(configs.index(config))] = {"run": first_run(config).name, "nearest": [near for _, near in lines]}
        used |= dict.fromkeys([*rows, *(row for _, near in lines for row, _ in near)])
    return {
        "configs": found,
        "queries": rows,
        "drawn": num_drawn,
        "images": {str(row): _thumbnail(image(table, row)) for row in used},
        "names": {str(row): table.class_names[table.labels[row]].replace("_", " ") for row in used},
    }, rows


def overlays(configs: Sequence[ConfigSummary], rows: Sequence[int], *, device: str) -> dict[str, Any]:
    """What the pooling of each config's first run looks at in images, by config, or why it does not say.

    One scale holds for all: white is the weight of average pooling.
    """
    explained: dict[int, Explained] = {}
    why: dict[str, str] = {}
    for i, config in enumerate(tqdm(configs, "overlays", unit="config", disable=not sys.stderr.isatty())):
        run_dir = first_run(config)
        try:
            run = load_run(run_dir, {"num_workers": 0}, device=device)
            if run.model.explains_pairs:
                why[str(i)] = "AVSL explains pairs of images: see `dmlbench explain`"
                continue
            explained[i] = explain_run(run, np.asarray(rows, dtype=np.int64), run_dir)
        except DmlbenchError as error:
            why[str(i)] = str(error).replace(str(run_dir), "/".join(run_dir.parts[-2:]))
    if not explained:
        return {"configs": {}, "why": why}
    most = greatest_weight(list(explained.values()))
    found = {}
    for i, one in explained.items():
        pictures = overlay(one, most)
        found[str(i)] = [
            [None if part is None else _thumbnail(part[row]) for part in pictures] for row in range(len(rows))
        ]
    return {"configs": found, "why": why, "rows": [int(row) for row in rows], "most": round(most, 2)}


def _thumbnail(pixels: NDArray[np.uint8]) -> str:
    """A data URI of an image [H, W] or [H, W, 3], made smaller where it is large."""
    picture = Image.fromarray(pixels).convert("RGB")
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
