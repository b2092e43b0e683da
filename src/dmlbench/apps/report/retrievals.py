"""Queries of a config's first run, what is nearest to them, and the images of both."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.apps.tables import ConfigSummary
from dmlbench.apps.trained import distance_of_run
from dmlbench.data.images.pixels import read_image
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files
from dmlbench.runtime import generator
from dmlbench.types import EmbeddingSet, ImageTable, IntArray, Neighbors

DRAWN_FOR_EACH = 8
"""Queries from which each one that is shown is chosen."""
_TESTED_ON = ("dataset_fingerprint", "n_query", "n_gallery")


def first_run(config: ConfigSummary) -> Path:
    """The first complete run."""
    return next(run.path for run in config.runs if run.state == "done")


def is_trained(run_dir: Path) -> bool:
    """Whether a run took optimizer steps here, so that it has a history and weights."""
    return bool(read_result(run_dir).get("steps"))


def that_can_be_shown(configs: Sequence[ConfigSummary]) -> list[ConfigSummary]:
    """Trained configs with the embeddings of their first run, tested on the same images as the first of them."""
    shown = [
        config for config in configs if "(untrained)" not in config.label and (first_run(config) / EMBEDDINGS).exists()
    ]
    for run_dir in map(first_run, shown):
        require_own_files(run_dir, read_result(run_dir))
    return [config for config in shown if all(config.summary[key] == shown[0].summary[key] for key in _TESTED_ON)]


def chosen_queries(shown: Sequence[ConfigSummary], count: int) -> tuple[IntArray, int]:
    """Queries to show, and how many were looked at: half fail in most configs, half succeed in most of them.

    They are among some drawn with a fixed seed; queries without another image of their class are left out.
    """
    total = shown[0].summary["n_query"]
    drawn = np.asarray(generator("report", total).permutation(total)[: DRAWN_FOR_EACH * count])
    some, searched, _ = _nearest(shown[0], drawn, 1)
    positive = (searched.labels[None] == some.labels[:, None]) & (searched.ids[None] != some.ids[:, None])
    drawn = drawn[positive.any(1).numpy()]
    wrong = np.sum([[not near[0][1] for _, near in retrieved(config, drawn, 1)] for config in shown], axis=0)
    order = np.argsort(-wrong, kind="stable")
    half = min(count // 2, int((wrong > 0).sum()))
    rest = order[half:][::-1][: count - half]
    return drawn[np.concatenate([order[:half], rest])], len(drawn)


def retrieved(config: ConfigSummary, chosen: IntArray, count: int) -> list[tuple[int, list[tuple[int, bool]]]]:
    """Chosen queries as rows of the table, and the rows nearest to them, each with whether it is of their class."""
    queries, searched, neighbors = _nearest(config, chosen, count)
    return [
        (int(row), [(int(searched.ids[j]), bool(searched.labels[j] == label)) for j in line])
        for row, label, line in zip(queries.ids, queries.labels, neighbors.index.tolist(), strict=True)
    ]


def _nearest(config: ConfigSummary, rows: IntArray, count: int) -> tuple[EmbeddingSet, EmbeddingSet, Neighbors]:
    """The queries ``rows`` of a config's first run, what is searched, and the nearest of it."""
    stored = load_embeddings(first_run(config) / EMBEDDINGS)
    queries, searched = stored.queries, stored.queries if stored.gallery is None else stored.gallery
    some = EmbeddingSet(queries.rows[rows], queries.labels[rows], queries.ids[rows])
    count = min(count, len(searched) - 1)
    return some, searched, nearest(some, searched, count, distance=distance_of_run(first_run(config)))


def image(table: ImageTable, row: int) -> NDArray[np.uint8]:
    """One image, [H, W] or [H, W, 3]."""
    if table.pixels is not None:
        return np.asarray(table.pixels[row])
    return np.asarray(read_image(Path(table.root) / str(table.paths[row])))
