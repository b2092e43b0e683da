"""R@1 with average and with maximum pooling by the size of the object (ProxyNCA++, appendix 0.E, figure 7).

Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020: the share of the image that the object's box
    covers, on CUB. The figure's sizes are not given.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from dmlbench.apps.loading import distance_of_run, table_of_run
from dmlbench.apps.pictures import plt
from dmlbench.config import listed
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files
from dmlbench.studies.record import Claim, Findings, Float, Parts
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray

_WAYS = {"gap": "average", "gmp": "maximum"}


def shares_of_boxes(table: ImageTable, rows: IntArray) -> Float:
    """Share [N] of each image that its published box covers."""
    originals = table.originals
    if originals is None or originals.boxes is None or table.pixels is not None:
        raise DataError(f"'{table.name}' has no boxes of its objects. Use cub200 with bounding_boxes.txt.")
    boxes = originals.boxes[rows]
    if np.isnan(boxes).any():
        lacking = table.paths[rows[np.isnan(boxes).any(axis=1)][0]]
        raise DataError(f"{originals.boxes_from} has no box of '{lacking}' of '{table.name}'. Get the original.")
    sizes = np.empty((len(rows), 2))
    for i, path in enumerate(table.paths[rows]):
        with Image.open(Path(table.root) / str(path)) as image:
            sizes[i] = image.size
    low, high = np.clip(boxes[:, :2], 0, sizes), np.clip(boxes[:, 2:], 0, sizes)
    share: Float = np.prod(high - low, axis=1) / np.prod(sizes, axis=1)
    return share


def by_size(hits: Float, shares: Float, edges: Sequence[float]) -> tuple[list[float | None], list[int]]:
    """Mean and number of the hits [N] whose shares are in [edges[i], edges[i + 1]); the last interval is closed.

    Hits of NaN (queries without a positive) are left out. An empty interval has the mean None.
    """
    group = np.clip(np.searchsorted(edges, shares, side="right") - 1, 0, len(edges) - 2)
    own = [hits[(group == i) & ~np.isnan(hits)] for i in range(len(edges) - 1)]
    return [float(values.mean()) if len(values) else None for values in own], [len(values) for values in own]


def conduct(args: Any, parts: Parts) -> Findings:
    """Group the queries of finished runs by the size of their object."""
    edges = [float(edge) for edge in args.edges]
    if edges != sorted(set(edges)) or len(edges) < 2 or (edges[0], edges[-1]) != (0.0, 1.0):
        raise ConfigError(f"edges: got {edges}, expected numbers that ascend from 0 to 1, such as [0,0.2,0.4,1].")
    given = {way: [Path(str(name)) for name in listed(getattr(args, way))] for way in _WAYS}
    if missing := [way for way in _WAYS if not given[way]]:
        way = missing[0]
        raise ConfigError(f"{way}=... is missing. Name run directories of models with {_WAYS[way]} pooling.")
    runs = {
        f"{way} {i} {read_result(path).get('embeddings_sha256', '')[:12]}": (way, path)
        for way, paths in given.items() for i, path in enumerate(paths)
    }  # fmt: skip

    def compute(name: str) -> dict[str, Any]:
        return _of_run(runs[name][1], edges, parts)

    found = parts.get(list(runs), compute, describe="runs")
    of_ways = {way: [found[name]["recall"] for name, (of, _) in runs.items() if of == way] for way in _WAYS}
    means = {way: pd.DataFrame(recalls, dtype=float).mean().tolist() for way, recalls in of_ways.items()}
    first = found[next(iter(runs))]
    counts = first["count"]
    if any(found[name]["count"] != counts for name in runs):
        raise ConfigError("runs: got runs of different test sets, expected one for all. Name runs of one fold.")
    sizes = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in pairwise(edges)]
    rows = tuple(
        (size, f"{count:,}", *("–" if np.isnan(means[way][i]) else f"{100 * means[way][i]:.1f}" for way in _WAYS))
        for i, (size, count) in enumerate(zip(sizes, counts, strict=True))
    )
    both = 100 * (np.array(means["gmp"]) - means["gap"])
    gains = both[~np.isnan(both)].tolist()
    claims = (
        Claim("0.E, figure 7", "maximum pooling is ahead of average pooling at every size",
              f"by {min(gains):+.1f} to {max(gains):+.1f} points; ahead at {sum(g > 0 for g in gains)} of {len(gains)} "
              "sizes", min(gains) > 0),
    )  # fmt: skip
    names = {way: sum(of == way for of, _ in runs.values()) for way in _WAYS}
    notes = (
        f"R@1 of {sum(counts):,} test queries; mean over {names['gap']} and {names['gmp']} runs; sizes, which are "
        "ours, are the share of the image within the object's box",
        *dict.fromkeys(f"{OTHER_DATA}{note}" for one in found.values() for note in one["notes"]),
    )
    title = f"R@1 by the size of the object: {first['dataset']}"
    heads = ("share of the image", "queries", "average pooling, %", "maximum pooling, %")
    return Findings(title, heads, rows, claims, notes, _figure(sizes, means, title))


def _of_run(run_dir: Path, edges: Sequence[float], parts: Parts) -> dict[str, Any]:
    result = read_result(run_dir)
    require_own_files(run_dir, result, (EMBEDDINGS,))
    parts.bind(data=result["dataset_fingerprint"])
    table = table_of_run(run_dir, result)
    stored = load_embeddings(run_dir / EMBEDDINGS)
    spec = EvaluationSpec(metrics=("recall_at_k",), recall_at=(1,))
    scores = evaluate(stored.queries, stored.gallery, spec, distance=distance_of_run(run_dir))
    shares = shares_of_boxes(table, stored.queries.ids.numpy())
    recall, count = by_size(scores.per_query["recall_at_1"], shares, edges)
    return {"dataset": table.name, "recall": recall, "count": count, "notes": list(table.notes)}


def _figure(sizes: Sequence[str], means: Mapping[str, list[float]], title: str) -> Figure:
    figure, axes = plt.subplots(figsize=(2 + 0.9 * len(sizes), 3.4), layout="constrained")
    for way, marker in zip(_WAYS, "os", strict=True):
        axes.plot(
            range(len(sizes)), 100 * np.array(means[way]), marker=marker, markersize=4, label=f"{_WAYS[way]} pooling"
        )
    axes.set_xticks(range(len(sizes)), list(sizes), rotation=30, ha="right", fontsize=7)
    axes.set_xlabel("share of the image within the object's box")
    axes.set_ylabel("R@1, %")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
    return figure
